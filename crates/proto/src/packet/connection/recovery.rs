//! What is taken for lost, by order, by age, by silence; and what the clock does besides.

use std::time::Duration;

use super::{Connection, Over, Stage};
use crate::packet::loss::{Content, Fate, Sent};
use crate::packet::paths::State;
use crate::packet::rtt;
use crate::packet::trace::{Cause, What};

/// After silence while something is expected.
const KEEP_ALIVE: Duration = Duration::from_secs(1);
/// The floor of patience grows to this if packets are late and not lost.
const WIDEST_FLOOR: Duration = Duration::from_millis(5);
/// Times that a path is silent before it is dropped.
const SILENCES: u32 = 2;
/// Times that one packet goes again before paths are taken for dead, where none has said anything for half of the
/// patience.
const QUIETS: u32 = 2;

/// Nothing is confirmed, over no path.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Quiet {
    since: Duration,
    /// Packets that went again for that.
    times: u32,
    /// When the next one goes, or what follows.
    until: Duration,
}

impl Quiet {
    /// Something was confirmed.
    pub(super) fn over(now: Duration) -> Self {
        Quiet {
            since: now,
            ..Quiet::default()
        }
    }
}

impl Connection {
    /// What of a path is lost by order or age.
    pub(super) fn find_lost(&mut self, at: u8, now: Duration) {
        let Some(path) = self.paths.get_mut(at) else {
            return;
        };
        let (lost, due) = self.reordering.find(path, &self.unconfirmed, now);
        path.due = due;
        self.lose_all(at, &lost, now);
    }

    /// Takes these packets of a path for lost, because later ones have arrived.
    fn lose_all(&mut self, at: u8, numbers: &[u64], now: Duration) {
        let mut count = 0;
        for number in numbers {
            count += u32::from(self.lose(*number, Cause::Order, now));
            self.stats.lost += 1;
            self.reordering.was_lost();
        }
        if count > 0 {
            self.congestion
                .lost(at, count, self.paths.used(), &self.trip, now);
        }
    }

    /// When the oldest packet of a path is lost because nothing later of its path has arrived, but of
    /// others. A suspect path's is a probe's matter, and silence's.
    fn tail_due(&self, at: u8, (number, sent): (u64, Duration)) -> Option<Duration> {
        let path = self.paths.get(at)?;
        let last = path.newest.is_none_or(|(newest, _)| newest < number);
        let judged = matches!(path.state, State::Active | State::Leaving);
        (last && judged && sent < self.confirmed).then(|| sent + self.reordering.tail(path))
    }

    /// All that is due by [`Connection::tail_due`]. Perhaps the path is dead: a probe tells.
    fn find_tail(&mut self, at: u8, now: Duration) {
        let Some(path) = self.paths.get_mut(at) else {
            return;
        };
        let age = self.reordering.tail(path);
        let due = |sent: &Sent| sent.at < self.confirmed && sent.at + age <= now;
        let flying = path.order.iter().filter_map(|number| {
            let sent = self.unconfirmed.get(*number)?;
            (sent.fate == Fate::Flying).then_some((*number, sent))
        });
        let lost: Vec<u64> = flying
            .take_while(|(_, sent)| due(sent))
            .map(|(number, _)| number)
            .collect();
        path.state = State::Suspect;
        self.paths.ask(at);
        self.lose_all(at, &lost, now);
    }

    /// A packet that was taken for lost has arrived.
    pub(super) fn was_late(&mut self, cause: Cause) {
        match cause {
            Cause::Order => self.reordering.was_late(),
            Cause::Silence => {
                let wider = self.config.floor + self.config.floor / 8;
                self.config.floor = wider.min(WIDEST_FLOOR.max(self.config.floor));
            }
        }
    }

    /// Takes a packet for lost: what it held goes again. `false`: it was but a probe.
    fn lose(&mut self, number: u64, cause: Cause, now: Duration) -> bool {
        let Some(sent) = self.unconfirmed.get_mut(number) else {
            return false;
        };
        if sent.fate != Fate::Flying {
            return false;
        }
        sent.fate = Fate::Lost(cause);
        let size = u64::from(sent.size);
        self.flying = self.flying.saturating_sub(size);
        if let Some(path) = self.paths.get_mut(sent.path) {
            path.flying = path.flying.saturating_sub(size);
        }
        // It stays with the packet: should this be only late, it counts.
        for content in &sent.content {
            match content {
                Content::Bytes(span) => self.outgoing.lost(span),
                other => self.unsaid.push_back(*other),
            }
        }
        let (probe, path, size, at) = (sent.probe, sent.path, sent.size, sent.at);
        let what = What::Lost {
            number,
            size,
            took: now.saturating_sub(at),
            cause,
        };
        self.note(now, path, what);
        if !probe && self.mtu.vanished(size as usize, now) {
            self.congestion.set_packet(self.mtu.size());
        }
        !probe
    }

    /// For how long the oldest packet of a path may be silent.
    fn patience(&self, at: u8, silences: u32) -> Duration {
        let rounds = silences + self.outage / self.paths.used().len().max(1) as u32;
        let mut patience = self.trip.patience(self.config.floor);
        // A short path must not judge a long one.
        match self.paths.get(at).map(|path| (path.trip, path.state)) {
            Some((trip, _)) if trip.known() => {
                patience = patience.max(trip.patience(Duration::ZERO))
            }
            Some((_, State::Active | State::Leaving)) => patience = patience.max(rtt::LONGEST),
            _ => {}
        }
        (patience * 2u32.pow(rounds.min(5))).min(rtt::LONGEST.max(patience))
    }

    /// When something is done about this oldest packet of a path if nothing of the path is confirmed, and whether
    /// that is to send it again and no more.
    fn silence_due(&self, at: u8, sent: Duration) -> (Duration, bool) {
        let silences = self.paths.get(at).map_or(0, |path| path.silences);
        let patience = self.patience(at, silences);
        let mut due = sent + patience;
        if silences == 0 {
            // A path that nobody knows is judged sooner once it is suspect: not before the answer to what goes again.
            due = due.max(self.quiet.until);
        }
        // A peer whose thread has no processor is silent over all paths at once. Then no path is at fault, and what
        // is on its way has arrived: to send all of it again, with half of the windows, makes that worse.
        let all = silences == 0 && self.quiet.since + patience / 2 <= sent + patience;
        (due, all && self.quiet.times < QUIETS)
    }

    /// This packet goes again, over another path. Its confirmation tells what became of those that were sent before it
    /// ([`Connection::find_tail`]).
    fn hurry(&mut self, at: u8, number: u64, now: Duration) {
        if let Some(path) = self.paths.get_mut(at) {
            path.state = State::Suspect;
        }
        self.paths.ask(at);
        let wait = self.patience(at, 0) * (1 + self.quiet.times);
        self.quiet.times += 1;
        self.quiet.until = now + wait;
        if self.lose(number, Cause::Silence, now) {
            self.stats.timed_out += 1;
        }
    }

    /// The oldest packet of a path that is unconfirmed, and when it was sent.
    fn oldest(&mut self, at: u8) -> Option<(u64, Duration)> {
        let path = self.paths.get_mut(at)?;
        while let Some(number) = path.order.front() {
            match self.unconfirmed.get(*number) {
                Some(sent) if sent.fate == Fate::Flying => return Some((*number, sent.at)),
                _ => path.order.pop_front(),
            };
        }
        None
    }

    /// When something is due without a datagram.
    pub fn deadline(&mut self) -> Option<Duration> {
        match self.stage {
            Stage::Calling(_, at) => return Some(at.min(self.heard + self.config.patience)),
            Stage::Unproven => return Some(self.heard + self.config.patience),
            Stage::Over(_) => return None,
            Stage::Open => {}
        }
        let mut due = self.received.deadline();
        let mut at_most = |at: Duration| due = Some(due.map_or(at, |least| least.min(at)));
        for place in 0..self.paths.used().len() {
            let at = self.paths.used()[place];
            if let Some(oldest) = self.oldest(at) {
                let age = self.paths.get(at).and_then(|path| path.due);
                at_most(self.silence_due(at, oldest.1).0);
                let tail = self.tail_due(at, oldest);
                age.into_iter().chain(tail).for_each(&mut at_most);
            }
        }
        if self.outgoing.has_work() {
            self.congestion.paced().into_iter().for_each(&mut at_most);
        }
        self.mtu.deadline().into_iter().for_each(&mut at_most);
        if self.flying > 0 {
            at_most(self.congestion.deadline());
        }
        if self.expects() {
            self.paths.looks().into_iter().for_each(&mut at_most);
            at_most(self.heard.max(self.kept_alive) + KEEP_ALIVE);
            at_most(self.heard + self.config.patience);
        }
        due
    }

    fn expects(&self) -> bool {
        self.incoming.waits() || !self.outgoing.is_idle()
    }

    /// It is that late.
    pub fn on_time(&mut self, now: Duration) {
        if self.over().is_some() {
            return;
        }
        let silence = now.saturating_sub(self.heard);
        if silence >= self.config.patience && (self.stage != Stage::Open || self.expects()) {
            self.end(Over::Silent);
            return;
        }
        if self.stage != Stage::Open {
            return;
        }
        self.reordering.settle();
        for place in 0..self.paths.used().len() {
            let at = self.paths.used()[place];
            let Some(path) = self.paths.get(at) else {
                continue;
            };
            if path.order.is_empty() {
                continue;
            }
            if path.due.is_some_and(|due| due <= now) {
                self.find_lost(at, now);
            }
            let oldest = self.oldest(at);
            let tail = oldest.and_then(|oldest| self.tail_due(at, oldest));
            if tail.is_some_and(|due| due <= now) {
                self.find_tail(at, now);
            }
            if let Some((number, sent)) = self.oldest(at) {
                match self.silence_due(at, sent) {
                    (due, _) if now < due => {}
                    (_, true) => self.hurry(at, number, now),
                    (_, false) => self.silent(at, now),
                }
            }
        }
        for at in self.congestion.asks(self.paths.used(), now) {
            self.paths.ask(at);
        }
        self.take_back(now);
        self.congestion.on_time(self.paths.used(), &self.trip, now);
        if silence >= KEEP_ALIVE
            && now.saturating_sub(self.kept_alive) >= KEEP_ALIVE
            && self.expects()
        {
            self.kept_alive = now;
            let path = self.paths.any();
            self.paths.ask(path);
        }
    }

    /// Dropped paths that answer again take back their places.
    fn take_back(&mut self, now: Duration) {
        if self.expects() {
            self.paths.look_back(now);
        }
        while let Some((old, new)) = self.paths.take_back() {
            self.congestion.replaced(old, new, self.paths.used());
            self.note(now, old, What::Replaced { by: new });
        }
    }

    /// Nothing of a path was confirmed for too long: others take over.
    fn silent(&mut self, at: u8, now: Duration) {
        let Some(path) = self.paths.get_mut(at) else {
            return;
        };
        (path.state, path.due) = (State::Suspect, None);
        path.silences += 1;
        let silences = path.silences;
        let order = std::mem::take(&mut path.order);
        self.paths.ask(at);
        for number in order {
            if self.lose(number, Cause::Silence, now) {
                self.stats.timed_out += 1;
            }
        }
        self.stats.silences += 1;
        self.outage = self.outage.saturating_add(1);
        self.congestion.silent(at, self.paths.used());
        self.note(now, at, What::Silent { times: silences });
        if silences == SILENCES {
            self.paths.doubt_all();
        }
        if silences >= SILENCES
            && let Some(fresh) = self.paths.replace(at, now)
        {
            self.stats.replaced += 1;
            self.congestion.replaced(at, fresh, self.paths.used());
            self.note(now, at, What::Replaced { by: fresh });
        }
    }
}
