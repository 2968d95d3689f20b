//! The statistics file of a process (docs/reference/records.md): written beside its name and renamed into
//! place, so that a reader never sees half of one.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::config::Choice;
use crate::lock::lock;
use crate::nics::Nic;
use crate::paths::Ended;
use crate::shared::Shared;
use crate::stats::{PathReport, PathStats};

fn text(value: &str) -> String {
    let mut out = String::from("\"");
    for c in value.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if (c as u32) < 0x20 => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_string()
}

fn first_set(names: &[&str]) -> String {
    names
        .iter()
        .find_map(|name| std::env::var(name).ok()?.parse::<i64>().ok())
        .map_or("null".into(), |rank| rank.to_string())
}

fn rank() -> String {
    first_set(&["RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"])
}

/// A path, with fields of its own behind the others.
fn of_path(path: &PathReport, state: &str, more: &str) -> String {
    format!(
        "{{\"peer\":{},\"nic\":{},\"source_port\":{},\"state\":\"{state}\",\"bytes_sent\":{},\
         \"bytes_received\":{},\"rate\":{},\"rtt_us\":{},\"window\":{},\"wait_us\":{},\
         \"retransmits\":{},\"heals\":{}{more}}}",
        text(&path.peer),
        text(&path.nic),
        path.port,
        path.sent,
        path.received,
        path.rate,
        path.rtt_us,
        path.window,
        path.wait_us,
        path.retransmits,
        path.heals,
    )
}

/// The NICs, the paths, and those that have ended: of one moment, so that sums agree.
fn of_paths(shared: &Shared) -> (Vec<String>, Vec<String>, Vec<String>) {
    let paths = lock(&shared.paths);
    let device = |nic: &Nic| {
        let [sent, received] = paths.carried(&nic.name);
        format!(
            "{{\"name\":{},\"address\":{},\"speed_mbps\":{},\"bytes_sent\":{sent},\
             \"bytes_received\":{received}}}",
            text(&nic.name),
            text(&nic.address.to_string()),
            nic.speed
        )
    };
    let live = |stats: &PathStats| {
        let path = stats.report();
        of_path(&path, if path.suspect { "suspect" } else { "live" }, "")
    };
    let ended = |one: &Ended| {
        let seconds = one.time.as_secs_f64();
        let more = format!(",\"why\":{},\"time\":{seconds:.3}", text(&one.why));
        of_path(&one.path, "ended", &more)
    };
    (
        shared.nics().iter().map(device).collect(),
        paths.live().map(|(_, stats)| live(stats)).collect(),
        paths.ended().map(ended).collect(),
    )
}

/// The record as JSON.
pub fn json(shared: &Shared) -> String {
    let mut out = String::new();
    let time = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0.0, |time| time.as_secs_f64());
    let rank = rank();
    let _ = write!(
        out,
        "{{\"version\":1,\"pid\":{},\"rank\":{rank},\"host\":{},\"time\":{time:.3},\"net\":{{",
        std::process::id(),
        text(&host()),
    );
    let (devices, paths, ended) = of_paths(shared);
    let peers: Vec<String> = shared
        .peers
        .all()
        .iter()
        .map(|peer| {
            lock(&peer.link).note_silences();
            format!(
                "{{\"peer\":{},\"connections\":{},\"comms\":{},\"under_way\":{},\"trials\":{},\
                 \"gains\":{},\"rerolls\":{},\"best_rate\":{},\"late\":{},\"took_us_log2\":{}}}",
                text(peer.name()),
                peer.connections.load(Relaxed),
                peer.claims.load(Relaxed),
                peer.traffic.under_way[0].load(Relaxed) + peer.traffic.under_way[1].load(Relaxed),
                peer.placement.trials.load(Relaxed),
                peer.placement.gains.load(Relaxed),
                peer.placement.rerolls.load(Relaxed),
                peer.placement.best.load(Relaxed),
                lock(&peer.link).lane.late(),
                peer.traffic.took.json(),
            )
        })
        .collect();
    let workers: Vec<String> = shared.counts().map(|counts| counts.json()).collect();
    let tcp = shared.workers.iter();
    let [read, written] = tcp.fold([0; 2], |[read, written], worker| {
        let of = |both: &[AtomicU64; 2]| both[1].load(Relaxed);
        [
            read + of(&worker.counts.reads),
            written + of(&worker.counts.writes),
        ]
    });
    let [udp_out, udp_in] = shared.packets.copied();
    let _ = write!(
        out,
        "\"copied\":{{\"tcp\":[{written},{read}],\"udp\":[{udp_out},{udp_in}]}},\"packets\":{},",
        shared.packets.json()
    );
    let _ = write!(
        out,
        "\"engine\":\"{}\",\"uptime_s\":{:.1},\"devices\":[{}],\"silences_us\":{},\"workers\":[{}],\"peers\":[{}],\"paths\":[{}],\"ended\":[{}]}}}}",
        match shared.config.engine {
            Choice::Tcp => "tcp",
            Choice::Udp => "udp",
            Choice::Xdp => "xdp",
        },
        shared.started.elapsed().as_secs_f64(),
        devices.join(","),
        shared.silences.json(),
        workers.join(","),
        peers.join(","),
        paths.join(","),
        ended.join(",")
    );
    out.push('\n');
    out
}

/// `net-<host>-r<rank>-<pid>` (without `r<rank>-` where no launcher said it): nodes may share a directory,
/// and process ids.
pub fn stem() -> String {
    let host = host().replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "_");
    let rank = match rank().as_str() {
        "null" => String::new(),
        rank => format!("r{rank}-"),
    };
    format!("net-{host}-{rank}{}", std::process::id())
}

/// Writes `directory/<stem>.json`.
///
/// # Errors
/// The directory cannot be made or written.
pub fn write(shared: &Shared, directory: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let name = format!("{}{}.json", stem(), shared.config.label);
    let part = directory.join(format!(".{name}.part"));
    std::fs::write(&part, json(shared))?;
    std::fs::rename(&part, directory.join(name))
}
