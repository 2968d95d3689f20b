//! What goes on between the calls: connections are read, the clock ticks, and whatever comes out of
//! the state machines is written to the sockets and wakes the executor (`pump`).

use super::*;

impl Shared {
    pub(super) fn now(&self) -> u64 {
        self.start.elapsed().as_micros() as u64
    }

    /// Reads and handles what has come over all connections, without waiting. A connection's end is
    /// left to its thread.
    pub(super) fn read_what_is_there(&self) {
        let inboxes = self.inboxes.get().map_or(&[][..], Vec::as_slice);
        let ready = if inboxes.len() > 1 {
            let streams: Vec<&TcpStream> = inboxes.iter().map(|inbox| &inbox.stream).collect();
            sys::readable(&streams, 0).unwrap_or_default()
        } else {
            vec![true; inboxes.len()]
        };
        for (inbox, ready) in inboxes.iter().zip(ready) {
            if ready
                && let Ok(mut bytes) = inbox.bytes.try_lock()
                && self.read(inbox, &mut bytes).is_err()
            {
                // Its thread finds the end, and says so.
                let _ = inbox.stream.shutdown(Shutdown::Both);
            }
        }
    }

    /// Reads and handles what has come over one connection.
    pub(super) fn read(&self, inbox: &Inbox, bytes: &mut Vec<u8>) -> io::Result<()> {
        let mut chunk = [0; 16 << 10];
        let ended = loop {
            match sys::receive(&inbox.stream, &mut chunk)? {
                None => break false,
                Some(0) => break true,
                Some(count) => bytes.extend_from_slice(&chunk[..count]),
            }
            if whole(bytes)?.is_some() {
                break false;
            }
        };
        let mut at = 0;
        let handled = self.handle(inbox, bytes, &mut at);
        bytes.drain(..at);
        handled?;
        if ended {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    /// The whole frames in `bytes`, from `at` on.
    pub(super) fn handle(&self, inbox: &Inbox, bytes: &[u8], at: &mut usize) -> io::Result<()> {
        while let Some(length) = whole(&bytes[*at..])? {
            let frame = &bytes[*at + 4..*at + 4 + length];
            *at += 4 + length;
            let mut core = lock(self);
            let now = self.now();
            match &mut core.coordinator {
                Some(coordinator) => {
                    let message = Up::decode(frame).map_err(|error| invalid(error.to_string()))?;
                    coordinator.receive(inbox.peer, message, now);
                }
                None => {
                    let message =
                        Down::decode(frame).map_err(|error| invalid(error.to_string()))?;
                    core.worker.receive(message, now);
                }
            }
            self.pump(&mut core);
            self.schedule_flush(&mut core);
        }
        Ok(())
    }

    /// Carries messages until nobody has one to send, and wakes the executor.
    pub(super) fn pump(&self, core: &mut Core) {
        loop {
            let up = core.worker.take();
            let now = self.now();
            let mut down = Vec::new();
            match &mut core.coordinator {
                Some(coordinator) => {
                    for message in up {
                        coordinator.receive(0, message, now);
                    }
                    down = coordinator.take();
                }
                None => {
                    let frames = frames(up.iter().map(Up::encode));
                    if !frames.is_empty()
                        && let Some(stream) = core.links.get_mut(&0)
                        && let Err(error) = stream.write_all(&frames)
                    {
                        let reason = format!("the connection to rank 0 is lost: {error}");
                        core.worker.receive(Down::Abort(reason), now);
                    }
                }
            }
            if down.is_empty() {
                break;
            }
            let frames = frames(down.iter().map(Down::encode));
            let mut lost = Vec::new();
            for (peer, stream) in &mut core.links {
                if let Err(error) = stream.write_all(&frames) {
                    lost.push((*peer, error.to_string()));
                }
            }
            for message in down {
                core.worker.receive(message, now);
            }
            for (peer, error) in lost {
                core.links.remove(&peer);
                if let Some(coordinator) = &mut core.coordinator {
                    coordinator.lost(peer, &error);
                }
            }
        }
        if core.worker.has_next() || core.worker.ended().is_some() {
            self.ready.notify_all();
            if !core.driven {
                self.idle.notify_all();
            }
        }
    }

    /// Lets the clock know that something waits to be announced, or for a schedule; not where it looks
    /// early enough anyway, since to wake it for each submission of a burst would cost more than they.
    pub(super) fn schedule_flush(&self, core: &mut Core) {
        if core.worker.unflushed() {
            core.waiting.get_or_insert_with(|| self.now());
        } else {
            core.waiting = None;
        }
        if let Some(due) = self.due(core)
            && due < core.alarm
        {
            core.alarm = due;
            self.clock.notify_one();
        }
    }

    /// When the clock has something to do; none where nothing waits for it.
    fn due(&self, core: &Core) -> Option<u64> {
        match core.waiting {
            Some(first) => Some(gather::announce(first, core.submitted, self.cycle)),
            None if core.worker.waits() => Some(self.now() + self.patience / 2),
            None => None,
        }
    }
}

pub(super) fn read_loop(shared: &Shared, index: usize) {
    let inboxes = shared.inboxes.get().map_or(&[][..], Vec::as_slice);
    let Some(inbox) = inboxes.get(index) else {
        return;
    };
    let why = loop {
        if let Err(error) = sys::readable(&[&inbox.stream], -1) {
            break error.to_string();
        }
        let mut bytes = inbox.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = shared.read(inbox, &mut bytes) {
            break error.to_string();
        }
    };
    let mut core = lock(shared);
    core.readers -= 1;
    let now = shared.now();
    if let Some(coordinator) = &mut core.coordinator {
        coordinator.lost(inbox.peer, &why);
    } else {
        let reason = format!("the connection to rank 0 is lost: {why}");
        core.worker.receive(Down::Abort(reason), now);
    }
    shared.pump(&mut core);
    shared.ready.notify_all();
}

pub(super) fn clock_loop(shared: &Shared) {
    /// Microseconds between its looks at what stalls.
    const IDLE: u64 = 500_000;
    let mut core = lock(shared);
    while !core.closed {
        let now = shared.now();
        core.alarm = shared.due(&core).unwrap_or(now + IDLE);
        if core.alarm > now {
            let left = Duration::from_micros(core.alarm - now);
            core = wait(&shared.clock, core, left);
            if core.closed {
                break;
            }
        }
        let now = shared.now();
        if core
            .waiting
            .is_some_and(|first| gather::announce(first, core.submitted, shared.cycle) <= now)
        {
            core.waiting = None;
            core.worker.flush();
        }
        core.worker.tick(now);
        if let Some(coordinator) = &mut core.coordinator {
            coordinator.tick(now);
        }
        shared.pump(&mut core);
    }
}
