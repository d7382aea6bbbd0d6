"""Torch twin and grouped products against plain autograd: outputs, all gradients, odd shapes, isolation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import grouped_lora as operation
from kernels.grouped_lora import grouped_lora
from kernels.path_choice import Implementation
from kernels.random_mask import keep_mask
from kernels.segments import Segments, SegmentSpec, make_segments

RANKS = (1, 2, 4, 8, 12, 24, 48, 64, 100)
DISTRIBUTIONS = {
    "distinct": (3, 5, 7, 11, 13, 17, 19, 23, 29),
    "uniform": (8,) * 9,
    "zipf": (60, 30, 20, 15, 12, 10, 8, 7, 6),
    "identical": (40,),
    "skewed": (150, 1, 1, 1, 1, 1, 1, 1, 1),
    "empty first and last": (0, 5, 3, 0, 5, 0, 2, 4, 0),
    "all empty": (0, 0, 0),
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float64: 1e-13}
"""Largest difference over the largest value. Half a unit in the last place of bfloat16 is 4e-3."""


GROUPED_TOLERANCE = {**TOLERANCE, torch.bfloat16: 2e-2}
"""The grouped products round dropped inputs, S and dS to bfloat16 as well, where the twin keeps float32."""


@pytest.fixture(params=[Implementation.TWIN, Implementation.TORCH_GROUPED], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Implementation:
    monkeypatch.setattr(operation, "_choose", lambda *_: request.param)
    return request.param  # type: ignore[no-any-return]


def make_specs(tokens: tuple[int, ...], *, dropout: float = 0.0) -> list[SegmentSpec]:
    specs, start = [], 2  # rank rows before the first and after the last adapter belong to nobody
    for i, count in enumerate(tokens):
        lora_rank = RANKS[i % len(RANKS)]
        specs.append(
            SegmentSpec(
                num_tokens=count,
                rank_start=start,
                lora_rank=lora_rank,
                scale=0.25 * (i + 1),
                dropout=dropout if i % 2 == 0 else 0.0,
                dropout_seed=1000 + i,
            )
        )
        start += lora_rank
    return specs


def make_inputs(specs: list[SegmentSpec], d_in: int, d_out: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(s.num_tokens for s in specs)
    rank_rows = max((s.rank_start + s.lora_rank for s in specs), default=0) + 3
    adapter_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    base, x = draw(num_tokens, d_out).to(dtype), draw(num_tokens, d_in).to(dtype)
    # Adapters that the compute dtype holds exactly, as its copies of them would.
    return base, x, *(draw(rank_rows, width).to(dtype).to(adapter_dtype) for width in (d_in, d_out))


def naive(base: Tensor, x: Tensor, a: Tensor, b: Tensor, segments: Segments, layer_index: int) -> Tensor:
    """The definition, written with out-of-place operations and left to autograd, in float64."""
    pieces = []
    for s in segments.on_host:
        x_s = x[s.tokens].double()
        if s.dropout:
            keep = keep_mask(
                seed=s.dropout_seed,
                layer_index=layer_index,
                num_tokens=s.num_tokens,
                width=x.shape[1],
                dropout=s.dropout,
                device=x.device,
            )
            x_s = x_s * keep / (1 - s.dropout)
        path = x_s @ a[s.rank_rows].double().T @ b[s.rank_rows].double()
        pieces.append(base[s.tokens].double() + s.scale * path)
    return torch.cat(pieces)


def run(function, inputs: tuple[Tensor, ...], segments: Segments) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    y = function(leaves[0] * 1, *leaves[1:], segments, 5)
    # Exact in bfloat16, so that every dtype gets the same gradient of y.
    weight = torch.linspace(-1, 2, y.numel()).bfloat16().double().view_as(y)
    (y.double() * weight).sum().backward()
    return y.detach(), *(leaf.grad for leaf in leaves)


def assert_close(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for name, g, e in zip(("y", "dbase", "dx", "dA", "dB"), got, expected, strict=True):
        scale = max(e.abs().max().item(), 1e-30) if e.numel() else 1.0
        difference = (g.double() - e.double()).abs().max().item() if e.numel() else 0.0
        assert difference <= tolerance * scale, f"{name}: {difference / scale:.2e}"


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_values_and_gradients_equal_plain_autograd(
    distribution: str, dtype: torch.dtype, dropout: float, implementation: Implementation
) -> None:
    specs = make_specs(DISTRIBUTIONS[distribution], dropout=dropout)
    segments = make_segments(specs)
    inputs = make_inputs(specs, 37, 53, dtype)
    got = run(grouped_lora, inputs, segments)
    assert got[0].dtype == got[2].dtype == dtype
    tolerance = TOLERANCE if implementation is Implementation.TWIN else GROUPED_TOLERANCE
    assert_close(got, run(naive, inputs, segments), tolerance[dtype])


@pytest.mark.parametrize(("d_in", "d_out"), [(1, 1), (3, 129), (128, 7), (64, 64)])
def test_odd_widths(d_in: int, d_out: int) -> None:
    specs = make_specs((4, 0, 9, 1))
    inputs = make_inputs(specs, d_in, d_out, torch.float32)
    segments = make_segments(specs)
    assert_close(run(grouped_lora, inputs, segments), run(naive, inputs, segments), 2e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_equal_finite_differences(dropout: float) -> None:
    specs = make_specs((2, 0, 3), dropout=dropout)
    segments = make_segments(specs)
    inputs = [tensor.requires_grad_() for tensor in make_inputs(specs, 5, 4, torch.float64)]
    assert torch.autograd.gradcheck(lambda base, *rest: grouped_lora(base * 1, *rest, segments, 2), inputs)


def test_gradient_of_rank_rows_without_tokens_is_exactly_zero() -> None:
    specs = make_specs((4, 0, 6))
    inputs = make_inputs(specs, 16, 8, torch.float32)
    _, _, _, da, db = run(grouped_lora, inputs, make_segments(specs))
    used = torch.zeros(da.shape[0], dtype=torch.bool)
    for spec in specs:
        used[spec.rank_start : spec.rank_start + spec.lora_rank] |= spec.num_tokens > 0
    for gradient in (da, db):
        assert torch.equal(gradient[~used], torch.zeros_like(gradient[~used]))
        assert (gradient[used].abs().amax(1) > 0).all()


def test_nan_in_one_segment_stays_there() -> None:
    specs = make_specs((4, 5, 6), dropout=0.2)
    segments = make_segments(specs)
    clean = make_inputs(specs, 16, 8, torch.float32)
    poisoned = [tensor.clone() for tensor in clean]
    poisoned[1][4:9] = float("nan")
    middle = slice(specs[1].rank_start, specs[1].rank_start + specs[1].lora_rank)
    poisoned[2][middle] = float("inf")
    got, expected = run(grouped_lora, tuple(poisoned), segments), run(grouped_lora, clean, segments)
    tokens = torch.tensor([True] * 4 + [False] * 5 + [True] * 6)
    rows = torch.ones(clean[2].shape[0], dtype=torch.bool)
    rows[middle] = False
    for g, e, mask in zip(got, expected, (tokens, tokens, tokens, rows, rows), strict=True):
        assert torch.equal(g[mask], e[mask])
    assert got[0][4:9].isnan().any()


def test_a_segment_alone_equals_itself_among_others_bit_for_bit() -> None:
    specs = make_specs((9, 4, 0, 6), dropout=0.2)
    inputs = make_inputs(specs, 48, 32, torch.float32)
    together = run(grouped_lora, inputs, make_segments(specs))
    start = 0
    for spec in specs:
        tokens = slice(start, start + spec.num_tokens)
        start += spec.num_tokens
        base, x = inputs[0][tokens], inputs[1][tokens]
        leaves = [tensor.clone().requires_grad_() for tensor in (base, x, inputs[2], inputs[3])]
        y = grouped_lora(leaves[0] * 1, *leaves[1:], make_segments([spec]), 5)
        assert torch.equal(y, together[0][tokens])


def test_rank_zero_and_excluded_segments_pass_the_base_alone() -> None:
    specs = [SegmentSpec(num_tokens=3), *make_specs((2, 4))]
    inputs = make_inputs(specs, 16, 8, torch.float32)
    y = grouped_lora(inputs[0].clone(), *inputs[1:], make_segments(specs).without({2}), 0)
    assert torch.equal(y[:3], inputs[0][:3])
    assert torch.equal(y[5:], inputs[0][5:])
    assert not torch.equal(y[3:5], inputs[0][3:5])


def test_scales_of_alpha_over_rank_and_rslora_in_one_batch() -> None:
    # (rank, alpha, rslora) -> scale: (8, 16, no) 2, (16, 16, yes) 4, (64, 16, no) 0.25, (24, 48, no) 2
    specs, start = [], 0
    for lora_rank, scale in ((8, 2.0), (16, 4.0), (64, 0.25), (24, 2.0)):
        specs.append(SegmentSpec(num_tokens=1, rank_start=start, lora_rank=lora_rank, scale=scale))
        start += lora_rank
    x, base = torch.ones(4, 1), torch.zeros(4, 1)
    y = grouped_lora(base, x, torch.ones(start, 1), torch.ones(start, 1), make_segments(specs), 0)
    assert y.flatten().tolist() == [16.0, 64.0, 16.0, 48.0]


def test_rows_expand_to_tokens() -> None:
    segments = make_segments(make_specs((2, 0, 1))).repeated(4)
    assert segments.token_offsets_S1.tolist() == [0, 8, 8, 12]
    assert segments.token_offsets_S1.dtype == segments.dropout_seeds_S.dtype == torch.int32
    assert [s.token_start for s in segments.on_host] == [0, 8, 8]
    assert segments.scales_S.tolist() == [0.25, 0.5, 0.75]


def test_works_on_strided_adapter_rows_as_the_slots_store_them() -> None:
    specs = make_specs((4, 3))
    base, x, a, b = make_inputs(specs, 16, 8, torch.float32)
    flat = torch.cat([torch.full((a.shape[0], 7), float("nan")), a, b], dim=1)
    y = grouped_lora(base.clone(), x, flat[:, 7:23], flat[:, 23:], make_segments(specs), 0)
    assert torch.allclose(y, grouped_lora(base.clone(), x, a, b, make_segments(specs), 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda base, x, a, b: (base[:2], x, a, b), r"base \[T, O\]"),
        (lambda base, x, a, b: (base, x, a[:, :3], b), r"A \[R, I\]"),
        (lambda base, x, a, b: (base[:2], x[:2], a, b), "segments over 2 tokens"),
        (lambda base, x, a, b: (base, x, a[:2], b[:2]), "rank rows below 2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message: str) -> None:  # type: ignore[no-untyped-def]
    specs = make_specs((2, 3))
    inputs = change(*make_inputs(specs, 6, 4, torch.float32))
    with pytest.raises(ValueError, match=message):
        grouped_lora(*inputs, make_segments(specs), 0)


@pytest.mark.parametrize("bad", [SegmentSpec(num_tokens=-1), SegmentSpec(num_tokens=1, dropout=1.0)])
def test_impossible_segments_are_refused(bad: SegmentSpec) -> None:
    with pytest.raises(ValueError, match="must be"):
        make_segments([bad])
