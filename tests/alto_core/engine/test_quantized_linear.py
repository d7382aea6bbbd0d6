"""Weights in 4 bits: what they take, what they give, what is refused. Against transformers: `test_against_peft`."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from alto_core.config import TuningTask
from alto_core.engine import quantized_linear
from alto_core.engine.backbone import release_backbone
from alto_core.engine.quantized_linear import Nf4Linear, check_quantization
from alto_core.errors import TaskFileError
from alto_core.preparation import plan_task
from alto_core.profiling import shape_of_backbone, shape_of_model
from alto_core.references import fingerprint
from alto_core.scheduling.memory_model import NF4_BYTES

TABLES = 4 * (16 + 256) + 4
"""Bytes of a layer that do not grow with it: the 16 values, those of the scales, their offset."""


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(384, 256).requires_grad_(False)


def test_a_packed_weight_takes_what_the_arithmetic_says_and_is_near_the_whole_one(linear: nn.Linear) -> None:
    packed = Nf4Linear(linear)
    num_bytes = sum(tensor.nbytes for tensor in packed.stored)
    assert num_bytes == pytest.approx(NF4_BYTES * linear.weight.numel() + TABLES, rel=0.01)
    assert (packed.weight - linear.weight).abs().max() < 0.16 * linear.weight.abs().max()
    assert (packed.weight.shape, packed.weight.dtype) == (linear.weight.shape, linear.weight.dtype)


def test_a_product_has_the_gradient_of_the_unpacked_weight_and_keeps_none(linear: nn.Linear) -> None:
    packed, x = Nf4Linear(linear), torch.randn(5, 384, requires_grad=True)
    y = packed(x)
    gc.collect()
    whole = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter) and o.shape == linear.weight.shape]
    assert len(whole) == 1 and whole[0] is linear.weight
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(y, nn.functional.linear(x, packed.weight, linear.bias))
    assert torch.equal(x.grad, torch.ones_like(y) @ packed.weight)


def test_all_but_head_and_embedding_is_packed_and_counted(tiny: Any) -> None:
    backbone = tiny.backbone(quantization="nf4")
    assert all(isinstance(backbone.model.get_submodule(layer.name), Nf4Linear) for layer in backbone.layers)
    assert type(backbone.model.lm_head) is nn.Linear
    whole = shape_of_backbone(tiny.backbone(), tiny.targets())
    loaded = shape_of_backbone(backbone, tiny.targets())
    ahead = shape_of_model(tiny.section(quantization="nf4"), tiny.targets(), on_gpu=False)
    assert loaded.quantized_parameters == ahead.quantized_parameters == sum(x.d_in * x.d_out for x in backbone.layers)
    assert loaded.num_parameters == whole.num_parameters
    assert loaded.backbone_bytes == ahead.backbone_bytes < whole.backbone_bytes


def test_measurements_of_a_packed_model_are_not_taken_for_anothers(tiny: Any) -> None:
    whole = fingerprint(tiny.backbone())
    backbone = tiny.backbone(quantization="nf4")
    packed = fingerprint(backbone)
    first = backbone.model.get_submodule(backbone.layers[0].name)
    first.stored[0][0] += 1
    try:
        assert len({str(one) for one in (whole, packed, fingerprint(backbone))}) == 3
    finally:
        release_backbone()  # the next test is not to be given this one


def test_what_cannot_be_packed_is_refused_before_anything_is_loaded(
    tiny: Any, tiny_task: Callable[..., TuningTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TaskFileError, match=r"model\.quantization: got nf4 with .*Conv1D, expected none, or a model"):
        check_quantization(tiny.section("gpt2", quantization="nf4"))
    model = {"name": str(tiny.folder()), "quantization": "nf4"}
    with pytest.raises(TaskFileError, match=r"cluster\.num_gpus: got 2, expected 1 with model\.quantization: nf4"):
        plan_task(tiny_task(model=model, cluster={"num_gpus": 2}))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert quantized_linear.check_quantization(tiny.section()) is None
    with pytest.raises(TaskFileError, match=r"library bitsandbytes is not installed.*alto-lora\[quantization\]"):
        check_quantization(tiny.section(quantization="nf4"))
