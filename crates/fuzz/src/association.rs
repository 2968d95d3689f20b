//! The engine's receive path: what a hostile peer with the key says to a process with a comm, its
//! memory between two fences. See `evener_engine::udp::hostile`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| evener_engine::udp::hostile::run(data));
