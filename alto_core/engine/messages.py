"""What a process and its ranks say to each other, pickled over a socket between the two that nobody else can open."""

from __future__ import annotations

import enum
import io
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch


class Outcome(enum.Enum):
    """What came of a call."""

    DONE = "done"
    FAILED = "failed"
    """With an error that left the rank as it was."""
    BROKEN = "broken"
    """In the middle of a pass that other ranks take part in; the rank ends."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a rank is to do."""

    name: str
    """Method of its engine; empty for a function."""
    function: Callable[..., Any] | None = None
    """To be called with the rank's backbone, where there is no name; None: nothing."""
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    passes: bool = False
    """It may run passes of the model; where that is sharded, all ranks get such a call at the same time."""

    @classmethod
    def method(cls, name: str, *arguments: Any, passes: bool = False, **options: Any) -> Call:
        """Of the rank's engine; `open` makes the engine and `close` ends it."""
        return cls(name=name, arguments=arguments, options=options, passes=passes)

    @classmethod
    def nothing(cls) -> Call:
        """Only take part in the passes of others."""
        return cls(name="", passes=True)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of it."""

    outcome: Outcome
    value: Any = None
    error: str = ""
    """Name of the exception's type."""
    text: str = ""
    is_out_of_memory: bool = False
    at: float = field(default_factory=time.monotonic)
    """By a clock that all processes of a machine share: of two ranks that broke, the first one is the cause."""


def send(connection: Connection, message: Any) -> None:
    """As `Connection.send`, but tensors go as arrays: torch's own way takes shared memory, which containers lack."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(message)
    connection.send_bytes(buffer.getbuffer())


def receive(connection: Connection) -> Any:
    """The next message.

    Raises:
        EOFError, OSError: the other side has ended.
    """
    return connection.recv()


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            return torch.from_numpy, (thing.contiguous().numpy(),)
        return NotImplemented
