//! Which interfaces carry the traffic.
//!
//! The rules are NCCL's for NCCL_SOCKET_IFNAME: a list of prefixes, `=` in front of the list for
//! exact names, `^` for all but these. EVENER_NET_IFNAME has the same form and goes first. Without
//! either: all that run, less loopback, container bridges and link-local addresses; loopback only
//! where there is nothing else. A driver is never looked at: a pod's eth0 is a veth.
//!
//! Cards may come later, or get another address ([`Nics::look_again`]). Each keeps its place in the list,
//! by which both ends call it; one that has gone keeps its place as well, in case it comes back.

use std::fmt;
use std::net::IpAddr;
use std::ops::Deref;

use crate::addresses::{Addresses, MOST};
use crate::sys::Interface;

/// A NIC that carries traffic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nic {
    /// The kernel's name.
    pub name: String,
    /// The kernel's number.
    pub index: u32,
    /// The address that its connections are bound to.
    pub address: IpAddr,
    /// Mb/s, as the driver says; 10000 where it does not.
    pub speed: u32,
    /// Whether it says so of a card: what is virtual has some number, or none.
    pub known: bool,
}

impl fmt::Display for Nic {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {} ({} Mb/s)", self.name, self.address, self.speed)
    }
}

impl Nic {
    /// Where the card is in sysfs; None where there is none.
    pub fn pci_path(&self) -> Option<String> {
        let path = std::fs::canonicalize(format!("/sys/class/net/{}/device", self.name)).ok()?;
        Some(path.to_str()?.to_owned())
    }
}

/// The NICs in use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Nics {
    list: Vec<Nic>,
    /// How often the list has changed.
    edition: u32,
}

impl Deref for Nics {
    type Target = [Nic];

    fn deref(&self) -> &[Nic] {
        &self.list
    }
}

/// What [`Nics::look_again`] has found.
#[derive(Debug, PartialEq, Eq)]
pub struct Change {
    /// Its place in the list.
    pub place: usize,
    /// What was there: where a card has another address, or is another one of the same name.
    pub was: Option<Nic>,
}

impl Nics {
    /// Those of the start.
    pub fn new(list: Vec<Nic>) -> Nics {
        Nics { list, edition: 0 }
    }

    /// Those of a later time.
    #[cfg(test)]
    pub fn of_edition(list: Vec<Nic>, edition: u32) -> Nics {
        Nics { list, edition }
    }

    /// How often the list has changed.
    pub fn edition(&self) -> u32 {
        self.edition
    }

    /// What peers are told.
    pub fn addresses(&self) -> Addresses {
        Addresses {
            edition: self.edition,
            list: self.list.iter().map(|nic| nic.address).collect(),
        }
    }

    /// The list and what is new in it, out of all addresses of now; `None` where nothing is.
    pub fn look_again(
        &self,
        all: &[Interface],
        rule: Option<&str>,
        family: Family,
    ) -> Option<(Nics, Vec<Change>)> {
        let loopback = |nic: &Nic| nic.address.is_loopback();
        // Where there was nothing else, all peers are on this machine.
        if rule.is_none() && self.list.iter().all(loopback) {
            return None;
        }
        let mut list = self.list.clone();
        let mut changes = Vec::new();
        for nic in choose(all, rule, family) {
            if rule.is_none() && loopback(&nic) {
                continue; // Nothing else is there just now.
            }
            let same = |one: &Nic| one.name == nic.name || one.index == nic.index;
            match list.iter().position(same) {
                None if list.len() < MOST => {
                    let place = list.len();
                    changes.push(Change { place, was: None });
                    list.push(nic);
                }
                None => {}
                Some(place) => {
                    let was = &list[place];
                    let stays = (&was.name, was.index) == (&nic.name, nic.index)
                        && all
                            .iter()
                            .any(|one| (one.index, one.address) == (was.index, was.address));
                    if !stays {
                        let was = Some(std::mem::replace(&mut list[place], nic));
                        changes.push(Change { place, was });
                    }
                }
            }
        }
        let edition = self.edition.wrapping_add(1);
        (!changes.is_empty()).then_some((Nics { list, edition }, changes))
    }
}

/// Which address of a NIC to take where it has several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// IPv4 where there is one.
    Any,
    /// IPv4 only.
    V4,
    /// IPv6 only.
    V6,
}

const CONTAINERS: [&str; 6] = ["docker", "br-", "virbr", "podman", "cni", "lxc"];

fn link_local(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => (v6.segments()[0] & 0xffc0) == 0xfe80,
    }
}

/// Whether `rule` (see the module) takes an interface of this name.
pub fn matches(rule: &str, name: &str) -> bool {
    let (wanted, rest) = match rule.strip_prefix('^') {
        Some(rest) => (false, rest),
        None => (true, rule),
    };
    let (exact, rest) = match rest.strip_prefix('=') {
        Some(rest) => (true, rest),
        None => (false, rest),
    };
    let hit = rest.split(',').filter(|one| !one.is_empty()).any(|one| {
        // NCCL allows name:port; the port is not ours.
        let one = one.split(':').next().unwrap_or(one);
        if exact {
            name == one
        } else {
            name.starts_with(one)
        }
    });
    hit == wanted
}

/// The NICs to use out of all addresses.
pub fn choose(all: &[Interface], rule: Option<&str>, family: Family) -> Vec<Nic> {
    let usable = |one: &&Interface| {
        one.running
            && !link_local(&one.address)
            && match family {
                Family::Any => true,
                Family::V4 => one.address.is_ipv4(),
                Family::V6 => one.address.is_ipv6(),
            }
    };
    let by_default = |one: &&Interface| {
        !one.loopback && !CONTAINERS.iter().any(|start| one.name.starts_with(start))
    };
    let mut picked: Vec<&Interface> = match rule {
        Some(rule) => all
            .iter()
            .filter(usable)
            .filter(|one| matches(rule, &one.name))
            .collect(),
        None => all.iter().filter(usable).filter(by_default).collect(),
    };
    if picked.is_empty() && rule.is_none() {
        picked = all
            .iter()
            .filter(usable)
            .filter(|one| one.loopback)
            .collect();
    }
    // One address a NIC: IPv4 before IPv6, else the first.
    picked.sort_by_key(|one| (one.index, one.address.is_ipv6()));
    picked.dedup_by_key(|one| one.index);
    picked.truncate(MOST);
    picked
        .into_iter()
        .map(|one| {
            let said = speed(&one.name);
            let mut nic = Nic {
                name: one.name.clone(),
                index: one.index,
                address: one.address,
                speed: said.unwrap_or(10_000),
                known: false,
            };
            nic.known = said.is_some() && nic.pci_path().is_some();
            nic
        })
        .collect()
}

fn speed(name: &str) -> Option<u32> {
    std::fs::read_to_string(format!("/sys/class/net/{name}/speed"))
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .filter(|speed| *speed > 0)
}

/// Of several NICs the first to which no socket may be bound, and what the kernel says: without
/// that, those of one subnet leave by whichever the routing table names.
pub fn unsteered(nics: &[Nic]) -> Option<(&Nic, std::io::Error)> {
    use socket2::{Domain, Socket, Type};
    let bind = |nic: &Nic| {
        let socket = Socket::new(
            Domain::for_address((nic.address, 0).into()),
            Type::DGRAM,
            None,
        )?;
        socket.bind_device(Some(nic.name.as_bytes()))
    };
    let several = if nics.len() > 1 { nics } else { &[] };
    several
        .iter()
        .find_map(|nic| bind(nic).err().map(|error| (nic, error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str, index: u32, address: &str) -> Interface {
        Interface {
            name: name.into(),
            index,
            address: address.parse().unwrap(),
            running: true,
            loopback: name == "lo",
        }
    }

    fn names(rule: Option<&str>, family: Family) -> Vec<String> {
        let all = [
            interface("lo", 1, "127.0.0.1"),
            interface("eth0", 2, "10.0.0.1"),
            interface("eth0", 2, "fe80::1"),
            interface("eth1", 3, "169.254.3.4"),
            interface("eth10", 4, "fd00::2"),
            interface("docker0", 5, "172.17.0.1"),
        ];
        let nics = choose(&all, rule, family);
        nics.into_iter().map(|nic| nic.name).collect()
    }

    #[test]
    fn the_default_takes_what_a_network_is_made_of() {
        assert_eq!(names(None, Family::Any), ["eth0", "eth10"]);
        assert_eq!(names(None, Family::V4), ["eth0"]);
        assert_eq!(names(None, Family::V6), ["eth10"]);
    }

    #[test]
    fn rules_are_nccls() {
        assert_eq!(names(Some("eth"), Family::Any), ["eth0", "eth10"]);
        assert_eq!(names(Some("=eth1"), Family::Any), [""; 0]);
        assert_eq!(names(Some("=eth10,lo"), Family::Any), ["lo", "eth10"]);
        assert_eq!(names(Some("^eth,lo"), Family::Any), ["docker0"]);
        assert_eq!(
            names(Some("^=eth0"), Family::Any),
            ["lo", "eth10", "docker0"]
        );
        assert_eq!(names(Some("docker0"), Family::Any), ["docker0"]);
    }

    #[test]
    fn loopback_is_used_where_there_is_nothing_else() {
        let nics = choose(&[interface("lo", 1, "127.0.0.1")], None, Family::Any);
        assert_eq!(nics[0].name, "lo");
    }

    /// As at the start, then with these addresses: what is new, and the list.
    fn later(rule: Option<&str>, first: &[Interface], then: &[Interface]) -> (Vec<Change>, Nics) {
        let nics = Nics::new(choose(first, rule, Family::Any));
        match nics.look_again(then, rule, Family::Any) {
            Some((nics, changes)) => (changes, nics),
            None => (Vec::new(), nics),
        }
    }

    #[test]
    fn a_card_that_comes_later_gets_a_place_and_keeps_it() {
        let (lo, eth0) = (
            interface("lo", 1, "127.0.0.1"),
            interface("eth0", 2, "10.0.0.1"),
        );
        let eth1 = interface("eth1", 3, "10.1.0.1");
        let down = Interface {
            running: false,
            ..eth1.clone()
        };
        let start = [lo.clone(), eth0.clone(), down];
        let all = [lo.clone(), eth0.clone(), eth1.clone()];
        let (changes, nics) = later(None, &start, &all);
        let place = |place| Change { place, was: None };
        assert_eq!(changes, [place(1)]);
        assert_eq!(nics.addresses().edition, 1);
        let addresses = [eth0.address, eth1.address];
        assert_eq!(nics.addresses().list, addresses);
        // Gone, and back as it was: nothing is new.
        for now in [&start[..], &all[..], std::slice::from_ref(&lo)] {
            assert_eq!(nics.look_again(now, None, Family::Any), None);
        }
        // What the rule does not take, and who has loopback alone.
        assert!(later(Some("=eth0"), &start, &all).0.is_empty());
        assert!(later(None, &[lo], &all).0.is_empty());
    }

    #[test]
    fn an_address_that_changes_takes_the_place_of_the_former() {
        let eth0 = interface("eth0", 2, "10.0.0.1");
        let other = interface("eth0", 2, "10.0.0.9");
        let start = [interface("eth1", 3, "10.1.0.1"), eth0.clone()];
        let both = [start[0].clone(), eth0, other.clone()];
        assert!(later(None, &start, &both).0.is_empty());
        let (changes, nics) = later(None, &start, &[start[0].clone(), other.clone()]);
        let was = changes[0].was.as_ref().map(|nic| nic.address);
        assert_eq!((changes[0].place, was), (0, Some(start[1].address)));
        assert_eq!(nics[0].address, other.address);
        // A card that was deleted and made anew has another number.
        let anew = interface("eth0", 7, "10.0.0.1");
        let (changes, nics) = later(None, &start, &[anew]);
        assert_eq!((changes.len(), nics.len(), nics[0].index), (1, 2, 7));
    }

    #[test]
    fn a_nic_that_no_socket_may_be_bound_to_is_named() {
        let nic = |name: &str| Nic {
            name: name.into(),
            index: 1,
            address: "127.0.0.1".parse().unwrap(),
            speed: 1,
            known: false,
        };
        let nics = [nic("lo"), nic("nothere0")];
        let (found, error) = unsteered(&nics).unwrap();
        assert_eq!(found.name, "nothere0");
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        // With one there is nothing to choose.
        assert!(unsteered(&nics[1..]).is_none());
    }
}
