"""What a short pass measures of layers, against plain torch; and what plans make of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from alto_core.engine.adapter_plan import LayerMeasure, adapted_names, allot_ranks, block_of, plan_adapter
from alto_core.engine.layer_probe import measure_layers
from alto_core.engine.target_modules import LinearLayer, find_linear_layers, select_layers

DIRECTIONS = 6


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_measures_are_those_of_plain_torch(tiny: Any, family: str) -> None:
    rows = tiny.rows(7, seed=2)
    with tiny.engine(family) as engine:
        model = tiny.backbone(family).model
        measures = measure_layers(engine, model, tiny.targets(family), rows, num_directions=DIRECTIONS)
        assert not engine.job_ids
    plain = tiny.plain_model(family)
    layers = select_layers(find_linear_layers(plain), tiny.targets(family))
    assert list(measures.keys() - {layer.name for layer in layers}) == []
    inputs: dict[str, list[torch.Tensor]] = {layer.name: [] for layer in layers}
    for layer in layers:
        plain.get_submodule(layer.name).register_forward_hook(
            lambda _, args, __, name=layer.name: inputs[name].append(args[0].detach().flatten(0, 1))
        )
    loss = sum(tiny.loss_sums(plain, rows)) / sum(row.num_labels for row in rows)
    loss.backward()
    for layer in layers:
        module, measure = plain.get_submodule(layer.name), measures[layer.name]
        weight, gradient = (t.T if layer.is_conv1d else t for t in (module.weight.detach(), module.weight.grad))
        assert measure.gradient == pytest.approx(float(gradient.norm()) / math.sqrt(3 * layer.d_in), rel=1e-3)
        assert measure.sensitivity == pytest.approx(float((weight * gradient).abs().mean()), rel=1e-3)
        # centered: the covariance of torch.cov, up to a factor that no singular vector sees
        _, s, vt = torch.linalg.svd(weight @ torch.cov(torch.cat(inputs[layer.name]).T))
        assert s[DIRECTIONS - 1] > 1.01 * s[DIRECTIONS], "else the last direction is not determined"
        overlap = measure.directions_kI @ vt[:DIRECTIONS].T
        assert torch.allclose(overlap.abs().diagonal(), torch.ones(DIRECTIONS), atol=5e-3), layer.name


def test_no_directions_are_measured_where_nobody_asks_for_them(tiny: Any) -> None:
    with tiny.engine() as engine:
        measures = measure_layers(engine, tiny.backbone().model, tiny.targets(), tiny.rows(2), num_directions=0)
    assert all(measure.directions_kI.numel() == 0 for measure in measures.values())


@pytest.mark.parametrize(
    ("weights", "costs", "most", "ranks"),
    [
        ((1.0, 1.0, 1.0), (10, 20, 30), (8, 8, 8), (4, 4, 4)),
        ((3.0, 1.0), (10, 10), (8, 8), (6, 2)),
        ((100.0, 1.0, 1.0), (10, 10, 10), (8, 8, 8), (8, 2, 2)),  # what the first may not have goes to the others
        ((0.0, 1.0), (10, 10), (8, 8), (1, 7)),
        ((5.0, 1.0), (10, 10), (2, 2), (2, 2)),
    ],
)
def test_ranks_are_in_proportion_within_the_budget(
    weights: tuple[float, ...], costs: tuple[int, ...], most: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    got = allot_ranks(weights, costs=costs, most=most, mean_rank=4)
    assert got == ranks
    assert sum(rank * cost for rank, cost in zip(got, costs, strict=True)) <= 4 * sum(costs)


def layer(name: str, index: int, width: int = 64) -> LinearLayer:
    return LinearLayer(name=name, index=index, d_in=width, d_out=width, is_conv1d=False)


def test_a_block_is_named_up_to_its_number() -> None:
    names = ["model.layers.11.self_attn.q_proj", "transformer.h.3.attn.c_attn", "model.projector"]
    assert [block_of(layer(name, 0)) for name in names] == ["model.layers.11", "transformer.h.3", "model.projector"]


def test_a_probe_keeps_the_blocks_of_the_largest_gradients(tiny: Any) -> None:
    layers = [layer(f"m.{block}.{side}", 2 * block + i) for block in range(4) for i, side in enumerate(("q", "v"))]
    gradients = {0: 1.0, 1: 4.0, 2: 2.0, 3: 0.5}
    measures = {
        item.name: LayerMeasure(
            gradient=gradients[item.index // 2], sensitivity=1.0, directions_kI=torch.zeros(0, item.d_in)
        )
        for item in layers
    }
    job = tiny.job(target_modules=("q", "v"), layer_share=0.5, lora_rank=6)
    assert [a.layer.name for a in plan_adapter(job, layers, measures)] == ["m.1.q", "m.1.v", "m.2.q", "m.2.v"]
    assert {a.lora_rank for a in plan_adapter(job, layers, measures)} == {6}
    by_gradient = tiny.job(target_modules=("q", "v"), layer_share=0.5, lora_rank=6, rank_allocation="gradient")
    assert [a.lora_rank for a in plan_adapter(by_gradient, layers, measures)] == [8, 8, 4, 4]
    few = tiny.job(target_modules=("q",), layer_share=0.01)
    assert [a.layer.name for a in plan_adapter(few, layers[::2], measures)] == ["m.1.q"]
    assert adapted_names([few, tiny.job(target_modules=("v",))], layers, measures) == ["m.1.q", "v"]


def test_scales_follow_sensitivity_where_a_is_frozen(tiny: Any) -> None:
    layers = [layer("m.0.q", 0), layer("m.1.q", 1)]
    measures = {
        item.name: LayerMeasure(gradient=1.0, sensitivity=sensitivity, directions_kI=torch.zeros(0, item.d_in))
        for item, sensitivity in zip(layers, (3.0, 1.0), strict=True)
    }
    fields = {"target_modules": ("q",), "lora_rank": 4, "rank_allocation": "sensitivity"}
    frozen = plan_adapter(tiny.job(train="b_only", **fields), layers, measures)
    assert [(a.lora_rank, a.scale_ratio) for a in frozen] == [(6, 1.0), (2, 2.0)]
    trained = plan_adapter(tiny.job(**fields), layers, measures)
    assert [(a.lora_rank, a.scale_ratio) for a in trained] == [(6, 1.0), (2, 1.0)]
