"""How long compiling took is known, whichever code it was for."""

from __future__ import annotations

import torch

from alto_core.engine.regional_compile import compile_time


def test_compilation_is_timed_and_what_is_compiled_already_takes_none() -> None:
    doubled = torch.compile(lambda x: 2 * x, backend="eager")
    times = []
    for _ in range(2):
        with compile_time() as seconds:
            doubled(torch.ones(3))
        times.append(seconds[0])
    assert times[0] > 0 and times[1] == 0
