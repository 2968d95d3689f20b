//! Which instructions the machine has, and how a loop is compiled once for each set of them.
//!
//! Kernels are plain safe loops over slices. [`Isa::run`] has such a loop compiled for AVX-512, for
//! AVX2 and for the baseline (SSE2 on x86-64, NEON on aarch64, where it is always there),
//! and calls the best that this machine has. Rust never contracts `a * b + c`, and division and
//! square root are correctly rounded everywhere, so all variants give the same bits.
//!
//! # Safety
//! The only unsafe act is to call a function that was compiled for instructions which the machine
//! may lack. An [`Isa`] value other than the baseline is made by [`Isa::detect`] and
//! [`Isa::available`] alone, after the CPU said that it has them.
#![allow(
    unsafe_code,
    reason = "calls of target-feature functions, checked by Isa"
)]

use std::sync::OnceLock;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Baseline,
}

/// A set of instructions that this machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa(Set);

impl Isa {
    /// The baseline of the target: always there.
    pub const BASELINE: Isa = Isa(Set::Baseline);

    /// All that this machine has, best first.
    pub fn available() -> Vec<Isa> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx512f")
                && std::arch::is_x86_feature_detected!("avx512bw")
                && std::arch::is_x86_feature_detected!("avx512vl")
                && std::arch::is_x86_feature_detected!("avx512dq")
            {
                sets.push(Isa(Set::Avx512));
            }
            if std::arch::is_x86_feature_detected!("avx2") {
                sets.push(Isa(Set::Avx2));
            }
        }
        sets.push(Isa::BASELINE);
        sets
    }

    /// The best that this machine has; looked up once.
    pub fn detect() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Isa::available()[0])
    }

    /// For logs: "avx512", "avx2", "neon", "sse2" or "baseline".
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            Set::Baseline if cfg!(target_arch = "aarch64") => "neon",
            Set::Baseline if cfg!(target_arch = "x86_64") => "sse2",
            Set::Baseline => "baseline",
        }
    }

    /// Runs `work`, compiled for this set: `work.run()` must be `#[inline(always)]`.
    #[inline]
    pub fn run<W: Work>(self, work: W) -> W::Output {
        match self.0 {
            // SAFETY: this value exists because the CPU said that it has these instructions.
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => unsafe { avx512(work) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => unsafe { avx2(work) },
            Set::Baseline => work.run(),
        }
    }
}

/// A loop that is compiled once for each set of instructions.
pub trait Work {
    /// What it gives back.
    type Output;
    /// The loop. It and all that it calls must be `#[inline(always)]`: a call that stays a call is
    /// compiled for the baseline.
    fn run(self) -> Self::Output;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2")]
fn avx512<W: Work>(work: W) -> W::Output {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2<W: Work>(work: W) -> W::Output {
    work.run()
}
