//! Weights of 16 bits as differences to those that the receiver holds; the definition is in
//! `evener.comm.codecs.differences` (Python), whose reference gives the same bits.
//!
//! A tile of [`TILE`] weights is coded by [`LANES`] lanes into one stream of words. The coder follows
//! the decoder: where a lane's decoder takes its next word, that word gets the next place in the
//! stream.

use rayon::prelude::*;

const LANES: usize = 32;
const STEPS: usize = 256;
/// Weights that share a header.
pub const TILE: usize = LANES * STEPS;
/// Weights of a lane that share a bit where it is a grouped tile's.
const GROUP: usize = 4;
const ESCAPE: u32 = 12;
const LOWEST: i32 = -3;
const HIGHEST: i32 = 1;

/// Where the exponent lies in a weight's 16 bits.
#[derive(Debug, Clone, Copy)]
pub struct Exponent {
    /// Bits below it.
    pub shift: u32,
    /// As many ones as it has bits.
    pub mask: u32,
}

impl Exponent {
    fn of(self, weight: u16) -> i32 {
        ((u32::from(weight) >> self.shift) & self.mask).cast_signed()
    }
}

/// Why a call was refused. Nothing has been written when [`plan`] and [`write`] return it; weights
/// that [`read`] was given are then of no use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DifferenceError {
    /// Slices that do not belong together.
    #[error(
        "{new} new weights, {old} old ones and {headers} headers: need as many, and one header per tile of {TILE}"
    )]
    Lengths {
        /// New weights.
        new: usize,
        /// Old weights.
        old: usize,
        /// Headers.
        headers: usize,
    },
    /// A message that was cut, or is none.
    #[error("a message of {words} words ends within tile {tile}")]
    Cut {
        /// Words that are there.
        words: usize,
        /// The tile that lacks some.
        tile: usize,
    },
}

fn check(new: usize, old: usize, headers: usize) -> Result<(), DifferenceError> {
    if new == old && headers == old.div_ceil(TILE) {
        Ok(())
    } else {
        Err(DifferenceError::Lengths { new, old, headers })
    }
}

fn ordered(bits: u16) -> u16 {
    bits ^ if bits >= 0x8000 { 0xffff } else { 0x8000 }
}

fn zigzag(new: u16, old: u16) -> u32 {
    let distance = ordered(new).wrapping_sub(ordered(old)).cast_signed();
    u32::from(((distance << 1) ^ (distance >> 15)).cast_unsigned())
}

fn apply(old: u16, z: u32) -> u16 {
    let distance = (z >> 1) ^ (z & 1).wrapping_neg();
    let number = ordered(old).wrapping_add(distance as u16);
    number ^ if number >= 0x8000 { 0x8000 } else { 0xffff }
}

fn parameter(chosen: i32, exponent: i32) -> u32 {
    (chosen - exponent).clamp(0, 15).cast_unsigned()
}

fn length(z: u32, k: u32) -> u32 {
    let q = z >> k;
    if q < ESCAPE {
        q + 1 + k
    } else if z == NONE {
        0
    } else {
        ESCAPE + 16
    }
}

/// Writes the headers of the message that turns `old` into `new`.
///
/// # Errors
/// [`DifferenceError::Lengths`].
pub fn plan(
    new: &[u16],
    old: &[u16],
    exponent: Exponent,
    headers: &mut [i32],
) -> Result<(), DifferenceError> {
    check(new.len(), old.len(), headers.len())?;
    headers
        .par_iter_mut()
        .zip(new.par_chunks(TILE).zip(old.par_chunks(TILE)))
        .for_each(|(header, (new, old))| *header = plan_tile(new, old, exponent));
    Ok(())
}

/// How a tile is coded: the low ten bits of its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Way {
    chosen: i32,
    grouped: bool,
}

impl Way {
    fn of(header: i32) -> Self {
        Self {
            chosen: header & 511,
            grouped: header & 512 != 0,
        }
    }

    fn header(self, words: u32) -> i32 {
        words.cast_signed() * 1024 + i32::from(self.grouped) * 512 + self.chosen
    }

    /// Whether a step of the optimizer is less than a unit of a weight with this exponent.
    fn rare(self, exponent: i32) -> bool {
        self.grouped && exponent > self.chosen
    }
}

/// A tile's distances, [`NONE`] past the last weight, and its old weights' exponents.
struct Tile {
    z: [u32; TILE],
    exponent: [i32; TILE],
}

/// No distance: it takes no bits.
const NONE: u32 = u32::MAX;

impl Tile {
    fn of(new: &[u16], old: &[u16], exponent: Exponent) -> Self {
        let mut found = Self {
            z: [NONE; TILE],
            exponent: [0; TILE],
        };
        for (at, (&n, &o)) in new.iter().zip(old).enumerate() {
            found.z[at] = zigzag(n, o);
            found.exponent[at] = exponent.of(o);
        }
        found
    }

    /// The header of the K and the kind with which the tile takes the fewest bits.
    fn plan(&self) -> i32 {
        let (mut count, mut sum) = (0_i64, 0_i64);
        for (&z, &exponent) in self.z.iter().zip(&self.exponent) {
            if z > 0 && z != NONE {
                count += 1;
                sum += i64::from(z.ilog2().cast_signed() + exponent);
            }
        }
        let middle = (sum / count.max(1)) as i32;
        let (mut best, mut header) = (u32::MAX, 0);
        for shift in LOWEST..=HIGHEST {
            let chosen = (middle + shift).max(0);
            let kinds = self.lanes(chosen);
            for (grouped, lanes) in [false, true].into_iter().zip(kinds) {
                let bits = lanes.iter().sum();
                if bits < best {
                    let words = lanes.iter().map(|bits| bits.div_ceil(32)).sum();
                    (best, header) = (bits, Way { chosen, grouped }.header(words));
                }
            }
        }
        header
    }

    /// Bits of each lane: plain, and grouped.
    fn lanes(&self, chosen: i32) -> [[u32; LANES]; 2] {
        let (mut plain, mut grouped) = ([0; LANES], [0; LANES]);
        for group in 0..STEPS / GROUP {
            for (lane, (plain, grouped)) in plain.iter_mut().zip(&mut grouped).enumerate() {
                let (mut all, mut of_rare) = (0, 0);
                let (mut flagged, mut moved) = (false, false);
                for step in 0..GROUP {
                    let at = (group * GROUP + step) * LANES + lane;
                    let (z, exponent) = (self.z[at], self.exponent[at]);
                    let bits = length(z, parameter(chosen, exponent));
                    let rare = exponent > chosen;
                    all += bits;
                    of_rare += if rare { bits } else { 0 };
                    flagged |= rare;
                    moved |= rare & (z > 0);
                }
                *plain += all;
                *grouped += all + u32::from(flagged) - if moved { 0 } else { of_rare };
            }
        }
        [plain, grouped]
    }

    /// Whether a rare weight of this group changed; none where there is no rare one.
    fn flag(&self, first: usize, way: Way) -> Option<bool> {
        if !way.grouped {
            return None;
        }
        let (mut flagged, mut moved) = (false, false);
        for step in 0..GROUP {
            let at = first + step * LANES;
            let rare = way.rare(self.exponent[at]);
            flagged |= rare;
            moved |= rare & (self.z[at] > 0);
        }
        flagged.then_some(moved)
    }
}

fn plan_tile(new: &[u16], old: &[u16], exponent: Exponent) -> i32 {
    if new == old {
        return 0;
    }
    Tile::of(new, old, exponent).plan()
}

#[derive(Clone, Copy)]
struct Lane {
    held: u64,
    filled: u32,
    /// The word that is being filled. Before the first one it is a full one that lies nowhere.
    here: Option<usize>,
}

/// Codes a tile into its words.
fn code_tile(new: &[u16], old: &[u16], way: Way, exponent: Exponent, out: &mut [i32]) {
    let tile = Tile::of(new, old, exponent);
    let mut taken = 0;
    let mut flags = [None; LANES];
    let mut lanes = [Lane {
        held: 0,
        filled: 32,
        here: None,
    }; LANES];
    for step in 0..STEPS {
        for (lane, state) in lanes.iter_mut().enumerate() {
            let at = step * LANES + lane;
            let (mut code, mut bits) = (0, 0);
            if step % GROUP == 0 {
                flags[lane] = tile.flag(at, way);
                if let Some(moved) = flags[lane] {
                    (code, bits) = (u64::from(moved), 1);
                }
            }
            let (z, exponent) = (tile.z[at], tile.exponent[at]);
            let k = parameter(way.chosen, exponent);
            let q = z >> k;
            let own = if q < ESCAPE {
                u64::from((1_u32 << q) - 1) | u64::from(z & ((1 << k) - 1)) << (q + 1)
            } else {
                u64::from((1_u32 << ESCAPE) - 1) | u64::from(z & 0xffff) << ESCAPE
            };
            // Factors: nobody could foretell the branch.
            let there = !((flags[lane] == Some(false)) & way.rare(exponent)) & (z != NONE);
            code |= (u64::from(there) * own) << bits;
            bits += u32::from(there) * length(z, k);
            state.held |= code << state.filled;
            state.filled += bits;
            if state.filled > 32 {
                if let Some(here) = state.here {
                    out[here] = (state.held as u32).cast_signed();
                }
                state.held >>= 32;
                state.filled -= 32;
                state.here = Some(taken);
                taken += 1;
            }
        }
    }
    for state in lanes {
        if let Some(here) = state.here {
            out[here] = (state.held as u32).cast_signed();
        }
    }
}

fn words_of(header: i32) -> usize {
    (header >> 10).max(0).cast_unsigned() as usize
}

/// Writes the message that [`plan`]'s `headers` begin: the headers, then each tile's words.
///
/// # Errors
/// [`DifferenceError::Lengths`], [`DifferenceError::Cut`] where `out` has no room.
pub fn write(
    new: &[u16],
    old: &[u16],
    exponent: Exponent,
    headers: &[i32],
    out: &mut [i32],
) -> Result<(), DifferenceError> {
    check(new.len(), old.len(), headers.len())?;
    let words = out.len();
    if words < headers.len() {
        return Err(DifferenceError::Cut { words, tile: 0 });
    }
    let (front, mut rest) = out.split_at_mut(headers.len());
    let mut parts = Vec::with_capacity(headers.len());
    for (tile, &header) in headers.iter().enumerate() {
        let Some((part, left)) = rest.split_at_mut_checked(words_of(header)) else {
            return Err(DifferenceError::Cut { words, tile });
        };
        parts.push(part);
        rest = left;
    }
    front.copy_from_slice(headers);
    parts
        .into_par_iter()
        .zip(headers)
        .zip(new.par_chunks(TILE).zip(old.par_chunks(TILE)))
        .filter(|((part, _), _)| !part.is_empty())
        .for_each(|((part, header), (new, old))| {
            code_tile(new, old, Way::of(*header), exponent, part);
        });
    Ok(())
}

/// Turns `weights`, the old ones, into the new ones.
///
/// # Errors
/// [`DifferenceError::Cut`] for a message that has fewer words than its headers say, or asks for
/// more.
pub fn read(
    message: &[i32],
    exponent: Exponent,
    weights: &mut [u16],
) -> Result<(), DifferenceError> {
    let words = message.len();
    let tiles = weights.len().div_ceil(TILE);
    let Some((headers, mut rest)) = message.split_at_checked(tiles) else {
        return Err(DifferenceError::Cut { words, tile: 0 });
    };
    let mut parts = Vec::with_capacity(tiles);
    for (tile, &header) in headers.iter().enumerate() {
        let Some((part, left)) = rest.split_at_checked(words_of(header)) else {
            return Err(DifferenceError::Cut { words, tile });
        };
        parts.push(part);
        rest = left;
    }
    let cut = parts
        .into_par_iter()
        .zip(headers)
        .zip(weights.par_chunks_mut(TILE))
        .enumerate()
        .filter(|(_, ((part, _), _))| !part.is_empty())
        .find_map_any(|(tile, ((part, header), weights))| {
            read_tile(part, Way::of(*header), exponent, weights)
                .is_none()
                .then_some(tile)
        });
    match cut {
        None => Ok(()),
        Some(tile) => Err(DifferenceError::Cut { words, tile }),
    }
}

fn read_tile(words: &[i32], way: Way, exponent: Exponent, weights: &mut [u16]) -> Option<()> {
    if way.grouped {
        read_lanes::<true>(words, way, exponent, weights)
    } else {
        read_lanes::<false>(words, way, exponent, weights)
    }
}

fn read_lanes<const GROUPED: bool>(
    words: &[i32],
    way: Way,
    exponent: Exponent,
    weights: &mut [u16],
) -> Option<()> {
    let mut taken = words.iter();
    let mut lanes = [(0_u64, 0_u32); LANES];
    let mut quiet = [false; LANES];
    for step in 0..STEPS {
        for (lane, (held, have)) in lanes.iter_mut().enumerate() {
            let at = step * LANES + lane;
            let Some(&weight) = weights.get(at) else {
                continue;
            };
            let flagged = GROUPED
                && step % GROUP == 0
                && (0..GROUP)
                    .filter_map(|step| weights.get(at + step * LANES))
                    .any(|&old| way.rare(exponent.of(old)));
            let old = exponent.of(weight);
            let k = parameter(way.chosen, old);
            let parse = |held: u64, quiet: &mut bool| {
                if flagged {
                    *quiet = held & 1 == 0;
                }
                let (z, bits) = one(held >> u32::from(flagged), k);
                // Factors: nobody could foretell the branch.
                let there = u32::from(!(GROUPED & *quiet & way.rare(old)));
                (there * z, there * bits + u32::from(flagged))
            };
            let mut found = parse(*held, &mut quiet[lane]);
            // What is not there reads as zeros, so a code that is cut says more bits than there are.
            if found.1 > *have {
                *held |= u64::from(taken.next()?.cast_unsigned()) << *have;
                *have += 32;
                found = parse(*held, &mut quiet[lane]);
            }
            *held >>= found.1;
            *have -= found.1;
            weights[at] = apply(weight, found.0);
        }
    }
    Some(())
}

/// The distance that `held` begins with, and its bits.
fn one(held: u64, k: u32) -> (u32, u32) {
    let q = held.trailing_ones().min(ESCAPE);
    if q < ESCAPE {
        let low = (held >> (q + 1)) as u32 & ((1 << k) - 1);
        ((q << k) | low, q + 1 + k)
    } else {
        ((held >> ESCAPE) as u32 & 0xffff, ESCAPE + 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KINDS: [Exponent; 2] = [
        Exponent {
            shift: 7,
            mask: 255,
        },
        Exponent {
            shift: 10,
            mask: 31,
        },
    ];

    fn there_and_back(new: &[u16], old: &[u16], exponent: Exponent) -> usize {
        let mut headers = vec![0; old.len().div_ceil(TILE)];
        plan(new, old, exponent, &mut headers).unwrap();
        let words: usize = headers.iter().map(|&h| words_of(h)).sum();
        let mut message = vec![-1; headers.len() + words];
        write(new, old, exponent, &headers, &mut message).unwrap();
        let mut weights = old.to_vec();
        read(&message, exponent, &mut weights).unwrap();
        assert_eq!(weights, new);
        words
    }

    #[test]
    fn every_pattern_after_every_exponent() {
        for exponent in KINDS {
            let new: Vec<u16> = (0..=u16::MAX).collect();
            let old: Vec<u16> = new.iter().map(|x| x.wrapping_mul(40_503)).collect();
            there_and_back(&new, &old, exponent);
            assert_eq!(there_and_back(&new, &new, exponent), 0);
        }
    }

    #[test]
    fn a_cut_message_is_refused() {
        let old: Vec<u16> = (0..20_000).collect();
        let new: Vec<u16> = old.iter().map(|x| x ^ 3).collect();
        let mut headers = [0; 3];
        plan(&new, &old, KINDS[0], &mut headers).unwrap();
        let words: usize = headers.iter().map(|&h| words_of(h)).sum();
        let mut message = vec![0; 3 + words];
        write(&new, &old, KINDS[0], &headers, &mut message).unwrap();
        let mut weights = old.clone();
        let cut = read(&message[..words], KINDS[0], &mut weights);
        assert!(matches!(cut, Err(DifferenceError::Cut { .. })));
        message[0] = (1 << 10) + 120;
        assert!(read(&message, KINDS[0], &mut weights).is_err());
    }

    proptest! {
        #[test]
        fn any_weights(
            pairs in prop::collection::vec((any::<u16>(), -40_i16..40, 0..4_u8), 0..20_000),
            kind in 0..2_usize,
        ) {
            let old: Vec<u16> = pairs.iter().map(|p| p.0).collect();
            let new: Vec<u16> = pairs
                .iter()
                .map(|&(old, by, jump)| match jump {
                    0 => old,
                    1 => !old,
                    _ => old.wrapping_add_signed(by),
                })
                .collect();
            there_and_back(&new, &old, KINDS[kind]);
        }
    }
}
