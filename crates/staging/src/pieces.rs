//! How a collective is cut into pieces, and in which order they cross: the same at both ends, so that no
//! piece carries a number.

/// Bytes of the smallest piece: below, calls cost more than they hide.
const LEAST_PIECE: usize = 1 << 20;
/// A message is cut into this many pieces, where they are not too small or too large, so that the
/// copies at both ends overlap the network. A piece costs a host's thread, the one that computes
/// gradients, five calls of the driver; the copies are much faster than the network.
const PIECES: usize = 4;

/// A part of a message that crosses at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Bytes.
    pub(crate) length: usize,
    /// From or to whom; `None`: to all.
    pub(crate) peer: Option<u32>,
}

/// Where a piece is in the caller's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) piece: Piece,
    /// Bytes from the payload's or the result's start.
    pub(crate) offset: usize,
}

/// Which collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Everybody's `bytes` to everybody.
    Gather,
    /// Part `p` of `bytes` to rank `p`.
    Parts,
}

/// The pieces of one collective, in the order in which they cross.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Pieces {
    pub(crate) sends: Vec<Part>,
    pub(crate) receives: Vec<Part>,
}

impl Pieces {
    /// `bytes`: of what one rank has for another.
    pub(crate) fn new(kind: Kind, rank: u32, size: u32, bytes: usize, slot: usize) -> Pieces {
        let mut pieces = Pieces::default();
        let step = bytes.div_ceil(PIECES).next_multiple_of(4096);
        let step = step.max(LEAST_PIECE).min(slot);
        // Each begins with its right neighbour, so that not all send to one at once.
        let others = || (1..size).map(move |distance| (rank + distance) % size);
        let sources = || (1..size).map(move |distance| (rank + size - distance) % size);
        for start in (0..bytes).step_by(step) {
            let length = step.min(bytes - start);
            let part = |peer: Option<u32>, offset| Part {
                piece: Piece { length, peer },
                offset,
            };
            match kind {
                Kind::Gather => pieces.sends.push(part(None, start)),
                Kind::Parts => pieces
                    .sends
                    .extend(others().map(|peer| part(Some(peer), peer as usize * bytes + start))),
            }
            let from = sources().map(|peer| part(Some(peer), peer as usize * bytes + start));
            pieces.receives.extend(from);
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_sends_another_receives() {
        for kind in [Kind::Gather, Kind::Parts] {
            for (size, bytes, slot) in [
                (2, 0, 64),
                (2, 1, 1 << 20),
                (3, 5 << 20, 1 << 20),
                (5, 3_000_001, 1 << 22),
            ] {
                let all: Vec<Pieces> = (0..size)
                    .map(|rank| Pieces::new(kind, rank, size, bytes, slot))
                    .collect();
                for from in 0..size {
                    for to in (0..size).filter(|to| *to != from) {
                        let sent: Vec<usize> = all[from as usize]
                            .sends
                            .iter()
                            .filter(|part| part.piece.peer.is_none_or(|peer| peer == to))
                            .map(|part| part.piece.length)
                            .collect();
                        let received: Vec<&Part> = all[to as usize]
                            .receives
                            .iter()
                            .filter(|part| part.piece.peer == Some(from))
                            .collect();
                        let lengths: Vec<usize> =
                            received.iter().map(|part| part.piece.length).collect();
                        assert_eq!(sent, lengths);
                        assert_eq!(sent.iter().sum::<usize>(), bytes);
                        let mut offset = from as usize * bytes;
                        for part in received {
                            assert_eq!(part.offset, offset);
                            assert!(part.piece.length <= slot);
                            offset += part.piece.length;
                        }
                    }
                }
            }
        }
    }
}
