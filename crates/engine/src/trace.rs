//! A trace of what the UDP engine does: every packet that goes and comes, and what the protocol decides
//! about it, as a file that Wireshark reads. docs/reference/network-trace.md has its layout.
//!
//! Without EVENER_NET_TRACE_DIR nothing of this exists, and an instance looks at one `Option` per
//! packet. With it each instance puts records into a ring of its own, which it never waits for: a record
//! that finds the ring full is left out and counted. One thread empties all rings and writes
//! ([`pcapng`]). A file that is half as large as all may be takes the place of the one before it, so the
//! last records are there, and never more bytes than asked for.

mod pcapng;

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use evener_proto::packet::Dropped;
use evener_proto::packet::format::HEADER;
use evener_proto::packet::trace::Note;

use crate::config::Config;
use crate::log::Level;
use crate::records;
use pcapng::{EVENTS, PACKETS};

/// Records that wait in a ring.
const ROOM: usize = 1 << 14;
/// Between two looks at rings that were empty.
const NAP: Duration = Duration::from_millis(5);
/// Records of a ring that are written before the next one's turn.
const TURN: usize = 1024;
/// Files of one process, at most.
const MOST_FILES: usize = 1000;
/// Connections whose peer is said again in each file, at most.
const MOST_OPEN: usize = 4096;

/// What is written.
pub enum Record {
    /// A packet went or came.
    Packet {
        /// By the engine's clock.
        at: Duration,
        /// It came.
        inbound: bool,
        /// From here ...
        from: SocketAddr,
        /// ... to here.
        to: SocketAddr,
        /// Its header.
        head: [u8; HEADER],
        /// Bytes of the datagram.
        length: usize,
        /// Why it was not taken.
        dropped: Option<Dropped>,
    },
    /// Something that the protocol did.
    Note {
        /// Number of the connection at this side.
        connection: u32,
        /// What.
        note: Note,
    },
    /// A connection is open.
    Opened {
        /// By the engine's clock.
        at: Duration,
        /// Its number at this side, and at the other.
        connection: (u32, u32),
        /// Who is there.
        peer: String,
    },
    /// A connection is over.
    Over {
        /// By the engine's clock.
        at: Duration,
        /// Its number at this side.
        connection: u32,
        /// Why.
        why: String,
    },
}

/// Where an instance puts its records.
#[derive(Clone)]
pub struct Ring {
    to: SyncSender<Record>,
    dropped: Arc<AtomicU64>,
}

impl Ring {
    /// Puts a record in, if there is room.
    pub fn add(&self, record: Record) {
        if self.to.try_send(record).is_err() {
            self.missed(1);
        }
    }

    /// A packet went or came.
    pub fn packet(
        &self,
        at: Duration,
        (from, to): (SocketAddr, SocketAddr),
        packet: &[u8],
        came: Option<Result<(), Dropped>>,
    ) {
        let mut head = [0; HEADER];
        let known = packet.len().min(HEADER);
        head[..known].copy_from_slice(&packet[..known]);
        self.add(Record::Packet {
            at,
            inbound: came.is_some(),
            from,
            to,
            head,
            length: packet.len(),
            dropped: came.and_then(Result::err),
        });
    }

    /// This many records were left out before they came here.
    pub fn missed(&self, count: u64) {
        self.dropped.fetch_add(count, Relaxed);
    }
}

/// Empties the rings into a file.
pub struct Writer {
    rings: Vec<Receiver<Record>>,
    dropped: Arc<AtomicU64>,
    file: BufWriter<File>,
    path: PathBuf,
    older: PathBuf,
    /// Bytes of the file, and at most.
    written: u64,
    most: u64,
    /// Seconds since 1970 at the engine's start.
    epoch: Duration,
    /// Connections that are open: said again in each file.
    open: HashMap<u32, (Duration, u32, String)>,
    counts: [u64; 2],
    block: Vec<u8>,
    /// What went wrong: nothing more is written.
    broken: bool,
}

impl Writer {
    /// For this many instances; their rings.
    ///
    /// # Errors
    /// The directory cannot be made, or the file not be written.
    pub fn start(
        directory: &Path,
        config: &Config,
        count: usize,
        started: Instant,
    ) -> io::Result<(Vec<Ring>, Writer)> {
        std::fs::create_dir_all(directory)?;
        let (mut tries, stem) = (1, records::stem());
        let (file, path) = loop {
            let more = if tries == 1 {
                String::new()
            } else {
                format!("-{tries}")
            };
            let path = directory.join(format!("{stem}{more}.pcapng"));
            match File::create_new(&path) {
                Ok(file) => break (file, path),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => tries += 1,
                Err(error) => return Err(error),
            }
            if tries > MOST_FILES {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
        };
        let dropped = Arc::new(AtomicU64::new(0));
        let (rings, all) = (0..count)
            .map(|_| {
                let (to, from) = sync_channel(ROOM);
                let dropped = dropped.clone();
                (Ring { to, dropped }, from)
            })
            .unzip();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let mut writer = Writer {
            rings: all,
            dropped,
            file: BufWriter::with_capacity(1 << 18, file),
            older: path.with_extension("old.pcapng"),
            path,
            written: 0,
            most: config.trace_bytes / 2,
            epoch: now.unwrap_or_default().saturating_sub(started.elapsed()),
            open: HashMap::new(),
            counts: [0; 2],
            block: Vec::new(),
            broken: false,
        };
        writer.begin()?;
        writer.file.flush()?;
        Ok((rings, writer))
    }

    /// Where it writes.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes until all rings are gone. `log` hears of what goes wrong.
    pub fn run(mut self, log: &dyn Fn(Level, &str)) {
        while !self.rings.is_empty() {
            let mut any = false;
            for ring in std::mem::take(&mut self.rings) {
                let mut over = false;
                for _ in 0..TURN {
                    match ring.try_recv() {
                        Ok(record) => {
                            any = true;
                            self.write(record, log);
                        }
                        Err(error) => {
                            over = error == TryRecvError::Disconnected;
                            break;
                        }
                    }
                }
                if !over {
                    self.rings.push(ring);
                }
            }
            if !any {
                let flushed = self.file.flush();
                self.check(flushed, log);
                std::thread::sleep(NAP);
            }
        }
        let ended = self.end();
        self.check(ended, log);
        let missed = self.dropped.load(Relaxed);
        let [packets, events] = self.counts;
        let text = format!(
            "trace {}: {packets} packets and {events} events, {missed} records left out",
            self.path.display()
        );
        log(Level::Info, &text);
    }

    fn check(&mut self, result: io::Result<()>, log: &dyn Fn(Level, &str)) {
        if let Err(error) = result
            && !std::mem::replace(&mut self.broken, true)
        {
            let text = format!("trace {}: {error}: it ends here", self.path.display());
            log(Level::Warn, &text);
        }
    }

    fn write(&mut self, record: Record, log: &dyn Fn(Level, &str)) {
        if self.broken {
            return;
        }
        self.block.clear();
        let place = self.add(&record);
        self.counts[place] += 1;
        let mut done = self.put();
        if done.is_ok() && self.written > self.most {
            done = self.turn_over();
        }
        self.check(done, log);
    }

    fn put(&mut self) -> io::Result<()> {
        self.written += self.block.len() as u64;
        self.file.write_all(&self.block)
    }

    /// Puts a record into `block`; to which interface it belongs.
    fn add(&mut self, record: &Record) -> usize {
        match record {
            Record::Packet {
                at,
                inbound,
                from,
                to,
                head,
                length,
                dropped,
            } => {
                let head = &head[..HEADER.min(*length)];
                let bytes = pcapng::datagram(*from, *to, head, *length);
                let size = bytes.len() + length - head.len();
                let comment = dropped.map(|why| format!("dropped: {why}"));
                let comment = comment.unwrap_or_default();
                let at = self.epoch + *at;
                pcapng::packet(
                    &mut self.block,
                    PACKETS,
                    at,
                    &bytes,
                    size,
                    Some(*inbound),
                    &comment,
                );
                PACKETS as usize
            }
            Record::Note { connection, note } => {
                let (bytes, comment) = pcapng::event(*connection, note);
                self.event(note.at, &bytes, &comment)
            }
            Record::Opened {
                at,
                connection: (own, other),
                peer,
            } => {
                // What nobody closes is not kept for ever.
                if self.open.len() < MOST_OPEN {
                    self.open.insert(*own, (*at, *other, peer.clone()));
                }
                let bytes = pcapng::opened(*own, *other);
                self.event(*at, &bytes, &format!("open: {peer}"))
            }
            Record::Over {
                at,
                connection,
                why,
            } => {
                self.open.remove(connection);
                self.event(*at, &pcapng::over(*connection), &format!("over: {why}"))
            }
        }
    }

    fn event(&mut self, at: Duration, bytes: &[u8], comment: &str) -> usize {
        let at = self.epoch + at;
        pcapng::packet(
            &mut self.block,
            EVENTS,
            at,
            bytes,
            bytes.len(),
            None,
            comment,
        );
        EVENTS as usize
    }

    /// A file's first blocks, and the connections that are open.
    fn begin(&mut self) -> io::Result<()> {
        self.block.clear();
        self.written = 0;
        pcapng::begin(&mut self.block, &records::stem());
        let open = std::mem::take(&mut self.open);
        for (own, (at, other, peer)) in &open {
            self.event(*at, &pcapng::opened(*own, *other), &format!("open: {peer}"));
        }
        self.open = open;
        self.put()
    }

    /// A file's last blocks: what was counted.
    fn end(&mut self) -> io::Result<()> {
        if self.broken {
            return Ok(());
        }
        self.block.clear();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let missed = self.dropped.load(Relaxed);
        let [packets, events] = self.counts;
        let now = now.unwrap_or_default();
        pcapng::counted(&mut self.block, PACKETS, now, packets, 0);
        // What was left out is of both kinds; it is said once.
        pcapng::counted(&mut self.block, EVENTS, now, events + missed, missed);
        self.put()?;
        self.file.flush()
    }

    /// The file is as long as it may be: it becomes the older one, and a new one begins.
    fn turn_over(&mut self) -> io::Result<()> {
        self.end()?;
        std::fs::rename(&self.path, &self.older)?;
        self.file = BufWriter::with_capacity(1 << 18, File::create_new(&self.path)?);
        self.begin()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evener_proto::packet::trace::What;

    fn blocks(bytes: &[u8]) -> Vec<(u32, Vec<u8>)> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let (mut at, mut all) = (0, Vec::new());
        while at < bytes.len() {
            let (kind, length) = (word(at), word(at + 4) as usize);
            assert!(length % 4 == 0 && length >= 12, "{length} at {at}");
            assert_eq!(word(at + length - 4) as usize, length);
            all.push((kind, bytes[at + 8..at + length - 4].to_vec()));
            at += length;
        }
        all
    }

    fn note(at: u64) -> Record {
        let what = What::Silent { times: 1 };
        let (total, flying) = (9, 8);
        let at = Duration::from_millis(at);
        let note = Note {
            at,
            path: 3,
            what,
            total,
            flying,
        };
        Record::Note {
            connection: 77,
            note,
        }
    }

    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("evener-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        path
    }

    fn started(directory: &Path, bytes: u64) -> (Vec<Ring>, Writer) {
        let config = Config {
            trace_bytes: bytes,
            ..Config::default()
        };
        Writer::start(directory, &config, 1, Instant::now()).unwrap()
    }

    #[test]
    fn what_finds_no_room_is_counted_and_not_waited_for() {
        let directory = directory("ring");
        let (mut rings, writer) = started(&directory, 1 << 30);
        let ring = rings.remove(0);
        for at in 0..ROOM as u64 + 5 {
            ring.add(note(at));
        }
        ring.missed(2);
        drop(ring);
        let path = writer.path().to_path_buf();
        writer.run(&|_, _| {});
        let all = blocks(&std::fs::read(path).unwrap());
        assert_eq!(all.iter().filter(|(kind, _)| *kind == 6).count(), ROOM);
        let (kind, last) = all.last().unwrap();
        assert_eq!(*kind, 5);
        // isb_ifdrop is the last option.
        let dropped = &last[last.len() - 12..last.len() - 4];
        assert_eq!(u64::from_le_bytes(dropped.try_into().unwrap()), 7);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn two_files_hold_the_last_records_and_no_more_bytes_than_may_be() {
        let directory = directory("turn");
        let (rings, mut writer) = started(&directory, 40_000);
        drop(rings);
        let peer = "somebody".to_string();
        let at = Duration::ZERO;
        let connection = (77, 78);
        let opened = Record::Opened {
            at,
            connection,
            peer,
        };
        writer.write(opened, &|_, _| {});
        for at in 0..2_000 {
            writer.write(note(at), &|_, _| {});
        }
        let (path, older) = (writer.path().to_path_buf(), writer.older.clone());
        writer.run(&|_, _| {});
        let files = [older, path].map(|path| std::fs::read(path).unwrap());
        assert!(files.iter().map(Vec::len).sum::<usize>() < 41_000);
        for file in &files {
            let all = blocks(file);
            assert_eq!(all[0].0, 0x0a0d_0d0a);
            // Who the connection is with is in both.
            assert_eq!(all[3].0, 6);
            let text = String::from_utf8_lossy(&all[3].1);
            assert!(text.contains("open: somebody"), "{text}");
        }
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 2);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_file_that_is_there_is_left_alone() {
        let directory = directory("twice");
        let (_rings, one) = started(&directory, 1 << 20);
        let (_more, other) = started(&directory, 1 << 20);
        assert_ne!(one.path(), other.path());
        std::fs::remove_dir_all(directory).unwrap();
    }
}
