//! The processes that this one talks to, and what keeps each of them known.
//!
//! Control forgets a peer that nobody uses. Others make comms with peers at the same time, so the
//! two meet in one lock: a [`Claim`] is taken under it ([`Peers::claim`]), or on a peer that is kept
//! by something else ([`Claim::of`]), and [`Peers::forget`] looks for claims under it. A comm, an
//! offer of one and a connection on its way to its worker each hold a claim. So a peer that is in
//! use is always the one that the table has: a second one of the same key would be dialled in its
//! place, and the comms of the first would wait for ever.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::lock::lock;
use crate::peer::{Peer, PeerKey};

/// Keeps a peer known until it is dropped.
#[derive(Debug)]
pub struct Claim(Arc<Peer>);

impl Claim {
    /// A claim on a peer that a connection or another claim keeps at this moment.
    pub fn of(peer: &Arc<Peer>) -> Claim {
        peer.claims.fetch_add(1, Ordering::Relaxed);
        Claim(peer.clone())
    }
}

impl Deref for Claim {
    type Target = Arc<Peer>;

    fn deref(&self) -> &Arc<Peer> {
        &self.0
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // What was done under the claim is seen by who forgets the peer.
        self.0.claims.fetch_sub(1, Ordering::Release);
    }
}

/// The table.
#[derive(Debug, Default)]
pub struct Peers(Mutex<HashMap<PeerKey, Arc<Peer>>>);

impl Peers {
    /// A claim on the peer with this key, made by `make` where it is new.
    pub fn claim(&self, key: PeerKey, make: impl FnOnce() -> Peer) -> Claim {
        let mut peers = lock(&self.0);
        Claim::of(peers.entry(key).or_insert_with(|| Arc::new(make())))
    }

    /// The peer with this key.
    pub fn get(&self, key: &PeerKey) -> Option<Arc<Peer>> {
        lock(&self.0).get(key).cloned()
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<Peer>> {
        lock(&self.0).values().cloned().collect()
    }

    /// Forgets a peer without connections and claims; whether it did.
    pub fn forget(&self, peer: &Arc<Peer>) -> bool {
        let mut peers = lock(&self.0);
        // In this order: a connection's worker takes claims before its connection ends.
        let unused = peer.connections.load(Ordering::Acquire) == 0
            && peer.claims.load(Ordering::Acquire) == 0;
        if unused
            && peers
                .get(&peer.key)
                .is_some_and(|known| Arc::ptr_eq(known, peer))
        {
            peers.remove(&peer.key);
        }
        unused
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::Transport;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    fn key() -> PeerKey {
        PeerKey {
            process: [7; 16],
            mirror: false,
            transport: Transport::Tcp,
            connection: 0,
        }
    }

    #[test]
    fn a_claim_keeps_its_peer() {
        let peers = Peers::default();
        let claim = peers.claim(key(), || Peer::for_tests(key()));
        let second = Claim::of(&claim);
        assert!(!peers.forget(&claim.clone()));
        drop(claim);
        assert!(!peers.forget(&second.clone()));
        let peer = second.clone();
        drop(second);
        peer.connections.fetch_add(1, Ordering::Relaxed);
        assert!(!peers.forget(&peer));
        peer.connections.fetch_sub(1, Ordering::Release);
        assert!(peers.forget(&peer));
        assert!(peers.get(&key()).is_none());
        let next = peers.claim(key(), || Peer::for_tests(key()));
        assert!(!Arc::ptr_eq(&next, &peer));
        // The old one is gone: that it is forgotten once more does nothing to the new one.
        assert!(peers.forget(&peer));
        assert!(peers.get(&key()).is_some());
    }

    #[test]
    fn who_claims_while_another_forgets_has_the_peer_of_the_table() {
        let peers = Peers::default();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    if let Some(peer) = peers.get(&key()) {
                        peers.forget(&peer);
                    }
                }
            });
            let callers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        for _ in 0..2000 {
                            let claim = peers.claim(key(), || Peer::for_tests(key()));
                            let known = peers.get(&key()).expect("a claim keeps it");
                            assert!(Arc::ptr_eq(&known, &claim), "an orphan");
                        }
                    })
                })
                .collect();
            for caller in callers {
                caller.join().expect("no caller panics");
            }
            done.store(true, Ordering::Relaxed);
        });
    }
}
