"""Networks: which plug-in, which cards, whether they reach GPU memory, what was set by hand.

NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:10.0.1.1<0>
NET/Socket: Using 2 threads and 4 sockets per thread
Using network IB;  from 2.27 Initialized NET plugin IB, Assigned NET plugin IB to comm
NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
GPU Direct RDMA Disabled for GPU 0 / HCA 0 (distance 5 > 4)
NCCL_IB_HCA set to mlx5_1;  NCCL_P2P_DISABLE set by environment to 1.
NET/IB : No device found.;  NET/Plugin: Could not find: libnccl-net.so
NET/OFI Selected Provider is efa (found 4 nics);  ... provider is cxi, fabric is cxi (found 4 nics)
NET/IB: [0] mlx5_0:uverbs0:1/RoCE provider=Mlx5 speed=100000 ...   (Mb/s)
P2P is disabled between connected GPUs 1 and 0.;  Could not enable P2P between dev 1(=b000) and ...
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CARDS = re.compile(rb"NET/([^:]+?) ?: Using((?: +\[\d{1,3}\][^\s\[;]+)+)")
_CARD = re.compile(rb" \[(\d{1,3})\]([^\s\[;]+)")
_IB_CARD = re.compile(r"^(.*?):(\d+)/(\w+)$")
_USING = re.compile(
    rb"(?:Using network|Initialized NET plugin|Assigned NET plugin) (.+?)(?: to comm)?\s*$"
)
_LOADED = re.compile(rb"NET/Plugin: Loaded net plugin (.+?) \((v\d+)\)")
_SOCKETS = re.compile(rb"NET/Socket: Using (\d{1,4}) threads and (\d{1,4}) sockets per thread")
_DIRECT = re.compile(rb"NET/(.+?) : GPU Direct RDMA (Enabled|Disabled) for HCA (\d{1,4}) '([^']*)'")
_FAR = re.compile(
    rb"GPU Direct RDMA Disabled for GPU (\w+) / HCA (\w+) \(distance (\d+) >=? (\d+)\)"
)
_ENV = re.compile(
    rb"(NCCL_[A-Z0-9_]+) (?:set by environment to|set to|set by user to) (.*?)\.?\s*$"
)
_ABSENT = re.compile(
    rb"NET/(IB) ?: (No device found)|NET/(\w+) ?: (No (?:usable )?(?:IP )?interface found)"
    rb"|NET/(Plugin) ?: ?(?:dlerror=)?(Could not find:? lib\S+|No plugin found[^,]{0,40}"
    rb"|Failed to (?:load|open|find)[^,]{0,80}|lib\S+ cannot open[^:]{0,40})"
    rb"|(Failed) to (open lib(?:ibverbs|rdmacm|mlx5)\S*|initialize NET plugin \w+)"
)
_PROVIDER = re.compile(
    rb"NET/OFI Selected [Pp]rovider is ([\w;-]+)(?:, fabric is (\S+))? \(found (\d{1,4}) nics?\)"
)
_SPEED = re.compile(rb"NET/IB: \[(\d{1,3})\] ([\w.-]+):\S*?:(\d{1,3})/(\w+) .*?speed=(\d{1,8})")
_PEERS = re.compile(
    rb"P2P is disabled between (?:connected )?GPUs|(?:Could not|Cannot) enable P2P between dev"
    rb"|P2P not supported between|[Pp]eer access is not supported"
)
_OOB = re.compile(rb"OOB ([^\s:]+):([^\s<]+)<")
_BOOTSTRAP = re.compile(rb"Bootstrap ?: Using (?:\[\d+\])?[^\s:]+:([^\s<]+)<")


@dataclass(frozen=True, slots=True)
class Card:
    """One card in a `Using` line. `port` is 0 and `link` empty for sockets."""

    index: int
    name: str
    port: int
    link: str


@dataclass(frozen=True, slots=True)
class Cards:
    """The cards that one network of one process found, and the out-of-band interface."""

    network: str
    cards: tuple[Card, ...]
    oob: str
    address: str
    """The out-of-band interface's, where the line names one."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address at which a process meets the others."""

    address: str


@dataclass(frozen=True, slots=True)
class Using:
    """The network that a process or communicator chose."""

    network: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A plug-in and the version of its interface."""

    network: str
    abi: str


@dataclass(frozen=True, slots=True)
class Sockets:
    """Threads a connection and sockets a thread of NCCL's socket transport."""

    threads: int
    per_thread: int


@dataclass(frozen=True, slots=True)
class Direct:
    """Whether a card of a network reaches GPU memory at all."""

    network: str
    index: int
    name: str
    enabled: bool


@dataclass(frozen=True, slots=True)
class Far:
    """A GPU and a card too far apart for GPUDirect (`distance` above `limit`)."""

    gpu: str
    card: str
    distance: int
    limit: int


@dataclass(frozen=True, slots=True)
class Env:
    """A variable that NCCL says it read."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Absent:
    """A network that did not come up, in NCCL's words."""

    network: str
    why: str


@dataclass(frozen=True, slots=True)
class Provider:
    """What libfabric runs on (efa, cxi, tcp, verbs), and how many cards it found."""

    name: str
    fabric: str
    cards: int


@dataclass(frozen=True, slots=True)
class Speed:
    """A card's line rate, Mb/s."""

    index: int
    name: str
    mbps: int


@dataclass(frozen=True, slots=True)
class NoPeers:
    """Two GPUs of a host that cannot reach one another's memory."""

    text: str


Network = (
    Cards
    | Address
    | Using
    | Loaded
    | Sockets
    | Direct
    | Far
    | Env
    | Absent
    | Provider
    | Speed
    | NoPeers
)


def network(message: bytes) -> Network | None:
    """The record in a line about networks or settings, None where there is none."""
    if found := _CARDS.match(message):
        oob = _OOB.search(message)
        return Cards(
            _text(found[1]).strip(),
            tuple(_card(int(i), _text(name)) for i, name in _CARD.findall(found[2])),
            _text(oob[1]) if oob else "",
            _text(oob[2]) if oob else "",
        )
    if found := _BOOTSTRAP.match(message):
        return Address(_text(found[1]))
    if found := _SOCKETS.match(message):
        return Sockets(int(found[1]), int(found[2]))
    if found := _LOADED.match(message):
        return Loaded(_text(found[1]), found[2].decode())
    if found := _USING.match(message):
        return Using(_text(found[1]))
    if found := _DIRECT.match(message):
        return Direct(_text(found[1]), int(found[3]), _text(found[4]), found[2] == b"Enabled")
    if found := _FAR.match(message):
        return Far(_text(found[1]), _text(found[2]), int(found[3]), int(found[4]))
    if found := _ENV.match(message):
        return Env(found[1].decode(), _text(found[2]))
    if found := _SPEED.match(message):
        return Speed(int(found[1]), _text(found[2]), int(found[5]))
    if found := _PROVIDER.match(message):
        return Provider(_text(found[1]), _text(found[2] or b""), int(found[3]))
    if found := _PEERS.search(message[:200]):
        return NoPeers(_text(message[:160]))
    if found := _ABSENT.match(message):
        network, why = [_text(group) for group in found.groups() if group]
        return Absent("IB" if network == "Failed" else network, why)
    return None


def _card(index: int, text: str) -> Card:
    if found := _IB_CARD.match(text):
        return Card(index, found[1], int(found[2]) if len(found[2]) < 6 else 0, found[3])
    return Card(index, text.split(":")[0], 0, "")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
