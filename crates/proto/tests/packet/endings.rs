//! A process may end as soon as it has received all that it waits for: what it received is acknowledged by
//! then, or its peer would wait for a process that is gone, and call the comm broken.

use std::time::Duration;

use evener_proto::packet::{Arrival, Event};
use proptest::prelude::*;

use super::attacks::{next, opened};

proptest! {
    #[test]
    fn whoever_has_a_message_has_acknowledged_it(
        order in Just((0..8).collect::<Vec<usize>>()).prop_shuffle(),
        length in 1u64..=5000,
        // After how many packets the receiver answers, as its turns happen to fall.
        turns in 1usize..4,
    ) {
        let (mut one, mut other) = opened();
        let now = Duration::from_millis(1);
        while let Some(credit) = next(&mut other, now) {
            one.receive(&credit, Arrival::default(), now, &mut |_| {}).unwrap();
        }
        let message = one.send(1, length);
        let packets: Vec<_> = std::iter::from_fn(|| next(&mut one, now)).collect();
        prop_assert!(packets.len() <= order.len());
        let mut answers = Vec::new();
        let came = order.into_iter().filter_map(|at| packets.get(at));
        for (count, packet) in came.enumerate() {
            let _ = other.receive(packet, Arrival::default(), now, &mut |_| {});
            if (count + 1) % turns == 0 || count + 1 == packets.len() {
                answers.extend(std::iter::from_fn(|| next(&mut other, now)));
            }
        }
        let received = std::iter::from_fn(|| other.event())
            .any(|event| matches!(event, Event::Received { channel: 1, .. }));
        prop_assert!(received);
        // The receiver's process ends here.
        for answer in answers {
            let _ = one.receive(&answer, Arrival::default(), now, &mut |_| {});
        }
        let sent = std::iter::from_fn(|| one.event()).any(|event| event == Event::Sent { channel: 1, message });
        prop_assert!(sent, "{} packets", packets.len());
    }
}
