//! Who has connected to rank 0 and has not said yet that it is a rank of this job.
//!
//! Anybody who reaches the port may connect, and the first words are waited for by a thread of their
//! own, so that one who says nothing holds nobody up. The number of those threads has a limit. Beyond
//! it the one who has been silent for longest is shown out: a rank says its words at once, and one
//! that is shown out all the same tries again. A rank that has been answered believes that it is
//! taken, so either it is answered or it is shown out: whoever is first decides.

use crate::stream::{answer, hear};
use crate::threads::spawn;
use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// This many may wait beside the job's own ranks.
pub(crate) const STRANGERS: usize = 64;

type Greeted = Option<(u32, TcpStream)>;

struct Visitor {
    /// Tells it apart.
    number: u64,
    stream: TcpStream,
    /// That it is answered, or shown out.
    decided: Arc<AtomicBool>,
}

pub(crate) struct Lobby {
    token: String,
    most: usize,
    /// Who waits, the oldest first.
    waiting: VecDeque<Visitor>,
    entered: u64,
    /// Ranks that nobody has asked for yet.
    ranks: VecDeque<(u32, TcpStream)>,
    send: Sender<(u64, Greeted)>,
    receive: Receiver<(u64, Greeted)>,
}

impl Lobby {
    /// `most`: how many may wait at once.
    pub(crate) fn new(token: &str, most: usize) -> Self {
        let (send, receive) = channel();
        Self {
            token: token.to_owned(),
            most,
            waiting: VecDeque::new(),
            entered: 0,
            ranks: VecDeque::new(),
            send,
            receive,
        }
    }

    /// Starts to listen to what `stream` says.
    ///
    /// # Errors
    /// Where there is no thread for it.
    pub(crate) fn enter(&mut self, stream: TcpStream) -> io::Result<()> {
        self.forget_gone();
        if self.waiting.len() >= self.most {
            self.show_out();
        }
        self.entered += 1;
        let (number, send, token) = (self.entered, self.send.clone(), self.token.clone());
        let decided = Arc::new(AtomicBool::new(false));
        self.waiting.push_back(Visitor {
            number,
            stream: stream.try_clone()?,
            decided: decided.clone(),
        });
        spawn("greet", move || {
            let found = hear(stream, &token)
                .ok()
                .filter(|_| !decided.swap(true, Ordering::SeqCst))
                .and_then(|(rank, stream)| Some((rank, answer(stream).ok()?)));
            let _ = send.send((number, found));
        })
    }

    /// The oldest that is not a rank leaves. Ranks that are answered in this moment may be more than
    /// `most`, and no more than the job has.
    fn show_out(&mut self) {
        let silent = |one: &Visitor| !one.decided.swap(true, Ordering::SeqCst);
        if let Some(oldest) = self.waiting.iter().position(silent)
            && let Some(one) = self.waiting.remove(oldest)
        {
            let _ = one.stream.shutdown(Shutdown::Both);
        }
    }

    /// The next one that has proved to be a rank, with its number; none within `limit`.
    pub(crate) fn greeted(&mut self, limit: Duration) -> Greeted {
        if self.ranks.is_empty() {
            let (number, found) = self.receive.recv_timeout(limit).ok()?;
            self.sort(number, found);
        }
        self.ranks.pop_front()
    }

    /// Those who were found to be strangers, or who left, or who are ranks, wait no longer.
    fn forget_gone(&mut self) {
        let gone: Vec<_> = self.receive.try_iter().collect();
        for (number, found) in gone {
            self.sort(number, found);
        }
    }

    fn sort(&mut self, number: u64, found: Greeted) {
        self.waiting.retain(|one| one.number != number);
        self.ranks.extend(found);
    }
}

impl Drop for Lobby {
    fn drop(&mut self) {
        for one in &self.waiting {
            let _ = one.stream.shutdown(Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{knock, listen};
    use std::io::Read;
    use std::net::TcpListener;

    const LONG: Duration = Duration::from_secs(8);

    fn visitors(listener: &TcpListener, lobby: &mut Lobby, count: usize) -> Vec<TcpStream> {
        let port = listener.local_addr().unwrap().port();
        (0..count)
            .map(|_| {
                let visitor = TcpStream::connect(("127.0.0.1", port)).unwrap();
                lobby.enter(listener.accept().unwrap().0).unwrap();
                visitor
            })
            .collect()
    }

    #[test]
    fn the_oldest_stranger_makes_room_and_a_rank_is_heard() {
        let listener = listen().unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut lobby = Lobby::new("secret", 4);
        let mut strangers = visitors(&listener, &mut lobby, 10);
        assert_eq!(lobby.waiting.len(), 4);
        for stranger in &mut strangers[..6] {
            stranger.set_read_timeout(Some(LONG)).unwrap();
            assert_eq!(stranger.read(&mut [0]).unwrap(), 0, "it is not shown out");
        }
        let rank = std::thread::spawn(move || knock("127.0.0.1", port, "secret", 3).is_ok());
        lobby.enter(listener.accept().unwrap().0).unwrap();
        let found = (0..8).find_map(|_| lobby.greeted(LONG));
        assert_eq!(found.unwrap().0, 3);
        assert!(rank.join().unwrap());
        assert!(lobby.waiting.len() <= 4);
    }

    #[test]
    fn a_rank_that_waits_to_be_taken_is_not_lost_when_the_lobby_fills() {
        let listener = listen().unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut lobby = Lobby::new("secret", 2);
        let rank = std::thread::spawn(move || knock("127.0.0.1", port, "secret", 1).unwrap());
        lobby.enter(listener.accept().unwrap().0).unwrap();
        let _answered = rank.join().unwrap();
        let _strangers = visitors(&listener, &mut lobby, 5);
        let found = (0..8).find_map(|_| lobby.greeted(LONG));
        assert_eq!(found.unwrap().0, 1);
    }

    #[test]
    fn who_leaves_makes_room_without_anybody_being_shown_out() {
        let listener = listen().unwrap();
        let mut lobby = Lobby::new("secret", 2);
        drop(visitors(&listener, &mut lobby, 2));
        assert!(lobby.greeted(LONG).is_none());
        assert!(lobby.greeted(LONG).is_none());
        assert_eq!(lobby.waiting.len(), 0);
    }
}
