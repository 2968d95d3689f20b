//! The program at the card's queue: UDP datagrams over IPv4 to our address and ports go to the queue's
//! socket, everything else goes on to the kernel (`XDP_PASS`).
//!
//! It is put together here, instruction by instruction, and loaded by bpf(2). It passes on what it does
//! not understand: fragments, IPv4 options, VLAN tags, IPv6. Packets for which there is no socket (another
//! queue) go on to the kernel as well: that is the last argument of `bpf_redirect_map`.
//!
//! Before a packet of ours it writes when it came, by the clock that the process has as well. A driver that
//! has no room there refuses ([`STAMP`] bytes are not moved then), and the packet goes on without.

use std::io;
use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::sys;

/// What is ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Datagrams to this address of the interface,
    pub address: Ipv4Addr,
    /// and to one of these ports.
    pub ports: RangeInclusive<u16>,
}

/// One instruction: opcode, registers, jump, number. 64 bits, as the kernel reads them.
fn instruction(code: u8, to: u8, from: u8, jump: i16, number: i32) -> u64 {
    let mut bytes = [0; 8];
    bytes[0] = code;
    bytes[1] = if cfg!(target_endian = "little") {
        from << 4 | to
    } else {
        to << 4 | from
    };
    bytes[2..4].copy_from_slice(&jump.to_ne_bytes());
    bytes[4..8].copy_from_slice(&number.to_ne_bytes());
    u64::from_ne_bytes(bytes)
}

/// Bytes before a packet that say when it came, in nanoseconds.
pub const STAMP: usize = 8;

const LOAD_8: u8 = 0x71;
const LOAD_16: u8 = 0x69;
const LOAD_32: u8 = 0x61;
const STORE_64: u8 = 0x7b;
const LOAD_NUMBER_64: u8 = 0x18;
const MOVE: u8 = 0xbf;
const MOVE_NUMBER: u8 = 0xb7;
const ADD_NUMBER: u8 = 0x07;
const AND_NUMBER: u8 = 0x57;
const TO_BIG_ENDIAN: u8 = 0xdc;
const IF_ABOVE: u8 = 0x2d;
const IF_ABOVE_NUMBER: u8 = 0x25;
const IF_BELOW_NUMBER: u8 = 0xa5;
/// Compares the low 32 bits: a 64-bit comparison would extend the number's sign.
const IF_NOT_NUMBER: u8 = 0x56;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const MONOTONIC_TIME: i32 = 5;
const REDIRECT_MAP: i32 = 51;
const MOVE_METADATA: i32 = 54;
const PASS: i32 = 2;
const MAP_DESCRIPTOR: u8 = 1;

/// Puts the program together for a rule and a map from queue to socket.
pub fn assemble(rule: &Rule, map: i32) -> Vec<u64> {
    let (low, high) = (*rule.ports.start(), *rule.ports.end());
    let wire16 = |value: u16| i32::from(value.to_be());
    let wire32 = |value: Ipv4Addr| u32::from(value).to_be() as i32;
    let (context, packet, end, value, time) = (6, 2, 3, 5, 7);
    // Jumps to the last two instructions are filled in below.
    let pass = i16::MAX;
    let mut all = vec![
        instruction(MOVE, context, 1, 0, 0),
        instruction(LOAD_32, packet, 1, 0, 0),
        instruction(LOAD_32, end, 1, 4, 0),
        // Ethernet 14, IPv4 20, UDP 8.
        instruction(MOVE, 4, packet, 0, 0),
        instruction(ADD_NUMBER, 4, 0, 0, 42),
        instruction(IF_ABOVE, 4, end, pass, 0),
        // IPv4,
        instruction(LOAD_16, value, packet, 12, 0),
        instruction(IF_NOT_NUMBER, value, 0, pass, wire16(0x0800)),
        // with a header of 20 bytes,
        instruction(LOAD_8, value, packet, 14, 0),
        instruction(IF_NOT_NUMBER, value, 0, pass, 0x45),
        // UDP,
        instruction(LOAD_8, value, packet, 23, 0),
        instruction(IF_NOT_NUMBER, value, 0, pass, 17),
        // not a fragment,
        instruction(LOAD_16, value, packet, 20, 0),
        instruction(AND_NUMBER, value, 0, 0, wire16(0x3fff)),
        instruction(IF_NOT_NUMBER, value, 0, pass, 0),
        // to our address
        instruction(LOAD_32, value, packet, 30, 0),
        instruction(IF_NOT_NUMBER, value, 0, pass, wire32(rule.address)),
        // and a port of ours.
        instruction(LOAD_16, value, packet, 36, 0),
        instruction(TO_BIG_ENDIAN, value, 0, 0, 16),
        instruction(IF_BELOW_NUMBER, value, 0, pass, i32::from(low)),
        instruction(IF_ABOVE_NUMBER, value, 0, pass, i32::from(high)),
        // When it came, in front of it.
        instruction(CALL, 0, 0, 0, MONOTONIC_TIME),
        instruction(MOVE, time, 0, 0, 0),
        instruction(MOVE, 1, context, 0, 0),
        instruction(MOVE_NUMBER, 2, 0, 0, -(STAMP as i32)),
        instruction(CALL, 0, 0, 0, MOVE_METADATA),
        instruction(IF_NOT_NUMBER, 0, 0, 6, 0),
        instruction(LOAD_32, 1, context, 8, 0),
        instruction(LOAD_32, packet, context, 0, 0),
        instruction(MOVE, end, 1, 0, 0),
        instruction(ADD_NUMBER, end, 0, 0, STAMP as i32),
        instruction(IF_ABOVE, end, packet, 1, 0),
        instruction(STORE_64, 1, time, 0, 0),
        // Then to the queue's socket; where there is none, to the kernel.
        instruction(LOAD_NUMBER_64, 1, MAP_DESCRIPTOR, 0, map),
        instruction(0, 0, 0, 0, 0),
        instruction(LOAD_32, 2, context, 16, 0),
        instruction(MOVE_NUMBER, 3, 0, 0, PASS),
        instruction(CALL, 0, 0, 0, REDIRECT_MAP),
        instruction(EXIT, 0, 0, 0, 0),
        instruction(MOVE_NUMBER, 0, 0, 0, PASS),
        instruction(EXIT, 0, 0, 0, 0),
    ];
    let last = all.len() - 2;
    for (at, one) in all.iter_mut().enumerate() {
        let mut bytes = one.to_ne_bytes();
        if bytes[2..4] == pass.to_ne_bytes() {
            let jump = (last - at - 1) as i16;
            bytes[2..4].copy_from_slice(&jump.to_ne_bytes());
            *one = u64::from_ne_bytes(bytes);
        }
    }
    all
}

/// The kernel has not taken the program.
#[derive(Debug, thiserror::Error)]
#[error("the kernel did not load the program: {error}{}", tail(.log))]
pub struct NotLoaded {
    /// Why.
    #[source]
    pub error: io::Error,
    /// What its verifier says.
    pub log: String,
}

fn tail(log: &str) -> String {
    match log.trim().lines().last() {
        Some(line) => format!(" (verifier: {line})"),
        None => String::new(),
    }
}

/// Loads the program for this map. `frags`: it takes packets of several frames.
///
/// # Errors
/// [`NotLoaded`], with the verifier's log.
pub(crate) fn load(rule: &Rule, map: BorrowedFd<'_>, frags: bool) -> Result<OwnedFd, NotLoaded> {
    let instructions = assemble(rule, map.as_raw_fd());
    sys::load_program(&instructions, frags, None).map_err(|error| {
        // A second time, for the log.
        let mut log = vec![0; 1 << 16];
        let _ = sys::load_program(&instructions, frags, Some(&mut log));
        let length = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
        NotLoaded {
            error,
            log: String::from_utf8_lossy(&log[..length]).into_owned(),
        }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What the program does with a frame, by a small machine that knows its instructions: `true`, it goes to
    /// our socket. The packet is at address 0. The stamp before it, where there is room, is 77.
    fn ours(program: &[u64], frame: &[u8]) -> bool {
        let [with, without] = [true, false].map(|room| stamped(program, frame, room));
        assert_eq!(with.is_some(), without.is_some());
        assert!(with.is_none_or(|stamp| stamp == Some(77)) && without.flatten().is_none());
        with.is_some()
    }

    /// The stamp of a frame that goes to our socket, if it has `room` for one.
    fn stamped(program: &[u64], frame: &[u8], room: bool) -> Option<Option<u64>> {
        let mut registers = [0u64; 11];
        let (mut moved, mut stamp) = (0u64, None);
        let mut at = 0usize;
        loop {
            let bytes = program[at].to_ne_bytes();
            let (to, from) = ((bytes[1] & 15) as usize, (bytes[1] >> 4) as usize);
            let jump = i16::from_ne_bytes([bytes[2], bytes[3]]);
            let number = i32::from_ne_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
            let load = |length: usize| {
                if from == 1 || from == 6 {
                    return match jump {
                        4 => frame.len() as u64,
                        8 => moved,
                        _ => 0,
                    };
                }
                let mut word = [0; 8];
                let start = registers[from] as usize + jump as usize;
                word[..length].copy_from_slice(&frame[start..start + length]);
                u64::from_le_bytes(word)
            };
            at += 1;
            let mut jumps = false;
            match bytes[0] {
                LOAD_8 => registers[to] = load(1),
                LOAD_16 => registers[to] = load(2),
                LOAD_32 => registers[to] = load(4),
                LOAD_NUMBER_64 => at += 1,
                MOVE => registers[to] = registers[from],
                MOVE_NUMBER => registers[to] = number as u64,
                ADD_NUMBER => registers[to] = registers[to].wrapping_add(number as u64),
                AND_NUMBER => registers[to] &= number as u64,
                TO_BIG_ENDIAN => registers[to] = u64::from((registers[to] as u16).swap_bytes()),
                IF_ABOVE => jumps = registers[to] > registers[from],
                IF_ABOVE_NUMBER => jumps = registers[to] > number as u64,
                IF_BELOW_NUMBER => jumps = registers[to] < number as u64,
                IF_NOT_NUMBER => jumps = registers[to] as u32 != number as u32,
                CALL if number == MONOTONIC_TIME => registers[0] = 77,
                CALL if number == MOVE_METADATA => {
                    moved = if room { registers[2] } else { 0 };
                    registers[0] = u64::from(!room);
                }
                CALL => {
                    assert_eq!(number, REDIRECT_MAP);
                    return Some(stamp);
                }
                STORE_64 => {
                    assert_eq!(
                        registers[to].wrapping_add(STAMP as u64),
                        0,
                        "before the packet"
                    );
                    stamp = Some(registers[from]);
                }
                EXIT => {
                    assert_eq!(registers[0], PASS as u64);
                    return None;
                }
                code => panic!("instruction {code:#x}"),
            }
            if jumps {
                at += jump as usize;
            }
        }
    }

    fn rule() -> Rule {
        Rule {
            address: Ipv4Addr::new(192, 168, 7, 9),
            ports: 20_000..=20_031,
        }
    }

    fn frame(port: u16) -> Vec<u8> {
        let mut frame = vec![0; 60];
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14] = 0x45;
        frame[20] = 0x40;
        frame[23] = 17;
        frame[30..34].copy_from_slice(&rule().address.octets());
        frame[36..38].copy_from_slice(&port.to_be_bytes());
        frame
    }

    proptest! {
        #[cfg(target_endian = "little")]
        #[test]
        fn our_ports_are_taken_and_all_others_passed_on(port: u16) {
            let program = assemble(&rule(), 3);
            prop_assert_eq!(ours(&program, &frame(port)), rule().ports.contains(&port));
        }

        #[cfg(target_endian = "little")]
        #[test]
        fn any_other_frame_is_passed_on(
            bytes in prop::collection::vec(any::<u8>(), 0..80),
            from in 12usize..42,
            value: u8,
        ) {
            let program = assemble(&rule(), 3);
            // What the wire says, by the standards' words rather than by offsets in a program.
            let wanted = |frame: &[u8]| crate::frames::parse(frame).is_some_and(|one| {
                one.to.ip() == &rule().address && rule().ports.contains(&one.to.port())
            });
            prop_assert_eq!(ours(&program, &bytes), wanted(&bytes));
            let mut one = frame(20_007);
            one[16..18].copy_from_slice(&46u16.to_be_bytes());
            one[38..40].copy_from_slice(&26u16.to_be_bytes());
            prop_assert!(ours(&program, &one) && wanted(&one));
            one[from] = value;
            // Lengths are the parser's to look at.
            if !(16..18).contains(&from) && !(38..40).contains(&from) {
                prop_assert_eq!(ours(&program, &one), wanted(&one), "byte {} is {}", from, value);
            }
        }
    }
}
