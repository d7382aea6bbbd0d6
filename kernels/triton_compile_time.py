"""How long Triton took to compile kernels of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]


@contextmanager
def kernel_compile_time() -> Iterator[list[float]]:
    """Yields a list whose one entry, after the block, is the seconds of it in which kernels were compiled.

    Kernels that `torch.compile` makes are part of its own time and not counted.
    """
    seconds, earlier = [0.0], triton.knobs.compilation.listener

    def listen(*, src: Any, times: Any, **others: Any) -> None:
        if not getattr(src, "name", "").startswith("triton_"):
            seconds[0] += times.total / 1e6
        if earlier is not None:
            earlier(src=src, times=times, **others)

    triton.knobs.compilation.listener = listen
    try:
        yield seconds
    finally:
        triton.knobs.compilation.listener = earlier
