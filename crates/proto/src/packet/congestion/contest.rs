//! How a connection grows and gives up beside TCP: as one stream of cubic does (RFC 9438).
//!
//! All paths that compete are one stream, however many they are: their windows together follow the curve. After a
//! loss they are [`KEEPS`] of what they were; from there the sum goes by time, a cube with its flat part where the loss
//! was, or as Reno would where that is more. Paths that do not share a queue are one stream all the same, which is
//! less than each could have (RFC 6356 couples the paths of a multipath TCP for the same reason).

use std::time::Duration;

/// What a loss leaves.
pub(super) const KEEPS: f64 = 0.7;
/// How steep the curve is, in packets per cubic second.
const STEEP: f64 = 0.4;
/// What Reno would gain per round trip if it kept as much: so that its mean is that of one that halves.
const GAINS: f64 = 3.0 * (1.0 - KEEPS) / (1.0 + KEEPS);
/// Growth in a round trip, at most.
const QUICKEST: f64 = 1.5;

/// The curve since the last loss. Sizes are packets.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Curve {
    /// When it begins; none before the first loss or contest.
    began: Option<Duration>,
    /// Where its flat part is.
    most: f64,
    /// Seconds until it is there.
    until: f64,
    /// What Reno would have.
    reno: f64,
}

impl Curve {
    /// From `window` on, which is flat there: nothing was lost.
    pub fn start(&mut self, window: f64, now: Duration) {
        *self = Curve {
            began: Some(now),
            most: window,
            until: 0.0,
            reno: window,
        };
    }

    /// A loss, with this window, which is `left` from here on.
    pub fn lost(&mut self, window: f64, left: f64, now: Duration) {
        *self = Curve {
            began: Some(now),
            most: window,
            until: ((window - left) / STEEP).cbrt(),
            reno: left,
        };
    }

    /// What a window of these packets gains for each that arrives; a round trip takes `trip` seconds.
    pub fn gains(&mut self, window: f64, trip: f64, now: Duration) -> f64 {
        let Some(began) = self.began else {
            self.start(window, now);
            return 0.0;
        };
        let window = window.max(1.0);
        // As Reno does, once it is where it was.
        let gains = if self.reno < self.most { GAINS } else { 1.0 };
        self.reno += gains / window;
        let ahead = now.saturating_sub(began).as_secs_f64() + trip - self.until;
        let aim = (STEEP * ahead.powi(3) + self.most).max(self.reno);
        (aim.min(window * QUICKEST) - window).max(0.01) / window
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goes on for so long, a window per round trip; the window then.
    fn run(curve: &mut Curve, mut window: f64, trip: f64, from: f64, to: f64) -> f64 {
        let mut now = from;
        while now < to {
            now += trip;
            let count = window as u32;
            for _ in 0..count {
                window += curve.gains(window, trip, Duration::from_secs_f64(now));
            }
        }
        window
    }

    /// RFC 9438, section 5.1: the curve is back where it was lost after the cube root of what it gave up by 0.4, slow
    /// around that, and quick before and after.
    #[test]
    fn it_is_back_where_it_lost_after_its_time() {
        let mut curve = Curve::default();
        curve.lost(1000.0, 700.0, Duration::ZERO);
        let back = (300.0f64 / 0.4).cbrt();
        let early = run(&mut curve, 700.0, 0.1, 0.0, back * 0.5);
        assert!((955.0..970.0).contains(&early), "{early}");
        let late = run(&mut curve, early, 0.1, back * 0.5, back);
        assert!((995.0..1005.0).contains(&late), "{late}");
        let beyond = run(&mut curve, late, 0.1, back, back * 2.0);
        assert!((1270.0..1340.0).contains(&beyond), "{beyond}");
    }

    /// Where round trips are short it is Reno's line: about half a packet each.
    #[test]
    fn on_a_short_way_it_goes_up_as_reno_does() {
        let mut curve = Curve::default();
        curve.lost(40.0, 28.0, Duration::ZERO);
        let window = run(&mut curve, 28.0, 1e-3, 0.0, 0.02);
        assert!(
            (28.0 + 18.0 * GAINS..28.0 + 21.0 * GAINS).contains(&window),
            "{window}"
        );
    }
}
