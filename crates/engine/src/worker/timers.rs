//! What a worker does by the clock: asks the kernel about its connections, and lets the protocol's
//! time pass.

use std::os::fd::AsRawFd;
use std::time::Duration;

use evener_proto::path::Report;

use super::Worker;
use crate::lock::lock;
use crate::stats::WorkerStats;
use crate::sys;

/// A connection is asked about at most this often: it is a call that takes the socket's lock.
const ASK: Duration = Duration::from_millis(4);

impl Worker {
    /// Does what is due; when it is next needed.
    pub(super) fn timers(&mut self, now: Duration) -> Duration {
        let mut next = now + Duration::from_secs(1);
        let shared = self.shared.clone();
        let counts = &shared.workers[self.index].counts;
        for index in 0..self.links.len() {
            let Some(Some(mine)) = self.links.get_mut(index) else {
                continue;
            };
            if mine.conns.is_empty() && mine.peer.home != self.index {
                // Others have all of its connections, and its clock.
                continue;
            }
            let peer = mine.peer.clone();
            let owing: Vec<usize> = {
                let link = lock(&peer.link);
                let Some(deadline) = link.lane.deadline() else {
                    continue;
                };
                if deadline > now {
                    next = next.min(deadline);
                    continue;
                }
                let owes = |number: &usize| {
                    let conn = self.conns.get(*number).and_then(Option::as_ref);
                    conn.is_some_and(|conn| link.lane.owes(conn.path) && now >= conn.asked + ASK)
                };
                mine.conns.iter().copied().filter(owes).collect()
            };
            let mut reports = Vec::with_capacity(owing.len());
            for number in owing {
                let Some(Some(conn)) = self.conns.get_mut(number) else {
                    continue;
                };
                conn.asked = now;
                WorkerStats::add(&counts.looks, 1);
                let Ok(info) = sys::tcp_info(conn.fd.as_raw_fd()) else {
                    continue;
                };
                conn.stats.looked(&info);
                let lossy = conn.adapt(&info);
                let report = Report {
                    unconfirmed: info.unacknowledged > 0 || info.unsent > 0 || conn.queued() > 0,
                    lossy,
                    advanced: info.bytes_acknowledged != conn.acknowledged,
                    rtt: Some(Duration::from_micros(info.rtt_us.into())),
                    rate: (info.delivery_rate > 0).then_some(info.delivery_rate as f64),
                };
                conn.acknowledged = info.bytes_acknowledged;
                mine.delivery.ahead.count(conn.look(now) as u64, now);
                reports.push((conn.path, report, conn.outstanding(), conn.stats.clone()));
            }
            let effects = {
                let mut link = lock(&peer.link);
                for (path, report, outstanding, stats) in reports {
                    link.lane.report(path, &report, now);
                    link.lane.delivered(path, outstanding, now);
                    let (window, wait) = link.lane.window(path);
                    stats.steered(window, wait);
                }
                let rtt = |number: &usize| {
                    let conn = self.conns.get(*number).and_then(Option::as_ref);
                    conn.map_or(Duration::ZERO, |conn| link.lane.rtt(conn.path))
                };
                // Paths that are about equally quick keep their turns.
                let quickest = mine.conns.iter().map(rtt).min().unwrap_or_default();
                let class = (quickest * 2 + Duration::from_micros(50)).as_nanos();
                mine.conns
                    .sort_by_key(|number| rtt(number).as_nanos() / class);
                link.lane.on_time(now);
                link.events(now);
                mine.dirty = true;
                if let Some(deadline) = link.lane.deadline() {
                    next = next.min(deadline.max(now + Duration::from_millis(1)));
                }
                link.effects()
            };
            self.apply(&peer, effects);
            self.forget_if_over(&peer);
            self.pump_dirty();
        }
        next
    }
}
