//! Memory that the kernel shares, cut into frames of one size: some for packets that come, and some for
//! packets that go. A socket has it for itself, or shares a [`Pool`] with others, of which the first frames
//! are lent to callers.
//!
//! # Who may touch a frame
//! A frame for sending is a [`Frame`], of which there is one: whoever has it may write, and putting it
//! into the ring gives it up. It comes back by the completion ring. A frame for receiving is read
//! between its descriptor's arrival and its way back to the fill ring, which is inside of one call of
//! [`Socket::receive`](crate::socket::Socket::receive). With a pool it may also be *kept*: then it is the
//! caller's, who reads it and gives it back. There are more frames for receiving than the fill ring has places
//! then: the rest is *spare*.
//!
//! Spare frames go into the fill ring in the order of their addresses, round and round. So packets that come behind
//! each other mostly lie behind each other too, whatever was kept before and in which order it came back, and a
//! device takes many out in one copy.

#![allow(unsafe_code, reason = "frames are in memory that the kernel shares")]

use std::io;

use crate::pool::{self, LENT_HEADERS, Part, Pool};
use crate::program::STAMP;
use crate::sys::Mapping;

/// One frame for sending, and the right to write it.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame(u32);

#[derive(Debug)]
enum Memory {
    Own(Mapping),
    Pool(Pool),
}

impl Memory {
    fn mapping(&self) -> &Mapping {
        match self {
            Memory::Own(mapping) => mapping,
            Memory::Pool(pool) => pool.mapping(),
        }
    }
}

/// The memory of one socket.
#[derive(Debug)]
pub struct Umem {
    memory: Memory,
    size: usize,
    /// Its first frame for receiving, the first for sending, and the end of those.
    first: u32,
    receiving: u32,
    all: u32,
    free: Vec<Frame>,
    /// Lent frames of a pool that this socket has claimed.
    claimed: Vec<bool>,
    /// Frames for receiving that a caller has.
    kept: Vec<bool>,
    /// And those that nobody has, how many they are, and where the next one is looked for.
    spare: Vec<bool>,
    spares: u32,
    next: usize,
    /// Which frames for sending are out: what comes back twice is not taken twice.
    out: Vec<bool>,
    /// Why there are no huge pages; `None`: there are.
    pub not_huge: Option<io::Error>,
}

impl Umem {
    /// `receiving` and `sending` frames of `size` bytes, in huge pages where the kernel has them free.
    ///
    /// # Errors
    /// Errors of mmap(2).
    pub fn new(size: usize, receiving: u32, sending: u32) -> io::Result<Umem> {
        let (mapping, not_huge) = pool::map(size * (receiving + sending) as usize)?;
        let mut umem = Self::over(Memory::Own(mapping), size, (0, receiving, sending), 0);
        umem.not_huge = not_huge;
        Ok(umem)
    }

    /// A umem over a part of a pool, whose memory is there. `filled` frames for receiving go into the fill ring first.
    pub fn of(part: &Part, filled: u32) -> Umem {
        let pool = part.pool.clone();
        let (receiving, sending) = (pool.receiving(), pool.sending());
        let (size, lent) = (pool.size(), pool.lent());
        let first = lent + part.place * (receiving + sending);
        let not_huge = pool.not_huge();
        let mut umem = Self::over(
            Memory::Pool(pool),
            size,
            (first, receiving, sending),
            lent as usize,
        );
        umem.next = filled as usize;
        if let Some(spare) = umem.spare.get_mut(umem.next..) {
            spare.fill(true);
            umem.spares = spare.len() as u32;
        }
        umem.not_huge = not_huge;
        umem
    }

    fn over(
        memory: Memory,
        size: usize,
        (first, receiving, sending): (u32, u32, u32),
        lent: usize,
    ) -> Umem {
        let (from, all) = (first + receiving, first + receiving + sending);
        Umem {
            memory,
            size,
            first,
            receiving: from,
            all,
            free: (from..all).rev().map(Frame).collect(),
            claimed: vec![false; lent],
            kept: vec![false; receiving as usize],
            spare: vec![false; receiving as usize],
            spares: 0,
            next: 0,
            out: vec![false; sending as usize],
            not_huge: None,
        }
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        self.memory.mapping()
    }

    /// Bytes of a frame.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Addresses of all frames for receiving.
    pub fn receiving(&self) -> impl Iterator<Item = u64> + use<> {
        let size = self.size as u64;
        (u64::from(self.first)..u64::from(self.receiving)).map(move |at| at * size)
    }

    /// The frame for receiving that this address is in.
    pub fn frame_of(&self, address: u64) -> Option<u64> {
        let at = address / self.size as u64;
        let ours = u64::from(self.first)..u64::from(self.receiving);
        ours.contains(&at).then_some(at * self.size as u64)
    }

    /// The place of a frame for receiving, by any address in it.
    fn place(&self, address: u64) -> Option<usize> {
        let frame = self.frame_of(address)? / self.size as u64;
        Some((frame - u64::from(self.first)) as usize)
    }

    /// The caller keeps a frame for receiving that has come.
    pub fn keep(&mut self, frame: u64) {
        if let Some(place) = self.place(frame) {
            self.kept[place] = true;
        }
    }

    /// A frame that was kept, by any address in it, is spare. `false`: it was not kept.
    pub fn give_back(&mut self, address: u64) -> bool {
        let Some(place) = self.place(address) else {
            return false;
        };
        let was = std::mem::take(&mut self.kept[place]);
        if was {
            self.set_aside(address);
        }
        was
    }

    /// A frame for receiving that has come, and that nobody keeps, is spare.
    pub fn set_aside(&mut self, address: u64) {
        if let Some(place) = self.place(address)
            && !std::mem::replace(&mut self.spare[place], true)
        {
            self.spares += 1;
        }
    }

    /// The next spare frame, which is spare no more.
    pub fn take_spare(&mut self) -> Option<u64> {
        if self.spares == 0 {
            return None;
        }
        let (before, after) = self.spare.split_at(self.next);
        let found = after.iter().position(|spare| *spare);
        let place = match found {
            Some(at) => self.next + at,
            None => before.iter().position(|spare| *spare)?,
        };
        self.spare[place] = false;
        self.spares -= 1;
        self.next = (place + 1) % self.spare.len();
        Some((u64::from(self.first) + place as u64) * self.size as u64)
    }

    /// Copies bytes into a spare frame, which is kept then: where they are. `None`: there is none, or they are too
    /// many.
    pub fn copy_in(&mut self, bytes: &[u8]) -> Option<usize> {
        if bytes.len() > self.size - LENT_HEADERS {
            return None;
        }
        let frame = self.take_spare()?;
        self.keep(frame);
        // Safety: a spare frame is inside of the mapping, and neither the kernel nor a caller has it; the bytes
        // are not in it, and fit, as was just seen.
        unsafe {
            let to = self.mapping().start().add(frame as usize + LENT_HEADERS);
            to.copy_from_nonoverlapping(std::ptr::NonNull::from(bytes).cast::<u8>(), bytes.len());
            Some(to.as_ptr() as usize)
        }
    }

    /// The room for headers of a lent frame, which is claimed. `None`: a socket has it, or it is none.
    pub fn claim(&mut self, frame: u32) -> Option<&mut [u8]> {
        let Memory::Pool(pool) = &self.memory else {
            return None;
        };
        if !pool.claim(frame) {
            return None;
        }
        self.claimed[frame as usize] = true;
        let start = frame as usize * self.size;
        // Safety: the frame is one of the first of the mapping, and as claims are atomics nobody else writes its
        // first bytes before it is let go of, nor does the kernel read them. Callers use what follows.
        unsafe {
            let start = self.mapping().start().add(start);
            Some(std::slice::from_raw_parts_mut(start.as_ptr(), LENT_HEADERS))
        }
    }

    /// A lent frame that was claimed is not with the kernel (any more).
    pub fn let_go(&mut self, frame: u32) -> bool {
        let claimed = self.claimed.get_mut(frame as usize);
        let was = claimed.is_some_and(std::mem::take);
        if let (true, Memory::Pool(pool)) = (was, &self.memory) {
            pool.let_go(frame);
        }
        was
    }

    /// Lets go of all lent frames: the card is gone, and gives none back. Should it come back and send one after
    /// all, its receiver has seen that packet's number, or its tag is wrong.
    pub fn let_all_go(&mut self) {
        for frame in 0..self.claimed.len() as u32 {
            self.let_go(frame);
        }
    }

    /// Bytes that the kernel has written: inside of one frame for receiving, else `None`.
    ///
    /// The caller has the descriptor and has not given the frame back.
    pub(crate) fn received(&self, address: u64, length: u32) -> Option<&[u8]> {
        let frame = self.frame_of(address)?;
        let end = address.checked_add(u64::from(length))?;
        if end > frame + self.size as u64 {
            return None;
        }
        // Safety: the range is inside of the mapping, as was just seen. The kernel does not write it before
        // the frame is in the fill ring again, and nobody else has a reference that writes to it.
        Some(unsafe {
            let start = self.mapping().start().add(address as usize);
            std::slice::from_raw_parts(start.as_ptr(), length as usize)
        })
    }

    /// The word before a packet that came, which is zero from then on: it says when, if the program was let
    /// write it.
    ///
    /// The caller has the descriptor and has not given the frame back.
    pub(crate) fn stamp(&mut self, address: u64) -> u64 {
        let before = address.wrapping_sub(STAMP as u64);
        if self.frame_of(before).is_none() || self.frame_of(before) != self.frame_of(address) {
            return 0;
        }
        // Safety: the word is inside of a frame for receiving, as was just seen, which the kernel does not write
        // before it is in the fill ring again. Nobody has a reference to what is before a packet.
        unsafe {
            let place = self.mapping().start().add(before as usize).cast::<u64>();
            let stamp = place.read_unaligned();
            place.write_unaligned(0);
            stamp
        }
    }

    /// A frame to write; `None`: all are on their way.
    pub fn take(&mut self) -> Option<Frame> {
        self.free.pop()
    }

    /// A frame that is not sent.
    pub fn give(&mut self, frame: Frame) {
        self.free.push(frame);
    }

    /// Frames that may be taken.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// The bytes of a frame.
    pub fn bytes(&mut self, frame: &Frame) -> &mut [u8] {
        let start = frame.0 as usize * self.size;
        // Safety: frames are made in `new` and `completed` for places inside of the mapping. There is one
        // of each, so the kernel has not got it, and `self` is borrowed for as long.
        unsafe {
            let start = self.mapping().start().add(start);
            std::slice::from_raw_parts_mut(start.as_ptr(), self.size)
        }
    }

    /// A frame goes to the kernel: its address.
    pub fn sent(&mut self, frame: Frame) -> u64 {
        self.out[(frame.0 - self.receiving) as usize] = true;
        u64::from(frame.0) * self.size as u64
    }

    /// The kernel has sent what is at this address. `false`: it had no such frame.
    pub fn completed(&mut self, address: u64) -> bool {
        let at = address / self.size as u64;
        if let Some(lent) = u32::try_from(at)
            .ok()
            .filter(|at| (*at as usize) < self.claimed.len())
        {
            return self.let_go(lent);
        }
        let receiving = u64::from(self.receiving);
        if at < receiving || at >= u64::from(self.all) {
            return false;
        }
        let was = std::mem::take(&mut self.out[(at - receiving) as usize]);
        if was {
            self.free.push(Frame(at as u32));
        }
        was
    }
}

impl Drop for Umem {
    fn drop(&mut self) {
        self.let_all_go();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lent_frames_are_one_sockets_at_a_time() {
        let pool = Pool::new(2048, 3, 2, (4, 2)).unwrap();
        let part = |place| Part {
            pool: pool.clone(),
            place,
        };
        let (mut one, mut other) = (Umem::of(&part(0), 2), Umem::of(&part(1), 2));
        assert_eq!(one.claim(1).unwrap().len(), LENT_HEADERS);
        assert!(one.claim(1).is_none() && other.claim(1).is_none() && one.claim(3).is_none());
        assert!(!other.completed(2048), "of another socket");
        assert!(one.completed(2048 + 128) && !one.completed(2048));
        assert!(other.claim(1).is_some());
        assert!(other.claim(2).is_some());
        drop(other);
        assert!(one.claim(1).is_some() && one.claim(2).is_some());
        one.let_all_go();
        assert!(one.claim(1).is_some());
        // Frames of its own are behind them.
        let own = one.take().unwrap();
        assert_eq!(one.sent(own), (3 + 4) * 2048);
        assert!(one.completed((3 + 4) * 2048));
    }

    #[test]
    fn what_is_kept_is_replaced_and_given_back_once() {
        let pool = Pool::new(2048, 1, 2, (4, 2)).unwrap();
        let mut umem = Umem::of(&Part { pool, place: 1 }, 3);
        let first = 2048 * (1 + 6);
        let frames: Vec<u64> = umem.receiving().collect();
        assert_eq!(frames[0], first);
        umem.keep(frames[0]);
        assert_eq!(umem.take_spare(), Some(frames[3]));
        umem.keep(frames[1]);
        assert_eq!(umem.take_spare(), None);
        assert_eq!(umem.copy_in(b"abc"), None);
        assert!(umem.give_back(frames[1] + 344) && umem.give_back(frames[0]));
        assert!(!umem.give_back(frames[0]));
        assert!(!umem.give_back(frames[2]), "the kernel has it");
        assert!(!umem.give_back(0));
        umem.set_aside(frames[3]);
        // Round and round, by address.
        assert_eq!(umem.take_spare(), Some(frames[0]));
        umem.set_aside(frames[0]);
        assert_eq!(umem.take_spare(), Some(frames[1]));
        assert_eq!(umem.take_spare(), Some(frames[3]));
        assert_eq!(umem.copy_in(&[0; 2000]), None);
        let at = umem.copy_in(b"abc").unwrap();
        let start = umem.mapping().start().as_ptr() as usize;
        assert_eq!(at, start + frames[0] as usize + LENT_HEADERS);
        assert_eq!(umem.received(frames[0] + 128, 3), Some(&b"abc"[..]));
        assert!(umem.give_back((at - start) as u64));
        assert_eq!(umem.take_spare(), Some(frames[0]));
    }

    #[test]
    fn a_frame_is_out_once() {
        let mut umem = Umem::new(2048, 4, 2).unwrap();
        let (one, two) = (umem.take().unwrap(), umem.take().unwrap());
        assert_eq!(umem.take(), None);
        umem.bytes(&one).fill(1);
        umem.bytes(&two).fill(2);
        assert_eq!(umem.bytes(&one), [1; 2048]);
        let address = umem.sent(one);
        assert_eq!(address, 4 * 2048);
        assert!(umem.completed(address + 100), "any address in the frame");
        assert!(!umem.completed(address), "a second time");
        assert!(!umem.completed(0) && !umem.completed(6 * 2048) && !umem.completed(u64::MAX));
        umem.give(two);
        assert_eq!(umem.free(), 2);
    }

    #[test]
    fn a_stamp_is_read_once_and_inside_of_a_frame_alone() {
        let mut umem = Umem::new(2048, 4, 2).unwrap();
        // Safety: nobody else has this memory.
        unsafe {
            let place = umem.mapping().start().add(2048 + 248);
            place.cast::<u64>().write_unaligned(77);
        }
        assert_eq!((umem.stamp(2048 + 256), umem.stamp(2048 + 256)), (77, 0));
        for outside in [0, 7, 2048, 2048 + 7, 4 * 2048 + 256, u64::MAX] {
            assert_eq!(umem.stamp(outside), 0, "{outside}");
        }
    }

    #[test]
    fn what_is_received_is_inside_of_one_frame() {
        let umem = Umem::new(2048, 4, 2).unwrap();
        assert_eq!(umem.receiving().collect::<Vec<_>>(), [0, 2048, 4096, 6144]);
        assert_eq!(umem.received(256, 1792).unwrap().len(), 1792);
        assert!(umem.received(256, 1793).is_none());
        assert!(
            umem.received(4 * 2048, 1).is_none(),
            "of a frame for sending"
        );
        assert!(umem.received(u64::MAX, 2).is_none());
        assert_eq!(umem.frame_of(2048 + 256), Some(2048));
    }
}
