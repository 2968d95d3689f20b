//! The collectives, by a mesh. `members` are the global ranks that take part, in order; this rank is
//! number `place` of them. All members call the same one with the same lengths.
//!
//! - Small all-reduces and broadcasts go by a tree: log2(n) messages, one after the other.
//! - Large ones go around a ring: every member sends about twice (all-reduce) or once (the others) the
//!   data, which is the least that can be.

use crate::mesh::{Lost, Mesh};
use crate::number;

/// Up to this many bytes a message costs more by its delay than by its length.
const SMALL: usize = 16 << 10;
/// A broadcast goes on to the next member in pieces of this size.
const STREAMED: usize = 256 << 10;

/// Some ranks of a mesh, as seen by one of them.
pub struct Members<'a> {
    /// The connections.
    pub mesh: &'a Mesh,
    /// Global ranks.
    pub ranks: &'a [usize],
    /// This rank's index in them.
    pub place: usize,
}

impl Members<'_> {
    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn at(&self, index: usize) -> usize {
        self.ranks[index % self.size()]
    }

    fn next(&self) -> usize {
        self.at(self.place + 1)
    }

    fn before(&self) -> usize {
        self.at(self.place + self.size() - 1)
    }

    fn send(&self, to: usize, data: &[u8]) -> Result<(), Lost> {
        self.mesh.exchange((to, data), (to, &mut []))
    }

    fn receive(&self, from: usize, data: &mut [u8]) -> Result<(), Lost> {
        self.mesh.exchange((from, &[]), (from, data))
    }

    /// Each element of `data` becomes the reduction of all members'.
    ///
    /// # Errors
    /// See [`Lost`].
    pub fn all_reduce(&self, data: &mut [u8], dtype: u8, op: u8) -> Result<(), Lost> {
        let size = self.size();
        if size == 1 || data.is_empty() {
            return Ok(());
        }
        if data.len() <= SMALL {
            return self.doubling(data, dtype, op);
        }
        let element = number::size(dtype);
        let parts = even(data.len() / element, size, element);
        self.ring_reduce(data, &parts, dtype, op)?;
        self.ring_gather(data, &parts)
    }

    /// Recursive doubling. Beyond a power of two, members hand their data to a partner first, and get
    /// the result from it.
    fn doubling(&self, data: &mut [u8], dtype: u8, op: u8) -> Result<(), Lost> {
        let size = self.size();
        let power = 1 << size.ilog2();
        if self.place >= power {
            let partner = self.at(self.place - power);
            self.send(partner, data)?;
            return self.receive(partner, data);
        }
        let extra = self.place + power;
        let mut theirs = vec![0; data.len()];
        if extra < size {
            self.receive(self.at(extra), &mut theirs)?;
            number::reduce(dtype, op, data, &theirs);
        }
        let mut distance = 1;
        while distance < power {
            let partner = self.place ^ distance;
            let peer = self.at(partner);
            self.mesh.exchange((peer, data), (peer, &mut theirs))?;
            // In the same order on both sides, so that both get the same bits.
            if partner < self.place {
                data.swap_with_slice(&mut theirs);
            }
            number::reduce(dtype, op, data, &theirs);
            distance *= 2;
        }
        if extra < size {
            self.send(self.at(extra), data)?;
        }
        Ok(())
    }

    /// After it this member's part (number `place` of `parts`) is reduced.
    pub(crate) fn ring_reduce(
        &self,
        data: &mut [u8],
        parts: &[(usize, usize)],
        dtype: u8,
        op: u8,
    ) -> Result<(), Lost> {
        let size = self.size();
        let element = number::size(dtype);
        for step in 1..size {
            let (out, into) = (
                parts[(self.place + size - step) % size],
                parts[(self.place + 2 * size - step - 1) % size],
            );
            let (sent, taken) = two(data, out, into);
            self.mesh.exchange_with(
                (self.next(), sent),
                self.before(),
                taken.len(),
                element,
                &mut |start, piece| {
                    number::reduce(dtype, op, &mut taken[start..start + piece.len()], piece);
                },
            )?;
        }
        Ok(())
    }

    /// Each member has its own part; after it all have all.
    pub(crate) fn ring_gather(
        &self,
        data: &mut [u8],
        parts: &[(usize, usize)],
    ) -> Result<(), Lost> {
        let size = self.size();
        for step in 0..size - 1 {
            let (out, into) = (
                parts[(self.place + size - step) % size],
                parts[(self.place + 2 * size - step - 1) % size],
            );
            let (sent, taken) = two(data, out, into);
            self.mesh
                .exchange((self.next(), sent), (self.before(), taken))?;
        }
        Ok(())
    }

    /// Each member has its part of `from`; after it each has its part of `to`. Parts of one list do not
    /// overlap; what is in a member's part of both stays where it is.
    pub(crate) fn hand_over(
        &self,
        data: &mut [u8],
        from: &[(usize, usize)],
        to: &[(usize, usize)],
    ) -> Result<(), Lost> {
        let size = self.size();
        for step in 1..size {
            let (next, before) = (
                (self.place + step) % size,
                (self.place + size - step) % size,
            );
            let out = common(from[self.place], to[next]);
            let into = common(from[before], to[self.place]);
            let (sent, taken) = two(data, out, into);
            self.mesh
                .exchange((self.at(next), sent), (self.at(before), taken))?;
        }
        Ok(())
    }

    /// `parts`: bytes of each member's part of `data`, one after the other. Each member's own part is
    /// reduced after it; the others are garbage.
    ///
    /// # Errors
    /// See [`Lost`].
    pub fn reduce_scatter(
        &self,
        data: &mut [u8],
        parts: &[usize],
        dtype: u8,
        op: u8,
    ) -> Result<(), Lost> {
        self.ring_reduce(data, &ends(parts), dtype, op)
    }

    /// `parts`: bytes of each member's part of `data`; each has put in its own.
    ///
    /// # Errors
    /// See [`Lost`].
    pub fn all_gather(&self, data: &mut [u8], parts: &[usize]) -> Result<(), Lost> {
        self.ring_gather(data, &ends(parts))
    }

    /// `data` becomes that of member `root`.
    ///
    /// # Errors
    /// See [`Lost`].
    pub fn broadcast(&self, data: &mut [u8], root: usize) -> Result<(), Lost> {
        let size = self.size();
        if size == 1 || data.is_empty() {
            return Ok(());
        }
        // As if the root was member 0.
        let place = (self.place + size - root) % size;
        let rank = |place: usize| self.at(place + root);
        if data.len() <= SMALL {
            let mut mask = 1;
            while mask < size {
                if place & mask != 0 {
                    self.receive(rank(place - mask), data)?;
                    break;
                }
                mask *= 2;
            }
            mask /= 2;
            while mask > 0 {
                if place + mask < size && place & (2 * mask - 1) == 0 {
                    self.send(rank(place + mask), data)?;
                }
                mask /= 2;
            }
            return Ok(());
        }
        // A chain: while one piece comes, the one before goes on.
        let (first, last) = (place == 0, place + 1 == size);
        let (before, next) = (rank(place + size - 1), rank(place + 1));
        if first {
            return self.send(next, data);
        }
        let mut had = 0;
        let mut start = 0;
        while start < data.len() {
            let end = data.len().min(start + STREAMED);
            let (done, coming) = data.split_at_mut(start);
            let out = if last { &[][..] } else { &done[had..] };
            self.mesh
                .exchange((next, out), (before, &mut coming[..end - start]))?;
            (had, start) = (start, end);
        }
        if last {
            return Ok(());
        }
        self.send(next, &data[had..])
    }

    /// Sends a part of `out` to each member and gets one of each: `sent` and `got` are their bytes.
    ///
    /// # Errors
    /// See [`Lost`].
    pub fn all_to_all(
        &self,
        out: &[u8],
        sent: &[usize],
        into: &mut [u8],
        got: &[usize],
    ) -> Result<(), Lost> {
        let (sent, got) = (ends(sent), ends(got));
        let own = |parts: &[(usize, usize)], index: usize| parts[index].0..parts[index].1;
        into[own(&got, self.place)].copy_from_slice(&out[own(&sent, self.place)]);
        let size = self.size();
        for step in 1..size {
            let (to, from) = (
                (self.place + step) % size,
                (self.place + size - step) % size,
            );
            self.mesh.exchange(
                (self.ranks[to], &out[own(&sent, to)]),
                (self.ranks[from], &mut into[own(&got, from)]),
            )?;
        }
        Ok(())
    }

    /// Two members swap data of the same length.
    ///
    /// # Errors
    /// See [`Lost`].
    pub fn swap(&self, partner: usize, out: &[u8], into: &mut [u8]) -> Result<(), Lost> {
        let peer = self.at(partner);
        self.mesh.exchange((peer, out), (peer, into))
    }

    /// Whether any member's `flag` is up.
    ///
    /// # Errors
    /// See [`Lost`].
    pub fn any(&self, flag: bool) -> Result<bool, Lost> {
        let mut data = [u8::from(flag)];
        self.all_reduce(&mut data, 0, number::MAX)?;
        Ok(data[0] != 0)
    }
}

/// `count` elements in `size` parts of nearly the same length: where each begins and ends, in bytes.
pub(crate) fn even(count: usize, size: usize, element: usize) -> Vec<(usize, usize)> {
    let at = |index: usize| count * index / size * element;
    (0..size).map(|index| (at(index), at(index + 1))).collect()
}

fn ends(lengths: &[usize]) -> Vec<(usize, usize)> {
    let mut end = 0;
    lengths
        .iter()
        .map(|length| {
            end += length;
            (end - length, end)
        })
        .collect()
}

/// What lies in both.
fn common(a: (usize, usize), b: (usize, usize)) -> (usize, usize) {
    let (start, end) = (a.0.max(b.0), a.1.min(b.1));
    if start < end { (start, end) } else { (0, 0) }
}

/// Two parts of `data` that do not overlap: the first to read, the second to write.
fn two(data: &mut [u8], out: (usize, usize), into: (usize, usize)) -> (&[u8], &mut [u8]) {
    if out.0 < into.0 || (out.0 == into.0 && out.1 <= into.0) {
        let (low, high) = data.split_at_mut(into.0);
        (&low[out.0..out.1], &mut high[..into.1 - into.0])
    } else {
        let (low, high) = data.split_at_mut(out.0);
        (&high[..out.1 - out.0], &mut low[into.0..into.1])
    }
}
