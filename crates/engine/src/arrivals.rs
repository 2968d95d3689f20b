//! Comms that come over several connections: each connection brings one lane, to its own thread, and the
//! comm is there when all lanes are.
//!
//! What a lane has put here, it takes away when its comm is closed or its connection is over before the
//! others came. So nothing stays that nobody completes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::comm::MOST_LANES;
use crate::lock::lock;
use crate::peer::Peer;
use crate::peers::Claim;

/// A comm: the listener that it wants, and its number.
pub(crate) type Wanted = (u64, u64);

/// What a lane's coming has done.
#[derive(Debug)]
pub(crate) enum Came {
    /// Others are still to come.
    Waits,
    /// All are there, by their places.
    All(Vec<Claim>),
    /// Such a lane cannot be.
    Refused,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Arrivals(Mutex<HashMap<Wanted, Vec<Option<Claim>>>>);

impl Arrivals {
    /// Lane `lane` of `lanes` of a comm has come over this peer's connection.
    pub(crate) fn come(&self, wanted: Wanted, (lane, lanes): (usize, usize), peer: Claim) -> Came {
        if lane >= lanes || lanes > MOST_LANES {
            return Came::Refused;
        }
        let mut all = lock(&self.0);
        let known = all
            .entry(wanted)
            .or_insert_with(|| (0..lanes).map(|_| None).collect());
        if known.len() != lanes || known[lane].is_some() {
            return Came::Refused;
        }
        known[lane] = Some(peer);
        if known.iter().any(Option::is_none) {
            return Came::Waits;
        }
        let whole = all.remove(&wanted).unwrap_or_default();
        Came::All(whole.into_iter().flatten().collect())
    }

    /// A connection takes back the lane of this comm, or without a comm all of its lanes.
    pub(crate) fn withdraw(&self, comm: Option<u64>, peer: &Arc<Peer>) {
        lock(&self.0).retain(|(_, number), lanes| {
            if comm.is_none_or(|comm| comm == *number) {
                for lane in lanes.iter_mut() {
                    lane.take_if(|claim| Arc::ptr_eq(claim, peer));
                }
            }
            lanes.iter().any(Option::is_some)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::{PeerKey, Transport};
    use proptest::prelude::*;
    use std::sync::atomic::Ordering;

    fn peers(count: u8) -> Vec<Arc<Peer>> {
        let key = |connection| PeerKey {
            process: [1; 16],
            mirror: true,
            transport: Transport::Udp,
            connection,
        };
        let peer = |connection| Arc::new(Peer::for_tests(key(connection)));
        (0..count).map(peer).collect()
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let (all, peers) = (Arrivals::default(), peers(2));
        let come = |lane| all.come((7, 9), lane, Claim::of(&peers[0]));
        assert!(matches!(come((2, 2)), Came::Refused));
        assert!(matches!(come((0, MOST_LANES + 1)), Came::Refused));
        assert!(matches!(come((0, 0)), Came::Refused));
        assert!(matches!(come((0, 2)), Came::Waits));
        assert!(matches!(come((0, 2)), Came::Refused));
        assert!(matches!(come((1, 3)), Came::Refused));
        let whole = all.come((7, 9), (1, 2), Claim::of(&peers[1]));
        assert!(matches!(whole, Came::All(claims) if claims.len() == 2));
        assert!(lock(&all.0).is_empty());
    }

    proptest! {
        /// In any order, and with connections that are over in the middle: a comm is there once, with
        /// its lanes in their places, exactly where all lanes came after the last of them was lost; and
        /// no claim stays behind.
        #[test]
        fn a_comm_is_there_when_all_its_lanes_are(
            steps in prop::collection::vec((0usize..4, 0u64..3, prop::bool::weighted(0.2)), 0..60),
        ) {
            let (all, peers) = (Arrivals::default(), peers(4));
            let mut model: HashMap<u64, [bool; 4]> = HashMap::new();
            for (lane, comm, lost) in steps {
                let known = model.entry(comm).or_default();
                if lost {
                    all.withdraw(Some(comm), &peers[lane]);
                    known[lane] = false;
                    continue;
                }
                let came = all.come((1, comm), (lane, 4), Claim::of(&peers[lane]));
                if std::mem::replace(&mut known[lane], true) {
                    prop_assert!(matches!(came, Came::Refused));
                } else if known.iter().all(|there| *there) {
                    *known = [false; 4];
                    let Came::All(claims) = came else {
                        return Err(TestCaseError::fail("all were there"));
                    };
                    for (claim, peer) in claims.iter().zip(&peers) {
                        prop_assert!(Arc::ptr_eq(claim, peer));
                    }
                } else {
                    prop_assert!(matches!(came, Came::Waits));
                }
            }
            for peer in &peers {
                all.withdraw(None, peer);
            }
            prop_assert!(lock(&all.0).is_empty());
            for peer in &peers {
                prop_assert_eq!(peer.claims.load(Ordering::Relaxed), 0);
            }
        }
    }
}
