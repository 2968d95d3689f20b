//! Comms between two engines, and waiting for what they carry: what the tests of several files need.

use std::sync::Arc;
use std::time::{Duration, Instant};

use evener_engine::comm::Comm;
use evener_engine::{Engine, Slot, Status};

/// Nothing takes longer, on a busy machine either.
pub const LIMIT: Duration = Duration::from_secs(60);

pub fn until<T>(mut step: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(value) = step() {
            return value;
        }
        assert!(Instant::now() < end, "nothing happened for {LIMIT:?}");
        std::thread::yield_now();
    }
}

/// A comm from `a` to `b`.
pub fn pair(a: &Engine, b: &Engine) -> (Arc<Comm>, Arc<Comm>) {
    let (listener, mut handle) = b.listen();
    let (mut send, mut receive) = (None, None);
    until(|| {
        if send.is_none() {
            send = a.connect(&mut handle).unwrap();
        }
        if receive.is_none() {
            receive = b.accept(&listener).unwrap();
        }
        (send.is_some() && receive.is_some()).then_some(())
    });
    b.close_listener(&listener);
    (send.unwrap(), receive.unwrap())
}

/// Bytes of a request, once it is finished.
pub fn finish(slot: &Slot) -> usize {
    until(|| match slot.test() {
        Status::Pending => None,
        Status::Done(length) => Some(length),
        Status::Failed(_) => panic!("the request failed"),
    })
}
