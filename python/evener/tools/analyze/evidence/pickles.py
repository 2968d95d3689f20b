"""Read a pickle of containers and numbers without running it.

A pickle is a program for a small machine; some of its instructions import and call functions. This
machine has only those that make dicts, lists, tuples, strings, bytes, numbers, booleans and None.
Any other one ends the reading, so nothing in the file can run, and a count of instructions and of
bytes bounds the work.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from evener.errors import UsageError

_MOST = 20_000_000
_CONTAINERS = 4_000_000
_MARK = object()
_MADE = frozenset([b"}", b"]", b"d", b"l", b"t", b"\x85", b"\x86", b"\x87"])
_CALLS = {
    b"c": "GLOBAL", b"\x93": "STACK_GLOBAL", b"R": "REDUCE", b"b": "BUILD", b"i": "INST",
    b"o": "OBJ", b"\x81": "NEWOBJ", b"\x92": "NEWOBJ_EX", b"P": "PERSID", b"Q": "BINPERSID",
    b"\x82": "EXT1", b"\x83": "EXT2", b"\x84": "EXT4",
}  # fmt: skip


class RefusedError(UsageError):
    """A pickle that would run code, is cut, or is too large."""


def is_pickle(head: bytes) -> bool:
    """Whether a file begins as a pickle of protocol 2 or later."""
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def loads(data: bytes, name: str) -> Any:
    """The value in `data`. Raises RefusedError with `name` where it is not one of plain values."""
    try:
        return _Machine(data, name).run()
    except RefusedError:
        raise
    except (IndexError, KeyError, ValueError, struct.error, TypeError, OverflowError) as error:
        raise RefusedError(
            f"{name}: a pickle that is cut or damaged ({type(error).__name__})",
            "give the whole file; a rank that was killed while it wrote leaves a part of one",
        ) from None


class _Machine:
    def __init__(self, data: bytes, name: str) -> None:
        self.data, self.name, self.at = data, name, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.containers = 0

    def take(self, count: int) -> bytes:
        """The next bytes; a count beyond the end is an error, before anything is allocated."""
        if count < 0 or self.at + count > len(self.data):
            raise ValueError("cut")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def popped(self) -> list[Any]:
        """What stands above the last mark."""
        stack = self.stack
        for place in range(len(stack) - 1, -1, -1):
            if stack[place] is _MARK:
                items = stack[place + 1 :]
                del stack[place:]
                return items
        raise ValueError("no mark")

    def run(self) -> Any:
        steps = 0
        while True:
            steps += 1
            if steps > _MOST or self.containers > _CONTAINERS:
                raise RefusedError(
                    f"{self.name}: a pickle of more than {_MOST:,} instructions or "
                    f"{_CONTAINERS:,} containers",
                    "give the dump of one rank, made with TORCH_FR_BUFFER_SIZE of at most 20000",
                )
            code = self.take(1)
            if code == b".":
                return self.stack.pop()
            if code in _CALLS:
                raise RefusedError(
                    f"{self.name}: a pickle that would run code ({_CALLS[code]}); it was not run",
                    "a flight recorder's dump holds plain values only: look at where this is from",
                )
            self.containers += code in _MADE
            do = _STEPS.get(code)
            if do is None:
                raise ValueError(f"instruction {code!r}")
            do(self)


def _put(machine: _Machine, key: int) -> None:
    machine.memo[key] = machine.stack[-1]


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    _as(machine.stack[-1], list).append(value)


def _appends(machine: _Machine) -> None:
    items = machine.popped()
    _as(machine.stack[-1], list).extend(items)


def _item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _as(machine.stack[-1], dict)[key] = value


def _items(machine: _Machine) -> None:
    items = machine.popped()
    _as(machine.stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))


def _as(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{type(value).__name__} where a {kind.__name__} belongs")
    return value


def _tuple(machine: _Machine, count: int) -> None:
    stack = machine.stack
    if len(stack) < count:
        raise ValueError("too few values")
    items = tuple(stack[len(stack) - count :]) if count else ()
    if count:
        del stack[len(stack) - count :]
    stack.append(items)


def _dict(machine: _Machine) -> None:
    items = machine.popped()
    machine.stack.append(dict(zip(items[::2], items[1::2], strict=True)))


def _long(machine: _Machine, form: str) -> int:
    count = machine.number(form)
    if count > 64:
        raise ValueError("a number of too many bytes")
    return int.from_bytes(machine.take(count), "little", signed=True)


def _string(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _push(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.stack.append(value(machine))

    return step


_STEPS: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.take(1),
    b"\x95": lambda m: m.take(8),
    b"(": _push(lambda _: _MARK),
    b"N": _push(lambda _: None),
    b"\x88": _push(lambda _: True),
    b"\x89": _push(lambda _: False),
    b"K": _push(lambda m: m.take(1)[0]),
    b"M": _push(lambda m: m.number("<H")),
    b"J": _push(lambda m: m.number("<i")),
    b"G": _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    b"\x8a": _push(lambda m: _long(m, "<B")),
    b"\x8b": _push(lambda m: _long(m, "<i")),
    b"\x8c": _push(lambda m: _string(m.take(m.number("<B")))),
    b"X": _push(lambda m: _string(m.take(m.number("<I")))),
    b"\x8d": _push(lambda m: _string(m.take(m.number("<Q")))),
    b"C": _push(lambda m: m.take(m.number("<B"))),
    b"B": _push(lambda m: m.take(m.number("<I"))),
    b"\x8e": _push(lambda m: m.take(m.number("<Q"))),
    b"}": _push(lambda _: {}),
    b"]": _push(lambda _: []),
    b")": _push(lambda _: ()),
    b"d": _dict,
    b"l": _push(lambda m: m.popped()),
    b"t": _push(lambda m: tuple(m.popped())),
    b"\x85": lambda m: _tuple(m, 1),
    b"\x86": lambda m: _tuple(m, 2),
    b"\x87": lambda m: _tuple(m, 3),
    b"a": _append,
    b"e": _appends,
    b"s": _item,
    b"u": _items,
    b"0": lambda m: m.stack.pop(),
    b"1": lambda m: m.popped(),
    b"2": lambda m: m.stack.append(m.stack[-1]),
    b"q": lambda m: _put(m, m.take(1)[0]),
    b"r": lambda m: _put(m, m.number("<I")),
    b"\x94": lambda m: _put(m, len(m.memo)),
    b"h": lambda m: m.stack.append(m.memo[m.take(1)[0]]),
    b"j": lambda m: m.stack.append(m.memo[m.number("<I")]),
}
