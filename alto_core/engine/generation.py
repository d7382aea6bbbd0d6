"""Greedy answers of many adapters in shared batches, through transformers' `generate` with its key/value cache.

Rows of one adapter lie side by side, prompts are padded on the left and masked, so an answer does not depend on the
batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from alto_core.engine.active_job import ActiveJob
from alto_core.engine.backbone import Backbone
from alto_core.engine.lora_linear import LoraRouting
from alto_core.engine.packed_attention import PACKED_ATTENTION
from kernels.segments import SegmentSpec, make_segments


@torch.inference_mode()
def generate_greedily(
    backbone: Backbone,
    routing: LoraRouting,
    prompts: Sequence[tuple[ActiveJob | None, tuple[int, ...]]],
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    pad_token_id: int,
    max_rows: int,
) -> list[tuple[int, ...]]:
    """Continue each prompt with its adapter (None: the untuned model).

    Args:
        prompts: adapter and prompt tokens, at least one token each.
        max_new_tokens: of each answer; fewer where the model's positions end.
        stop_token_ids: the answer ends before the first of these.
        pad_token_id: fills short rows; never seen by a token.
        max_rows: of one batch.

    Returns:
        New tokens of each prompt, in the order of `prompts`, without the stop token.

    Raises:
        ValueError: a prompt is empty.
    """
    if any(not ids for _, ids in prompts):
        raise ValueError("expected prompts of at least one token, but got an empty one")
    answers: list[tuple[int, ...]] = [()] * len(prompts)
    with _padded_attention(backbone.model):
        for room, numbers in _batches(backbone, prompts, max_new_tokens, max_rows):
            batch = [prompts[i] for i in numbers]
            for i, new_ids in zip(
                numbers, _generate_batch(backbone, routing, batch, room, stop_token_ids, pad_token_id), strict=True
            ):
                answers[i] = new_ids
    return answers


def _batches(
    backbone: Backbone, prompts: Sequence[tuple[ActiveJob | None, tuple[int, ...]]], max_new_tokens: int, max_rows: int
) -> Iterator[tuple[int, list[int]]]:
    """Numbers of the prompts of each batch: equal room for an answer, adapter by adapter, short ones first."""
    adapter_order = {id(active): i for i, active in enumerate({id(a): a for a, _ in prompts}.values())}

    def room(i: int) -> int:
        positions = backbone.max_positions
        return max_new_tokens if positions is None else min(max_new_tokens, positions - len(prompts[i][1]))

    def order(i: int) -> tuple[int, int, int]:
        active, ids = prompts[i]
        return room(i), adapter_order[id(active)], len(ids)

    answerable = sorted((i for i in range(len(prompts)) if room(i) > 0), key=order)
    for same_room, group in itertools.groupby(answerable, key=room):
        numbers = list(group)
        for start in range(0, len(numbers), max_rows):
            yield same_room, numbers[start : start + max_rows]


def _generate_batch(
    backbone: Backbone,
    routing: LoraRouting,
    batch: Sequence[tuple[ActiveJob | None, tuple[int, ...]]],
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    pad_token_id: int,
) -> list[tuple[int, ...]]:
    longest = max(len(ids) for _, ids in batch)
    padding = [longest - len(ids) for _, ids in batch]
    ids_BL = torch.tensor([[pad_token_id] * pad + list(ids) for pad, (_, ids) in zip(padding, batch, strict=True)])
    mask_BL = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    groups = [(active, len(list(rows))) for active, rows in itertools.groupby((active for active, _ in batch))]
    specs = [SegmentSpec(num_tokens=rows) if active is None else active.segment(rows) for active, rows in groups]
    layers = [frozenset[int]() if active is None else active.layer_indices for active, _ in groups]
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_token_ids) or None,
        pad_token_id=pad_token_id,
        use_cache=True,
    )
    with routing.use(make_segments(specs, backbone.device), layers):
        out_BL = backbone.model.generate(
            ids_BL.to(backbone.device), attention_mask=mask_BL.to(backbone.device), generation_config=config
        )
    return [_until_stop(row, stop_token_ids) for row in out_BL[:, longest:].tolist()]


def _until_stop(new_ids: list[int], stop_token_ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.takewhile(lambda token: token not in stop_token_ids, new_ids))


@contextmanager
def _padded_attention(model: Any) -> Iterator[None]:
    """transformers' own masked attention instead of the packed one."""
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(PACKED_ATTENTION)
