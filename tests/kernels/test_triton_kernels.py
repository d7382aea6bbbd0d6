"""Triton kernels against the definition in float64: outputs, all gradients, masks, odd shapes, capture, bit equality.

On a CUDA device everything runs (`pytest -m gpu`). Without one, a few small cases run in Triton's interpreter, in a
process of their own, since that has to be chosen before Triton is imported and an error there can end the process.
The interpreter takes shapes that the hardware refuses, so it does not replace the GPU run.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.projections import Projection
from kernels.random_mask import keep_mask
from kernels.segments import Segments, SegmentSpec, make_segments

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
ON_GPU = torch.cuda.is_available() and HAS_TRITON
DEVICE = "cuda" if ON_GPU else "cpu"

full = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device and Triton")
small = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="runs in the interpreter's process, or on a GPU")

RANKS = (16, 64, 1, 100, 8, 12, 256, 24, 3)
DISTRIBUTIONS = {
    "distinct": (3, 50, 70, 11, 130, 17, 64, 23, 290),
    "uniform": (64,) * 9,
    "zipf": (600, 300, 200, 150, 120, 100, 80, 70, 60),
    "identical": (400,),
    "skewed": (2500, 1, 1, 1, 1, 1, 1, 1, 1),
    "empty first and last": (0, 50, 33, 0, 5, 0, 200, 4, 0),
    "all empty": (0, 0, 0),
    "more segments": (5, 0, 70, 9) * 16,
}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
"""Norm of the difference over the norm. A rounding to bfloat16 alone is 1.7e-3, and S is rounded on the way to dA."""


def make_specs(tokens: tuple[int, ...], *, ranks: tuple[int, ...] = RANKS, dropout: float = 0.0) -> list[SegmentSpec]:
    specs, start = [], 2
    for i, count in enumerate(tokens):
        spec = SegmentSpec(
            num_tokens=count,
            rank_start=start,
            lora_rank=ranks[i % len(ranks)],
            scale=0.25 * (i % 7 + 1),
            dropout=dropout if i % 2 == 0 else 0.0,
            dropout_seed=4_000_000_000 + i,
        )
        specs.append(spec)
        start += spec.lora_rank
    return specs


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


class Problem:
    """Inputs of up to three projections over one x, and the float64 answer."""

    def __init__(self, specs: list[SegmentSpec], d_in: int, d_outs: tuple[int, ...], dtype: torch.dtype, seed: int = 0):
        self.segments = make_segments(specs, DEVICE)
        num_tokens = self.segments.num_tokens
        rows = max((s.rank_start + s.lora_rank for s in specs), default=0) + 3
        self.dtype, self.x = dtype, draw(num_tokens, d_in, seed=seed, dtype=dtype)
        self.base = [draw(num_tokens, d, seed=seed + 10 + i, dtype=dtype) for i, d in enumerate(d_outs)]
        self.dy = [draw(num_tokens, d, seed=seed + 20 + i, dtype=dtype) for i, d in enumerate(d_outs)]
        self.weight = [draw(d, d_in, seed=seed + 50 + i, dtype=dtype) * d_in**-0.5 for i, d in enumerate(d_outs)]
        # Values that the compute dtype holds exactly, so that only the kernels' own rounding is compared.
        self.a = [(draw(rows, d_in, seed=seed + 30 + i, dtype=dtype) * d_in**-0.5).float() for i in range(len(d_outs))]
        self.a = [a.to(dtype).float() for a in self.a]
        self.b = [(draw(rows, d, seed=seed + 40 + i, dtype=dtype) * 0.2).float() for i, d in enumerate(d_outs)]
        self.b = [b.to(dtype).float() for b in self.b]

    def expected(
        self, i: int, layer_index: int, segments: Segments | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """y without the base, dx of the LoRA path, dA, dB, each in float64."""
        x, a, b = (v.double().requires_grad_() for v in (self.x, self.a[i], self.b[i]))
        path = x.new_zeros(self.base[i].shape)
        pieces = []
        for s in (segments or self.segments).on_host:
            x_s = x[s.tokens]
            if s.dropout:
                size = {"num_tokens": s.num_tokens, "width": x.shape[1]}
                keep = keep_mask(
                    seed=s.dropout_seed, layer_index=layer_index, dropout=s.dropout, device=x.device, **size
                )
                x_s = x_s * keep / (1 - s.dropout)
            pieces.append(s.scale * (x_s @ a[s.rank_rows].T @ b[s.rank_rows]))
        path = torch.cat(pieces) + 0 * (a.sum() + b.sum() + x.sum())
        path.backward(self.dy[i].double())
        assert x.grad is not None and a.grad is not None and b.grad is not None
        return path.detach(), x.grad, a.grad, b.grad


def assert_close(name: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    difference, size = (got.double() - expected).norm().item(), expected.norm().item()
    assert difference <= tolerance * max(size, 1e-30), f"{name}: {difference / max(size, 1e-30):.2e} of {tolerance:.0e}"


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Every `torch.empty` holds NaN, so that a value nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def check_single(problem: Problem, layer_index: int = 5) -> None:
    from kernels.triton_lora import lora_backward_, lora_forward_

    base, x, a, b, segments = problem.base[0], problem.x, problem.a[0], problem.b[0], problem.segments
    path, dx, da, db = problem.expected(0, layer_index)
    tolerance = TOLERANCE[problem.dtype]
    y = base.clone()
    s = lora_forward_(y, x, a, b, segments, layer_index)
    assert_close("y", y, base.double() + path, tolerance)
    got_da, got_db = torch.full_like(a, 0.5), torch.full_like(b, -0.5)
    got_dx = lora_backward_(got_da, got_db, problem.dy[0], x, a, b, segments, layer_index, s)
    assert got_dx is not None
    for name, got, expected in (("dx", got_dx, dx), ("dA", got_da - 0.5, da), ("dB", got_db + 0.5, db)):
        assert_close(name, got, expected, tolerance)
    used = torch.zeros(a.shape[0], dtype=torch.bool)
    for spec in segments.active:
        used[spec.rank_rows] = True
    assert torch.equal(got_da[~used], torch.full_like(got_da[~used], 0.5))
    assert torch.equal(got_db[~used], torch.full_like(got_db[~used], -0.5))


@small
@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("tokens", "ranks"), [((5, 0, 70), (3, 16, 20)), ((0, 0), (4,)), ((33,), (70,))], ids=["mixed", "empty", "wide"]
)
def test_small_cases_equal_the_definition(tokens: tuple[int, ...], ranks: tuple[int, ...], dropout: float) -> None:
    check_single(Problem(make_specs(tokens, ranks=ranks, dropout=dropout), 72, (40,), torch.float32))


@small
@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "dropout"), [((3, 16, 20, 5), 0.0), ((70, 9, 66, 20), 0.3)], ids=["narrow", "wide"])
def test_projections_with_adapters_of_their_own(ranks: tuple[int, ...], dropout: float) -> None:
    from kernels.triton_lora import backward_projections, forward_projections

    problem = Problem(make_specs((5, 20, 33, 9), ranks=ranks, dropout=dropout), 40, (24, 8, 16), torch.float32)
    every = problem.segments
    segments = [every.without({3}), every.without({1}), every.without({1, 2, 3})]
    projections = []
    for i, own in enumerate(segments):
        a, b = problem.a[i].clone(), problem.b[i].clone()
        for left_out, s in zip(own.on_host, every.on_host, strict=True):
            if not left_out.lora_rank:
                a[s.rank_rows], b[s.rank_rows] = float("nan"), float("nan")
        projections.append(
            Projection(
                weight=problem.weight[i],
                bias_O=None,
                a_RI=a,
                b_RO=b,
                layer_index=i,
                gradient_sinks=(torch.zeros_like(a), torch.zeros_like(b)),
            )
        )
    ys, s_PTQ = forward_projections(problem.x, projections, segments, overlap=False)
    dx = backward_projections(
        problem.dy,
        problem.x,
        s_PTQ,
        projections,
        segments,
        input_needs_gradient=True,
        accumulate=True,
        overlap=False,
    )
    assert dx is not None
    expected_dx = torch.zeros_like(problem.x, dtype=torch.float64)
    for i, (own, p) in enumerate(zip(segments, projections, strict=True)):
        path, dx_lora, da, db = problem.expected(i, i, own)
        weight = problem.weight[i].double()
        expected_dx += dx_lora + problem.dy[i].double() @ weight
        values = (ys[i], *p.gradient_sinks)
        for name, got, expected in zip(
            ("y", "dA", "dB"), values, (problem.x.double() @ weight.T + path, da, db), strict=True
        ):
            assert_close(f"{name} {i}", got, expected, TOLERANCE[torch.float32])
    assert_close("dx", dx, expected_dx, TOLERANCE[torch.float32])


@small
@pytest.mark.gpu
def test_split_reduction_and_cut_tokens_equal_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels import triton_outer, triton_tuning
    from kernels.triton_tuning import Tiles

    table = {"shrink": ((1, 1, 1, Tiles(block_tokens=16, block_width=32, splits=3)),)}
    monkeypatch.setattr(triton_tuning, "_table", lambda: table)
    monkeypatch.setattr(triton_outer, "chunk_tokens", lambda *_: 32)
    triton_tuning.choose_tiles.cache_clear()
    check_single(Problem(make_specs((70, 3, 0, 32), ranks=(20, 5, 8, 16), dropout=0.25), 100, (40,), torch.float32))
    triton_tuning.choose_tiles.cache_clear()


@small
@pytest.mark.gpu
@pytest.mark.parametrize("by_side", [False, True])
def test_adamw_equals_torch_and_leaves_others_alone(by_side: bool) -> None:
    from kernels.triton_adamw import AdamWState, adamw_update_

    ranks, width, steps = (3, 5, 2, 4), 300, 3
    job_of_row = torch.tensor([-1] + [0] * 3 + [1] * 5 + [-1] + [2] * 2 + [3] * 4, dtype=torch.int32)
    rows = len(job_of_row)
    params, m, v = draw(rows, width, seed=1, dtype=torch.float32), *torch.zeros(2, rows, width, device=DEVICE)
    rates, decays, limits = (1e-2, 3e-3, 1e-3, 5e-3), (0.0, 0.1, 0.01, 0.0), (0.0, 1.0, 1e6, 1.0)
    # Columns of A and B in turn, as a layer's lie; job 0 trains B alone, job 1 at three times the rate of A.
    is_b = (torch.arange(width) // 75) % 2 == 1
    a_ratios, b_ratios = ((0.0, 1.0, 1.0, 1.0), (2.0, 3.0, 1.0, 1.0)) if by_side else ((1.0,) * 4, (1.0,) * 4)
    before, twins, optimizers = params.clone(), [], []
    for job in range(len(ranks)):
        sides = [torch.nn.Parameter(params[job_of_row == job][:, side].clone()) for side in (~is_b, is_b)]
        twins.append(sides)
        groups = [
            {"params": [side], "lr": rates[job] * ratio}
            for side, ratio in zip(sides, (a_ratios[job], b_ratios[job]), strict=True)
        ]
        optimizers.append(torch.optim.AdamW(groups, weight_decay=decays[job]))
    shadow = torch.full_like(params, 7.0, dtype=torch.float16)
    for step in range(1, steps + 1):
        grads = draw(rows, width, seed=step, dtype=torch.float32)
        grads[job_of_row == 3, 5] = float("nan")
        if by_side:
            grads[job_of_row == 0, 6] = float("nan")  # of A, which that job does not train

        def column(values: tuple[float, ...]) -> Tensor:
            return torch.tensor(values, device=DEVICE)

        state = AdamWState(
            job_of_row_R=job_of_row.to(DEVICE),
            is_updated_J=torch.tensor([1, 1, int(step > 1), 1], dtype=torch.int32, device=DEVICE),
            learning_rate_J=column(rates),
            weight_decay_J=column(decays),
            beta1_J=column((0.9,) * 4),
            beta2_J=column((0.999,) * 4),
            epsilon_J=column((1e-8,) * 4),
            correction1_J=column((1 - 0.9**step,) * 4),
            correction2_sqrt_J=column(((1 - 0.999**step) ** 0.5,) * 4),
            max_grad_norm_J=column(limits),
            a_ratio_J=column(a_ratios),
            b_ratio_J=column(b_ratios),
            is_b_W=is_b.to(torch.int8).to(DEVICE),
        )
        losses = column((1.0, 2.0, float("nan") if step > 1 else 1.0, 3.0))
        norms = adamw_update_(params, grads, m, v, state, losses_J=losses, shadow_RW=shadow, by_side=by_side)
        for job in (0, 1):
            trained = [i for i, ratio in enumerate((a_ratios[job], b_ratios[job])) if ratio]
            for i in trained:
                twins[job][i].grad = grads[job_of_row == job][:, is_b == bool(i)].clone()
            norm = torch.cat([twins[job][i].grad.flatten() for i in trained]).norm()
            assert abs(norms[job].item() - norm.item()) < 1e-5 * norm.item()
            if limits[job]:
                torch.nn.utils.clip_grad_norm_([twins[job][i] for i in trained], limits[job])
            optimizers[job].step()
        assert norms[3].isnan()
    for job in (0, 1):
        for i, side in enumerate(twins[job]):
            got = params[job_of_row == job][:, is_b == bool(i)]
            assert_close(f"job {job}, side {i}", got, side.detach().double(), 1e-6)
            if not (a_ratios[job], b_ratios[job])[i]:
                assert torch.equal(got, before[job_of_row == job][:, is_b == bool(i)])
        assert torch.equal(shadow[job_of_row == job], params[job_of_row == job].half())
    untouched = (job_of_row != 0) & (job_of_row != 1)
    assert torch.equal(params[untouched], before[untouched])
    assert not m[untouched].any() and not v[untouched].any()
    assert (shadow[untouched] == 7.0).all()


@small
@pytest.mark.gpu
def test_mask_equals_the_stated_one_bit_for_bit() -> None:
    # With A = 1 on one rank row and one-hot rows of x, S shows single elements of the mask.
    from kernels.triton_shrink import shrink

    width, dropout, seed, layer = 48, 0.4, 0xDEADBEEF, 3
    spec = SegmentSpec(num_tokens=width, rank_start=0, lora_rank=1, scale=1.0, dropout=dropout, dropout_seed=seed)
    before = SegmentSpec(num_tokens=7, rank_start=1, lora_rank=1, scale=1.0)
    segments = make_segments([before, spec], DEVICE)
    keep = keep_mask(
        seed=seed, layer_index=layer, num_tokens=width, width=width, dropout=dropout, device=torch.device("cpu")
    )
    for shift in range(0, width, 7):
        x = torch.zeros(7 + width, width)
        x[7 + torch.arange(width), (torch.arange(width) + shift) % width] = 1.0
        s = shrink(x.to(DEVICE), [torch.ones(2, width, device=DEVICE)], [segments], [layer])
        got = s[0, 7:, 0].cpu()
        rows = torch.arange(width)
        assert torch.equal(got > 0, keep[rows, (rows + shift) % width])
        assert torch.allclose(got[got > 0], torch.tensor(1 / 0.6))


@full
@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_values_and_gradients_equal_the_definition(distribution: str, dtype: torch.dtype, dropout: float) -> None:
    check_single(Problem(make_specs(DISTRIBUTIONS[distribution], dropout=dropout), 192, (320,), dtype))


@full
@pytest.mark.gpu
@pytest.mark.parametrize(("d_in", "d_out"), [(1, 1), (3, 129), (128, 7), (65, 2049), (1024, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_widths(d_in: int, d_out: int, dtype: torch.dtype) -> None:
    check_single(Problem(make_specs((40, 0, 190, 1, 77), dropout=0.2), d_in, (d_out,), dtype))


@full
@pytest.mark.gpu
@pytest.mark.parametrize("rank", [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 65, 100, 128, 200, 256])
def test_every_rank_alone(rank: int) -> None:
    check_single(Problem(make_specs((100, 40), ranks=(rank,)), 256, (128,), torch.bfloat16))


@full
@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("d_outs", [(256,), (512, 128), (256, 64, 64)], ids=str)
def test_projections_that_share_their_input(d_outs: tuple[int, ...], dropout: float, overlap: bool) -> None:
    problem = Problem(make_specs((600, 0, 90, 33, 1), dropout=dropout), 192, d_outs, torch.bfloat16)
    got, expected = run_linears(problem, overlap=overlap), expected_linears(problem)
    for name, g, e in zip(names(len(d_outs)), got, expected, strict=True):
        assert_close(name, g, e, TOLERANCE[torch.bfloat16])


def names(count: int) -> list[str]:
    return [f"{part} {i}" for part in ("y", "dA", "dB") for i in range(count)] + ["dx"]


def run_linears(problem: Problem, *, overlap: bool = True, accumulate: bool = False) -> list[Tensor]:
    from kernels.grouped_lora import grouped_lora_linears

    sinks = [(torch.zeros_like(a), torch.zeros_like(b)) for a, b in zip(problem.a, problem.b, strict=True)]
    projections = [
        Projection(
            weight=weight,
            bias_O=None,
            a_RI=a.to(problem.dtype),
            b_RO=b.to(problem.dtype),
            layer_index=i,
            gradient_sinks=sink,
        )
        for i, (weight, a, b, sink) in enumerate(zip(problem.weight, problem.a, problem.b, sinks, strict=True))
    ]
    x = problem.x.clone().requires_grad_()
    outputs = grouped_lora_linears(x, projections, problem.segments, overlap=overlap, accumulate=accumulate)
    torch.autograd.backward(outputs, problem.dy)
    assert x.grad is not None
    return [*(y.detach() for y in outputs), *(s[0] for s in sinks), *(s[1] for s in sinks), x.grad]


def expected_linears(problem: Problem) -> list[Tensor]:
    ys, das, dbs, dx = [], [], [], torch.zeros_like(problem.x, dtype=torch.float64)
    for i, weight in enumerate(problem.weight):
        path, dx_lora, da, db = problem.expected(i, i)
        ys.append(problem.x.double() @ weight.double().T + path)
        das.append(da)
        dbs.append(db)
        dx += dx_lora + problem.dy[i].double() @ weight.double()
    return [*ys, *das, *dbs, dx]


@full
@pytest.mark.gpu
def test_repeated_runs_are_equal_bit_for_bit() -> None:
    problem = Problem(make_specs((3000, 0, 90, 33, 1), dropout=0.2), 192, (512, 128), torch.bfloat16)
    first = run_linears(problem)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run_linears(problem), strict=True))


@full
@pytest.mark.gpu
def test_a_segment_alone_equals_itself_among_others() -> None:
    specs = make_specs((70, 33, 64, 200), dropout=0.2)
    problem = Problem(specs, 256, (128,), torch.bfloat16)
    from kernels.triton_lora import lora_forward_

    together = problem.base[0].clone()
    lora_forward_(together, problem.x, problem.a[0], problem.b[0], problem.segments, 1)
    start = 0
    for spec in specs:
        tokens = slice(start, start + spec.num_tokens)
        start += spec.num_tokens
        alone = problem.base[0][tokens].clone()
        lora_forward_(alone, problem.x[tokens].clone(), problem.a[0], problem.b[0], make_segments([spec], DEVICE), 1)
        assert torch.equal(alone, together[tokens])


@full
@pytest.mark.gpu
def test_nan_in_one_segment_stays_there() -> None:
    specs = make_specs((70, 33, 64))
    problem = Problem(specs, 64, (128,), torch.bfloat16)
    clean = run_linears(problem)
    problem.x[70:103] = float("nan")
    poisoned = run_linears(problem)
    rows = torch.ones(clean[1].shape[0], dtype=torch.bool)
    rows[specs[1].rank_start : specs[1].rank_start + specs[1].lora_rank] = False
    tokens = torch.ones(167, dtype=torch.bool)
    tokens[70:103] = False
    for name, g, e in zip(names(1), poisoned, clean, strict=True):
        mask = tokens if name[:1] == "y" or name == "dx" else rows
        assert torch.equal(g[mask], e[mask]), name


@full
@pytest.mark.gpu
def test_captured_graph_follows_changed_segments_and_ranks() -> None:
    from kernels.grouped_lora import grouped_lora_linears

    def specs(order: tuple[int, ...], ranks: tuple[int, ...]) -> list[SegmentSpec]:
        return make_specs(order, ranks=ranks, dropout=0.2)

    plans = [specs((100, 60, 0, 40), (16, 64, 8, 3)), specs((1, 0, 190, 9), (8, 5, 40, 64))]
    problem = Problem(plans[0], 192, (256, 128), torch.bfloat16)
    rows = 160
    a = [draw(rows, 192, seed=70 + i, dtype=problem.dtype) * 0.1 for i in range(2)]
    b = [draw(rows, d, seed=80 + i, dtype=problem.dtype) * 0.1 for i, d in enumerate((256, 128))]
    sinks = [(torch.zeros(rows, 192, device=DEVICE), torch.zeros(rows, d, device=DEVICE)) for d in (256, 128)]
    projections = [
        Projection(weight=w, bias_O=None, a_RI=a[i], b_RO=b[i], layer_index=i, gradient_sinks=sinks[i])
        for i, w in enumerate(problem.weight)
    ]
    segments = make_segments(plans[0], DEVICE, rank_limit=64)
    x = problem.x.clone().requires_grad_()

    def step() -> list[Tensor]:
        x.grad = None
        outputs = grouped_lora_linears(x, projections, segments, accumulate=False)
        torch.autograd.backward(outputs, problem.dy)
        assert x.grad is not None
        return [*(y.detach() for y in outputs), x.grad]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for plan in (plans[1], plans[0]):
        fresh = make_segments(plan, DEVICE, rank_limit=64)
        segments.overwrite_with(fresh)
        for sink in sinks:
            for gradient in sink:
                gradient.zero_()
        graph.replay()
        problem.segments = fresh
        problem.a, problem.b = [v.float() for v in a], [v.float() for v in b]
        expected = expected_linears(problem)
        got = [captured[0], captured[1], sinks[0][0], sinks[1][0], sinks[0][1], sinks[1][1], captured[2]]
        for name, g, e in zip(names(2), got, expected, strict=True):
            assert_close(name, g, e, TOLERANCE[torch.bfloat16])


@full
@pytest.mark.gpu
def test_overwriting_gives_exact_zeros_to_segments_without_tokens() -> None:
    problem = Problem(make_specs((50, 0, 20)), 64, (128,), torch.bfloat16)
    from kernels.triton_outer import outer_
    from kernels.triton_shrink import shrink

    s = shrink(problem.x, [problem.a[0]], [problem.segments], [0])
    grad = torch.full_like(problem.b[0], float("nan"))
    outer_(grad, problem.dy[0], s[0], problem.segments, 0, scaled=True, accumulate=False)
    for spec in problem.segments.on_host:
        block = grad[spec.rank_rows]
        assert block.isfinite().all()
        assert block.any() == (spec.num_tokens > 0)
    assert grad[:2].isnan().all() and grad[-3:].isnan().all()


@full
@pytest.mark.gpu
def test_offsets_past_two_to_the_31() -> None:
    tokens, width, out = (1 << 20) + 300, 2048 + 64, 64
    specs = [
        SegmentSpec(num_tokens=1 << 20, rank_start=0, lora_rank=4, scale=1.0),
        SegmentSpec(num_tokens=300, rank_start=4, lora_rank=8, scale=0.5),
    ]
    segments = make_segments(specs, DEVICE)
    from kernels.triton_lora import lora_backward_, lora_forward_

    x = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16)
    a, b = torch.randn(12, width, device=DEVICE) * 0.02, torch.randn(12, out, device=DEVICE)
    y = torch.zeros(tokens, out, device=DEVICE, dtype=torch.bfloat16)
    s = lora_forward_(y, x, a, b, segments, 0)
    da, db, dy = torch.zeros_like(a), torch.zeros_like(b), torch.randn_like(y)
    dx = lora_backward_(da, db, dy, x, a, b, segments, 0, s)
    assert dx is not None
    tail = slice(1 << 20, None)
    ds = 0.5 * dy[tail].double() @ b[4:].double().T
    assert_close("y", y[tail], 0.5 * x[tail].double() @ a[4:].double().T @ b[4:].double(), 8e-3)
    assert_close("dx", dx[tail], ds @ a[4:].double(), 8e-3)
    assert_close("dA", da[4:], ds.T @ x[tail].double(), 8e-3)


@pytest.mark.skipif(INTERPRETED or ON_GPU or not HAS_TRITON, reason="the small cases run directly here, or not at all")
def test_small_cases_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    files = [__file__, str(Path(__file__).with_name("test_linear_cross_entropy.py"))]
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *files]
    folder = Path(__file__).resolve().parents[2]
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert " passed" in result.stdout
