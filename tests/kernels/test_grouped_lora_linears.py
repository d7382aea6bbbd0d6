"""Layers that share an input, on every implementation: adapters of their own, bias, Conv1D views, gradient sinks."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import grouped_lora as operation
from kernels import reference, torch_grouped
from kernels.grouped_lora import grouped_lora_linears
from kernels.path_choice import Implementation, choose_path
from kernels.projections import Projection
from kernels.segments import Segments, SegmentSpec, make_segments

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
WIDTH, WIDTHS_OUT = 48, (64, 16, 24)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2}
"""Norm of the difference over the norm."""


def make_specs(*, dropout: float) -> list[SegmentSpec]:
    """Ranks that are no multiples of 16, a job without tokens, tokens without a job."""
    specs, start = [SegmentSpec(num_tokens=3)], 1
    for i, (tokens, rank) in enumerate(((9, 3), (0, 8), (20, 24), (5, 1))):
        place = {"num_tokens": tokens, "rank_start": start, "lora_rank": rank}
        specs.append(SegmentSpec(**place, scale=0.5 + i, dropout=dropout * (i != 2), dropout_seed=3_000_000_000 + i))
        start += rank
    return specs


class Layers:
    """One to three layers over one x, with NaN in every rank row and sink that must not be read."""

    def __init__(self, segments: list[Segments], dtype: torch.dtype, device: torch.device):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)

        self.segments, rows = segments, 1 + 3 + 8 + 24 + 1 + 2
        self.x = draw(segments[0].num_tokens, WIDTH).requires_grad_()
        self.dy = [draw(segments[0].num_tokens, width) for width in WIDTHS_OUT[: len(segments)]]
        sink_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.projections = []
        for i, own in enumerate(segments):
            a, b = draw(rows, WIDTH, scale=0.2), draw(rows, WIDTHS_OUT[i], scale=0.2)
            unused = torch.ones(rows, dtype=torch.bool)
            for s in own.on_host:
                unused[s.rank_rows] = False
            a[unused.to(device)], b[unused.to(device)] = float("nan"), float("nan")
            sinks = tuple(torch.full_like(v, 0.25, dtype=sink_dtype) for v in (a, b))
            self.projections.append(
                Projection(
                    # The second as a Conv1D stores it.
                    weight=draw(WIDTH, WIDTHS_OUT[i]).T if i == 1 else draw(WIDTHS_OUT[i], WIDTH),
                    bias_O=draw(WIDTHS_OUT[i]) if i < 2 else None,
                    a_RI=a.requires_grad_(),
                    b_RO=b,
                    layer_index=4 + i,
                    gradient_sinks=sinks,  # type: ignore[arg-type]
                )
            )

    def run(self, *, accumulate: bool = True) -> list[Tensor]:
        """y of each, dA and dB of each, dx."""
        self.x.grad = None
        segments = self.segments[0] if len({id(s) for s in self.segments}) == 1 else self.segments
        ys = grouped_lora_linears(self.x, self.projections, segments, accumulate=accumulate)
        torch.autograd.backward(ys, self.dy)
        assert self.x.grad is not None
        return [*(y.detach() for y in ys), *(sink for p in self.projections for sink in p.gradient_sinks), self.x.grad]

    def expected(self) -> list[Tensor]:
        """The same by the twin's formulas, a layer at a time, in float64 on the CPU."""
        x, ys, sinks = self.x.detach().double().cpu(), [], []
        dx = torch.zeros_like(x)
        for p, own, dy in zip(self.projections, self.segments, self.dy, strict=True):
            weight, a, b, dy = (v.detach().double().cpu() for v in (p.weight_OI, p.a_RI, p.b_RO, dy))
            layer = (a, b, make_segments(list(own.on_host)), p.layer_index)
            y = functional.linear(x, weight, None if p.bias_O is None else p.bias_O.double().cpu())
            shrunk = reference.lora_forward_(y, x, *layer)
            pair = (torch.full_like(a, 0.25), torch.full_like(b, 0.25))
            dx_lora = reference.lora_backward_(*pair, dy, x, *layer, shrunk)
            assert dx_lora is not None
            dx += dy @ weight + dx_lora
            ys.append(y)
            sinks += pair
        return [*ys, *sinks, dx]


def assert_close(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        difference = (g.double().cpu() - e).norm().item()
        assert difference <= tolerance * e.norm().item(), f"{i}: {difference / e.norm().item():.2e}"


def make_layers(pattern: str, dtype: torch.dtype, device: torch.device, *, dropout: float) -> Layers:
    every = make_segments(make_specs(dropout=dropout), device)
    segments = {
        "one": [every],
        "same": [every] * 3,
        # Segment 1 is only on the first layer, 3 only on the others.
        "own": [every.without({3}), every.without({1}), every.without({1, 4})],
        "none on the second": [every, every.without(range(5))],
    }
    return Layers(segments[pattern], dtype, device)


@pytest.fixture(params=["twin", "bmm", "grouped_mm", "chosen"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each implementation by force, and the one that the device would choose."""
    if request.param != "chosen":
        chosen = Implementation.TWIN if request.param == "twin" else Implementation.TORCH_GROUPED
        monkeypatch.setattr(operation, "_choose", lambda *_: chosen)
        monkeypatch.setattr(torch_grouped, "_serves_grouped_mm", lambda *_: request.param == "grouped_mm")
    return request.param


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("pattern", ["one", "same", "own", "none on the second"])
def test_equal_to_one_layer_at_a_time(
    pattern: str, dropout: float, dtype: torch.dtype, device: torch.device, implementation: str
) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if implementation == "grouped_mm" and dtype != torch.bfloat16:
        pytest.skip("torch's grouped_mm is for bfloat16")
    layers = make_layers(pattern, dtype, device, dropout=dropout)
    assert_close(layers.run(), layers.expected(), TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", ["twin", "bmm", "grouped_mm"], indirect=True)
def test_overwriting_touches_the_rank_rows_of_all_jobs_and_no_others(implementation: str) -> None:
    layers = make_layers("same", torch.bfloat16, CPU, dropout=0.2)
    added = [sink.clone() - 0.25 for sink in layers.run()[3:9]]
    for p in layers.projections:
        for sink in p.gradient_sinks:
            sink.fill_(float("nan"))
    written = layers.run(accumulate=False)[3:9]
    without_tokens = slice(4, 12)
    for a, w in zip(added, written, strict=True):
        assert w[[0, 37, 38]].isnan().all()
        assert torch.equal(w[without_tokens], torch.zeros_like(w[without_tokens]))
        assert torch.allclose(a[1:37], w[1:37], atol=1e-6)


@pytest.mark.parametrize("implementation", ["twin", "bmm", "grouped_mm"], indirect=True)
def test_gradients_reach_the_sinks_where_x_needs_none(implementation: str) -> None:
    layers = make_layers("same", torch.bfloat16, CPU, dropout=0.2)
    expected = [sink.clone() for sink in layers.run()[3:9]]
    for p in layers.projections:
        for sink in p.gradient_sinks:
            sink.fill_(0.25)
    ys = grouped_lora_linears(layers.x.detach(), layers.projections, layers.segments[0])
    torch.autograd.backward(ys, layers.dy)
    got = [sink for p in layers.projections for sink in p.gradient_sinks]
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def test_segments_of_another_layout_are_refused() -> None:
    specs = make_specs(dropout=0.0)
    first, other = make_segments(specs), make_segments([*specs[:-2], specs[-1], specs[-2]])
    layers = Layers([first, first], torch.float32, CPU)
    with pytest.raises(ValueError, match="by `without`"):
        grouped_lora_linears(layers.x, layers.projections, [first, other])
    with pytest.raises(ValueError, match="2 projections and 1 segments"):
        grouped_lora_linears(layers.x, layers.projections, [first])


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_keeps_segments_after_their_step(count: int) -> None:
    # They are views of all inputs of a training pass.
    segments = [make_segments(make_specs(dropout=0.0)) for _ in range(count)]
    layers = Layers(segments, torch.float32, CPU)
    with torch.no_grad():
        grouped_lora_linears(layers.x, layers.projections, segments)
    alive = [weakref.ref(own) for own in segments]
    del layers, segments
    assert not any(still() for still in alive)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_grouped_products_are_chosen_where_triton_cannot_serve() -> None:
    assert choose_path(torch.device("cuda"), torch.float64).implementation is Implementation.TORCH_GROUPED
