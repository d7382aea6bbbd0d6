"""Faults that are brought into the process of a rank, which imports nothing for them but the engine."""

from __future__ import annotations

import torch

from alto_core.engine.capture_choice import PassKind
from alto_core.engine.passes import PassRunner, PassWork


def refuse_large_passes(_backbone: object) -> None:
    """Forward and backward have run when memory is found short, as with a last allocation."""
    run = PassRunner.run

    def limited(self: PassRunner, kind: PassKind, work: PassWork) -> torch.Tensor:
        losses = run(self, kind, work)
        if kind is PassKind.GRADIENTS and work.batch.num_tokens > 40:
            raise torch.OutOfMemoryError("out of memory (made up)")
        return losses

    PassRunner.run = limited  # type: ignore[method-assign]


def break_passes(_backbone: object) -> None:
    """In the middle, while the other ranks are in theirs."""

    def broken(*_arguments: object) -> torch.Tensor:
        raise RuntimeError("made up")

    PassRunner._gradients = broken  # type: ignore[method-assign,assignment]
