//! The parser of packets: any bytes parse or are refused, and what parses is what was written.
#![no_main]

use evener_proto::packet::format::{Frames, Greeting, HEADER, Header};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok((header, body)) = Header::parse(data) else {
        return;
    };
    let mut again = vec![0; HEADER];
    assert!(header.emit(&mut again));
    assert_eq!(again, data[..HEADER]);
    for frame in Frames::new(body) {
        let Ok(frame) = frame else {
            break;
        };
        // What it holds is looked at to its end.
        if let evener_proto::packet::format::Frame::Ack(ack) = frame {
            let _ = (ack.ranges().count(), ack.heard().count());
        }
    }
    if let Ok(greeting) = Greeting::parse(body) {
        let mut again = vec![0; body.len()];
        assert!(greeting.emit(&mut again));
        assert_eq!(Greeting::parse(&again), Ok(greeting));
    }
});
