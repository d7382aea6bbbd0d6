"""Passes of generation: over prompts as they come, over one token of every row from a CUDA graph where there is one.

A step over all rows is the same few hundred small kernels each time, so the host would take most of it. Where training
passes are captured, steps are as well: rows are filled up to a captured number with rows that have ended, and which
rows and adapters a step serves is content of its inputs. A row that sees more places changes nothing: kernels read that
on the device. The first step of a new size runs one by one, which also loads what its graph needs.

Shape suffixes: T tokens of a pass, N rows of a pass, M pages of a row at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from alto_core.engine.active_job import ActiveJob
from alto_core.engine.backbone import Backbone, packed_logits
from alto_core.engine.cached_attention import CachedRows, KeyValuePages, LatestTokens, places_in_pool
from alto_core.engine.capture_choice import bucket
from alto_core.engine.graph_capture import GraphPool
from alto_core.engine.lora_linear import LoraRouting
from alto_core.engine.packed_attention import PackedRows, RaggedRows, RowLayout
from alto_core.engine.row_states import NewRow, RowStates
from kernels.path_choice import Implementation, choose_path
from kernels.segments import Segments, SegmentSpec, make_segments

CAPTURE_FLOPS = 3e13
"""What a GPU could have computed while a step is captured: about 0.2 seconds of generation."""


class AdapterRoutes:
    """Sends rows that lie by adapter, in the order of the adapters, through these.

    Args:
        backbone: with the adapters' layers attached.
        routing: of these layers.
        adapters: of all rows that will ever come; None: the untuned model.
    """

    def __init__(self, backbone: Backbone, routing: LoraRouting, adapters: Sequence[ActiveJob | None]):
        self.count = len(adapters)
        self._device, self._routing, self._adapters = backbone.device, routing, tuple(adapters)
        self._on_kernels = choose_path(backbone.device, backbone.dtype).implementation is Implementation.TRITON
        self._layers = [frozenset[int]() if a is None else a.layer_indices for a in adapters] + [frozenset[int]()]

    def segments(self, tokens_by_adapter: Sequence[int], size: int) -> Segments:
        """So many tokens of each adapter, one after another, filled up to a size. All have one count and rank limit."""
        specs = [
            SegmentSpec(num_tokens=count) if adapter is None else adapter.segment(count)
            for adapter, count in zip(self._adapters, tokens_by_adapter, strict=True)
        ]
        return make_segments([*specs, SegmentSpec(num_tokens=size - sum(tokens_by_adapter))], self._device)

    def use(self, segments: Segments) -> AbstractContextManager[None]:
        """Route the forward passes inside the context."""
        if all(adapter is None for adapter in self._adapters):
            return nullcontext()
        if self._on_kernels:
            return self._routing.use_on_device(segments, accumulate=True, unfinished=None)
        return self._routing.use(segments, self._layers)


@dataclass(frozen=True, kw_only=True, eq=False)
class _StepInputs:
    """Which rows a step over their latest tokens serves."""

    slots_N: Tensor
    order_N: Tensor
    """0 .. N - 1."""
    segments: Segments


class Decoder:
    """Runs the passes of one batch of rows.

    Args:
        backbone: with the adapters' layers attached.
        routes: to the adapters.
        cache: where keys and values are kept.
        states: of the rows.
        capture: replay steps from CUDA graphs; only on Triton kernels.
    """

    def __init__(
        self, backbone: Backbone, routes: AdapterRoutes, cache: KeyValuePages, states: RowStates, *, capture: bool
    ):
        self._backbone, self._routes, self._cache, self._states = backbone, routes, cache, states
        self._graphs = GraphPool(backbone.device) if capture else None
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, _StepInputs]] = {}
        self._step_inputs: _StepInputs | None = None
        self._num_rows = 0
        self._row_flops = 2 * sum(parameter.numel() for parameter in backbone.model.parameters())
        self._filled_flops = 0
        """Spent on rows that filled up steps since the last capture."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the graphs' memory back."""
        for graph, _ in self._captured.values():
            assert self._graphs is not None
            self._graphs.forget(graph)
        self._captured.clear()
        self._step_inputs = None

    def read_prompts(self, rows: Sequence[NewRow], tokens_by_adapter: Sequence[int]) -> None:
        """Fill the caches of rows that lie by adapter, and choose their first tokens."""
        device, lengths = self._backbone.device, tuple(len(row.prompt_ids) for row in rows)
        slots_N, last_N = self._states.begin(rows), torch.tensor(lengths).cumsum(0).to(device) - 1
        ids_T = torch.tensor([token for row in rows for token in row.prompt_ids]).to(device)
        positions_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
        pages_TM = self._states.pages_RM[slots_N].repeat_interleave(
            torch.tensor(lengths).to(device), dim=0, output_size=len(ids_T)
        )
        layout = CachedRows(
            cache=self._cache, places_T=places_in_pool(pages_TM, positions_T), rows=self._prompt_rows(lengths)
        )
        segments = self._routes.segments(tokens_by_adapter, len(ids_T))
        self._states.choose(self._logits(ids_T, positions_T, layout, last_N, segments), slots_N)

    def arrange(self, slots: Sequence[int], rows_by_adapter: Sequence[int]) -> None:
        """From now on steps serve the rows in these slots, which lie by adapter."""
        self._num_rows, size = len(slots), self._size(len(slots))
        filled = torch.full((size,), self._states.no_row)
        filled[: len(slots)] = torch.tensor(slots, dtype=torch.long)
        segments = self._routes.segments(rows_by_adapter, size)
        if size in self._captured:
            self._step_inputs = self._captured[size][1]
            self._step_inputs.slots_N.copy_(filled)
            self._step_inputs.segments.overwrite_with(segments)
        else:
            device = self._backbone.device
            self._step_inputs = _StepInputs(
                slots_N=filled.to(device), order_N=torch.arange(size, device=device), segments=segments
            )

    def step(self, most_places: int) -> None:
        """Read every row's last token and choose the next one. Waits for nothing.

        Args:
            most_places: no row has more places after this step.
        """
        inputs = self._step_inputs
        assert inputs is not None, "arrange rows first"
        size = len(inputs.slots_N)
        self._filled_flops += (size - self._num_rows) * self._row_flops
        if self._graphs is None:
            self._run(inputs, most_places)
        elif size in self._captured:
            self._captured[size][0].replay()
        else:
            with self._graphs.warming_up():
                self._run(inputs, self._states.max_places)
            graph, _ = self._graphs.capture(lambda: self._run(inputs, self._states.max_places))
            self._captured[size], self._filled_flops = (graph, inputs), 0

    def _size(self, num_rows: int) -> int:
        """Rows of the next steps: with graphs those of the smallest that holds them, unless filling it up has cost as
        much as to capture a smaller one.

        A rule over counts, not over measured times: the same work makes the same choices again.
        """
        if self._graphs is None:
            return num_rows
        own = bucket(num_rows)
        fitting = min((size for size in self._captured if size >= num_rows), default=own)
        return own if own < fitting and self._filled_flops > CAPTURE_FLOPS else fitting

    def _run(self, inputs: _StepInputs, most_places: int) -> None:
        states, slots_N = self._states, inputs.slots_N
        positions_N, pages_NM = states.positions_R[slots_N], states.pages_RM[slots_N]
        latest = LatestTokens(
            cache=self._cache,
            pages_NM=pages_NM,
            # what an ended row attends to is not read by anybody
            counts_N=(positions_N + 1).masked_fill(states.ended_R[slots_N], 1).int(),
            most_places=most_places,
        )
        layout = CachedRows(cache=self._cache, places_T=places_in_pool(pages_NM, positions_N), rows=latest)
        tokens_N = states.tokens_R[slots_N]
        states.choose(self._logits(tokens_N, positions_N, layout, inputs.order_N, inputs.segments), slots_N)

    def _logits(
        self, ids_T: Tensor, positions_T: Tensor, layout: RowLayout, kept_N: Tensor, segments: Segments
    ) -> Tensor:
        with self._backbone.passing(gradients=False), self._routes.use(segments):
            return packed_logits(self._backbone.model, ids_T, positions_T, layout, kept_N)

    def _prompt_rows(self, lengths: tuple[int, ...]) -> RowLayout:
        device = self._backbone.device
        if not self._backbone.takes_ragged_rows:
            return PackedRows(lengths, device)
        offsets = torch.tensor((0, *lengths)).cumsum(0, dtype=torch.int32).to(device)
        return RaggedRows(offsets, max(lengths))
