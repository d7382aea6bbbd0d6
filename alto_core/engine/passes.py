"""One forward pass over the rows of many jobs, with or without gradients and update: as it comes, or from a CUDA graph.

On CUDA with Triton kernels and flash attention passes are captured as `capture_choice` says and replayed from then on.
Jobs that come and go, other ranks, learning rates and batch sizes change the content of their inputs alone.

Shape suffixes: P labels, Q measured quantities, J slots, U units of a loss.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from alto_core.data.packing import PackedBatch, pack_rows
from alto_core.engine.backbone import Backbone
from alto_core.engine.capture_choice import CaptureChoice, PassKey, PassKind
from alto_core.engine.graph_capture import GraphPool
from alto_core.engine.joint_adamw import JointAdamW
from alto_core.engine.lora_linear import LoraRouting
from alto_core.engine.losses import pass_losses
from alto_core.engine.objective import LabelFields, Objective
from alto_core.engine.packed_attention import PackedRows, RaggedRows
from alto_core.engine.pass_inputs import PassInputs, PassShape, shape_of
from alto_core.engine.regional_compile import compile_time
from kernels.segments import SegmentSpec, make_segments
from kernels.side_streams import UnfinishedGradients

UNFINISHED_TOKENS, UNFINISHED_VALUES = 1024, 2**21
"""Up to so many tokens, or values of a layer's input, gradients of adapters may run on beside the layers that follow.

It keeps all layers' inputs and gradients in memory, and gains where the frozen products leave the GPU room.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class PassWork:
    """The content of one pass."""

    batch: PackedBatch
    specs: tuple[SegmentSpec, ...]
    layers_by_segment: tuple[Collection[int], ...]
    fields: LabelFields
    lowest_layer: int = 0
    """No adapter of the pass has a linear layer before this one."""


@dataclass(frozen=True, kw_only=True)
class CaptureTime:
    """What one capture took."""

    kind: PassKind
    tokens: int
    """Of the captured pass."""
    seconds: float
    """With the run before it, in which whatever is missing is compiled."""
    compile_seconds: float
    """Of these in `torch.compile` and in Triton."""


class PassRunner:
    """Runs passes of one engine.

    Args:
        backbone: with the jobs' layers attached.
        routing: of these layers.
        optimizer: for passes that update; None where jobs are updated one by one.
        objective: of passes with gradients.
        num_slots: of the engine.
        max_lora_rank: of any job.
        max_row_tokens: of any row, as far as it is known; a longer one makes captured passes be captured anew.
        on_kernels: all layers run on Triton kernels.
        capture: replay passes from CUDA graphs; only with `on_kernels` and flash attention.
    """

    def __init__(
        self,
        backbone: Backbone,
        routing: LoraRouting,
        optimizer: JointAdamW | None,
        objective: Objective,
        *,
        num_slots: int,
        max_lora_rank: int,
        max_row_tokens: int,
        on_kernels: bool,
        capture: bool,
    ):
        self._backbone, self._routing, self._optimizer, self.objective = backbone, routing, optimizer, objective
        self._max_lora_rank = max_lora_rank
        self._on_kernels, self.captures = on_kernels, capture
        num_quantities = 1 + len(objective.measures)
        self.measured_QJ = torch.zeros(num_quantities, num_slots, dtype=torch.float32, device=backbone.device)
        """Losses and the objective's measures by slot, added up over passes until someone zeroes them."""
        self.losses_J = self.measured_QJ[0]
        self.norms_J = torch.zeros_like(self.losses_J)
        """Norms of the gradients of the last update, by slot."""
        self._slot_numbers_J1 = torch.arange(num_slots, device=backbone.device)[:, None]
        self._choice = CaptureChoice(
            num_parameters=sum(parameter.numel() for parameter in backbone.model.parameters()),
            num_slots=num_slots,
            max_lora_rank=max_lora_rank,
            max_row_tokens=max_row_tokens,
        )
        self._captured: dict[PassKey, _CapturedPass] = {}
        self.capture_times: list[CaptureTime] = []
        """Of all captures so far; who reads them may empty the list."""
        self._graphs = GraphPool(backbone.device) if capture else None
        self._unfinished_tokens = max(UNFINISHED_TOKENS, UNFINISHED_VALUES // backbone.layers[0].d_in)

    @property
    def num_captures(self) -> int:
        """Captured passes that are kept."""
        return len(self._captured)

    @property
    def share_prompts(self) -> bool:
        """Whether packs of this runner hold a pair's prompt once."""
        return self._backbone.shares_prompts

    def run(self, kind: PassKind, work: PassWork) -> Tensor:
        """Run one pass; gives the losses of its labels, float32 [P], valid until the next pass."""
        has_dropout = any(spec.dropout for spec in work.specs)
        pairs = work.fields.pairs
        needed = shape_of(
            work.batch,
            work.specs,
            lora_rank=self._max_lora_rank,
            has_dropout=has_dropout,
            pairs=0 if pairs is None else len(pairs.pair_weights_M),
            lowest_layer=work.lowest_layer,
        )
        if self.captures:
            captured = self._captured_pass(kind, needed)
            _load(captured.inputs, work)
            captured.graph.replay()
            return captured.losses_P[: needed.labels]
        inputs = PassInputs(needed, self._backbone.device)
        _load(inputs, work)
        with self._backbone.passing(gradients=kind is not PassKind.LOSSES):
            losses_P = self._gradients(kind, inputs, None if self._on_kernels else work)
        self._update(kind)
        return losses_P

    def close(self) -> None:
        """Give the captured passes' memory back. The next pass is captured anew."""
        for key in tuple(self._captured):
            self._forget(key)
        self._choice.clear()

    def _forget(self, key: PassKey) -> None:
        assert self._graphs is not None
        self._graphs.forget(self._captured.pop(key).graph)

    def _gradients(self, kind: PassKind, inputs: PassInputs, work: PassWork | None) -> Tensor:
        """Forward and backward: with `work` routed on the host layer by layer, without it by what the device holds."""
        backbone = self._backbone
        unfinished = UnfinishedGradients() if inputs.shape.tokens <= self._unfinished_tokens else None
        if work is None:
            accumulate = kind is not PassKind.UPDATE
            routed = self._routing.use_on_device(
                inputs.segments,
                accumulate=accumulate,
                unfinished=unfinished,
                lowest_layer=inputs.shape.lowest_layer,
            )
        else:
            routed = self._routing.use(make_segments(work.specs, backbone.device), work.layers_by_segment)
        with torch.set_grad_enabled(kind is not PassKind.LOSSES), routed:
            if kind is PassKind.LOSSES:
                return pass_losses(backbone, inputs, self._rows(inputs))[1]
            measured = self.objective.measure(backbone, inputs, self._rows(inputs))
            measured.objective.backward()  # parts of the model may run again in it, so it is routed as well
        if unfinished is not None:
            unfinished.finish()
        is_own_JU = measured.slots_U[None, :] == self._slot_numbers_J1
        for total_J, share_U in zip(self.measured_QJ, measured.shares_QU, strict=True):
            # Masked, not multiplied by 0: another job's NaN must not come along.
            total_J += torch.where(is_own_JU, share_U[None, :], 0.0).sum(1).float()
        return measured.losses_P

    def _update(self, kind: PassKind) -> None:
        if kind is PassKind.UPDATE:
            assert self._optimizer is not None
            self.norms_J.copy_(self._optimizer.update(self.losses_J))

    def _rows(self, inputs: PassInputs) -> PackedRows | RaggedRows:
        if self._backbone.takes_ragged_rows:
            return RaggedRows(inputs.row_offsets_N1, inputs.shape.longest_row, inputs.shared_keys)
        return PackedRows(inputs.row_lengths, self._backbone.device, inputs.row_prefixes)

    def _captured_pass(self, kind: PassKind, needed: PassShape) -> _CapturedPass:
        has_sides = kind is PassKind.UPDATE and self._optimizer is not None and self._optimizer.has_sides
        choice = self._choice.choose(kind, needed, has_sides=has_sides)
        for key in choice.forgotten:
            self._forget(key)
        if choice.must_capture:
            try:
                self._captured[choice.key] = self._timed_capture(kind, choice.shape)
            except BaseException:
                self._choice.forget(choice.key)
                raise
        return self._captured[choice.key]

    def _timed_capture(self, kind: PassKind, shape: PassShape) -> _CapturedPass:
        torch.cuda.synchronize(self._backbone.device)  # what was enqueued before is none of its time
        started = time.perf_counter()
        with compile_time() as compiling:
            captured = self._capture(kind, shape)
        seconds = time.perf_counter() - started
        self.capture_times.append(
            CaptureTime(kind=kind, tokens=shape.tokens, seconds=seconds, compile_seconds=compiling[0])
        )
        return captured

    def _capture(self, kind: PassKind, shape: PassShape) -> _CapturedPass:
        inputs = PassInputs(shape, self._backbone.device)
        nothing = PassWork(
            batch=pack_rows([]),
            specs=(),
            layers_by_segment=(),
            fields=LabelFields(label_weights_P=np.zeros(0, np.float32), label_slots_P=np.zeros(0, np.int32)),
        )
        _load(inputs, nothing)
        assert self._graphs is not None
        with self._graphs.warming_up():
            # Nobody's tokens change no job. The optimizer is warm already.
            self._gradients(kind, inputs, None)

        def run() -> Tensor:
            losses_P = self._gradients(kind, inputs, None)
            self._update(kind)
            return losses_P

        graph, losses_P = self._graphs.capture(run)
        return _CapturedPass(inputs=inputs, graph=graph, losses_P=losses_P)


@dataclass(frozen=True, kw_only=True, eq=False)
class _CapturedPass:
    inputs: PassInputs
    graph: torch.cuda.CUDAGraph
    losses_P: Tensor
    """What a replay writes."""


def _load(inputs: PassInputs, work: PassWork) -> None:
    fields = work.fields
    inputs.load(
        work.batch,
        work.specs,
        label_weights_P=fields.label_weights_P,
        label_slots_P=fields.label_slots_P,
        pairs=fields.pairs,
    )
