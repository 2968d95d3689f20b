//! Mistakes that were made once, for tests that must find them: they are built into no release, only
//! where the feature `faults` is on, and each is made only while a test has [`put`] it back.

/// One of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Messages are cut wherever a packet or chunk is full.
    AnyCut,
    /// Bytes are copied in any order into memory that is read meanwhile.
    AnyOrder,
    /// The kernel copies into memory that is read meanwhile.
    ByKernel,
    /// A message counts as received when a packet of it is missing.
    Unfinished,
}

#[cfg(feature = "faults")]
static MADE: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);

/// Whether it is to be made.
#[inline]
pub fn is(fault: Fault) -> bool {
    #[cfg(feature = "faults")]
    {
        let made = MADE.load(std::sync::atomic::Ordering::Relaxed);
        made >> fault as u8 & 1 == 1
    }
    #[cfg(not(feature = "faults"))]
    {
        let _ = fault;
        false
    }
}

/// Makes these, and no others, in this process.
#[cfg(feature = "faults")]
pub fn put(faults: &[Fault]) {
    let made = faults
        .iter()
        .fold(0, |made, fault| made | 1 << *fault as u8);
    MADE.store(made, std::sync::atomic::Ordering::Relaxed);
}
