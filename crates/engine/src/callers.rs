//! What callers do with an engine: listen, connect, accept, post, release. No call blocks but the last,
//! which waits for a worker's turn.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use evener_proto::{Side, Why};

use crate::Error;
use crate::comm::Comm;
use crate::config::Choice;
use crate::hello::{HANDLE, Handle};
use crate::lock::lock;
use crate::log::Level;
use crate::news::News;
use crate::peer::{PeerKey, Transport};
use crate::requests::{ACCEPTED, DECLINED};
use crate::shared::{Mailbox, Shared};
use crate::slots::Slot;
use crate::sys::Memory;
use crate::task::Task;

/// Where peers' comms arrive.
#[derive(Debug)]
pub struct Listener {
    number: u64,
    mailbox: Arc<Mailbox>,
}

/// See the module.
pub struct Callers {
    pub(crate) shared: Arc<Shared>,
}

impl Callers {
    /// A listener, and the handle for those who will connect to it.
    pub fn listen(&self) -> (Listener, [u8; HANDLE]) {
        let number = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let mailbox = Arc::new(Mailbox::default());
        lock(&self.shared.listeners).insert(number, mailbox.clone());
        (Listener { number, mailbox }, self.handle(number).emit())
    }

    /// What leads to a listener of this process.
    fn handle(&self, listener: u64) -> Handle {
        let shared = &self.shared;
        let udp = !shared.instances.is_empty();
        Handle {
            process: shared.process,
            token: shared.token,
            listener,
            port: shared.port,
            udp,
            addresses: shared.nics().addresses().list,
        }
    }

    /// Takes no more comms for this listener. Those that were not accepted are declined.
    pub fn close_listener(&self, listener: &Listener) {
        lock(&self.shared.listeners).remove(&listener.number);
        let offers = std::mem::take(&mut *lock(&listener.mailbox.offers));
        for (peer, comm) in offers {
            self.shared.decline(&peer, comm);
        }
        let beginning = std::mem::take(&mut *lock(&listener.mailbox.beginning));
        for comm in beginning {
            self.release(&comm);
        }
    }

    /// Connects to a listener without ever blocking: call it again, with the same bytes, until it
    /// gives a comm.
    ///
    /// # Errors
    /// [`Error::Handle`], [`Error::Declined`], [`Error::Comm`].
    pub fn connect(&self, handle: &mut [u8; HANDLE]) -> Result<Option<Arc<Comm>>, Error> {
        if self.shared.is_broken() {
            return Err(Error::Stopped);
        }
        let cookie = Handle::cookie(handle);
        let known = lock(&self.shared.pending).get(&cookie).cloned();
        if let Some(comm) = known {
            let result = match (comm.failure(), comm.opened.load(Ordering::Acquire)) {
                (Some(why), _) => Err(Error::Comm(why)),
                (None, DECLINED) => Err(Error::Declined),
                (None, ACCEPTED) if comm.is_registered() => Ok(Some(comm.clone())),
                _ => return Ok(None),
            };
            lock(&self.shared.pending).remove(&cookie);
            Handle::set_cookie(handle, 0);
            if result.is_err() {
                self.release(&comm);
            }
            return result;
        }
        let parsed = Handle::parse(handle).ok_or(Error::Handle)?;
        let comm = self.open(&parsed, self.transport(&parsed));
        let number = comm.id;
        lock(&self.shared.pending).insert(number, comm);
        Handle::set_cookie(handle, number);
        Ok(None)
    }

    /// What carries comms to this process.
    fn transport(&self, to: &Handle) -> Transport {
        let shared = &self.shared;
        match shared.config.engine {
            Choice::Tcp => Transport::Tcp,
            Choice::Udp | Choice::Xdp if to.udp => Transport::Udp,
            Choice::Udp | Choice::Xdp => {
                let text =
                    "a peer does not take UDP (EVENER_NET_ENGINE is tcp there): TCP goes to it";
                shared.log(Level::Info, text);
                Transport::Tcp
            }
        }
    }

    /// Begins a comm to the handle's listener over this transport.
    fn open(&self, to: &Handle, transport: Transport) -> Arc<Comm> {
        let shared = &self.shared;
        let key = PeerKey {
            process: to.process,
            mirror: false,
            transport,
            connection: 0,
        };
        let number = shared.next.fetch_add(1, Ordering::Relaxed);
        let key = match transport {
            Transport::Tcp => key,
            Transport::Udp => self.emptiest(key),
        };
        let peer = shared.peer(key, to.token, to.port, &to.addresses, None);
        let comm = Comm::new(number, Side::Send, peer);
        self.begin(&comm, Some(to.listener));
        if transport == Transport::Tcp {
            shared.news(News::Want(key));
        }
        comm
    }

    /// The connection that has the fewest comms: one thread moves all packets of a connection.
    fn emptiest(&self, key: PeerKey) -> PeerKey {
        let shared = &self.shared;
        let connections = shared.instances.len().min(usize::from(u8::MAX));
        let comms = |key: &PeerKey| {
            let peer = shared.peers.get(key);
            peer.map_or(0, |peer| peer.claims.load(Ordering::Relaxed))
        };
        let all = (0..connections).map(|number| PeerKey {
            connection: number as u8,
            ..key
        });
        all.min_by_key(comms).unwrap_or(key)
    }

    fn begin(&self, comm: &Arc<Comm>, listener: Option<u64>) {
        self.shared
            .ask(&comm.peer, Task::Begin(comm.clone(), listener));
    }

    /// Accepts a comm without ever blocking: call it again until it gives one.
    ///
    /// # Errors
    /// [`Error::Stopped`].
    pub fn accept(&self, listener: &Listener) -> Result<Option<Arc<Comm>>, Error> {
        if self.shared.is_broken() {
            return Err(Error::Stopped);
        }
        while let Some((peer, number)) = lock(&listener.mailbox.offers).pop_front() {
            let comm = Comm::new(number, Side::Receive, peer);
            self.begin(&comm, None);
            lock(&listener.mailbox.beginning).push_back(comm);
        }
        let mut beginning = lock(&listener.mailbox.beginning);
        let Some(place) = beginning.iter().position(|comm| comm.is_registered()) else {
            return Ok(None);
        };
        let comm = beginning.remove(place);
        if let Some(comm) = &comm {
            self.shared.ask(&comm.peer, Task::Accept(comm.clone()));
        }
        Ok(comm)
    }

    /// Posts a message (on a sending comm) or a buffer (on a receiving one). `None`: no slot is
    /// free, try again.
    ///
    /// # Errors
    /// [`Error::Comm`], [`Error::Stopped`].
    ///
    /// # Safety
    /// The memory may be read (sending) or written (receiving) by other threads until
    /// [`Slot::test`] says that the request is finished, or [`Callers::release`] or
    /// [`Callers::withdraw`] has returned. One thread at a time posts to a comm.
    #[allow(
        unsafe_code,
        reason = "the contract is the caller's; nothing is dereferenced here"
    )]
    pub unsafe fn post<'a>(
        &self,
        comm: &'a Comm,
        memory: Memory,
    ) -> Result<Option<&'a Slot>, Error> {
        if let Some(why) = comm.failure() {
            return Err(Error::Comm(why));
        }
        if self.shared.is_broken() {
            return Err(Error::Stopped);
        }
        let Some(number) = comm.slots.vacant() else {
            return Ok(None);
        };
        let slot = comm.slots.post(number, memory);
        self.shared
            .ring(&comm.peer, comm.bit.load(Ordering::Relaxed));
        Ok(Some(slot))
    }

    /// Ends a comm. When this returns, no memory of its requests is used any more.
    pub fn release(&self, comm: &Arc<Comm>) {
        self.shared.ask(&comm.peer, Task::Release(comm.clone()));
        let mut patience = 0;
        while !comm.is_released() && !self.shared.is_broken() {
            // A worker's turn is a few microseconds; asleep, it has just been woken.
            patience += 1;
            if patience < 100 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// Makes sure that no unfinished request of a comm uses this memory: where one does, the comm
    /// ends. When this returns, the memory is not used any more.
    pub fn withdraw(&self, comm: &Arc<Comm>, memory: Memory) {
        let start = memory.start as usize;
        if comm.slots.uses(start, start.saturating_add(memory.length)) {
            comm.fail(Why::PeerClosed);
            self.release(comm);
        }
    }
}
