"""The hub: lets nodes in, keeps the shared weights, averages changes, and sends all the same bytes.

One thread does all that is decided (asyncio); only the arithmetic of a round runs beside it, so
that the hub hears its nodes meanwhile. Its link carries everybody's bytes: a round of K nodes
brings K changes and takes K averages.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from evener import __version__
from evener.base.records import StatsFile
from evener.comm.hub import frames
from evener.comm.hub.frames import Fields, FrameError
from evener.comm.hub.membership import Claim, Do, Membership
from evener.comm.hub.shared import Form, Outer, Shared, Sizes, average, difference
from evener.comm.hub.token import Token
from evener.errors import UsageError

_HELLO = 10.0  # seconds for a stranger to say who it is
_STRANGERS = 64
_BEAT = 1.0
_LOOK = 0.1
LINGER = 30.0
"""Seconds without a node, after one has come to its end, after which the hub ends: the connection
of another one may have broken just then."""
_ENDS = (OSError, EOFError, FrameError, asyncio.TimeoutError)


class RefusedError(Exception):
    """A node cannot come in; `args`: the problem and the fix."""


@dataclass
class _Peer:
    """A node's connection. `outbox`: what is to be sent, in order; None ends it."""

    number: int
    name: str
    uid: str
    writer: asyncio.StreamWriter
    outbox: asyncio.Queue[tuple[Fields, frames.Payload] | None]
    gives: bool = False
    came: bool = False
    sent: int = 0
    received: int = 0
    sender: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class _Job:
    """What all nodes train, as the first of them said."""

    said: list[list[str]]
    form: Form
    outer: Outer

    @property
    def every(self) -> int | None:
        """Steps of a round; None where a node says none."""
        said = dict(self.said).get("every", "")
        return int(said) if said.isdecimal() and len(said) < 10 else None

    @classmethod
    def of(cls, fields: Fields) -> _Job:
        """Raises FrameError and RefusedError for what cannot be."""
        said = fields.get("job")
        if not isinstance(said, list) or not all(
            isinstance(row, list) and len(row) == 2 and all(isinstance(w, str) for w in row)
            for row in said
        ):
            raise FrameError("its job is no list of pairs")
        sizes = Sizes(*(frames.count(fields, name, 1 << 40) for name in ("large", "small", "kept")))
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if sizes.state > there:
            raise RefusedError(
                f"its weights and momentum are {sizes.state / 1e9:.1f} GB, and the hub's host has "
                f"{there / 1e9:.1f} GB of memory",
                "run the hub on a host with more memory",
            )
        lr, momentum = fields.get("outer_lr"), fields.get("outer_momentum")
        if not isinstance(lr, float) or not isinstance(momentum, float):
            raise FrameError("its outer step is no pair of numbers")
        try:
            return cls(said, Form(frames.words(fields, "form"), sizes), Outer(lr, momentum))
        except UsageError as error:
            raise RefusedError(error.problem, error.fix) from None


@dataclass
class Hub:
    """See the module. `say` gets one line for whatever happens to the membership."""

    token: Token
    tls: ssl.SSLContext
    membership: Membership
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    port: int = 0
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.shared: Shared | None = None
        self._job: _Job | None = None
        self._peers: dict[int, _Peer] = {}
        self._changes: dict[int, bytearray] = {}
        self._counted: tuple[int, set[str]] = (0, set())  # whose changes a round has
        self._averaged = 0  # steps of all nodes that came into an average of this hub's
        self._left_over: object = None  # what the form of the last average left out
        self._snapshot: bytes | None = None
        self._drift: float | None = None  # of the last round
        self._strangers = self._number = 0
        self._waited = False
        self._bytes = [0, 0]
        self._tasks: set[asyncio.Task[None]] = set()
        self._stats = StatsFile.open("hub", 0)

    async def serve(self, host: str, port: int) -> None:
        """Listen, until cancelled. Raises UsageError where the address cannot be used."""
        try:
            server = await asyncio.start_server(
                self._connected, host, port, ssl=self.tls, ssl_handshake_timeout=_HELLO
            )
        except OSError as error:
            raise UsageError(
                f"the hub cannot listen on {host}:{port}: {error.strerror or error}",
                "name an address of this host and a free port",
            ) from None
        self.port = server.sockets[0].getsockname()[1]
        try:
            beat = busy = self.clock()
            while True:
                await asyncio.sleep(_LOOK)
                self.look()
                if self.membership.members or not self.membership.done:
                    busy = self.clock()
                elif self.clock() - busy > LINGER:
                    self.finished.set()
                if self.clock() - beat >= _BEAT:
                    beat = self.clock()
                    self._beat()
        finally:
            server.close()
            for peer in list(self._peers.values()):
                peer.writer.transport.abort()
            for task in list(self._tasks):
                task.cancel()

    # --- one connection ---

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: _Peer | None = None
        if self._strangers >= _STRANGERS:
            writer.transport.abort()
            return
        try:
            self._strangers += 1
            try:
                first = frames.read(reader, lambda _: 0, frames.FIRST)
                fields, _ = await asyncio.wait_for(first, _HELLO)
                peer = await self._admit(fields, writer)
            finally:
                self._strangers -= 1
            if peer is not None:
                peer.sender = asyncio.create_task(self._send(peer))
                await self._listen(peer, reader)
        except RefusedError as refusal:
            why, fix = refusal.args
            who = writer.get_extra_info("peername")
            self.say(f"a node at {who[0] if who else '?'} was refused: {why}")
            with contextlib.suppress(*_ENDS):
                said = frames.write(writer, {"is": "refused", "why": why, "fix": fix})
                await asyncio.wait_for(said, _HELLO)
                await asyncio.wait_for(self._close_write(writer), _HELLO)
        except _ENDS as error:
            if isinstance(error, FrameError) and peer is not None:
                self.say(f"node {peer.name} sent what cannot be: {error}")
        finally:
            if peer is not None:
                self._lost(peer)
            writer.transport.abort()

    @staticmethod
    async def _close_write(writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()

    async def _admit(self, fields: Fields, writer: asyncio.StreamWriter) -> _Peer | None:
        """The node that says hello; None for a launcher that asks for a slot."""
        if fields.get("protocol") != frames.PROTOCOL or fields.get("version") != __version__:
            raise RefusedError(
                f"it has Evener {str(fields.get('version'))[:40]}, and the hub has {__version__}",
                "install the same version on all hosts",
            )
        secret = frames.words(fields, "secret", 1000)
        if not hmac.compare_digest(secret.encode(), self.token.secret.encode()):
            raise RefusedError("it has another token", "copy the hub's token file to the node")
        name, uid = frames.words(fields, "name"), frames.words(fields, "uid")
        slots = self.membership.slots
        if fields["is"] == "promise":
            slot = self.membership.promises(name, self.clock())
            await frames.write(writer, {"is": "welcome", "slot": slot, "slots": slots})
            await self._close_write(writer)
            return None
        if fields["is"] != "hello":
            raise FrameError("its first message is no hello")
        wants = frames.count(fields, "slot", 1 << 20) if fields.get("slot") is not None else None
        self._number += 1
        slot = self.membership.meets(self._number, name, uid, self.clock(), wants)
        peer = _Peer(self._number, name, uid, writer, asyncio.Queue())
        self._peers[peer.number] = peer
        welcome = {"is": "welcome", "slot": slot, "slots": slots}
        self._post(peer, {**welcome, "silence": self.membership.silence})
        return peer

    async def _listen(self, peer: _Peer, reader: asyncio.StreamReader) -> None:
        def heard() -> None:
            if peer.number in self.membership.members:
                self.membership.hears(peer.number, self.clock())

        def most(fields: Fields) -> int:
            if self._job is None:
                return 0
            if fields["is"] == "state":
                return self._job.form.sizes.state if peer.gives else 0
            return self._job.form.size if fields["is"] == "change" else 0

        while True:
            fields, payload = await frames.read(reader, most, heard=heard)
            if peer.number not in self.membership.members:
                return  # it was left out, and is told
            peer.received += len(payload)
            self._bytes[0] += len(payload)
            self._take(peer, fields, payload)
            self.look()

    def _take(self, peer: _Peer, fields: Fields, payload: bytearray) -> None:
        now, number, what = self.clock(), peer.number, fields["is"]
        if what == "beat":
            self.membership.hears(number, now)
        elif what == "leave":
            self.say(f"node {peer.name} has come to its end")
            self.membership.leaves(number)
            raise EOFError
        elif what == "join":
            self._join(fields)
            self.membership.asks(number, _claim(fields), now)
        elif self._job is None:
            raise FrameError(f"{what[:40]!r} before a job is known")
        elif what == "enter":
            self.membership.enters(number, _claim(fields), now)
        elif what == "change":
            if len(payload) != self._job.form.size:
                raise FrameError(f"a change of {len(payload)} bytes")
            steps = frames.count(fields, "steps", 1 << 31)
            if self.membership.brings(number, _claim(fields), steps, now):
                self._changes[number] = payload
        elif what == "state":
            claim = _claim(fields)
            if not peer.gives or len(payload) != self._job.form.sizes.state:
                raise FrameError(f"shared weights of {len(payload)} bytes that nobody asked for")
            peer.gives = False
            shared = Shared(self._job.form.sizes)
            shared.fill(payload, claim.round, frames.count(fields, "steps"))
            if shared.claim != claim:
                raise FrameError("its shared weights have another digest than it says")
            self.shared, self._snapshot, self._left_over = shared, None, None
            self._changes.clear()
            self.membership.gives(number, claim)
            self._news(f"round {claim.round} begins with the weights of node {peer.name}")
        else:
            raise FrameError(f"{what[:40]!r} is no message")

    def _join(self, fields: Fields) -> None:
        """Raises RefusedError for a node that trains something else."""
        job = _Job.of(fields)
        idle = self.shared is None and all(
            m.claim is None for m in self.membership.members.values()
        )
        if self._job is None or idle:
            self._job = job
        if why := difference(self._job.said, job.said):
            raise RefusedError(why, "start every node with the same program and options")

    def _lost(self, peer: _Peer) -> None:
        self._peers.pop(peer.number, None)
        if peer.sender is not None:
            peer.sender.cancel()
        if peer.number in self.membership.members:
            self.membership.lost(peer.number)
            self._news(f"node {peer.name} is gone: its connection ended{self._here()}")
        self.look()

    async def _send(self, peer: _Peer) -> None:
        with contextlib.suppress(*_ENDS):
            while (item := await peer.outbox.get()) is not None:
                await frames.write(peer.writer, *item)
                peer.sent += len(item[1])
                self._bytes[1] += len(item[1])
        peer.writer.transport.abort() if peer.writer.is_closing() else peer.writer.close()

    def _post(self, peer: _Peer, fields: Fields, payload: frames.Payload = b"") -> None:
        peer.outbox.put_nowait((fields, payload))

    # --- what is decided ---

    def look(self) -> None:
        """Do what is to be done now."""
        while (do := self.membership.decide(self.clock())) is not None:
            self._do(do)
        if self.membership.waits and not self._waited:
            self._waited = True
            self._news(
                f"waiting: {len(self.membership.inside)} of the {self.membership.need} nodes that "
                "must be there are in"
            )

    def _do(self, do: Do) -> None:
        peer = self._peers.get(do.number)
        if do.what == "close":
            task = asyncio.create_task(self._close(do.numbers))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif do.what == "call":
            assert self.shared is not None
            for one in self._peers.values():
                if do.number in (0, one.number):
                    self._post(one, {"is": "call", "round": self.shared.round})
        elif peer is None:
            return
        elif do.what == "drop":
            self._post(peer, {"is": "out", "why": do.why})
            peer.outbox.put_nowait(None)
            self._news(f"node {peer.name} is left out: {do.why}{self._here()}")
            asyncio.get_running_loop().call_later(_BEAT, peer.writer.transport.abort)
        elif do.what == "give":
            peer.gives = True
            self._post(peer, {"is": "give"})
        else:
            self._answer(peer, do.what)

    def _answer(self, peer: _Peer, what: str) -> None:
        assert self.shared is not None
        state: frames.Payload = b""
        fields: Fields = {"is": what, **_said(self.shared)}
        if what == "take":
            self._snapshot = state = self._snapshot or bytes(self.shared.raw())
            last, whose = self._counted
            fields["counted"] = last == self.shared.round and peer.uid in whose
        self._post(peer, fields, state)
        if not peer.came:
            peer.came = True
            slot = self.membership.members[peer.number].slot
            self._news(f"node {peer.name} is here, with share {slot} of the data{self._here()}")

    def _here(self) -> str:
        count = len(self.membership.members)
        return f" ({count} node{'s' * (count != 1)} now)"

    async def _close(self, numbers: tuple[int, ...]) -> None:
        """End a round: average, step, and tell all who have the weights that are moved."""
        job, shared = self._job, self.shared
        assert job is not None and shared is not None
        there = {**self.membership.left, **self.membership.members}
        members = [there[number] for number in numbers if number in self._changes]
        brought = [(self._changes[m.number], m.brought or 0) for m in members]
        result, left = await asyncio.to_thread(self._average, job, shared, brought)
        self._changes.clear()
        self._snapshot, self._waited = None, False
        for place in left:
            member = members[place]
            if (peer := self._peers.get(member.number)) is not None:
                self._news(f"node {member.name} is left out: its change is not finite")
                self.membership.lost(member.number)
                self._post(peer, {"is": "out", "why": "its change is not finite"})
                peer.outbox.put_nowait(None)
        counted = [m for i, m in enumerate(members) if i not in left]
        shared.steps += max((m.brought or 0 for m in counted), default=0)
        self._averaged += sum(m.brought or 0 for m in counted)
        self._counted = shared.round, {member.uid for member in counted}
        for number in self.membership.closed(shared.claim):
            if (peer := self._peers.get(number)) is not None:
                said = {"is": "result", **_said(shared), "nodes": len(counted)}
                self._post(peer, said, result)
        self._record(len(counted))
        self.look()

    def _average(
        self, job: _Job, shared: Shared, brought: list[tuple[bytearray, int]]
    ) -> tuple[memoryview, list[int]]:
        import torch

        form = job.form
        mean, buffers, left, self._drift = average(form, brought)
        if len(left) == len(brought):
            return memoryview(b""), left
        if form.feedback and self._left_over is None:
            self._left_over = torch.zeros(form.sizes.large)
        residual = self._left_over if isinstance(self._left_over, torch.Tensor) else None
        result = form.write(mean, buffers, residual, (shared.round, -1))
        shared.step(*form.read(result), job.outer)
        return result, left

    # --- what is said ---

    def _news(self, text: str) -> None:
        self.say(text)
        for peer in self._peers.values():
            self._post(peer, {"is": "news", "text": text})

    def _beat(self) -> None:
        waits = self.membership.waits
        for peer in self._peers.values():
            if peer.outbox.empty():
                self._post(peer, {"is": "beat", "waits": waits})
        if self._stats is not None and self._stats.due:
            self._record(len(self.membership.inside))

    def _record(self, nodes: int) -> None:
        if self._stats is None:
            return
        shared = self.shared
        members = self.membership.members
        self._stats.write(
            {
                "round": 0 if shared is None else shared.round,
                "steps": 0 if shared is None else shared.steps,
                "averaged": self._averaged,
                "every": None if self._job is None else self._job.every,
                "nodes": nodes,
                "drift": self._drift,
                "bytes_received": self._bytes[0],
                "bytes_sent": self._bytes[1],
                "members": [
                    {
                        "name": peer.name,
                        "slot": members[peer.number].slot,
                        "place": members[peer.number].place,
                        "bytes_received": peer.received,
                        "bytes_sent": peer.sent,
                    }
                    for peer in self._peers.values()
                    if peer.number in members
                ],
            }
        )


def _claim(fields: Fields) -> Claim:
    return Claim(frames.count(fields, "round"), frames.count(fields, "digest"))


def _said(shared: Shared) -> Fields:
    claim = shared.claim
    return {"round": claim.round, "digest": claim.digest, "steps": shared.steps}
