"""From what the user names to streams of bytes: files, folders, patterns, `-`, archives, encodings.

A compressed file is read as it is unpacked, so memory stays bounded whatever it unpacks to; one
that grows more than a log can is refused. Text in UTF-16 becomes UTF-8.
"""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import io
import lzma
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from evener.errors import UsageError

_FILES = 20_000
_HEAD = 1 << 16
_BOMB_SIZE = 256 << 20
_BOMB_RATIO = 300
# Bytes that text does not have: all control bytes but tab, line ends, form feed and escape.
_ODD = bytes(b for b in range(32) if b not in (8, 9, 10, 12, 13, 27))
# What lies beside logs and is none: never opened in a folder.
_OTHER = frozenset(
    [".py", ".pyc", ".so", ".o", ".a", ".sh", ".yaml", ".yml", ".toml", ".md", ".rst", ".pt",
     ".pth", ".bin", ".safetensors", ".onnx", ".npz", ".npy", ".png", ".jpg", ".jpeg", ".gif",
     ".mp4",
     ".pdf", ".html", ".css", ".js", ".whl", ".tar", ".tgz", ".parquet", ".arrow", ".h5", ".ckpt",
     ".lock", ".proto", ".cu", ".cc", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".ipynb",
     ".tfevents", ".csv", ".db", ".sqlite", ".model", ".idx"]
)  # fmt: skip


# Damaged, cut, encrypted, or packed in a way that Python does not know.
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, OSError)


class UnreadableError(UsageError):
    """A file that cannot be read, or that is none of the formats."""


@dataclass(frozen=True)
class Input:
    """One file to read. `found` in a folder or archive: it is left out where it is no text."""

    name: Path
    open: Callable[[], BinaryIO]
    size: int = 0
    found: bool = False


def expand(paths: list[Path]) -> list[Input]:
    """Every file that `paths` name, in order. Raises UnreadableError where there is none."""
    inputs: list[Input] = []
    for path in paths:
        text = str(path)
        if text == "-":
            inputs.append(Input(Path("stdin"), lambda: sys.stdin.buffer))
        elif path.is_dir():
            inputs += _folder(path)
        elif not path.exists() and any(c in text for c in "*?["):
            named = sorted(glob.glob(text, recursive=True))  # noqa: PTH207
            if not named:
                raise UnreadableError(f"{path}: no file fits this pattern", "check the folder")
            if len(named) > _FILES:
                raise UnreadableError(f"{path}: more than {_FILES} files", "name those of one run")
            inputs += expand([Path(name) for name in named])
        elif text.endswith(".zip"):
            inputs += _archive(path)
        else:
            inputs.append(_file(path))
    return inputs


def _file(path: Path, found: bool = False) -> Input:
    def opened() -> BinaryIO:
        return path.open("rb")

    try:
        size = path.stat().st_size
    except OSError:
        size = 0
    return Input(path, opened, size, found)


def _folder(path: Path) -> list[Input]:
    inputs = []
    for entry in sorted(path.rglob("*")):
        parts = entry.relative_to(path).parts
        if any(part.startswith((".", "__")) for part in parts) or entry.suffix.lower() in _OTHER:
            continue
        if entry.suffix == ".zip":
            inputs += _archive(entry)
        elif entry.is_file():
            inputs.append(_file(entry, found=True))
        if len(inputs) >= _FILES:
            raise UnreadableError(f"{path}: more than {_FILES} files", "name the folder of one run")
    if not inputs:
        raise UnreadableError(f"{path}: a folder without any log", "name a folder that holds logs")
    return inputs


def _archive(path: Path) -> list[Input]:
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise UnreadableError(f"{path}: {error}", "give a whole zip file") from None
    inputs = []
    if len(archive.infolist()) > _FILES:
        raise UnreadableError(f"{path}: more than {_FILES} files", "give the logs of one run")
    for info in archive.infolist():
        if info.is_dir() or Path(info.filename).suffix.lower() in _OTHER:
            continue
        if info.file_size > _BOMB_SIZE and info.file_size > _BOMB_RATIO * max(
            info.compress_size, 1
        ):
            raise _bomb(path / info.filename)
        inputs.append(Input(path / info.filename, _member(archive, info), info.file_size, True))
    return inputs


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Callable[[], BinaryIO]:
    return lambda: cast(BinaryIO, _Member(archive, info))


def _bomb(name: Path) -> UnreadableError:
    return UnreadableError(
        f"{name}: it unpacks to more than {_BOMB_RATIO} times its size, which no log does",
        "unpack it yourself and look at what it is",
    )


class _Member:
    """One file of an archive. What is damaged in it ends it; where nothing could be read, that is
    an error."""

    def __init__(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
        self._name, self._some = f"{archive.filename}/{info.filename}", False
        self.cut = False
        try:
            self._file = archive.open(info)
        except _DAMAGED as error:
            raise self._refused(error) from None

    def read(self, size: int = -1) -> bytes:
        try:
            part = self._file.read(size)
        except _DAMAGED as error:
            if self._some:
                self.cut = True
                return b""
            raise self._refused(error) from None
        self._some = True
        return part

    def close(self) -> None:
        self._file.close()

    def _refused(self, error: Exception) -> UnreadableError:
        return UnreadableError(
            f"{self._name}: cannot be unpacked ({error})", "give a whole zip file"
        )


class Stream:
    """The text of one input: `head` is its begin, `read` gives all of it, the head too."""

    def __init__(self, given: Input) -> None:
        self.name = given.name
        self._cut = False
        self._file = given.open()
        self._raw = _Peeked(self._file)
        self._next: Callable[[int], bytes] = self._unpacked()
        self._rest, self._at = b"", 0
        self.head = self._take(_HEAD)
        self._rest = self.head
        if decode := _encoding(self.head):
            self._recode(decode)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not sys.stdin.buffer:
            self._file.close()

    @property
    def cut(self) -> bool:
        """Whether it was packed, and its end was missing or damaged: what is before it was read."""
        return self._cut or (isinstance(self._file, _Member) and self._file.cut)

    @property
    def binary(self) -> bool:
        """Whether this is no text: a share of zero and control bytes that no log has."""
        head = self.head[:_HEAD]
        odd = sum(head.count(byte) for byte in _ODD)
        return len(head) >= 512 and odd > len(head) * 0.03

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size` and one decoded character; empty at the end."""
        if self._rest:
            rest = self._rest[self._at : self._at + size]
            self._at += size
            if self._at >= len(self._rest):
                self._rest, self._at = b"", 0
            return rest
        return self._next(size)

    def all(self, most: int) -> bytes:
        """All of it, up to `most` bytes; the reading begins again after it."""
        parts, total = [], 0
        while total < most and (part := self.read(1 << 20)):
            parts.append(part)
            total += len(part)
        whole = b"".join(parts)
        self._rest, self._at = whole, 0
        return whole

    def _take(self, size: int) -> bytes:
        parts, total = [], 0
        while total < size and (part := self._next(size - total)):
            parts.append(part)
            total += len(part)
        return b"".join(parts)

    def _unpacked(self) -> Callable[[int], bytes]:
        raw, head = self._raw, self._raw.head
        packed: Any
        if head.startswith(b"\x1f\x8b"):
            packed = gzip.GzipFile(fileobj=raw)
        elif head.startswith(b"BZh"):
            packed = bz2.BZ2File(raw)
        elif head.startswith(b"\xfd7zXZ\0"):
            packed = lzma.LZMAFile(cast(BinaryIO, raw))  # noqa: SIM115
        elif head.startswith(b"\x28\xb5\x2f\xfd"):
            packed = _zstd(raw, self.name)
        else:
            return raw.read
        written = 0

        def read(size: int) -> bytes:
            nonlocal written
            try:
                part: bytes = packed.read(min(size, 1 << 20))
            except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
                if written:
                    self._cut = True
                    return b""  # a log whose end is missing: what is there is read
                raise UnreadableError(
                    f"{self.name}: cannot be unpacked ({error})", "give the whole file"
                ) from None
            written += len(part)
            if written > _BOMB_SIZE and written > _BOMB_RATIO * max(raw.taken, 1):
                raise _bomb(self.name)
            return part

        return read

    def _recode(self, encoding: str) -> None:
        decoder = codecs.getincrementaldecoder(encoding)("replace")
        inner, start = self._next, self.head
        first = decoder.decode(start).lstrip("\ufeff").encode("utf-8", "replace")

        def read(size: int) -> bytes:
            while raw := inner(size):
                if text := decoder.decode(raw).encode("utf-8", "replace"):
                    return text
            return b""

        self.head = self._rest = first
        self._next = read


class _Peeked(io.RawIOBase):
    """A stream whose first bytes were looked at, and a count of what was taken of it."""

    def __init__(self, file: BinaryIO) -> None:
        self.head = file.read(8)
        self._file, self._left, self.taken = file, self.head, len(self.head)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._left:
            left, self._left = self._left, b""
            if 0 < size < len(left):
                left, self._left = left[:size], left[size:]
            return left
        part = self._file.read(size if size > 0 else 1 << 20)
        self.taken += len(part)
        return part

    def readinto(self, buffer: Any) -> int:
        part = self.read(len(buffer))
        buffer[: len(part)] = part
        return len(part)


def _zstd(raw: _Peeked, name: Path) -> Any:
    try:
        from compression import zstd  # type: ignore[import-not-found]

        return zstd.ZstdFile(raw)
    except ImportError:  # noqa: S110 - of Python 3.14
        pass
    try:
        import zstandard  # type: ignore[import-not-found]

        return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    except ImportError:  # noqa: S110 - the program zstd is left
        pass
    tool = shutil.which("zstd")
    if tool is None:
        raise UnreadableError(
            f"{name}: nothing here unpacks zstd", "install the package zstandard, or `zstd -d` it"
        )
    if not name.is_file():
        raise UnreadableError(
            f"{name}: zstd from a stream", "use `zstd -dc FILE | evener analyze -`"
        )
    process = subprocess.Popen(
        [tool, "-dcq", "--", str(name)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    return _Child(process)


class _Child:
    """The output of a process that unpacks; it ends with its reader."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        part = self._process.stdout.read(size)
        if not part and self._process.wait():
            raise OSError("zstd says that it is damaged")
        return part

    def __del__(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _encoding(head: bytes) -> str:
    """The encoding of a text that is not UTF-8, empty for what needs none."""
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "utf-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    sample = head[:2048]
    if len(sample) >= 16:
        even, odd = sample[0::2].count(0), sample[1::2].count(0)
        half = len(sample) // 2
        if odd > half * 0.7 and even < half * 0.1:
            return "utf-16-le"
        if even > half * 0.7 and odd < half * 0.1:
            return "utf-16-be"
    return "utf-8-sig" if head.startswith(b"\xef\xbb\xbf") else ""
