"""Each line of text to the readers that may want it, by the words that are in it."""

from __future__ import annotations

import re

from evener.tools.analyze.evidence import inspector, kernel, launcher, ras, state, store, watchdog
from evener.tools.analyze.evidence.lines import split
from evener.tools.analyze.evidence.records import Evidence
from evener.tools.analyze.evidence.traces import CHAINS, HEAD, LONE, Traces

_LINE = 8192
_HEAD = HEAD.encode()
_WORDS = tuple(
    dict.fromkeys(
        [_HEAD, *CHAINS, *LONE]
        + [
            word
            for reader in (watchdog, launcher, store, kernel, state, ras, inspector)
            for word in reader.WORDS
        ]
    )
)


# A file of one rank by its name: rank_3.log, rank3/stderr, trainer.rank-3.out.
_FILE = re.compile(
    r"(?:^|[^a-zA-Z])rank[_-]?(\d{1,6})(?:[._-](?:std|err|out|log|txt|gz|zst)|[./]|$)"
)


class Reader:
    """The readers of one file. Make a new one for each file."""

    def __init__(self, evidence: Evidence, name: str = "") -> None:
        self.evidence = evidence
        found = _FILE.search(name)
        self._rank = int(found[1]) if found else -1
        self._watchdog = watchdog.Watchdog(evidence)
        self._traces = Traces(evidence)
        self._launcher = launcher.Launcher(evidence)
        self._store = store.Store(evidence)
        self._kernel = kernel.Kernel(evidence)
        self._state = state.State(evidence)
        self._ras = ras.Ras(evidence)
        self._words = _WORDS

    def block(self, text: bytes) -> None:
        """Look which words are in the next lines at all: of a block, most are in none."""
        self._words = tuple(word for word in _WORDS if word in text)

    def line(self, raw: bytes, where: int, host: str = "") -> None:
        """Take one line of a program, a launcher or the system."""
        stateful = (
            self._traces.active or self._state.active or self._ras.active or self._watchdog.active
        )
        if not stateful and not any(word in raw for word in self._words):
            return
        timed = any(word in raw for word in inspector.WORDS) and raw.find(b"{", 0, 200) >= 0
        if timed and inspector.line(raw[raw.find(b"{") :], where, self.evidence):
            return
        text = raw[:_LINE].decode("utf-8", "replace").replace("\x00", " ").rstrip("\r\n")
        line = split(text, where)
        line.host = line.host or host
        line.rank = line.rank if line.rank >= 0 else self._rank
        if line.rank >= 0 and len(self.evidence.ranks) < 200_000:
            self.evidence.ranks.setdefault(line.rank, where)
        # A traceback's last line may be another reader's, too.
        last = ": " in line.text or line.text.endswith("Error")
        if self._traces.line(line, text) and HEAD not in text and not last:
            return
        for part in (watchdog, launcher, store, kernel):
            listed = part is watchdog and self._watchdog.active
            if listed or any(word in raw for word in part.WORDS):
                self._part(part).line(line)
        self._state.line(line)
        self._ras.line(line)

    def _part(
        self, module: object
    ) -> watchdog.Watchdog | launcher.Launcher | store.Store | kernel.Kernel:
        if module is watchdog:
            return self._watchdog
        if module is launcher:
            return self._launcher
        return self._store if module is store else self._kernel
