"""The spool of one task: everything that is to go to MLflow, written down in order on this disk before it is sent.

`spool.jsonl` is only ever appended to, one message a line: `<crc32 of the JSON, 8 hex digits> <JSON>`. `cursor` holds
the byte up to which MLflow has everything. The messages themselves stand in `messages`.

A line counts once its newline is there and its checksum fits: what a kill cut short is passed over. Appending hands the
line to the operating system, so that it outlives the process; the sender forces lines to the disk before it sends them,
so that a power cut costs no more than the seconds since then.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from alto_core.errors import TrackingError
from alto_core.tracking.messages import Message, from_dict, to_dict
from alto_core.whole_files import whole_file

MAX_UNWRITTEN_BYTES = 64 * 2**20
"""What is kept in memory while the disk takes nothing; above it training stops rather than lose a point."""

_LINES_FILE = "spool.jsonl"
_CURSOR_FILE = "cursor"
_TAIL_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class Line:
    """One message and where it stands."""

    start: int
    """Offset of its first byte."""
    end: int
    """Offset behind its newline."""
    message: Message | None
    """None: it is damaged."""


class Spool:
    """Reads and appends. One process at a time appends; any number may read. Creates nothing before the first line."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._file = folder / _LINES_FILE
        self._unwritten = b""

    @property
    def end(self) -> int:
        """The offset behind the last whole line."""
        if not self._file.exists():
            return 0
        with self._file.open("rb") as source:
            start = source.seek(0, os.SEEK_END)
            while start > 0:
                stop, start = start, max(0, start - _TAIL_BYTES)
                source.seek(start)
                newline = source.read(stop - start).rfind(b"\n")
                if newline >= 0:
                    return start + newline + 1
        return 0

    @property
    def has_unwritten(self) -> bool:
        """Whether lines wait in memory for a disk that took nothing."""
        return bool(self._unwritten)

    @property
    def cursor(self) -> int:
        """MLflow has every line that ends at or before this offset. 0 where it was never set, or is not readable."""
        try:
            offset, checksum = (self.folder / _CURSOR_FILE).read_text(encoding="ascii").split()
        except (OSError, ValueError):
            return 0
        return int(offset) if checksum == _checksum(offset.encode()) and int(offset) <= self.end else 0

    def set_cursor(self, offset: int) -> None:
        """Note what MLflow has. An older note that survives a crash costs a second sending, which adds nothing."""
        content = f"{offset} {_checksum(str(offset).encode())}"
        with whole_file(self.folder / _CURSOR_FILE, flush=False) as note:
            note.write_text(content, encoding="ascii")

    def append(self, messages: Sequence[Message]) -> int:
        """Write messages down. Where the disk takes nothing they wait in memory for the next call.

        Returns:
            Bytes written.

        Raises:
            TrackingError: more than `MAX_UNWRITTEN_BYTES` wait in memory.
        """
        pending = self._unwritten + b"".join(map(_as_line, messages))
        if not pending:
            return 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(pending)
        except OSError as error:
            self._unwritten = pending
            if len(pending) > MAX_UNWRITTEN_BYTES:
                raise TrackingError(
                    f"{self._file}: got {error.strerror}, expected room for what is logged. Free space on this disk, "
                    "then resume the task."
                ) from error
            return 0
        self._unwritten = b""
        return len(pending)

    def sync(self) -> None:
        """Force what was appended to the disk."""
        if self._file.exists():
            with self._file.open("rb") as lines:
                os.fsync(lines.fileno())

    def lines(self, start: int = 0) -> Iterator[Line]:
        """The whole lines from an offset on."""
        if not self._file.exists():
            return
        with self._file.open("rb") as source:
            source.seek(start)
            for raw in source:
                end = start + len(raw)
                if not raw.endswith(b"\n"):
                    return  # still being written, or cut short by a kill
                yield Line(start=start, end=end, message=_from_line(raw))
                start = end

    def lock(self) -> FileLock:
        """For the one who delivers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder / "delivery.lock")

    def _write(self, content: bytes) -> None:
        with self._file.open("ab", buffering=0) as out:
            before = os.fstat(out.fileno()).st_size
            if before and not _ends_a_line(self._file, before):
                content = b"\n" + content  # the last writer was killed in the middle of a line
            try:
                written = 0
                while written < len(content):
                    written += out.write(content[written:])
            except OSError:
                with suppress(OSError):  # what was written in part is passed over as a damaged line
                    os.ftruncate(out.fileno(), before)
                raise


def _as_line(message: Message) -> bytes:
    content = json.dumps(to_dict(message), separators=(",", ":")).encode()
    return f"{_checksum(content)} ".encode() + content + b"\n"


def _from_line(raw: bytes) -> Message | None:
    checksum, _, content = raw.rstrip(b"\n").partition(b" ")
    if checksum.decode("ascii", "replace") != _checksum(content):
        return None
    return from_dict(json.loads(content))


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def _ends_a_line(file: Path, size: int) -> bool:
    with file.open("rb") as source:
        source.seek(size - 1)
        return source.read(1) == b"\n"
