//! Links that go and come, cards that come later, and addresses that change.
//!
//! Nothing is said for it that is not said anyway: the first words on each connection hold all addresses
//! of both ends, and their edition ([`crate::hello`]). A node whose list has changed dials each peer once
//! more over each pair of NICs. So it makes itself known over those that lead there, and each such
//! connection takes the place of another. The side that keeps the flows then dials what has come.

use super::{Control, PeerKey};
use crate::addresses::Addresses;
use crate::lock::lock;
use crate::log::Level;
use crate::nics::Family;
use crate::sys::{self, LinkChange, LinkWatch};
use crate::task::StreamTask;

impl Control {
    pub(super) fn links_changed(&mut self) {
        let Some(changes) = self.links.as_ref().map(LinkWatch::changes) else {
            return;
        };
        // Too many to be told: whatever is gone will be found by silence.
        let (mut back, mut look) = (changes.is_none(), changes.is_none());
        let nics = self.shared.nics();
        for change in changes.unwrap_or_default() {
            let LinkChange::Running(interface, up) = change else {
                look = true;
                continue;
            };
            look |= up;
            let Some(nic) = nics.iter().find(|nic| nic.index == interface) else {
                continue;
            };
            if up {
                back = true;
            } else {
                let text = format!("{} lost its carrier: its paths are given up", nic.name);
                self.shared.log(Level::Info, &text);
                self.end_paths(interface, "its interface lost the carrier");
            }
        }
        if look {
            self.look_again();
        }
        if back {
            let now = self.now();
            for state in self.peers.values_mut() {
                state.dialer.hurry(now);
            }
        }
    }

    fn end_paths(&self, interface: u32, why: &'static str) {
        for worker in &self.shared.workers {
            worker.ask_own(StreamTask::InterfaceDown(interface, why));
        }
    }

    /// Takes cards and addresses that are new.
    fn look_again(&mut self) {
        let Ok(all) = sys::interfaces() else {
            return; // The next news comes.
        };
        let config = &self.shared.config;
        let address = self
            .listener
            .local_addr()
            .ok()
            .and_then(|at| at.as_socket());
        let family = match config.family {
            // Peers would dial in vain where nobody listens.
            Family::Any if address.is_some_and(|at| at.is_ipv4()) => Family::V4,
            family => family,
        };
        let nics = self.shared.nics();
        let Some((nics, changes)) = nics.look_again(&all, config.interfaces.as_deref(), family)
        else {
            return;
        };
        for change in &changes {
            let nic = &nics[change.place];
            let text = match &change.was {
                None => format!("{nic} has come: it is used"),
                Some(was) => format!("{nic} replaces {}", was.address),
            };
            self.shared.log(Level::Info, &text);
            if let Some(was) = &change.was {
                self.end_paths(was.index, "its interface has another address");
            }
        }
        self.shared.say_unsteered(&nics);
        *lock(&self.shared.nics) = nics.into();
        let keys: Vec<PeerKey> = self.peers.keys().copied().collect();
        for key in keys {
            self.reroute(key);
            let now = self.now();
            if let Some(state) = self.peers.get_mut(&key) {
                state.dialer.greet_again(now);
            }
        }
    }

    /// A peer has said its addresses.
    pub(super) fn learn(&mut self, key: PeerKey, said: &Addresses) {
        let Some(peer) = self.shared.peers.get(&key) else {
            return;
        };
        if lock(&peer.addresses).learn(said) {
            let text = format!("{} has {} address(es)", peer.name(), said.list.len());
            self.shared.log(Level::Debug, &text);
            self.reroute(key);
        }
    }

    /// Either end has other addresses: flows for each pair of NICs that is new, and no waits for those
    /// that are known.
    fn reroute(&mut self, key: PeerKey) {
        let now = self.now();
        let Some(peer) = self.peers.get(&key).map(|state| state.peer.clone()) else {
            return;
        };
        if key.mirror {
            return;
        }
        let routes = self.routes(&peer);
        let (first, most) = self.flows(routes.len());
        if let Some(state) = self.peers.get_mut(&key) {
            let each = if state.keeps {
                first / routes.len().max(1)
            } else {
                0
            };
            state.dialer.widen(&routes, (each, most), now);
            state.dialer.hurry(now);
        }
    }
}
