//! Memory that the kernel shares, cut into frames of one size. The first part of them is for packets
//! that come, the rest for packets that go.
//!
//! # Who may touch a frame
//! A frame for sending is a [`Frame`], of which there is one: whoever has it may write, and putting it
//! into the ring gives it up. It comes back by the completion ring. A frame for receiving is read
//! between its descriptor's arrival and its way back to the fill ring, which is inside of one call of
//! [`Socket::receive`](crate::socket::Socket::receive).

#![allow(unsafe_code, reason = "frames are in memory that the kernel shares")]

use std::io;

use crate::program::STAMP;
use crate::sys::Mapping;

const HUGE: usize = 2 << 20;

/// One frame for sending, and the right to write it.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame(u32);

/// The memory of one socket.
#[derive(Debug)]
pub struct Umem {
    mapping: Mapping,
    size: usize,
    receiving: u32,
    all: u32,
    free: Vec<Frame>,
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
        let all = receiving + sending;
        let length = (size * all as usize).next_multiple_of(HUGE);
        let (mapping, not_huge) = match Mapping::own(length, true) {
            Ok(mapping) => (mapping, None),
            Err(error) => (Mapping::own(length, false)?, Some(error)),
        };
        Ok(Umem {
            mapping,
            size,
            receiving,
            all,
            free: (receiving..all).rev().map(Frame).collect(),
            out: vec![false; sending as usize],
            not_huge,
        })
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Bytes of a frame.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Addresses of all frames for receiving.
    pub fn receiving(&self) -> impl Iterator<Item = u64> + use<> {
        let size = self.size as u64;
        (0..u64::from(self.receiving)).map(move |at| at * size)
    }

    /// The frame for receiving that this address is in.
    pub fn frame_of(&self, address: u64) -> Option<u64> {
        let at = address / self.size as u64;
        (at < u64::from(self.receiving)).then_some(at * self.size as u64)
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
            let start = self.mapping.start().add(address as usize);
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
            let start = self.mapping.start().add(start);
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

#[cfg(test)]
mod tests {
    use super::*;

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
