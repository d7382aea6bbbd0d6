"""Processes of one machine that each hold a frozen backbone, whole or a part of it, and do what this process asks.

A rank does nothing by itself: it takes a call, answers it, and takes the next. So whoever trains keeps order, records
and checkpoints to itself, and the ranks keep adapters and moments. A rank that dies, or whose pass broke in the middle,
ends the whole group at once, which frees every device; the error names the rank and the cause.

Ranks meet through a file in a temporary folder, not through a port. They end with this process, however it ends: the
connections close.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from alto_core.config import ModelSection
from alto_core.engine.backbone import release_backbone
from alto_core.engine.launcher import Launcher
from alto_core.engine.messages import Answer, Call, Outcome, receive, send
from alto_core.engine.rank_setup import BROKEN_EXIT_CODE, RankSetup
from alto_core.errors import AltoError, EngineError, ModelError, RankLostError

EXIT_SECONDS = 10.0
"""For a rank to end; after that it is killed."""
CAUSE_SECONDS = 1.0
"""A rank whose neighbour died fails as well, maybe before the death is seen."""
ALL_ENDED = "All ranks have ended and their devices are free; the task can be resumed."
STDERR = 2
SHOWN_LINES = 15
"""Of what a rank wrote before it died."""


@dataclass(eq=False)
class _Rank:
    setup: RankSetup
    process_id: int
    connection: Connection
    log: Path

    @property
    def name(self) -> str:
        return f"rank {self.setup.rank} of {self.setup.num_ranks} ({self.setup.device})"


class RankGroup:
    """Ranks with the backbone of one model, each on a device of its own.

    Args:
        section: the model.
        devices: of the ranks.
        sharded: whether each holds a part of the decoder layers, or all of them.

    Raises:
        ModelError, EngineError: the model cannot be loaded, or a rank failed.
    """

    def __init__(self, section: ModelSection, devices: Sequence[str], *, sharded: bool):
        self.devices, self.sharded = tuple(devices), sharded
        self._folder = tempfile.TemporaryDirectory(prefix="alto-ranks-")
        self._launcher = _launcher()
        self._ranks: list[_Rank] = []
        try:
            for rank, device in enumerate(devices):
                setup = RankSetup(
                    rank=rank,
                    num_ranks=len(devices),
                    device=device,
                    section=section,
                    sharded=sharded,
                    folder=Path(self._folder.name),
                )
                self._ranks.append(_start(self._launcher, setup))
            self._collect(self._ranks)
        except BaseException:
            self._kill()
            raise

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def is_open(self) -> bool:
        return bool(self._ranks)

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(rank.process_id for rank in self._ranks)

    def call(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        """Let ranks do something at the same time, and wait for all of them.

        Args:
            calls: by rank. Where the backbone is sharded, the other ranks take part in the passes that they run.

        Returns:
            What each rank of `calls` answered.

        Raises:
            EngineError, ModelError, torch.OutOfMemoryError: what a rank raised, after the others have done what they
                were asked; or a rank is lost, and the group with it.
        """
        answers = self._answers(calls)
        for number, answer in answers.items():
            if answer.outcome is Outcome.FAILED:
                raise self._as_raised(number, answer)
        return {number: answer.value for number, answer in answers.items()}

    def try_call(self, calls: Mapping[int, Call]) -> dict[int, Exception]:
        """As `call`, but gives the errors by rank instead of raising the first."""
        answers = self._answers(calls)
        failed = {number: answer for number, answer in answers.items() if answer.outcome is Outcome.FAILED}
        return {number: self._as_raised(number, answer) for number, answer in failed.items()}

    def on_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function with every rank's backbone; it may run passes."""
        call = Call(name="", function=function, arguments=arguments, passes=True)
        answers = self.call(dict.fromkeys(range(len(self)), call))
        return [answers[rank] for rank in range(len(self))]

    def close(self) -> None:
        """End all ranks and wait for them."""
        for rank in self._ranks:
            rank.connection.close()
        deadline = time.monotonic() + EXIT_SECONDS
        for rank in self._ranks:
            self._launcher.wait_for(rank.process_id, max(0.0, deadline - time.monotonic()))
        self._kill()

    def _answers(self, calls: Mapping[int, Call]) -> dict[int, Answer]:
        if not self.is_open:
            raise EngineError("the ranks have ended, expected them to run. Resume the task.")
        together = self.sharded and any(call.passes for call in calls.values())
        asked = [rank for rank in self._ranks if together or rank.setup.rank in calls]
        try:
            for rank in asked:
                with contextlib.suppress(BrokenPipeError):  # its death is seen where its answer is waited for
                    send(rank.connection, calls.get(rank.setup.rank, Call.nothing()))
            answers = self._collect(asked)
        except BaseException:
            self._kill()  # an answer that nobody waits for would be taken for the next one's
            raise
        return {number: answers[number] for number in calls}

    def _collect(self, asked: Sequence[_Rank]) -> dict[int, Answer]:
        """Wait for one answer of each."""
        waiting = {rank.connection: rank for rank in asked}
        answers: dict[int, Answer] = {}
        while waiting:
            for connection in wait(list(waiting)):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                answer = _answer_of(rank)
                if answer is None or answer.outcome is Outcome.BROKEN:
                    raise self._lost([rank, *waiting.values()], {rank: answer} if answer else {})
                answers[rank.setup.rank] = answer
        return answers

    def _as_raised(self, number: int, answer: Answer) -> Exception:
        """An error of a rank as if this process had raised it."""
        if answer.is_out_of_memory:
            return torch.OutOfMemoryError(answer.text)
        for kind in (EngineError, ModelError):
            if answer.error == kind.__name__:
                return kind(answer.text)
        return EngineError(f"{self._ranks[number].name} failed: {answer.error}: {answer.text}")

    def _lost(self, unanswered: Sequence[_Rank], broken: dict[_Rank, Answer]) -> AltoError:
        """End the group, and say why: a death is a cause, and of passes that broke the first; the others follow.

        Args:
            unanswered: ranks, that which was noticed first at the front.
            broken: what has been heard of broken passes.
        """
        deadline = time.monotonic() + CAUSE_SECONDS
        while not (dead := self._dead()) and time.monotonic() < deadline:
            for rank in unanswered[1:]:
                if rank not in broken and rank.connection.poll() and (answer := _answer_of(rank)) is not None:
                    broken[rank] = answer
            time.sleep(0.05)
        broken = {rank: answer for rank, answer in broken.items() if answer.outcome is Outcome.BROKEN}
        cause = min(broken, key=lambda rank: broken[rank].at, default=None)
        error: AltoError
        if dead:
            error = RankLostError(f"{dead[0].name} was lost: {self._end_of(dead[0])}. {ALL_ENDED}")
        elif cause is None:
            error = RankLostError(f"{unanswered[0].name} was lost: it does not answer. {ALL_ENDED}")
        elif broken[cause].error == ModelError.__name__:
            error = ModelError(broken[cause].text)
        elif broken[cause].is_out_of_memory:
            remedy = "Use a smaller max_slots or data.max_length"
            error = EngineError(f"{cause.name} ran out of memory: {broken[cause].text}. {remedy}. {ALL_ENDED}")
        else:
            error = EngineError(f"{cause.name} failed: {broken[cause].error}: {broken[cause].text}. {ALL_ENDED}")
        self._kill()
        return error

    def _dead(self) -> list[_Rank]:
        """Ranks that ended without saying why; those that a signal ended first."""
        codes = {rank: self._launcher.exit_code(rank.process_id) for rank in self._ranks}
        dead = [rank for rank, code in codes.items() if code not in (None, BROKEN_EXIT_CODE)]
        return sorted(dead, key=lambda rank: (codes[rank] or 0) >= 0)

    def _end_of(self, rank: _Rank) -> str:
        """How a process ended, and its last words."""
        code = self._launcher.exit_code(rank.process_id) or 0
        try:
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        except ValueError:
            how = f"ended by signal {-code}"
        lines = rank.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-SHOWN_LINES:]
        return f"{how}; its last words:\n" + "\n".join(lines) + "\n" if lines else how

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.connection.close()
            if self._launcher.exit_code(rank.process_id) is None:
                with contextlib.suppress(ProcessLookupError):  # it has ended in between
                    os.kill(rank.process_id, signal.SIGKILL)
        for rank in self._ranks:
            self._launcher.wait_for(rank.process_id, EXIT_SECONDS)
        self._ranks = []
        self._folder.cleanup()


def _answer_of(rank: _Rank) -> Answer | None:
    """None: its process has ended."""
    try:
        answer: Answer = receive(rank.connection)
    except (EOFError, OSError):
        return None
    return answer


_current: tuple[tuple[Any, ...], RankGroup] | None = None


def rank_group(section: ModelSection, devices: Sequence[str], *, sharded: bool) -> RankGroup:
    """Start ranks, or take the ones that this process started last if they are the same and still there."""
    global _current
    key = (section, tuple(devices), sharded)
    if _current is not None and _current[0] == key and _current[1].is_open:
        return _current[1]
    release_ranks()
    release_backbone()  # the first rank needs the device
    ranks = RankGroup(section, devices, sharded=sharded)
    _current = (key, ranks)
    return ranks


def release_ranks() -> None:
    """End the ranks of this process, if it has any."""
    global _current
    if _current is not None:
        _current[1].close()
    _current = None


@functools.cache
def _launcher() -> Launcher:
    """One serves all groups of this process."""
    return Launcher()


def _start(launcher: Launcher, setup: RankSetup) -> _Rank:
    ours, theirs = socket.socketpair()
    log = setup.folder / f"rank-{setup.rank}.log"
    with theirs, log.open("wb") as file:
        # One voice is enough; what the others have to say is shown if they die.
        output = STDERR if setup.rank == 0 else file.fileno()
        process_id = launcher.start(theirs.fileno(), output, setup.device)
    rank = _Rank(setup=setup, process_id=process_id, connection=Connection(ours.detach()), log=log)
    send(rank.connection, setup)
    return rank
