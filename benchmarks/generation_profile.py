"""Where the time of one decode step goes, from two runs that differ in their number of steps alone.

What the longer run takes beyond the shorter one is what its further steps take, whatever reading the prompts, capturing
and the first step cost. No stop tokens: all rows run to the end.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SHORT_TOKENS, LONG_TOKENS = 20, 84
"""Of the two timed runs. The first token of an answer comes from its prompt."""
PROFILED_TOKENS = (9, 17)
"""Of the two profiled runs."""
PARTS = (
    ("attention", "paged_attention"),
    ("adapters", "shrink_kernel|expand_kernel|add_splits"),
    ("matrix products", "gemm|nvjet|cutlass|cublas|splitK|sm90_xmma"),
    ("choice of tokens", "argmax|ArgMax|RadixSort|[Ss]oft[Mm]ax|[Ss]can"),
    ("places of keys, values and rows", "index|scatter|gather"),
    ("norms, rotations, activations", ""),
)
"""Name of a part, and what the names of its kernels have in them; the first that fits."""
TOP_KERNELS = 16


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Time of kernels in one step."""

    milliseconds_by_part: dict[str, float]
    lines: tuple[str, ...]
    """The longest kernels: milliseconds a step, launches a step, name."""


def step_milliseconds(answer: Callable[[int], object]) -> float:
    """Wall time of one step; `answer(n)` generates n tokens for all rows and waits for them."""
    seconds = []
    for tokens in (SHORT_TOKENS, LONG_TOKENS):
        start = time.perf_counter()
        answer(tokens)
        seconds.append(time.perf_counter() - start)
    return 1e3 * (seconds[1] - seconds[0]) / (LONG_TOKENS - SHORT_TOKENS)


def profile_step(answer: Callable[[int], object]) -> StepProfile:
    """Time of each kernel in one step; on CUDA."""
    short, long = (_kernels(lambda count=count: answer(count)) for count in PROFILED_TOKENS)
    steps = PROFILED_TOKENS[1] - PROFILED_TOKENS[0]
    parts: dict[str, float] = defaultdict(float)
    kernels = []
    for name, (calls, milliseconds) in long.items():
        calls_before, milliseconds_before = short.get(name, (0, 0.0))
        spent, count = (milliseconds - milliseconds_before) / steps, (calls - calls_before) / steps
        parts[_part_of(name)] += spent
        kernels.append((spent, count, name))
    lines = [f"{spent:8.3f} ms {count:6.1f} x {name[:110]}" for spent, count, name in sorted(kernels, reverse=True)]
    return StepProfile(milliseconds_by_part=dict(parts), lines=tuple(lines[:TOP_KERNELS]))


def describe(profile: StepProfile) -> Sequence[str]:
    """Lines for people: shares of the parts, then the longest kernels."""
    total = sum(profile.milliseconds_by_part.values())
    ordered = sorted(profile.milliseconds_by_part.items(), key=lambda item: -item[1])
    shares = [f"{spent:8.3f} ms {spent / total:6.1%} {part}" for part, spent in ordered]
    return [f"{total:8.3f} ms of kernels a step", *shares, *profile.lines]


def _kernels(run: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """Calls and milliseconds by kernel."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    found: dict[str, tuple[int, float]] = {}
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            calls, milliseconds = found.get(event.name(), (0, 0.0))
            found[event.name()] = (calls + 1, milliseconds + event.duration_ns() / 1e6)
    return found


def _part_of(name: str) -> str:
    return next(part for part, pattern in PARTS if re.search(pattern, name))
