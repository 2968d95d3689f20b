//! Source ports as paths.
//!
//! A fabric hashes addresses and ports to choose one of its routes, so a source port *is* a path whose
//! way nobody knows. A connection has up to 256 of them and uses some at a time. One that answers
//! stays in use (REPS, arXiv 2407.21625, recycles what came back clean in the same way); one that is
//! silent is *suspect*: it gets a probe and no bytes. Silent again, it is dropped for one that was not
//! used for the longest time (as PLB, SIGCOMM 2022, re-rolls a flow's hash), and comes back into the
//! pool behind all others. One that had carried before is asked now and then whether it answers
//! again, and then takes back its place from the one that stands in for it. So after a repair a route has
//! the paths that it had; else all would stay on the routes that were left.
//!
//! Which path is next: the one whose window is the least full. A path that a hash put beside many
//! others, or on a slow link, has a small window ([`congestion`](super::congestion)), so bytes go where
//! there is room. A few packets in a row take the same path: one call to the kernel carries them all.
//!
//! On a quick network a connection's window is some dozens of packets, a few for each of sixteen paths,
//! and a call to the kernel costs as much as several packets. So there a path may have a *run* of what
//! belongs to several others, up to the connection's window, and then others are in turn ([`Share`]).
//! The bytes that each gets per turn are in parts of its window, so who is slow gets little.

use std::collections::VecDeque;
use std::time::Duration;

use super::rtt::RoundTrip;

/// Most paths of a connection: a packet has 8 bits for them.
pub const MOST: usize = 256;
/// Packets in a row over one path: as many as half of its window (all of it, if it is a run; less where round trips are long), but no
/// more than one call to the kernel takes. Fewer leave a quick path to single calls, more fill a queue
/// of few packets alone.
const BURST: u32 = 44;

/// Acknowledgements ask for none themselves, so nobody would see that their path is dead. Every this many
/// there is one that asks.
const ASKS_EVERY: u64 = 16;

/// Between two looks whether a dropped path answers again: at first, and after more of them by doubling.
const LOOK: Duration = Duration::from_millis(250);
/// Looks until the time between them doubles, and how often it does.
const LOOKS: (u32, u32) = (8, 2);

/// What a connection may send, for the choice of a path.
#[derive(Debug, Clone, Copy)]
pub struct Share {
    /// Bytes that all paths may have in flight together, and how many are.
    pub total: f64,
    /// Bytes that are.
    pub flying: u64,
    /// Bytes that one path should take in a row.
    pub run: f64,
    /// The part of a path's window that goes over it in a row, where it has no run.
    pub burst: f64,
}

impl Share {
    /// How many windows a path may have in flight: 1 where its own window is run enough.
    fn stretch(&self, used: usize) -> f64 {
        (self.run * used as f64 / self.total.max(1.0)).clamp(1.0, used as f64)
    }

    /// Whether a run can begin. A few packets that go at once are a call to the kernel for each few;
    /// what is on its way is confirmed soon, and then there is room for more.
    fn begins(&self) -> bool {
        let room = self.total - self.flying as f64;
        room >= self.run.min(self.total / 8.0)
    }
}

/// Whether a path is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Takes packets.
    Active,
    /// Was silent for too long: a probe decides.
    Suspect,
    /// Takes no bytes: what it stands in for takes its place when nothing of it is on its way.
    Leaving,
    /// Not in use.
    Spare,
}

/// One path.
#[derive(Debug)]
pub struct Path {
    /// Whether it is used.
    pub state: State,
    /// Bytes that are unconfirmed.
    pub flying: u64,
    /// Packets that are unconfirmed, in the order in which they were sent. Acknowledged ones stay
    /// until they are at the front.
    pub order: VecDeque<u64>,
    /// The newest acknowledged packet, and when it was sent.
    pub newest: Option<(u64, Duration)>,
    /// From sending to acknowledgement, with the time that the receiver keeps that back.
    pub trip: RoundTrip,
    /// When its oldest packet is lost by its age.
    pub due: Option<Duration>,
    /// Times that its oldest packet was silent for too long, in a row.
    pub silences: u32,
    /// A probe is due.
    probe: bool,
    /// It has carried since it came into use.
    proven: bool,
    /// Not in use, and something of it was acknowledged.
    returns: bool,
}

/// All paths of a connection, the peer's excepted.
#[derive(Debug)]
pub struct Paths {
    all: Vec<Path>,
    /// Places of those in use.
    used: Vec<u8>,
    /// Others, the one unused for the longest first.
    spare: VecDeque<u8>,
    /// By the same places as `used`: what had carried there and was dropped. It is not in the pool.
    former: Vec<Option<u8>>,
    /// When these are asked next, and how often they were in vain.
    look: (Duration, u32),
    /// Whether one of them may have answered.
    returns: bool,
    current: u8,
    burst: u32,
    /// A probe may be due for one of those in use.
    asks: bool,
    /// Which of those in use an acknowledgement asked over last.
    asked: usize,
    /// Acknowledgements that ask, whichever they are.
    doubts: usize,
    /// For what has no window: greetings, probes, acknowledgements.
    turn: usize,
}

impl Paths {
    /// `most` ports, `used` of them at a time.
    pub fn new(used: usize, most: usize) -> Self {
        let most = most.clamp(1, MOST);
        let used = used.clamp(1, most);
        let path = |at| Path {
            state: if at < used {
                State::Active
            } else {
                State::Spare
            },
            flying: 0,
            order: VecDeque::new(),
            newest: None,
            trip: RoundTrip::default(),
            due: None,
            silences: 0,
            probe: false,
            proven: false,
            returns: false,
        };
        Paths {
            all: (0..most).map(path).collect(),
            used: (0..used).map(|at| at as u8).collect(),
            spare: (used..most).map(|at| at as u8).collect(),
            former: vec![None; used],
            look: (Duration::ZERO, 0),
            returns: false,
            current: 0,
            burst: 0,
            asks: false,
            asked: 0,
            doubts: 0,
            turn: 0,
        }
    }

    /// The path at this place, if there is one.
    pub fn get(&self, at: u8) -> Option<&Path> {
        self.all.get(usize::from(at))
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, at: u8) -> Option<&mut Path> {
        self.all.get_mut(usize::from(at))
    }

    /// Those in use.
    pub fn used(&self) -> &[u8] {
        &self.used
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Whether any is in use and not suspect.
    pub fn any_active(&self) -> bool {
        self.used
            .iter()
            .any(|at| self.all[usize::from(*at)].state == State::Active)
    }

    /// The path for a packet of `size` bytes: one whose window, by `window`, has room.
    pub fn choose(&mut self, size: u64, share: Share, window: impl Fn(u8) -> f64) -> Option<u8> {
        let suspects = !self.any_active();
        let stretch = share.stretch(self.used.len());
        let runs = stretch > 1.0;
        let fill = |at: u8| {
            let path = &self.all[usize::from(at)];
            let usable = path.state == State::Active || suspects;
            let most = window(at) * stretch;
            // An empty path takes one packet, however small its window is.
            let room = path.flying == 0 || (path.flying + size) as f64 <= most;
            // If paths have runs, the empty ones are in turn: else the largest would have all.
            let fill = if runs && path.flying == 0 {
                0.0
            } else {
                (path.flying + size) as f64 / most.max(1.0)
            };
            (usable && room).then_some(fill)
        };
        let most = window(self.current) * (stretch - 1.0 + share.burst) / size as f64;
        let most = most.clamp(2.0, f64::from(BURST)) as u32;
        if self.burst < most && fill(self.current).is_some() && self.used.contains(&self.current) {
            self.burst += 1;
            return Some(self.current);
        }
        if runs && !share.begins() {
            return None;
        }
        // Equal ones in turn: start behind the last.
        self.turn = (self.turn + 1) % self.used.len();
        let places = (self.turn..self.used.len()).chain(0..self.turn);
        let filled = places.filter_map(|place| Some((place, fill(self.used[place])?)));
        let (place, _) = filled.min_by(|one, other| one.1.total_cmp(&other.1))?;
        if runs {
            self.turn = place;
        }
        (self.current, self.burst) = (self.used[place], 1);
        Some(self.current)
    }

    /// A path for what needs no window, in turn.
    pub fn any(&mut self) -> u8 {
        self.turn = (self.turn + 1) % self.used.len();
        let active = |at: &&u8| self.all[usize::from(**at)].state == State::Active;
        let (late, early) = (&self.used[self.turn..], &self.used[..self.turn]);
        let found = late.iter().chain(early).find(active);
        found.copied().unwrap_or(self.used[self.turn])
    }

    /// A probe is due for this path.
    pub fn ask(&mut self, at: u8) {
        if let Some(path) = self.get_mut(at) {
            path.probe = true;
            self.asks = true;
        }
    }

    /// The next path for which a probe is due; it counts as sent.
    pub fn asked(&mut self) -> Option<u8> {
        if !self.asks {
            return None;
        }
        let former = self.former.iter().flatten();
        let mut all = self.used.iter().chain(former).copied();
        let found = all.find(|at| self.all[usize::from(*at)].probe);
        match found {
            Some(at) => self.all[usize::from(at)].probe = false,
            None => self.asks = false,
        }
        found
    }

    /// A packet of this path was acknowledged: it is sound. If the path is not in use only what `asked` counts: the
    /// others are from before it was dropped.
    pub fn answered(&mut self, at: u8, asked: bool) {
        let Some(path) = self.get_mut(at) else {
            return;
        };
        if path.state == State::Spare && !asked {
            return;
        }
        (path.silences, path.probe) = (0, false);
        match path.state {
            State::Spare => (path.returns, self.returns) = (true, true),
            state => {
                path.proven = true;
                if state == State::Suspect {
                    path.state = State::Active;
                }
            }
        }
    }

    /// The path for this acknowledgement (they are counted) if it is to ask for one itself. Such have a turn
    /// of their own: every sixteenth of all would be over the same path each time, where sixteen are in turn.
    pub fn asks_back(&mut self, number: u64) -> Option<u8> {
        if self.doubts == 0 && !number.is_multiple_of(ASKS_EVERY) {
            return None;
        }
        self.doubts = self.doubts.saturating_sub(1);
        let active = |at: &u8| self.all[usize::from(*at)].state == State::Active;
        let places =
            (self.asked + 1..self.used.len()).chain(0..=self.asked.min(self.used.len() - 1));
        let place = places
            .into_iter()
            .find(|place| active(&self.used[*place]))?;
        self.asked = place;
        Some(self.used[place])
    }

    /// A path is dead, so others may be: the next acknowledgements ask, over each of them.
    pub fn doubt_all(&mut self) {
        self.doubts = self.used.len();
    }

    /// Takes another path instead of this one. The new one's place, or none if there is no spare.
    pub fn replace(&mut self, at: u8, now: Duration) -> Option<u8> {
        let place = self.used.iter().position(|used| *used == at)?;
        let fresh = self.spare.pop_front()?;
        self.used[place] = fresh;
        let proven = self.get(at).is_some_and(|path| path.proven);
        if proven && self.former[place].is_none() {
            self.former[place] = Some(at);
            self.look = (now + LOOK, 0);
        } else {
            self.spare.push_back(at);
        }
        self.comes_to_be(at, State::Spare);
        // What is not known to carry gets a probe first.
        self.comes_to_be(fresh, State::Suspect);
        self.ask(fresh);
        Some(fresh)
    }

    /// A path has another way from now on. If it is not in use it may never have carried, so nobody would
    /// ask it: it is asked, and gets the place that its number has, from one that has another's.
    pub fn renew(&mut self, at: u8, now: Duration) {
        let place = usize::from(at) % self.used.len();
        let at_home = usize::from(self.used[place]) % self.used.len() == place;
        let spare = self.spare.iter().position(|spare| *spare == at);
        let Some(spare) = spare.filter(|_| !at_home && self.former[place].is_none()) else {
            return;
        };
        self.spare.remove(spare);
        self.former[place] = Some(at);
        self.look = (now + LOOK, 0);
        self.ask(at);
    }

    fn comes_to_be(&mut self, at: u8, state: State) {
        if let Some(path) = self.get_mut(at) {
            (path.state, path.silences, path.probe) = (state, 0, false);
            (path.proven, path.returns) = (false, false);
        }
    }

    /// When dropped paths are asked next, if there are any.
    pub fn looks(&self) -> Option<Duration> {
        let any = self.former.iter().any(Option::is_some);
        any.then_some(self.look.0)
    }

    /// Asks the dropped paths that had carried whether they answer again, if it is time.
    pub fn look_back(&mut self, now: Duration) {
        if self.looks().is_none_or(|at| now < at) {
            return;
        }
        let times = self.look.1 + 1;
        self.look = (now + LOOK * 2u32.pow((times / LOOKS.0).min(LOOKS.1)), times);
        for place in 0..self.former.len() {
            if let Some(at) = self.former[place] {
                self.ask(at);
            }
        }
    }

    /// A dropped path that answers again takes its place, once nothing is on its way over the one that
    /// stands in for it: that one, and the one that is back.
    pub fn take_back(&mut self) -> Option<(u8, u8)> {
        if !self.returns {
            return None;
        }
        let mut waits = false;
        for place in 0..self.used.len() {
            let answers = |at: &u8| self.all[usize::from(*at)].returns;
            let Some(back) = self.former[place].filter(answers) else {
                continue;
            };
            let other = self.used[place];
            let stands_in = &mut self.all[usize::from(other)];
            if stands_in.flying > 0 {
                // What is suspect has no bytes either, and is judged as such.
                if stands_in.state == State::Active {
                    stands_in.state = State::Leaving;
                }
                waits = true;
                continue;
            }
            self.comes_to_be(other, State::Spare);
            self.spare.push_front(other);
            self.comes_to_be(back, State::Active);
            (self.used[place], self.former[place]) = (back, None);
            return Some((other, back));
        }
        self.returns = waits;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    /// No runs.
    const PLENTY: Share = Share {
        total: 1e9,
        flying: 0,
        run: 0.0,
        burst: 0.5,
    };

    #[test]
    fn the_emptiest_path_is_next_and_bursts_stay_together() {
        let mut paths = Paths::new(4, 8);
        let first = paths.choose(1000, PLENTY, |_| 1e6).unwrap();
        for _ in 1..BURST {
            assert_eq!(paths.choose(1000, PLENTY, |_| 1e6), Some(first));
        }
        paths.get_mut(first).unwrap().flying = 8000;
        // A small window is for two in a row.
        paths.burst = 1;
        assert_eq!(paths.choose(1000, PLENTY, |_| 9000.0), Some(first));
        paths.burst = 4;
        assert_ne!(paths.choose(1000, PLENTY, |_| 9000.0), Some(first));
        let second = paths.choose(1000, PLENTY, |_| 1e6).unwrap();
        assert_ne!(second, first);
        for at in 0..4 {
            paths.get_mut(at).unwrap().flying = 8000;
        }
        assert_eq!(paths.choose(1000, PLENTY, |_| 8500.0), None);
        assert_eq!(
            paths.choose(1000, PLENTY, |at| if at == 3 { 1e5 } else { 1e3 }),
            Some(3)
        );
    }

    /// Sixteen paths of four packets each, and calls of twenty: who has more bytes in flight than its
    /// window has no more than its part of the time.
    #[test]
    fn on_a_quick_network_paths_have_runs_in_turn() {
        let (mut paths, size) = (Paths::new(16, 16), 1000);
        let window = |at: u8| if at == 3 { 1000.0 } else { 4200.0 };
        let (mut sent, mut runs, mut last) = ([0u32; 16], 0, None);
        let mut flying = VecDeque::new();
        for _ in 0..4000 {
            let share = Share {
                total: 64_000.0,
                flying: flying.len() as u64 * size,
                run: 20_000.0,
                burst: 0.5,
            };
            let fits = share.flying + size <= share.total as u64;
            match paths.choose(size, share, window).filter(|_| fits) {
                Some(at) => {
                    sent[usize::from(at)] += 1;
                    runs += u32::from(last != Some(at));
                    last = Some(at);
                    paths.get_mut(at).unwrap().flying += size;
                    flying.push_back(at);
                }
                // Twenty packets are confirmed.
                None => {
                    for at in flying.drain(..20) {
                        paths.get_mut(at).unwrap().flying -= size;
                    }
                }
            }
        }
        let all: u32 = sent.iter().sum();
        assert!(all / runs >= 12, "{all} packets in {runs} runs");
        let slow = f64::from(sent[3]) / f64::from(all);
        assert!((0.01..0.03).contains(&slow), "{slow} for one of 64 parts");
        let others = sent.iter().enumerate().filter(|(at, _)| *at != 3);
        let (least, most) = others.fold((u32::MAX, 0), |(low, high), (_, count)| {
            (low.min(*count), high.max(*count))
        });
        assert!(most - least <= 2 * 20, "{sent:?}");
    }

    /// Where as many paths are in turn as acknowledgements do not ask, and everywhere else.
    #[test]
    fn acknowledgements_ask_over_each_path_in_turn() {
        for used in [1, 3, 8, 16, 17, 32] {
            let mut paths = Paths::new(used, used);
            let mut asked = vec![0; used];
            for number in 1..=2 * ASKS_EVERY * used as u64 {
                paths.any();
                if let Some(at) = paths.asks_back(number) {
                    asked[usize::from(at)] += 1;
                }
            }
            assert_eq!(asked, vec![2; used], "{used} paths");
        }
    }

    #[test]
    fn all_paths_are_asked_where_one_is_dead_but_suspects_have_probes() {
        let mut paths = Paths::new(4, 4);
        paths.get_mut(2).unwrap().state = State::Suspect;
        assert_eq!(paths.asks_back(1), None);
        paths.doubt_all();
        let asked: Vec<_> = (1..6).map(|number| paths.asks_back(number)).collect();
        assert_eq!(asked, [Some(1), Some(3), Some(0), Some(1), None]);
        for at in 0..4 {
            paths.get_mut(at).unwrap().state = State::Suspect;
        }
        assert_eq!(paths.asks_back(ASKS_EVERY), None);
    }

    #[test]
    fn one_that_had_carried_takes_back_its_place() {
        let mut paths = Paths::new(2, 4);
        paths.answered(1, true);
        assert_eq!(paths.replace(1, NOW), Some(2));
        assert_eq!(paths.asked(), Some(2));
        // Not before its time, and for as long as it takes.
        paths.look_back(NOW);
        assert_eq!((paths.looks(), paths.asked()), (Some(NOW + LOOK), None));
        for _ in 0..40 {
            let at = paths.looks().unwrap();
            paths.look_back(at);
            assert_eq!(paths.asked(), Some(1));
        }
        assert_eq!(paths.take_back(), None);
        // Neither is what has stood in and has carried forgotten for that, nor is the first.
        paths.answered(2, true);
        assert_eq!(paths.replace(2, NOW), Some(3));
        // What went over it before it was dropped, and is told of now, says nothing.
        paths.answered(1, false);
        assert_eq!(paths.take_back(), None);
        paths.answered(1, true);
        paths.answered(3, false);
        paths.get_mut(3).unwrap().flying = 10;
        assert_eq!(paths.take_back(), None);
        assert_eq!(paths.get(3).unwrap().state, State::Leaving);
        paths.answered(3, true);
        assert_eq!(paths.choose(10, PLENTY, |_| 1e3), Some(0));
        paths.get_mut(3).unwrap().flying = 0;
        assert_eq!(paths.take_back(), Some((3, 1)));
        assert_eq!((paths.take_back(), paths.looks()), (None, None));
        assert_eq!(paths.used(), [0, 1]);
        assert_eq!(paths.replace(0, NOW), Some(3));
    }

    #[test]
    fn one_with_another_way_gets_the_place_of_its_number() {
        let mut paths = Paths::new(2, 6);
        // Neither 1 nor 3 carries; 4 does.
        for dead in [1, 2, 3] {
            paths.replace(dead, NOW).unwrap();
        }
        assert_eq!(paths.used(), [0, 4]);
        while paths.asked().is_some() {}
        for at in 0..6 {
            paths.renew(at, NOW);
        }
        // One takes the place, if it answers; 0 keeps its own.
        assert_eq!((paths.asked(), paths.asked()), (Some(1), None));
        assert_eq!(paths.take_back(), None);
        paths.answered(1, true);
        assert_eq!(paths.take_back(), Some((4, 1)));
        assert_eq!(paths.used(), [0, 1]);
    }

    #[test]
    fn a_dropped_path_comes_back_last() {
        let mut paths = Paths::new(2, 4);
        assert_eq!(paths.replace(1, NOW), Some(2));
        assert_eq!(paths.used(), [0, 2]);
        assert_eq!(paths.get(2).unwrap().state, State::Suspect);
        paths.answered(2, true);
        assert_eq!(paths.get(2).unwrap().state, State::Active);
        assert_eq!(paths.replace(0, NOW), Some(3));
        assert_eq!(paths.replace(3, NOW), Some(1));
        assert_eq!(paths.replace(9, NOW), None);
        assert_eq!(Paths::new(1, 1).replace(0, NOW), None);
    }

    #[test]
    fn suspects_carry_only_if_there_is_nothing_else() {
        let mut paths = Paths::new(2, 2);
        paths.get_mut(0).unwrap().state = State::Suspect;
        for _ in 0..20 {
            assert_eq!(paths.choose(10, PLENTY, |_| 1e3), Some(1));
            assert_eq!(paths.any(), 1);
        }
        paths.get_mut(1).unwrap().state = State::Suspect;
        assert!(paths.choose(10, PLENTY, |_| 1e3).is_some());
    }
}
