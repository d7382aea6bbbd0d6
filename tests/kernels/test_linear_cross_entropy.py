"""Token losses of a frozen head: against torch's cross entropy, in chunks, and the Triton kernel against its twin."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import linear_cross_entropy as module
from kernels.linear_cross_entropy import linear_cross_entropy, softmax_losses_twin_

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
small = pytest.mark.skipif(
    not (ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"), reason="runs in the interpreter's process, or on a GPU"
)


def problem(num_positions: int, width: int, vocabulary: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_positions)
    return {
        "hidden_PD": torch.randn(num_positions, width, generator=generator).to(dtype),
        "weight_VD": torch.randn(vocabulary, width, generator=generator).to(dtype),
        "bias_V": torch.randn(vocabulary, generator=generator).to(dtype),
        "label_ids_P": torch.randint(0, vocabulary, (num_positions,), generator=generator),
        "label_weights_P": torch.rand(num_positions, generator=generator),
    }


@pytest.mark.parametrize("chunk_bytes", [1, 10_000, 1 << 30])
@pytest.mark.parametrize("has_bias", [True, False])
def test_equals_torch(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, has_bias: bool) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    inputs = problem(37, 12, 53)
    if not has_bias:
        inputs["bias_V"] = None  # type: ignore[assignment]
    hidden = inputs["hidden_PD"].requires_grad_()
    objective, losses = linear_cross_entropy(**inputs)
    (objective * 3).backward()
    got, hidden.grad = hidden.grad, None
    logits = functional.linear(hidden, inputs["weight_VD"], inputs["bias_V"])
    expected = functional.cross_entropy(logits, inputs["label_ids_P"], reduction="none")
    (expected * inputs["label_weights_P"]).sum().mul(3).backward()
    assert losses.dtype == torch.float32 and not losses.requires_grad
    assert torch.allclose(losses.double(), expected, atol=1e-5)
    assert torch.allclose(got, hidden.grad, atol=1e-6)


def test_a_position_of_weight_zero_passes_no_gradient_whatever_its_loss_is() -> None:
    inputs = problem(5, 8, 11, torch.float32)
    inputs["label_weights_P"][2] = 0.0
    inputs["hidden_PD"][2] = float("nan")
    hidden = inputs["hidden_PD"].requires_grad_()
    objective, losses = linear_cross_entropy(**inputs)
    objective.backward()
    assert losses[2].isnan() and objective.isfinite()
    assert hidden.grad[[0, 1, 3, 4]].isfinite().all() and hidden.grad[[0, 1, 3, 4]].any(1).all()


def test_nothing_is_kept_for_backward_without_gradients() -> None:
    inputs = problem(5, 8, 11, torch.float32)
    with torch.no_grad():
        objective, losses = linear_cross_entropy(**inputs)
    assert not objective.requires_grad and losses.isfinite().all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    inputs = problem(5, 8, 11)
    with pytest.raises(ValueError, match=r"hidden \(5, 8\), weight \(11, 7\)"):
        linear_cross_entropy(**{**inputs, "weight_VD": inputs["weight_VD"][:, :7]})


@small
@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [11, 300, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_equals_twin(vocabulary: int, dtype: torch.dtype) -> None:
    from kernels.triton_cross_entropy import softmax_losses_

    generator = torch.Generator().manual_seed(vocabulary)
    logits = (8 * torch.randn(6, vocabulary, generator=generator)).to(dtype).to(DEVICE)
    labels = torch.randint(0, vocabulary, (6,), generator=generator).to(DEVICE)
    weights = torch.tensor([0.5, 0.0, 1.0, 2.0, 0.25, 1.0], device=DEVICE)
    logits[1, 3] = float("nan")
    logits[4] *= 100  # all probability in one place
    twin = logits.clone()
    losses, expected = softmax_losses_(logits, labels, weights, True), softmax_losses_twin_(twin, labels, weights, True)
    assert torch.allclose(losses, expected, rtol=1e-5, atol=1e-4, equal_nan=True)
    assert torch.allclose(logits.float(), twin.float(), atol=1e-6 if dtype is torch.float32 else 1e-2)
    assert not logits[1].any(), "weight 0"
    before = logits.clone()
    softmax_losses_(logits, labels, weights, False)
    assert torch.equal(logits, before), "without a gradient the logits stay"
