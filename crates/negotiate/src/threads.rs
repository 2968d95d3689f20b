//! Threads of this crate: named, with small stacks.

use std::{io, thread};

pub(crate) fn spawn(what: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new()
        .name(format!("negotiate-{what}"))
        .stack_size(256 << 10)
        .spawn(run)
        .map(drop)
}
