//! How large a packet may be: found by padded probes, as DPLPMTUD does it (RFC 8899), never by ICMP.
//!
//! Sizes are those that networks have, less 28 bytes for IPv4 and UDP (48 for IPv6): 1500, 3498 (the
//! largest with one page a packet on some cards), 9000, and what the port says its card takes. A probe
//! that is lost three times ends the search for some minutes; what a probe carried is nothing, so its
//! loss says nothing about congestion. If packets of a found size vanish while smaller ones come
//! through (a path moved behind a narrower link), [`Mtu::vanished`] goes back to the start.

use std::time::Duration;

/// Bytes that every path carries: 1280, the least of IPv6, less 48.
pub const LEAST: usize = 1232;
const SIZES: [usize; 7] = [1372, 1452, 1472, 3450, 3470, 8952, 8972];
const ATTEMPTS: u8 = 3;
const BETWEEN: Duration = Duration::from_millis(5);
/// After a search that ended below what the card takes.
const REST: Duration = Duration::from_secs(120);

/// The size of packets of one connection.
#[derive(Debug)]
pub struct Mtu {
    size: usize,
    /// What the card takes.
    most: usize,
    attempts: u8,
    next: Duration,
    /// Large packets that were lost since the last that came through.
    lost: u32,
}

impl Mtu {
    /// `first` is known to work (or taken to), `most` is what the card takes, both without the headers
    /// of IP and UDP.
    pub fn new(first: usize, most: usize) -> Self {
        let most = most.clamp(LEAST, 65_507);
        Mtu {
            size: first.clamp(LEAST, most),
            most,
            attempts: 0,
            next: Duration::ZERO,
            lost: 0,
        }
    }

    /// Bytes of a packet.
    pub fn size(&self) -> usize {
        self.size
    }

    fn candidate(&self) -> Option<usize> {
        let fits = |size: &usize| *size > self.size && *size <= self.most;
        let known = SIZES.into_iter().chain([self.most]).filter(fits).min();
        known.filter(|_| self.attempts < ATTEMPTS)
    }

    /// The size of a probe that is due.
    pub fn probe(&mut self, now: Duration) -> Option<usize> {
        if self.size >= self.most || now < self.next {
            return None;
        }
        if self.attempts >= ATTEMPTS {
            self.attempts = 0;
        }
        let size = self.candidate()?;
        self.next = now + BETWEEN;
        self.attempts += 1;
        if self.attempts >= ATTEMPTS {
            self.next = now + REST;
        }
        Some(size)
    }

    /// When the next probe is due.
    pub fn deadline(&self) -> Option<Duration> {
        (self.size < self.most).then_some(self.next)
    }

    /// A packet of this size has arrived.
    pub fn arrived(&mut self, size: usize) {
        if size > LEAST {
            self.lost = 0;
        }
        if size > self.size && size <= self.most {
            (self.size, self.attempts, self.next) = (size, 0, Duration::ZERO);
        }
    }

    /// A packet of this size timed out. `true`: large ones seem to vanish, and the size has changed.
    pub fn vanished(&mut self, size: usize, now: Duration) -> bool {
        if size <= LEAST || size > self.size {
            return false;
        }
        self.lost += 1;
        // A dead path loses dozens at once and heals; this many without one arrival is another thing.
        if self.lost < 512 || self.size == LEAST {
            return false;
        }
        (self.size, self.lost) = (LEAST, 0);
        (self.attempts, self.next) = (0, now + REST / 60);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(card: usize, path: usize) -> usize {
        let (mut mtu, mut now) = (Mtu::new(LEAST, card), Duration::ZERO);
        for _ in 0..60 {
            if let Some(size) = mtu.probe(now)
                && size <= path
            {
                mtu.arrived(size);
            }
            now += Duration::from_millis(5);
        }
        mtu.size()
    }

    #[test]
    fn it_finds_what_the_path_carries() {
        for (card, path, want) in [
            (1472, 1472, 1472),
            (8972, 8972, 8972),
            (8972, 1472, 1472),
            (8972, 3470, 3470),
            (65_507, 65_507, 65_507),
            (9500, 9500, 9500),
            (1300, 1300, 1300),
        ] {
            assert_eq!(found(card, path), want, "{card} {path}");
        }
    }

    #[test]
    fn it_rests_and_tries_again_and_goes_back_if_large_ones_vanish() {
        let mut mtu = Mtu::new(1472, 8972);
        for step in 0..3 {
            assert_eq!(mtu.probe(BETWEEN * step), Some(3450));
        }
        assert_eq!(mtu.probe(REST / 2), None);
        assert_eq!(mtu.probe(REST * 2), Some(3450));
        mtu.arrived(3450);
        for _ in 0..511 {
            assert!(!mtu.vanished(3450, REST));
        }
        assert!(mtu.vanished(3450, REST));
        assert_eq!(mtu.size(), LEAST);
    }
}
