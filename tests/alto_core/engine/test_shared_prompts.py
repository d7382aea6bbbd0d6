"""What a captured pass on a GPU does with pairs, step by step on the CPU: shared keys, filled-up shapes.

Flash attention does not run here, so a few lines of torch stand in for it, with its rule for fewer queries than keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import varlen

from alto_core.engine import passes
from alto_core.engine.capture_choice import PassKind
from alto_core.engine.packed_attention import shares_prompts
from alto_core.engine.pass_inputs import PassInputs, shape_of
from alto_core.engine.passes import PassRunner, PassWork
from alto_core.engine.shared_prompts import ABSENT, SharedKeys, key_places
from kernels.segments import SegmentSpec

CPU = torch.device("cpu")


def flash_attention(*, at_the_end: bool) -> Callable[..., Tensor]:
    """Variable-length causal attention; with fewer queries than keys these stand at the end of the keys, or not."""

    def varlen_attn(
        query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, key_offsets: Tensor, *_: int, **options: Any
    ) -> Tensor:
        # Memory that no row covers, as a GPU leaves it.
        out = torch.full_like(query, float("nan"))
        bounds = zip(offsets.tolist()[:-1], offsets.tolist()[1:], key_offsets.tolist()[:-1], key_offsets.tolist()[1:],
                     strict=True)  # fmt: skip
        for first, last, first_key, last_key in bounds:
            rows = (query[first:last], key[first_key:last_key], value[first_key:last_key])
            shift = (last_key - first_key) - (last - first) if at_the_end else 0
            seen = torch.arange(last_key - first_key)[None] <= torch.arange(last - first)[:, None] + shift
            heads = functional.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in rows), attn_mask=seen, scale=options.get("scale"), enable_gqa=True
            )
            out = torch.cat((out[:first], heads.transpose(0, 1), out[last:]))
        return out

    return varlen_attn


def test_keys_of_a_shared_prompt_stand_before_both_answers() -> None:
    # Rows of 2, 5 (prompt of 3) with 2 behind it, and 1 token.
    places = key_places((2, 5, 2, 1), (0, 0, 3, 0))
    assert places.source_K.tolist() == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 7, 8, 9]
    assert places.own_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 10, 11, 12]
    assert places.again_T.tolist() == [ABSENT, ABSENT, 7, 8, 9, *[ABSENT] * 5]
    assert places.offsets_N1.tolist() == [0, 2, 7, 12, 13]


def test_gradients_of_a_shared_prompt_are_added_up_and_unused_keys_are_not_read() -> None:
    places = key_places((4, 2), (0, 3))
    spare = 3
    source_K = torch.cat((torch.from_numpy(places.source_K), torch.zeros(spare, dtype=torch.long)))
    own_T, again_T = torch.from_numpy(places.own_T), torch.from_numpy(places.again_T)
    shared = SharedKeys(source_K, own_T, again_T, torch.from_numpy(places.offsets_N1))
    x_THD = torch.randn(6, 2, 4, requires_grad=True)
    repeated = shared.repeated(x_THD)
    upstream = torch.randn(repeated.shape)
    upstream[-spare:] = float("nan")
    (found,) = torch.autograd.grad(repeated, x_THD, upstream)
    plain = x_THD.index_select(0, source_K[:-spare])
    (expected,) = torch.autograd.grad(plain, x_THD, upstream[:-spare])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("at_the_end", [True, False])
def test_attention_that_places_queries_elsewhere_is_told(monkeypatch: pytest.MonkeyPatch, at_the_end: bool) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", flash_attention(at_the_end=at_the_end))
    assert shares_prompts(CPU, torch.float32) is at_the_end


def run_filled_up(self: PassRunner, kind: PassKind, work: PassWork) -> Tensor:
    """As a captured pass runs: in a shape that holds more of everything."""
    pairs = work.fields.pairs
    needed = shape_of(
        work.batch, work.specs, lora_rank=8, has_dropout=False, pairs=0 if pairs is None else len(pairs.pair_weights_M)
    )
    shape = self._choice.choose(kind, needed).shape
    assert shape.holds(needed) and shape.tokens > needed.tokens
    inputs = PassInputs(shape, CPU)
    for _ in range(2):  # the second time over what the first left
        passes._load(inputs, work)
    nobody = SegmentSpec(num_tokens=shape.tokens - work.batch.num_tokens)
    filled = dataclasses.replace(
        work, specs=(*work.specs, nobody), layers_by_segment=(*work.layers_by_segment, frozenset())
    )
    return self._gradients(kind, inputs, filled)[: needed.labels]


def test_a_filled_up_pass_on_ragged_rows_gives_the_same_step(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = tiny.pairs(7)
    jobs = [tiny.job(lora_rank=rank, beta=beta, adapter_batch_size=2) for rank, beta in ((3, 0.5), (5, 0.1))]
    found = []
    for is_filled in (False, True):
        backbone = dataclasses.replace(tiny.backbone(), takes_ragged_rows=is_filled)
        if is_filled:
            monkeypatch.setattr(varlen, "varlen_attn", flash_attention(at_the_end=True))
            monkeypatch.setattr(PassRunner, "run", run_filled_up)
        with tiny.preferring(pairs, backbone=backbone) as engine:
            for job in jobs:
                engine.admit(job, tiny.budget())
            records = [
                tiny.step(engine, {jobs[0].job_id: pairs[:4], jobs[1].job_id: pairs[start : start + 3]})
                for start in (0, 4)
            ]
            gradients = [engine._of(job.job_id).block.grads_rW.clone() for job in jobs]
            losses = engine.evaluate([job.job_id for job in jobs], pairs, max_tokens=30)
        found.append((records, gradients, losses))
    (plain_records, plain_gradients, plain_losses), (records, gradients, losses) = found
    for expected, record in zip(sum(plain_records, ()), sum(records, ()), strict=True):
        assert record.train_loss == pytest.approx(expected.train_loss, abs=1e-5)
        assert record.measures == pytest.approx(expected.measures, abs=1e-4)
    for expected, gradient in zip(plain_gradients, gradients, strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-3)
    for job in jobs:
        assert losses[job.job_id].loss_sums == pytest.approx(plain_losses[job.job_id].loss_sums, abs=1e-4)
