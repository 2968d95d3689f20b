"""A function that is called with many sizes: what torch's and TensorFlow's forms share.

A call is run plain (as the function is), or padded to its bucket's edge and run compiled, as
`policy.Buckets` says. Before a compiled form is used it is compared with the plain one on the
inputs of that call: where a row's result depends on the padding, nothing is compiled, and the
reason is logged and recorded. So is an error of the compiler. What passed is in the record, with a
digest of the code, and a later process with the same code does not compare again.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from evener.base.log import info0, logger
from evener.compile import store
from evener.compile.policy import Bucket, Buckets, Options, Turn

# Signatures (other shapes, dtypes, modes) of one function that get buckets; more run plain.
_SIGNATURES = 16
_SAVE_EVERY = 10.0  # seconds

Call = TypeVar("Call")


class WrongError(Exception):
    """The compiled form may not be used; the text says why."""


class Bucketed(ABC, Generic[Call]):
    """Calls one function; `Call` is what a framework makes of the arguments of a call."""

    def __init__(self, name: str, maker: str, options: Options, record: bool) -> None:
        self.options = options
        name = self.name = store.claim(name, self) if record else name
        self._maker, self._record = maker, record
        self._saved = store.load(name, maker) if record else {}
        self._buckets: dict[str, Buckets] = {}
        self._by_key: dict[Hashable, Buckets] = {}
        self._told: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._last = time.monotonic()
        if record:
            atexit.register(_save, weakref.ref(self))

    def _run(self, call: Call, size: int, key: Hashable, signature: Callable[[], str]) -> Any:
        """One call. key: of its signature, whose text is made when the key is new."""
        buckets = self._by_key.get(key)
        if buckets is None:
            buckets = self._of(signature())
            if buckets is not None:
                self._by_key[key] = buckets
        if buckets is None:
            return self._plain(call)
        turn = buckets.take(size)
        bucket = turn.bucket
        if turn.compile and bucket is not None:
            if self._quiet(call, size, bucket.edge) and self.options.background:
                self._later(self._kept(call), buckets, bucket, size)
                bucket = None
            else:
                self._make(call, buckets, bucket, size)
                bucket = bucket if bucket.status == "ready" else None
            turn = Turn(size, bucket)
        begun = self._now() if turn.timed else 0.0
        found = self._plain(call) if bucket is None else self._compiled(call, size, bucket.edge)
        if turn.timed:
            why = buckets.ran(turn, self._now() - begun)
            if why and bucket is not None:
                info0("compile: %s, bucket %d is off: %s", self.name, bucket.edge, why)
        if self._record and time.monotonic() - self._last > _SAVE_EVERY:
            self.save()
        return found

    def _of(self, signature: str) -> Buckets | None:
        found = self._buckets.get(signature)
        if found is None:
            with self._lock:
                if len(self._buckets) >= _SIGNATURES:
                    self._say(
                        f"it has {_SIGNATURES} kinds of calls, and runs as it is for others: "
                        f"{signature[:200]}"
                    )
                    return None
                found = Buckets(self.options, self._saved.get(signature))
                found = self._buckets.setdefault(signature, found)
        return found

    def _later(self, call: Call, buckets: Buckets, bucket: Bucket, size: int) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "evener-compile")
        self._pool.submit(self._make, call, buckets, bucket, size)

    def _make(self, call: Call, buckets: Buckets, bucket: Bucket, size: int) -> None:
        begun, wrong = time.perf_counter(), ""
        try:
            bucket.check = self._prepare(call, size, bucket.edge, bucket.check)
        except WrongError as error:
            wrong = str(error)
        except Exception as error:  # noqa: BLE001 - of the compiler: the plain form is there
            text = " ".join(str(error).split())
            wrong = f"the compiler says {type(error).__name__}: {text[:300]}"
        seconds = time.perf_counter() - begun
        buckets.made(bucket, seconds, wrong)
        if wrong:
            buckets.stop(wrong)
            self._say(f"it runs as it is: {wrong}", once=wrong)
        else:
            info0("compile: %s for %d rows in %.2g s", self.name, bucket.edge, seconds)

    def _say(self, text: str, once: str = "it has") -> None:
        """Say a line; one for each `once`."""
        if once not in self._told:
            self._told.add(once)
            logger.warning("compile: %s: %s", self.name, text)

    def wait(self) -> None:
        """Until what is compiled in the background is ready."""
        if self._pool is not None:
            self._pool.submit(lambda: None).result()

    def report(self) -> dict[str, Any]:
        """What `evener compile report` shows of this function, by signature."""
        return {signature: buckets.saved() for signature, buckets in self._buckets.items()}

    def save(self) -> None:
        """Write the record now; that happens by itself at intervals and at the end."""
        self._last = time.monotonic()
        if self._buckets:
            store.save(self.name, self._maker, {**self._saved, **self.report()})

    def _now(self) -> float:
        """The time, when what was begun before has ended."""
        return time.perf_counter()

    def _kept(self, call: Call) -> Call:
        """The call's inputs as they are now, for another thread."""
        return call

    @abstractmethod
    def _quiet(self, call: Call, size: int, edge: int) -> bool:
        """Whether the function may run once more in another thread, and nothing else notices.

        Called before `_prepare`, in the thread of the call.
        """

    @abstractmethod
    def _plain(self, call: Call) -> Any:
        """Run the function as it is."""

    @abstractmethod
    def _compiled(self, call: Call, size: int, edge: int) -> Any:
        """Pad, run the compiled form, cut."""

    @abstractmethod
    def _prepare(
        self, call: Call, size: int, edge: int, known: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Compile for `edge` and compare with the plain form. Nothing is different afterwards.

        known: what it gave in an earlier process, for the record. Where that was for the same code,
        nothing is compared. Raises WrongError where the compiled form may not be used.
        """


def _save(reference: weakref.ref[Any]) -> None:
    if (one := reference()) is not None:
        one.save()
