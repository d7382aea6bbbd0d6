"""The ways to run one frozen linear layer with many adapters that the benchmarks compare, forward and backward.

Every method gets the same bfloat16 inputs and adapter values and makes y, dx, dA and dB in one call, so that a call can
be captured in a CUDA graph. Each is written as well as its primitives allow: `bmm` and `grouped_mm` add in the product
where torch can, stack rank-padded adapters, and pad or group ragged tokens by index tensors made beforehand.

Shape suffixes: see `kernels.segments`; J jobs, L most tokens of a job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.grouped_lora import grouped_lora_linears
from kernels.projections import Projection
from kernels.segments import Segments, SegmentSpec, make_segments

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]]]
"""(x, dy) -> y, dx, dA and dB of each job ([r, I], [r, O]; maybe padded or in float32)."""
BF16 = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer and its jobs."""

    d_in: int
    d_out: int
    tokens: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def scales(self) -> tuple[float, ...]:
        return tuple(2.0 for _ in self.ranks)

    def floor_bytes(self) -> int:
        """Least traffic of the LoRA path beside the frozen products, each tensor once per kernel.

        Forward: x read, y read and written. Backward: dy read, dx read and written, x read. A and B are read in both
        passes in bfloat16, their gradients written in float32; S and dS are written once and read twice each.
        """
        activations = 2 * self.num_tokens * (4 * self.d_in + 3 * self.d_out)
        adapters = sum(self.ranks) * (self.d_in + self.d_out) * (2 + 2 + 4)
        shrunk = sum(t * r for t, r in zip(self.tokens, self.ranks, strict=True)) * 2 * 6
        return activations + adapters + shrunk


class Weights:
    """The frozen weight and all adapters, drawn once per case."""

    def __init__(self, case: Case, device: str = "cuda"):
        self.case, self.device = case, device
        generator = torch.Generator(device).manual_seed(1)

        def draw(*shape: int, scale: float) -> Tensor:
            return (torch.randn(*shape, generator=generator, device=device) * scale).to(BF16)

        self.weight_OI = draw(case.d_out, case.d_in, scale=case.d_in**-0.5)
        self.a = [draw(r, case.d_in, scale=case.d_in**-0.5) for r in case.ranks]
        self.b = [draw(r, case.d_out, scale=0.05) for r in case.ranks]

    def segments(self) -> Segments:
        return adapter_segments(self.case.tokens, self.case.ranks, self.case.scales, self.device)


def adapter_segments(
    tokens: Sequence[int], ranks: Sequence[int], scales: Sequence[float], device: str = "cuda"
) -> Segments:
    """Segments of jobs whose rank rows lie one after another."""
    starts = [sum(ranks[:i]) for i in range(len(ranks))]
    return make_segments(
        [
            SegmentSpec(num_tokens=t, rank_start=start, lora_rank=r, scale=s)
            for t, start, r, s in zip(tokens, starts, ranks, scales, strict=True)
        ],
        device,
    )


def base_only(w: Weights) -> Step:
    def step(x: Tensor, dy: Tensor) -> Any:
        y = functional.linear(x, w.weight_OI)
        return y, *torch.autograd.grad(y, [x], dy), (), ()

    return step


def loop(w: Weights) -> Step:
    a, b = [v.clone().requires_grad_() for v in w.a], [v.clone().requires_grad_() for v in w.b]

    def step(x: Tensor, dy: Tensor) -> Any:
        parts = [
            (x_i @ a_i.T) @ b_i * scale
            for x_i, a_i, b_i, scale in zip(x.split(w.case.tokens), a, b, w.case.scales, strict=True)
        ]
        y = functional.linear(x, w.weight_OI) + torch.cat(parts)
        return _gradients(y, x, dy, a, b)

    return step


def stacked_forward(w: Weights, method: str) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """x -> y by padded `bmm` or by `grouped_mm`, and the stacked A [J, I, r] and B [J, r, O] to differentiate for."""
    a_JIr, b_JrO = _stacked(w)
    forward = {"bmm": _bmm_forward, "grouped_mm": _grouped_mm_forward}[method]
    return forward(w, a_JIr, b_JrO), [a_JIr, b_JrO]


def _bmm_forward(w: Weights, a_JIr: Tensor, b_JrO: Tensor) -> Callable[[Tensor], Tensor]:
    case = w.case
    longest, jobs = max(case.tokens), len(case.tokens)
    scales_J11 = torch.tensor(case.scales, device=w.device, dtype=BF16)[:, None, None]
    is_ragged = min(case.tokens) != longest
    rows = torch.arange(jobs, device=w.device).repeat_interleave(torch.tensor(case.tokens, device=w.device))
    starts = torch.tensor([sum(case.tokens[:i]) for i in range(jobs)], device=w.device)
    place_T = rows * longest + torch.arange(case.num_tokens, device=w.device) - starts[rows]

    def forward(x: Tensor) -> Tensor:
        base = functional.linear(x, w.weight_OI)
        if is_ragged:
            padded = x.new_zeros(jobs * longest, case.d_in).index_copy(0, place_T, x)
            s = torch.bmm(padded.view(jobs, longest, case.d_in), a_JIr) * scales_J11
            return base + torch.bmm(s, b_JrO).view(jobs * longest, case.d_out).index_select(0, place_T)
        s = torch.bmm(x.view(jobs, longest, case.d_in), a_JIr) * scales_J11
        return torch.baddbmm(base.view(jobs, longest, case.d_out), s, b_JrO).view(-1, case.d_out)

    return forward


def _grouped_mm_forward(w: Weights, a_JIr: Tensor, b_JrO: Tensor) -> Callable[[Tensor], Tensor]:
    counts = torch.tensor(w.case.tokens, device=w.device)
    offsets_J = counts.cumsum(0).int()
    scale_T1 = torch.tensor(w.case.scales, device=w.device, dtype=BF16).repeat_interleave(counts)[:, None]

    def forward(x: Tensor) -> Tensor:
        s = functional.grouped_mm(x, a_JIr, offs=offsets_J) * scale_T1
        return functional.linear(x, w.weight_OI) + functional.grouped_mm(s, b_JrO, offs=offsets_J)

    return forward


def _stacked_step(w: Weights, method: str) -> Step:
    forward, (a_JIr, b_JrO) = stacked_forward(w, method)

    def step(x: Tensor, dy: Tensor) -> Any:
        y = forward(x)
        dx, da_JIr, db_JrO = torch.autograd.grad(y, [x, a_JIr, b_JrO], dy)
        return y, dx, da_JIr.transpose(1, 2).unbind(), db_JrO.unbind()

    return step


class _AddmmLora(torch.autograd.Function):
    """One adapter on its own rows, in the manner of Unsloth: additions inside the products, S not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        y = x @ weight.T
        return y.addmm_(x @ a.T, b, alpha=scale)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, a, b = ctx.saved_tensors
        ds = dy @ b.T
        da = torch.mm(ds.T, x).mul_(ctx.scale)
        db = torch.mm((x @ a.T).T, dy).mul_(ctx.scale)
        dx = (dy @ weight).addmm_(ds, a, alpha=ctx.scale)
        return dx, None, da, db, None


def unsloth_style(w: Weights) -> Step:
    a, b = [v.clone().requires_grad_() for v in w.a], [v.clone().requires_grad_() for v in w.b]

    def step(x: Tensor, dy: Tensor) -> Any:
        ys, dxs, das, dbs = [], [], [], []
        parts = zip(x.detach().split(w.case.tokens), dy.split(w.case.tokens), a, b, w.case.scales, strict=True)
        for x_i, dy_i, a_i, b_i, scale in parts:
            x_i = x_i.requires_grad_()
            y = _AddmmLora.apply(x_i, w.weight_OI, a_i, b_i, scale)
            dx, da, db = torch.autograd.grad(y, [x_i, a_i, b_i], dy_i)
            for values, value in zip((ys, dxs, das, dbs), (y, dx, da, db), strict=True):
                values.append(value)
        # Each adapter runs alone, so nothing has to be joined.
        return ys, dxs, das, dbs

    return step


def ours(w: Weights, *, overlap: bool | None = None) -> Step:
    case, segments = w.case, w.segments()
    a_RI, b_RO = torch.cat(w.a).requires_grad_(), torch.cat(w.b)
    sinks = (torch.zeros_like(a_RI, dtype=torch.float32), torch.zeros_like(b_RO, dtype=torch.float32))
    projection = Projection(weight=w.weight_OI, bias_O=None, a_RI=a_RI, b_RO=b_RO, layer_index=0, gradient_sinks=sinks)

    def step(x: Tensor, dy: Tensor) -> Any:
        (y,) = grouped_lora_linears(x, [projection], segments, accumulate=False, overlap=overlap)
        (dx,) = torch.autograd.grad(y, [x], dy)
        return y, dx, sinks[0].split(case.ranks), sinks[1].split(case.ranks)

    return step


METHODS: dict[str, Callable[[Weights], Step]] = {
    "base": base_only,
    "loop": loop,
    "bmm": lambda w: _stacked_step(w, "bmm"),
    "grouped_mm": lambda w: _stacked_step(w, "grouped_mm"),
    "unsloth": unsloth_style,
    "ours": ours,
    "ours_serial": lambda w: ours(w, overlap=False),
}


def check(step: Step, w: Weights, x: Tensor, dy: Tensor, tolerance: float = 1.5e-2) -> None:
    """Compare one call with a float32 loop.

    Raises:
        ValueError: an output or a gradient differs by more than the tolerance, norm over norm.
    """
    y, dx, das, dbs = step(x, dy)
    y, dx = (torch.cat(list(v)) if isinstance(v, list) else v for v in (y, dx))
    start = 0
    got, expected = [[], [], [], []], [[], [], [], []]  # type: ignore[var-annotated]
    for j, (t, r, scale) in enumerate(zip(w.case.tokens, w.case.ranks, w.case.scales, strict=True)):
        rows = slice(start, start + t)
        start += t
        x_i, dy_i, a, b = x.detach()[rows].float(), dy[rows].float(), w.a[j].float(), w.b[j].float()
        ds = dy_i @ b.T * scale
        wanted = (
            x_i @ w.weight_OI.T.float() + scale * (x_i @ a.T) @ b,
            dy_i @ w.weight_OI.float() + ds @ a,
            ds.T @ x_i,
            scale * (x_i @ a.T).T @ dy_i,
        )
        for i, value in enumerate((y[rows], dx[rows], das[j][:r], dbs[j][:r])):
            got[i].append(value.detach().float().flatten())
            expected[i].append(wanted[i].flatten())
    for name, g, e in zip(("y", "dx", "dA", "dB"), got, expected, strict=True):
        error = ((torch.cat(g) - torch.cat(e)).norm() / torch.cat(e).norm()).item()
        if not error <= tolerance:
            raise ValueError(f"{name}: expected a relative difference of {tolerance} at most, but got {error:.2e}")


def zipf_tokens(jobs: int, total: int) -> tuple[int, ...]:
    """Token counts that fall as 1 / number; every job has at least one, and they add up to `total`."""
    weights = [1 / (i + 1) for i in range(jobs)]
    counts = [max(1, int(total * value / sum(weights))) for value in weights]
    counts[0] += total - sum(counts)
    return tuple(counts)


def capture(function: Callable[[], Any], pool: Any = None, *, warm_up: bool = True) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call, after warm-up. Graphs of one pool share memory: only one may be replayed at a time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2 if warm_up else 0):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        function()
    return graph


def time_graphs(graphs: dict[str, torch.cuda.CUDAGraph], *, repeats: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds per replay of each graph: `repeats` rounds in turn, each about `seconds` long."""
    counts = {}
    for name, graph in graphs.items():
        graph.replay()
        counts[name] = max(2, math.ceil(seconds / (_time(graph.replay, 2) / 1000)))
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            times[name].append(_time(graph.replay, counts[name]))
    return times


def print_profile(method: str, graph: torch.cuda.CUDAGraph) -> None:
    """The kernels that take most time in one replay."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)
    total = sum(e.device_time_total for e in events)
    print(f"{method}: kernels {total / 1000:.1f} ms")
    for event in events[:14]:
        print(f"  {event.device_time_total / 1000:7.2f} ms {event.count:5d} x {event.key[:90]}")


def copy_bandwidth() -> float:
    """Bytes read plus bytes written per second of a large device-to-device copy."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    # Not in a graph: there a copy becomes a node of its own kind, which runs slower than the kernel.
    best = min(_time(lambda: target.copy_(source), 5) for _ in range(5))
    return 2 * source.numel() * 4 / (best / 1000)


def _time(call: Callable[[], Any], count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def _stacked(w: Weights) -> tuple[Tensor, Tensor]:
    """A [J, I, r] and B [J, r, O], zero beyond a job's rank."""
    largest = max(w.case.ranks)
    a = torch.stack([functional.pad(v, (0, 0, 0, largest - len(v))) for v in w.a]).transpose(1, 2).contiguous()
    b = torch.stack([functional.pad(v, (0, 0, 0, largest - len(v))) for v in w.b])
    return a.requires_grad_(), b.requires_grad_()


def _gradients(y: Tensor, x: Tensor, dy: Tensor, a: list[Tensor], b: list[Tensor]) -> Any:
    dx, *rest = torch.autograd.grad(y, [x, *a, *b], dy)
    return y, dx, rest[: len(a)], rest[len(a) :]
