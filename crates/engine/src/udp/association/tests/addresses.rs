//! Addresses that change: both lists, what the peer hears of them, and which sockets paths have then.

use std::net::IpAddr;

use super::*;
use crate::nics::Nic;

fn nic(name: &str, index: u32, address: IpAddr) -> Nic {
    Nic {
        name: name.to_owned(),
        index,
        address,
        speed: 10_000,
        known: false,
    }
}

/// Addresses of loopback that end so, each as a card of its own.
fn cards(hosts: &[u8]) -> Vec<Nic> {
    let card = |(index, host): (usize, &u8)| nic("lo", index as u32, [127, 0, 0, *host].into());
    hosts.iter().enumerate().map(card).collect()
}

fn at(host: u8, port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, host], port))
}

/// Sockets of an end, and what they need.
struct Room {
    sockets: Sockets,
    shared: Shared,
}

impl Room {
    fn new(initiates: bool, hosts: &[u8], remote: SocketAddr) -> Room {
        Room {
            sockets: Sockets::new(hostile::peer(), initiates, &cards(hosts), vec![remote]),
            shared: Shared::for_tests(),
        }
    }

    fn open(&mut self, paths: usize) {
        for path in 0..paths {
            let (mut batch, mut effects) = (Batch::default(), Vec::new());
            let now = Duration::ZERO;
            let place = self
                .sockets
                .place_of(path, &self.shared, &mut batch, now, &mut effects);
            assert_eq!(place, Some(path));
        }
    }

    /// The last number of the address that each path is bound to, where it has a socket.
    fn bound(&self, paths: usize) -> Vec<Option<u8>> {
        let host = |own: &sockets::Own| match own.at.ip() {
            IpAddr::V4(ip) => ip.octets()[3],
            IpAddr::V6(_) => 0,
        };
        (0..paths)
            .map(|path| self.sockets.get(path).map(host))
            .collect()
    }
}

#[test]
fn paths_move_to_what_has_come_and_others_stay() {
    let mut room = Room::new(true, &[1], at(9, 99));
    room.open(4);
    assert_eq!(room.bound(4), [Some(1); 4]);
    room.sockets.have(&cards(&[1, 2]), &room.shared);
    assert_eq!(room.bound(4), [Some(1), None, Some(1), None]);
    room.open(4);
    assert_eq!(room.bound(4), [Some(1), Some(2), Some(1), Some(2)]);
    // The peer has another one, and then the first of ours changes.
    let hosts: Vec<IpAddr> = [9, 10].map(|host| at(host, 0).ip()).to_vec();
    room.sockets.peer_has(&hosts, &room.shared);
    let remotes: Vec<_> = (0..3)
        .map(|path| *room.sockets.remote(path).unwrap())
        .collect();
    assert_eq!(remotes, [at(9, 99), at(10, 99), at(9, 99)]);
    assert_eq!(room.bound(4), [Some(1), Some(2), Some(1), Some(2)]);
    room.sockets.have(&cards(&[3, 2]), &room.shared);
    assert_eq!(room.bound(4), [None, Some(2), None, Some(2)]);
    // None of these can be reached: better the former.
    let v6: IpAddr = [0xfd00, 0, 0, 0, 0, 0, 0, 1].into();
    room.sockets.peer_has(&[v6], &room.shared);
    assert_eq!(room.sockets.remote(1), Some(&at(10, 99)));
}

#[test]
fn a_card_whose_packets_are_too_small_is_not_used() {
    let mut room = Room::new(true, &[1], at(9, 99));
    room.open(2);
    let mut all = cards(&[1]);
    // Of one that is not there, 1500 bytes are assumed.
    all.push(nic("evener-none", 7, [127, 0, 0, 2].into()));
    room.sockets.have(&all, &room.shared);
    assert_eq!(room.bound(2), [Some(1), Some(1)]);
    // Alone it is better than none.
    room.sockets.have(&all[1..], &room.shared);
    room.open(2);
    assert_eq!(room.bound(2), [Some(2), Some(2)]);
}

#[test]
fn who_answers_forgets_addresses_that_have_gone() {
    let mut room = Room::new(false, &[1], at(2, 20));
    room.sockets.answer_to(at(3, 30));
    let remotes = |room: &Room| [0, 1].map(|path| *room.sockets.remote(path).unwrap());
    assert_eq!(remotes(&room), [at(2, 20), at(3, 30)]);
    // Addresses that are translated on the way: none that it says is one from which it is heard.
    room.sockets.peer_has(&[at(77, 0).ip()], &room.shared);
    assert_eq!(remotes(&room), [at(2, 20), at(3, 30)]);
    room.sockets
        .peer_has(&[at(77, 0).ip(), at(3, 0).ip()], &room.shared);
    assert_eq!(remotes(&room), [at(3, 30); 2]);
}

fn address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        any::<[u8; 4]>().prop_map(IpAddr::from),
        any::<[u8; 16]>().prop_map(IpAddr::from),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Whatever the network does to packets, the peer hears the newest list, and messages arrive.
    #[test]
    fn the_newest_list_is_heard(
        lists in prop::collection::vec(
            (prop::collection::vec(address(), 1..=crate::addresses::MOST), 0u64..200), 1..5),
        side in 0..2usize, seed in any::<u64>(), loss in 0u64..15, delay in 0u64..20,
    ) {
        let mut world = World::new(seed, loss, delay);
        world.run(&[50_000; 3], (0, Fault::Nothing));
        let mut nics = Nics::default();
        for (edition, (list, turns)) in lists.iter().enumerate() {
            let cards = list.iter().enumerate();
            let cards = cards.map(|(at, address)| nic("lo", at as u32, *address)).collect();
            nics = Nics::of_edition(cards, edition as u32 + 1);
            let now = world.now();
            world.sides[side].have(&nics, &world.shared, now);
            for _ in 0..*turns {
                world.turn();
            }
        }
        let begun = world.step;
        while !world.sides[side].signals.is_idle() {
            prop_assert!(world.step < begun + 100_000, "it is never heard");
            world.turn();
        }
        let heard = lock(&world.sides[1 - side].peer.addresses).clone();
        prop_assert_eq!(heard, nics.addresses());
    }
}
