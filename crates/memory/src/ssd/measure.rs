//! Bytes per second of a store's file, with the operations that the store makes: all its buffers,
//! each as one operation, as deep as it goes.

use crate::ssd::SsdError;
use crate::ssd::requests::Span;
use crate::ssd::store::Store;
use std::time::Instant;

/// Bytes per second. `both`: read and written together, half of each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Reads alone.
    pub read: f64,
    /// Writes alone.
    pub write: f64,
    /// The sum, while both go on.
    pub both: f64,
}

/// Measures the first `bytes` of the file, which are lost: written once so that they are there,
/// written again, read, and both at once. Each phase moves `bytes`, or stops after `seconds`.
///
/// # Errors
/// As [`Store::wait`].
pub fn measure(store: &mut Store, bytes: u64, seconds: f64) -> Result<Rates, SsdError> {
    let room = store.buffers().room() as u64;
    let blocks = (bytes.min(store.size()) / room).max(1);
    let written = run(store, blocks, seconds, |_| true)?.0;
    // What was not written before the time was over has no place on the disk yet: reading it would
    // be reading nothing.
    let write = run(store, written, seconds, |_| true)?.1;
    let read = run(store, written, seconds, |_| false)?.1;
    let both = run(store, written, seconds, |at| at % 2 == 1)?.1;
    Ok(Rates { read, write, both })
}

/// Blocks that were moved, and bytes per second.
fn run(
    store: &mut Store,
    blocks: u64,
    seconds: f64,
    write: impl Fn(u64) -> bool,
) -> Result<(u64, f64), SsdError> {
    let room = store.buffers().room();
    let count = store.buffers().count();
    if room as u64 > store.size() {
        return Err(SsdError::Misuse(
            "a buffer is larger than the file".to_owned(),
        ));
    }
    let mut tickets: Vec<Option<u64>> = vec![None; count];
    let begun = Instant::now();
    let mut moved = 0;
    for block in 0..blocks {
        let buffer = (block % count as u64) as usize;
        if let Some(ticket) = tickets[buffer].take() {
            store.wait(ticket)?;
        }
        if block >= count as u64 && begun.elapsed().as_secs_f64() > seconds {
            break;
        }
        let span = Span {
            buffer,
            offset: block * room as u64,
            length: room,
        };
        tickets[buffer] = Some(store.submit(write(block), span)?);
        moved = block + 1;
    }
    for ticket in tickets.into_iter().flatten() {
        store.wait(ticket)?;
    }
    let took = begun.elapsed().as_secs_f64().max(1e-9);
    Ok((moved, (moved * room as u64) as f64 / took))
}
