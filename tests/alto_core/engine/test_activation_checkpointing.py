"""Recomputed activations: the same numbers, less memory kept, and a model that is as before afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from alto_core.engine.activation_checkpointing import recompute
from alto_core.engine.decoder_layers import decoder_layers
from alto_core.errors import ModelError


def kept_bytes(tiny: Any, what: str) -> tuple[list[float], int]:
    """Losses of three updates with dropout, and the bytes that one forward pass keeps for backward."""
    job, rows, kept = tiny.job(dropout=0.2), tiny.rows(6, shortest=12), []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with tiny.engine(recomputed=what) as engine:
        engine.admit(job, tiny.budget())
        losses = [tiny.step(engine, {job.job_id: rows})[0].train_loss for _ in range(2)]
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            losses.append(tiny.step(engine, {job.job_id: rows})[0].train_loss)
    return losses, sum(kept)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("what", ["mlp", "layers"])
def test_recomputed_equals_kept(tiny: Any, family: str, what: str) -> None:
    jobs = [tiny.job(family, lora_rank=rank, dropout=0.2) for rank in (2, 5)]
    curves = []
    for recomputed in ("none", what):
        with tiny.engine(family, recomputed=recomputed) as engine:
            for job in jobs:
                engine.admit(job, tiny.budget())
            curves.append([tiny.step(engine, {j.job_id: tiny.rows(4) for j in jobs}) for _ in range(4)])
    assert curves[0] == curves[1]


def test_less_is_kept(tiny: Any) -> None:
    losses, everything = kept_bytes(tiny, "none")
    mlp_losses, without_mlp = kept_bytes(tiny, "mlp")
    layer_losses, without_layers = kept_bytes(tiny, "layers")
    assert losses == mlp_losses == layer_losses
    assert without_layers < without_mlp < everything


def test_the_model_is_as_before_when_the_engine_is_closed(tiny: Any) -> None:
    with tiny.engine(recomputed="layers"):
        pass
    assert all("forward" not in vars(layer) for layer in decoder_layers(tiny.backbone().model))


def test_a_model_without_such_parts_is_refused() -> None:
    class Bare(torch.nn.Module):
        class config:  # noqa: N801 - stands for transformers' attribute
            @staticmethod
            def get_text_config() -> Any:
                class Text:
                    num_hidden_layers = 3

                return Text

        @property
        def base_model(self) -> torch.nn.Module:
            return self

    with pytest.raises(ModelError, match="activation_checkpointing"):
        recompute(Bare(), "mlp")
