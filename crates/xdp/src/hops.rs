//! Where frames to an address go next: the Ethernet address of the peer or of the router before it.
//!
//! The kernel's tables say so. Where they do not know yet, there is no answer, and the caller's own UDP
//! socket sends that packet: that is what makes the kernel ask for the address. Packets of ours do not
//! pass the kernel, so it would take the neighbour for silent: once in [`CONFIRM`] there is no answer for a
//! known address too, and one packet goes its way. What changes is heard from the kernel.

use std::collections::HashMap;
use std::io;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use crate::frames::Mac;
use crate::netlink::{Netlink, News};

/// Between two packets by the kernel's way for one address.
const CONFIRM: Duration = Duration::from_secs(15);
/// Between two looks at what the kernel has to say.
const LOOK: Duration = Duration::from_millis(10);
/// Between two questions for an address that is not known.
const AGAIN: Duration = Duration::from_millis(1);

#[derive(Debug)]
struct Known {
    mac: Option<Mac>,
    asked: Instant,
    confirmed: Instant,
}

/// The next hops of one interface.
#[derive(Debug)]
pub struct Hops {
    interface: u32,
    netlink: Netlink,
    news: News,
    known: HashMap<Ipv4Addr, Known>,
    looked: Instant,
}

impl Hops {
    /// Hops of the interface with this number.
    ///
    /// # Errors
    /// Errors of netlink.
    pub fn new(interface: u32) -> io::Result<Hops> {
        Ok(Hops {
            interface,
            news: News::open()?,
            netlink: Netlink::open()?,
            known: HashMap::new(),
            looked: Instant::now(),
        })
    }

    fn ask(&mut self, to: Ipv4Addr) -> io::Result<Option<Mac>> {
        match self.netlink.route(to, self.interface)? {
            Some(route) => self.netlink.neighbour(route.neighbour, self.interface),
            None => Ok(None),
        }
    }

    /// The next hop to this address; `None`: the kernel is to send this packet.
    pub fn to(&mut self, to: Ipv4Addr, now: Instant) -> Option<Mac> {
        if now.saturating_duration_since(self.looked) >= LOOK {
            self.looked = now;
            if self.news.any() {
                // What was known may be wrong: asked anew, at the next packet of each.
                for known in self.known.values_mut() {
                    known.mac = None;
                    known.asked = now.checked_sub(AGAIN).unwrap_or(now);
                }
            }
        }
        let asks = match self.known.get(&to) {
            Some(known) => {
                known.mac.is_none() && now.saturating_duration_since(known.asked) >= AGAIN
            }
            None => true,
        };
        if asks {
            // An error is no route: the kernel's way has the same, and says so to its caller.
            let mac = self.ask(to).ok().flatten();
            let confirmed = self.known.get(&to).map_or(now, |known| known.confirmed);
            let known = Known {
                mac,
                asked: now,
                confirmed,
            };
            self.known.insert(to, known);
        }
        let known = self.known.get_mut(&to)?;
        if known.mac.is_some() && now.saturating_duration_since(known.confirmed) >= CONFIRM {
            known.confirmed = now;
            return None;
        }
        known.mac
    }
}
