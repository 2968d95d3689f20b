"""Errors of the rendezvous: torchrun's TCPStore, MASTER_ADDR, ports and names."""

from __future__ import annotations

import re

from evener.tools.analyze.evidence.lines import Line
from evener.tools.analyze.evidence.records import Evidence, Meeting

_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "port",
        re.compile(
            r"failed to bind to (?P<host>\S+?):(?P<port>\d{1,5})\b.{0,60}(?:98|in "
            r"use)"
        ),
    ),
    ("port", re.compile(r"port: (?P<port>\d{1,5}),.{0,120}(?:EADDRINUSE|address already in use)")),
    (
        "port",
        re.compile(
            r"(?:EADDRINUSE|[Aa]ddress already in "
            r"use).{0,80}?(?::(?P<port>\d{2,5}))?\b"
        ),
    ),
    (
        "short",
        re.compile(
            r"(?:Timed out after (?P<extra>\d+) seconds waiting for clients\. "
            r")?(?P<host>\d{1,6})/(?P<port>\d{1,6}) clients joined"
        ),
    ),
    (
        "name",
        re.compile(
            r"gai error: ?-?\d+|gaierror|[Nn]ame or service not known|[Tt]emporary failure in name "
            r"resolution|nodename nor servname|[Cc]ould not resolve|No address associated"
        ),
    ),
    (
        "timeout",
        re.compile(
            r"client socket has timed out after (?P<extra>\d+) ?m?s while trying to connect to "
            r"\(?\[?(?P<host>[\w.:-]{1,200}?)\]?(?:, |:)(?P<port>\d{1,5})\)?"
        ),
    ),
    (
        "refused",
        re.compile(
            r"client socket has failed to connect to (?:any network address of "
            r")?\(?\[?(?P<host>[\w.:-]{1,200}?)\]?(?:, |:)(?P<port>\d{1,5})\)?"
            r"(?: \(errno: (?P<extra>\d+ - [^)]{1,60})\))?"
        ),
    ),
    (
        "timeout",
        re.compile(
            r"failed to connect/validate to host \[?(?P<host>[\w.:-]{1,200}?)\]?:(?P<port>\d{1,5})"
        ),
    ),
    (
        "timeout",
        re.compile(
            r"RendezvousTimeoutError|(?:TCPStore|rendezvous).{0,60}timed out", re.IGNORECASE
        ),
    ),
    ("unreached", re.compile(r"RendezvousConnectionError|connect\(\) timed out")),
    ("closed", re.compile(r"RendezvousClosedError")),
    (
        "nodes",
        re.compile(
            r"(?P<extra>[Mm]ismatch\w* .{0,60}(?:world[ _]size|nnodes|number of "
            r"nodes).{0,80})"
        ),
    ),
)
_ENDPOINT = re.compile(
    r"\brdzv_endpoint *[:=] *\[?(?P<host>[\w.:-]*?[\w.-])\]?(?::(?P<port>\d{1,5}))?$"
)
_PLACES = (
    re.compile(r"\(([\w.-]{1,200}), (\d{1,5})\)"),
    re.compile(r"[Hh]ost(?:name)?:? ['\"]?([\w.-]{2,200})['\"]?(?:[: ](\d{2,5})\b)?"),
    re.compile(r"([A-Za-z][\w.-]{1,200}):(\d{2,5})\b(?!\])"),
)
_WARNING = re.compile(r"\s*(?:\[rank\d+\]:)?\[?W[\d ]|WARNING|.{0,40}\bWARN\b")
WORDS = (
    b"failed to bind", b"EADDRINUSE", b"ddress already in use", b"clients joined", b"gai error",
    b"gaierror", b"ervice not known", b"name resolution", b"nor servname", b"not resolve",
    b"o address associated", b"client socket has", b"failed to connect/validate", b"Rendezvous",
    b"TCPStore", b"nnodes", b"orld size", b"rdzv_endpoint", b"connect() timed",
)  # fmt: skip


class Store:
    """Failures of the rendezvous, each place once."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._seen: set[tuple[str, str, str]] = set()
        self._endpoint = ("", "")

    def line(self, line: Line) -> None:
        """Take one line that has one of WORDS."""
        text = line.text[:2000]
        if "NCCL WARN" in text:
            return
        if found := _ENDPOINT.search(text.strip()):
            self._endpoint = found["host"], found["port"] or ""
            return
        for kind, pattern in _KINDS:
            found = pattern.search(text)
            if not found:
                continue
            groups = found.groupdict()
            host, port = groups.get("host") or "", groups.get("port") or ""
            if kind == "name":
                places = (place.search(text) for place in _PLACES)
                if place := next((p for p in places if p), None):
                    host, port = place[1], place[2] or ""
            if kind == "unreached":
                host, port = self._endpoint
            key = (kind, host, port + "w" * (_WARNING.match(text) is not None))
            if key not in self._seen and len(self._seen) < 1000:
                self._seen.add(key)
                self._evidence.add(
                    Meeting(
                        kind,
                        host,
                        port,
                        text.strip()[:300],
                        line.where,
                        groups.get("extra") or "",
                        kind != "port" and _WARNING.match(text) is not None,
                    )
                )
            return
