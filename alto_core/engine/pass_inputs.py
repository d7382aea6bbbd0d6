"""All that changes from pass to pass, as tensors of one buffer on the device.

A pass of fixed shape is filled up: tokens behind the last row form rows that belong to no job, labels behind the last
have weight 0, segments behind the last are empty. So one captured CUDA graph serves every step that fits its shape,
whichever jobs, ranks, learning rates or dropout seeds it holds; one copy moves all of it to the device.

Shape suffixes: T tokens, K keys (T and the shared tokens again), N1 = rows + 1, P labels, M preference pairs,
S segments, S1 = S + 1, J slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from alto_core.data.packing import PackedBatch
from alto_core.engine.shared_prompts import ABSENT, SharedKeys, key_places
from alto_core.engine.staging import StagedFields
from kernels.segments import Segments, SegmentSpec, make_segments

NOBODY = -1
"""Slot of a label that fills up the pass."""


@dataclass(frozen=True, kw_only=True)
class PassShape:
    """Sizes that a pass cannot exceed."""

    tokens: int
    labels: int
    rows: int
    """With those that fill up the tokens."""
    segments: int
    longest_row: int
    lora_rank: int
    """Largest of any job."""
    has_dropout: bool
    shared_tokens: int = 0
    """Of prompts that stand once for two answers."""
    pairs: int = 0
    """That an objective over preference pairs looks at."""
    lowest_layer: int = 0
    """Linear layers before this one run without adapters, so that backward ends there."""

    def holds(self, other: PassShape) -> bool:
        """Whether a pass of the other shape can be filled up to this one."""
        spare = self.tokens - other.tokens
        if spare < 0 or self.longest_row < other.longest_row or self.has_dropout < other.has_dropout:
            return False
        if self.lowest_layer > other.lowest_layer:
            return False
        rows = other.rows + -(-spare // self.longest_row)
        counts = (
            (self.labels, other.labels),
            (self.rows, rows),
            (self.segments, other.segments),
            (self.shared_tokens, other.shared_tokens),
            (self.pairs, other.pairs),
        )
        return self.lora_rank >= other.lora_rank and all(own >= needed for own, needed in counts)


Array = TypeVar("Array")


@dataclass(frozen=True, kw_only=True, eq=False)
class PairFields(Generic[Array]):
    """What an objective over pairs knows of each; all float32 [M] but the slots. Pair m is rows 2 m and 2 m + 1."""

    pair_weights_M: Array
    """1 / the job's pairs in the update; 0 fills up."""
    pair_betas_M: Array
    chosen_references_M: Array
    """Log-probability of the answer under the reference, nats."""
    rejected_references_M: Array
    chosen_scales_M: Array
    """1, or 1 / the answer's tokens: factor on its log-probabilities."""
    rejected_scales_M: Array
    pair_sft_weights_M: Array
    """On the negative log-likelihood of the chosen answer."""
    pair_slots_M: Array
    """int32."""


PAIR_FILLERS = PairFields(
    pair_weights_M=0.0,
    pair_betas_M=1.0,
    chosen_references_M=0.0,
    rejected_references_M=0.0,
    chosen_scales_M=1.0,
    rejected_scales_M=1.0,
    pair_sft_weights_M=0.0,
    pair_slots_M=float(NOBODY),
)
_PAIR_NAMES = tuple(field.name for field in dataclasses.fields(PairFields))


def shape_of(
    batch: PackedBatch,
    specs: Sequence[SegmentSpec],
    *,
    lora_rank: int,
    has_dropout: bool,
    pairs: int = 0,
    lowest_layer: int = 0,
) -> PassShape:
    """The exact shape of a pass."""
    return PassShape(
        tokens=batch.num_tokens,
        labels=len(batch.label_ids_P),
        rows=batch.num_rows,
        segments=len(specs),
        longest_row=batch.longest_row,
        lora_rank=lora_rank,
        has_dropout=has_dropout,
        shared_tokens=batch.num_shared_tokens,
        pairs=pairs,
        lowest_layer=lowest_layer,
    )


class PassInputs:
    """Tensors of one pass.

    Args:
        shape: of the pass.
        device: where it runs.
    """

    def __init__(self, shape: PassShape, device: torch.device):
        self.shape = shape
        self._staged = StagedFields(_layout(shape), device)
        on_device = self._staged.on_device
        self.token_ids_T, self.position_ids_T = on_device["token_ids_T"], on_device["position_ids_T"]
        self.label_positions_P, self.label_ids_P = on_device["label_positions_P"], on_device["label_ids_P"]
        self.label_weights_P, self.label_slots_P = on_device["label_weights_P"], on_device["label_slots_P"]
        """float32, 1 / the job's labels in the update; int32."""
        self.row_offsets_N1 = on_device["row_offsets_N1"]
        self.shared_keys = (
            SharedKeys(*(on_device[name] for name in ("key_sources_K", "own_keys_T", "keys_again_T", "key_offsets_N1")))
            if shape.shared_tokens
            else None
        )
        self.label_rows_P = on_device["label_rows_P"]
        """int64; 2 M for labels that fill up the pass. Empty without pairs, as are the pairs' own."""
        self.pairs = PairFields(**{name: on_device[name] for name in _PAIR_NAMES})
        self.segments = Segments(
            **{name: on_device[name] for name in _SEGMENT_FIELDS},
            num_tokens=shape.tokens,
            has_dropout=shape.has_dropout,
            on_host=(),
            rank_limit=max(1, shape.lora_rank),
        )
        self.num_labels = 0
        """Of the batch that was loaded last."""
        self.row_lengths: tuple[int, ...] = ()
        """Of the batch that was loaded last, with the rows that fill it up."""
        self.row_prefixes: tuple[int, ...] = ()
        """The same."""

    def load(
        self,
        batch: PackedBatch,
        specs: Sequence[SegmentSpec],
        *,
        label_weights_P: NDArray[np.float32],
        label_slots_P: NDArray[np.int32],
        pairs: PairFields[NDArray[np.generic]] | None = None,
    ) -> None:
        """Bring a pass to the device. On CUDA it is enqueued, and kernels that follow on the stream see it."""
        self.num_labels = len(batch.label_ids_P)
        self.row_lengths = self._filled_rows(batch)
        self.row_prefixes = (*batch.row_prefixes, *[0] * (len(self.row_lengths) - batch.num_rows))
        host = self._staged.begin()
        num_tokens = batch.num_tokens
        host["token_ids_T"][:num_tokens] = batch.token_ids_T
        host["token_ids_T"][num_tokens:] = 0
        host["position_ids_T"][:num_tokens] = batch.position_ids_T
        host["position_ids_T"][num_tokens:] = np.arange(self.shape.tokens - num_tokens) % self.shape.longest_row
        for name, values, rest in (
            ("label_positions_P", batch.label_positions_P, 0),
            ("label_ids_P", batch.label_ids_P, 0),
            ("label_weights_P", label_weights_P, 0.0),
            ("label_slots_P", label_slots_P, NOBODY),
        ):
            host[name][: len(values)] = values
            host[name][len(values) :] = rest
        offsets = np.cumsum((0, *self.row_lengths))
        host["row_offsets_N1"][: len(offsets)] = offsets
        host["row_offsets_N1"][len(offsets) :] = offsets[-1]
        if self.shape.shared_tokens:
            self._load_keys(host)
        if self.shape.pairs:
            self._load_pairs(host, batch, pairs)
        filled = [*specs, *[SegmentSpec(num_tokens=0)] * (self.shape.segments - len(specs))]
        on_host = make_segments(filled, rank_limit=self.segments.rank_limit)
        for name in _SEGMENT_FIELDS:
            host[name][:] = getattr(on_host, name).numpy()
        self._staged.send()

    def _load_keys(self, host: dict[str, NDArray[np.generic]]) -> None:
        places = key_places(self.row_lengths, self.row_prefixes)
        for name, values, rest in (
            ("key_sources_K", places.source_K, 0),
            ("own_keys_T", places.own_T, ABSENT),
            ("keys_again_T", places.again_T, ABSENT),
            ("key_offsets_N1", places.offsets_N1, places.offsets_N1[-1]),
        ):
            host[name][: len(values)] = values
            host[name][len(values) :] = rest

    def _load_pairs(
        self, host: dict[str, NDArray[np.generic]], batch: PackedBatch, pairs: PairFields[NDArray[np.generic]] | None
    ) -> None:
        host["label_rows_P"][: self.num_labels] = batch.label_rows_P
        host["label_rows_P"][self.num_labels :] = 2 * self.shape.pairs
        for name in _PAIR_NAMES:
            values = () if pairs is None else getattr(pairs, name)
            host[name][: len(values)] = values
            host[name][len(values) :] = getattr(PAIR_FILLERS, name)

    def _filled_rows(self, batch: PackedBatch) -> tuple[int, ...]:
        whole, rest = divmod(self.shape.tokens - batch.num_tokens, self.shape.longest_row)
        return (*batch.row_lengths, *[self.shape.longest_row] * whole, *[rest] * (rest > 0))


_SEGMENT_FIELDS = (
    "token_offsets_S1",
    "rank_offsets_S",
    "ranks_S",
    "scales_S",
    "dropout_S",
    "dropout_thresholds_S",
    "dropout_seeds_S",
)


def _layout(shape: PassShape) -> dict[str, tuple[int, torch.dtype]]:
    """Length and dtype of each field."""
    long, whole, real = torch.int64, torch.int32, torch.float32
    shares = shape.shared_tokens > 0
    return {
        "token_ids_T": (shape.tokens, long),
        "position_ids_T": (shape.tokens, long),
        "label_positions_P": (shape.labels, long),
        "label_ids_P": (shape.labels, long),
        "label_rows_P": (shape.labels * (shape.pairs > 0), long),
        "key_sources_K": ((shape.tokens + shape.shared_tokens) * shares, long),
        "own_keys_T": (shape.tokens * shares, long),
        "keys_again_T": (shape.tokens * shares, long),
        "label_weights_P": (shape.labels, real),
        "label_slots_P": (shape.labels, whole),
        "row_offsets_N1": (shape.rows + 1, whole),
        "key_offsets_N1": ((shape.rows + 1) * shares, whole),
        **{name: (shape.pairs, whole if name == "pair_slots_M" else real) for name in _PAIR_NAMES},
        "token_offsets_S1": (shape.segments + 1, whole),
        "rank_offsets_S": (shape.segments, whole),
        "ranks_S": (shape.segments, whole),
        "scales_S": (shape.segments, real),
        "dropout_S": (shape.segments, real),
        "dropout_thresholds_S": (shape.segments, whole),
        "dropout_seeds_S": (shape.segments, whole),
    }
