//! What messages go over: a plug-in's comms, or a TCP stream each. One direction of one comm is a
//! queue: what was posted first finishes first, as NCCL looks at the oldest step only.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use crate::scenario::{Control, Scenario};
use crate::stream::Stream;
use crate::team::Team;
use crate::watch::Watch;
use crate::{DriveError, NULL, Object, Plugin};

enum Kind {
    Plugin {
        plugin: Plugin,
        /// Comms that receive, and those that send.
        comms: [Vec<Object>; 2],
        flying: [Vec<VecDeque<Object>>; 2],
    },
    /// Those that receive, and those that send.
    Streams([Vec<Stream>; 2]),
    Teams([Vec<Team>; 2]),
}

/// See the module.
pub struct Net(Kind);

impl Net {
    /// Opens all comms of a scenario, in both of its processes.
    pub fn open(scenario: &Scenario, control: &mut Control) -> Result<Net, DriveError> {
        match &scenario.plugin {
            Some(path) => plugged(scenario, path, control),
            None if scenario.streams > 1 => teams(scenario, control),
            None => streams(scenario, control),
        }
        .map(Net)
    }

    /// Whether a plug-in is behind it, and not plain streams.
    pub fn is_plugin(&self) -> bool {
        matches!(self.0, Kind::Plugin { .. })
    }

    /// Posts a message or a buffer for one. Whether there was room for the request.
    ///
    /// # Safety
    /// The memory stays until [`Net::finished`] has counted it.
    pub unsafe fn post(
        &mut self,
        comm: usize,
        sending: bool,
        at: *mut u8,
        size: usize,
    ) -> Result<bool, DriveError> {
        let way = usize::from(sending);
        match &mut self.0 {
            Kind::Plugin {
                plugin,
                comms,
                flying,
            } => {
                // SAFETY: the caller's promise.
                let request = unsafe {
                    if sending {
                        plugin.isend(comms[way][comm], at, size, NULL)?
                    } else {
                        plugin.irecv(comms[way][comm], at, size, NULL)?
                    }
                };
                flying[way][comm].extend(request);
                Ok(request.is_some())
            }
            Kind::Streams(streams) => {
                // SAFETY: the caller's promise.
                unsafe { streams[way][comm].post(at, size) };
                Ok(true)
            }
            Kind::Teams(teams) => {
                // SAFETY: the caller's promise.
                unsafe { teams[way][comm].post(at, size) };
                Ok(true)
            }
        }
    }

    /// How many requests have finished since the last call.
    pub fn finished(&mut self, comm: usize, sending: bool) -> Result<usize, DriveError> {
        let way = usize::from(sending);
        match &mut self.0 {
            Kind::Plugin { plugin, flying, .. } => {
                let mut count = 0;
                while let Some(request) = flying[way][comm].front() {
                    if plugin.test(*request, !sending)?.is_none() {
                        break;
                    }
                    flying[way][comm].pop_front();
                    count += 1;
                }
                Ok(count)
            }
            Kind::Streams(streams) => streams[way][comm].progress(sending),
            Kind::Teams(teams) => teams[way][comm].progress(),
        }
    }

    /// Closes all comms, in both processes.
    pub fn close(self, control: &mut Control) -> Result<(), DriveError> {
        if let Kind::Plugin {
            mut plugin,
            comms: [receives, sends],
            ..
        } = self.0
        {
            for comm in sends {
                plugin.close_send(comm)?;
            }
            for comm in receives {
                plugin.close_recv(comm)?;
            }
            control.meet()?;
            plugin.finalize()?;
        }
        Ok(())
    }
}

fn plugged(
    scenario: &Scenario,
    path: &std::path::Path,
    control: &mut Control,
) -> Result<Kind, DriveError> {
    let mut plugin = Plugin::load(path, scenario.version)?;
    plugin.init()?;
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for _ in 0..scenario.comms {
        let (listener, handle) = plugin.listen(0)?;
        control.0.write_all(&handle)?;
        let mut theirs = [0; 128];
        control.0.read_exact(&mut theirs)?;
        let (mut send, mut receive) = (None, None);
        let mut watch = Watch::new(Instant::now());
        // As the service thread does: all that is pending is polled in one loop.
        while send.is_none() || receive.is_none() {
            if send.is_none() {
                send = plugin.connect(0, &mut theirs)?;
            }
            if receive.is_none() {
                receive = plugin.accept(listener)?;
            }
            watch.turn(Instant::now(), false)?;
        }
        sends.extend(send);
        receives.extend(receive);
        plugin.close_listen(listener)?;
    }
    let queues = || std::iter::repeat_with(VecDeque::new).take(scenario.comms);
    Ok(Kind::Plugin {
        plugin,
        comms: [receives, sends],
        flying: [queues().collect(), queues().collect()],
    })
}

fn streams(scenario: &Scenario, control: &mut Control) -> Result<Kind, DriveError> {
    let [receives, sends] = sockets(scenario.comms, control)?;
    let all = |sockets: Vec<TcpStream>| sockets.into_iter().map(Stream::new).collect();
    let (receives, sends): (Result<_, _>, Result<_, _>) = (all(receives), all(sends));
    Ok(Kind::Streams([receives?, sends?]))
}

fn teams(scenario: &Scenario, control: &mut Control) -> Result<Kind, DriveError> {
    let [mut receives, mut sends] = sockets(scenario.comms * scenario.streams, control)?;
    let (mut receiving, mut sending) = (Vec::new(), Vec::new());
    for _ in 0..scenario.comms {
        let of = |sockets: &mut Vec<TcpStream>| sockets.drain(..scenario.streams).collect();
        receiving.push(Team::new(of(&mut receives), false)?);
        sending.push(Team::new(of(&mut sends), true)?);
    }
    Ok(Kind::Teams([receiving, sending]))
}

/// The number of connections for each direction: those that receive, and those that send.
fn sockets(count: usize, control: &mut Control) -> Result<[Vec<TcpStream>; 2], DriveError> {
    let ours = control.0.local_addr()?.ip();
    let theirs = control.0.peer_addr()?.ip();
    let listener = TcpListener::bind((ours, 0))?;
    control.say(listener.local_addr()?.port().into())?;
    let port = control.hear()? as u16;
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for _ in 0..count {
        // The backlog takes our connection before the peer accepts it.
        sends.push(TcpStream::connect((theirs, port))?);
        receives.push(listener.accept()?.0);
    }
    Ok([receives, sends])
}
