"""The process of one rank: loads its backbone, joins the others, and answers calls until its connection closes."""

from __future__ import annotations

import os
import select
import sys
import threading
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock

from alto_core.device import is_out_of_memory
from alto_core.engine.backbone import Backbone, load_backbone
from alto_core.engine.engine import Engine
from alto_core.engine.messages import Answer, Call, Outcome, receive, send
from alto_core.engine.rank_setup import BROKEN_EXIT_CODE, RankSetup
from alto_core.engine.sharding import ShardedLayers

PATIENCE = timedelta(hours=1)
"""For other ranks in a collective. Deaths are seen at once by the starting process, which ends all ranks."""


def run(descriptor: int) -> int:
    """Serve the connection with this descriptor; returns the exit code of the process."""
    connection = Connection(descriptor)
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    setup = receive(connection)
    try:
        rank = _Rank(_join(setup))
    except Exception as error:
        send(connection, _failure(error, Outcome.BROKEN))
        return BROKEN_EXIT_CODE
    send(connection, Answer(outcome=Outcome.DONE))
    try:
        while True:
            answer = rank.answer(receive(connection))
            send(connection, answer)
            if answer.outcome is Outcome.BROKEN:
                return BROKEN_EXIT_CODE
    except (EOFError, ConnectionError):
        return 0


def _end_with(descriptor: int) -> None:
    """The other end closes when the ranks are to end, and when whoever trains has died.

    At once, for this rank may be waiting for others that have ended already.
    """
    hang_up = select.poll()
    hang_up.register(descriptor, 0)  # asks for nothing; a hang-up is told all the same
    hang_up.poll()
    os._exit(0)


def _join(setup: RankSetup) -> Backbone:
    if setup.device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // setup.num_ranks))
    if setup.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(setup.device))
    if not setup.sharded:
        return load_backbone(setup.section, setup.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if setup.device.startswith("cuda") else "gloo",
        init_method=f"file://{setup.folder / 'meeting'}",
        rank=setup.rank,
        world_size=setup.num_ranks,
        timeout=PATIENCE,
    )
    # One rank after the other, so that the host holds the whole model once and not once per rank.
    turn = FileLock(setup.folder / "loading.lock")
    turn.acquire()

    def shard(model: Any) -> ShardedLayers:
        try:
            return ShardedLayers(model, torch.device(setup.device))
        finally:
            turn.release()

    return load_backbone(setup.section, setup.device, shard=shard)


class _Rank:
    """Does what it is asked to, one thing after the other."""

    def __init__(self, backbone: Backbone):
        self._backbone = backbone
        self._engine: Engine | None = None

    def answer(self, call: Call) -> Answer:
        sharded, together = self._backbone.sharded, call.passes
        try:
            answer = Answer(outcome=Outcome.DONE, value=self._do(call))
        except Exception as error:
            answer = _failure(error, Outcome.BROKEN if sharded is not None and sharded.is_broken else Outcome.FAILED)
        if sharded is not None and together and answer.outcome is not Outcome.BROKEN:
            try:
                sharded.finish()
            except Exception as error:
                return _failure(error, Outcome.BROKEN)
        return answer

    def _do(self, call: Call) -> Any:
        if call.function is not None:
            return call.function(self._backbone, *call.arguments)
        if call.name == "open":
            self._engine = Engine(self._backbone, **call.options)
            return self._engine.prompt_note
        if not call.name:
            return None
        assert self._engine is not None, "open an engine first"
        value = getattr(self._engine, call.name)(*call.arguments, **call.options)
        if call.name == "close":
            self._engine = None
        return value


def _failure(error: Exception, outcome: Outcome) -> Answer:
    return Answer(
        outcome=outcome, error=type(error).__name__, text=str(error), is_out_of_memory=is_out_of_memory(error)
    )


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1])))
