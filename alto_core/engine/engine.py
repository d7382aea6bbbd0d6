"""The engine: a backbone, its slots, and everything a job can go through in one. The executor drives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from alto_core.data.rows import TokenRow
from alto_core.domain import JobBudget, LoraJob, RowLosses, StepRecord
from alto_core.engine.activation_checkpointing import Recomputed, keep_activations, recompute
from alto_core.engine.active_job import ActiveJob
from alto_core.engine.adapter_plan import LayerMeasure
from alto_core.engine.backbone import Backbone
from alto_core.engine.checkpoint import JobSnapshot, take_snapshot, write_snapshot
from alto_core.engine.export import export_adapter
from alto_core.engine.generation import generate
from alto_core.engine.joint_adamw import JointAdamW
from alto_core.engine.lora_linear import LoraRouting, attach, detach
from alto_core.engine.objective import Objective, TokenObjective
from alto_core.engine.passes import CaptureTime, PassRunner
from alto_core.engine.regional_compile import compile_layers, uncompile_layers
from alto_core.engine.residents import Residents
from alto_core.engine.sampling import Sampling
from alto_core.engine.slots import AdapterSlots
from alto_core.engine.step import JointStepper
from alto_core.engine.target_modules import select_layers
from alto_core.engine.validation import side_losses
from alto_core.errors import ModelError
from kernels.path_choice import Implementation, choose_path

PASS_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Tokens of one training pass where the caller does not say. On a CPU larger passes take memory and save no time."""

UNTUNED = ""
"""Stands for the base model alone where a job id is asked for."""


class Engine:
    """Trains, evaluates and runs many adapters over one backbone. Closing it leaves the backbone as it was.

    Args:
        backbone: serves one engine at a time.
        target_modules: name endings of all layers that any job adapts.
        num_slots: most jobs at a time.
        rank_rows: sum of those that they take.
        max_lora_rank: rank rows of any job; None: `rank_rows`.
        max_pass_tokens: tokens of one training pass, which bounds the memory of activations; a joint step with more
            takes several. One micro batch is never divided. None: by kind of device.
        max_row_tokens: of the longest row, so that captured passes need not be captured anew for it; a longer one is
            taken all the same.
        objective: what jobs minimise; None: the negative log-likelihood of the trained tokens.
        measures: of the task's layers, by name; None where no job needs them.
        recomputed: parts of the model whose activations are not kept for backward.
        cuda_graph: where the device can, compile the model's layers and replay passes and steps of generation from CUDA
            graphs. False runs the same operations one by one, for debugging.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        target_modules: Sequence[str],
        num_slots: int,
        rank_rows: int,
        max_lora_rank: int | None = None,
        max_pass_tokens: int | None = None,
        max_row_tokens: int = 1,
        objective: Objective | None = None,
        measures: Mapping[str, LayerMeasure] | None = None,
        recomputed: Recomputed = "none",
        cuda_graph: bool = True,
    ):
        layers = select_layers(backbone.layers, target_modules)
        if not layers:
            raise ModelError(
                f"target_modules: got {list(target_modules)}, which match no linear layer of {backbone.name!r}."
            )
        self._backbone = backbone
        on_kernels = choose_path(backbone.device, backbone.dtype).implementation is Implementation.TRITON
        self._slots = AdapterSlots(
            layers,
            num_slots=num_slots,
            rank_rows=rank_rows,
            device=backbone.device,
            shadow_dtype=backbone.dtype if on_kernels and backbone.dtype != torch.float32 else None,
        )
        self._routing = LoraRouting()
        max_lora_rank = max_lora_rank or rank_rows
        self._jobs = Residents(backbone, self._slots, measures or {}, max_lora_rank=max_lora_rank)
        optimizer = JointAdamW(self._slots) if on_kernels else None
        # FSDP frees and allocates gathered weights, which no captured graph can follow.
        self._can_capture = cuda_graph and on_kernels and backbone.sharded is None
        self._runner = PassRunner(
            backbone,
            self._routing,
            optimizer,
            objective or TokenObjective(),
            num_slots=num_slots,
            max_lora_rank=max_lora_rank,
            max_row_tokens=max_row_tokens,
            on_kernels=on_kernels,
            capture=self._can_capture and backbone.takes_ragged_rows,
        )
        max_tokens = max_pass_tokens or PASS_TOKENS[backbone.device.type]
        self._stepper = JointStepper(self._runner, optimizer, max_pass_tokens=max_tokens)
        recompute(backbone.model, recomputed)
        attach(backbone.model, self._slots, self._routing)
        if self._runner.captures:
            compile_layers(backbone.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Jobs that hold a slot."""
        return self._jobs.job_ids

    @property
    def device(self) -> torch.device:
        return self._backbone.device

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def rank_rows(self) -> int:
        """Sum of ranks that fit."""
        return self._slots.rank_rows

    @property
    def max_pass_tokens(self) -> int:
        """Tokens of one training pass."""
        return self._stepper.max_pass_tokens

    @property
    def ahead(self) -> frozenset[str]:
        """Jobs that have made a step that ran out of memory for others. Here a step is made for all or for none."""
        return frozenset()

    @property
    def prompt_note(self) -> str:
        """One clause for people: how the prompts of preference pairs are encoded."""
        return "prompts are read once per pair" if self._runner.share_prompts else "prompts are read twice per pair"

    def limit_pass_tokens(self, max_pass_tokens: int) -> None:
        """Make smaller passes from now on, and give back what captured passes and the allocator hold unused.

        Call it when a step ran out of memory; that step has changed no job.
        """
        self._stepper.max_pass_tokens = max_pass_tokens
        self.forget_captures()

    def forget_captures(self) -> None:
        """Give back what captured passes and the allocator hold; passes are captured anew when they come again."""
        if self._backbone.device.type == "cuda":
            torch.cuda.synchronize(self._backbone.device)
        self._runner.close()
        if self._backbone.device.type == "cuda":
            torch.cuda.empty_cache()

    def fits(self, job: LoraJob, rank_start: int | None = None) -> bool:
        """Whether a slot and enough neighbouring rank rows are free; those from `rank_start` on, if given."""
        return self._jobs.fits(job, rank_start)

    def admit(
        self, job: LoraJob, budget: JobBudget, *, init_adapter: Path | None = None, rank_start: int | None = None
    ) -> None:
        """Give a job a slot and its initial adapter: by its `init`, or the function of an existing adapter.

        A start adapter of another alpha is rescaled, so that the job begins with the same outputs.

        Args:
            job: to be trained.
            budget: of the job.
            init_adapter: PEFT folder to start from.
            rank_start: first of its rank rows; None: of the first gap. See `rank_start`.

        Raises:
            EngineError: the job is here already, or does not fit.
            ModelError: a layer of the job is not among the engine's, or `init_adapter` does not fit the job.
        """
        self._jobs.admit(job, budget, init_adapter, rank_start)

    def restore(
        self, job: LoraJob, budget: JobBudget, folder: Path, *, step: int | None = None, rank_start: int | None = None
    ) -> int:
        """Give a job a slot and the state that `save` wrote. It goes on bit for bit as if it had never stopped.

        Args:
            job: whose state it is.
            budget: of the job.
            folder: its states.
            step: take no newer state; None: the newest.
            rank_start: first of its rank rows; None: of the first gap.

        Returns:
            The step of the state: an older one than asked for, where that is damaged.

        Raises:
            EngineError: the job is here already or does not fit, or the state is damaged, incomplete, or another job's.
        """
        return self._jobs.restore(job, budget, folder, step, rank_start).step

    def load_adapter(self, job: LoraJob, folder: Path) -> None:
        """Give an exported adapter a slot, for evaluation and generation only.

        Raises:
            EngineError: the job is here already, or does not fit.
            ModelError: the folder is not this job's adapter.
        """
        self._jobs.load_adapter(job, folder)

    def snapshot(self, job_id: str) -> JobSnapshot:
        """A copy of a job's whole state in host memory, for `write_snapshot`."""
        return take_snapshot(self._of(job_id), self._slots)

    def save(self, job_id: str, folder: Path) -> None:
        """Write a job's whole state under `folder`; the two newest states are kept."""
        write_snapshot(self.snapshot(job_id), folder)

    def rank_start(self, job_id: str) -> int:
        """First rank row of a job. Which gaps lie between jobs decides which others fit."""
        return self._of(job_id).block.rank_start

    def has_best(self, job_id: str) -> bool:
        """Whether an adapter was set aside by `keep_best`."""
        return self._of(job_id).best_step is not None

    def evict(self, job_id: str) -> None:
        """End a job's stay. Its rank rows are zeroed and free."""
        self._jobs.evict(job_id)

    def step(self, rows_by_job: Mapping[str, Sequence[TokenRow]]) -> None:
        """Make one optimizer update of each named job, all in shared passes; other jobs do not move.

        On CUDA the step is enqueued, and the call returns before it is done.

        Args:
            rows_by_job: the rows of each job's update, cut into micro batches of its adapter batch size.
        """
        self._stepper.step([self._of(job_id) for job_id in rows_by_job], list(rows_by_job.values()))

    def take_records(self) -> tuple[StepRecord, ...]:
        """What the steps since the last call measured: one record per job and step, in the order of the steps.

        Waits for the device. A loss or gradient that is not finite left its job's adapter alone.
        """
        return self._stepper.take_records()

    def take_capture_times(self) -> tuple[CaptureTime, ...]:
        """What each capture since the last call took, in their order; none where nothing is captured."""
        times = tuple(self._runner.capture_times)
        self._runner.capture_times.clear()
        return times

    def evaluate(self, job_ids: Sequence[str], rows: Sequence[TokenRow], *, max_tokens: int) -> dict[str, RowLosses]:
        """Losses of all rows under each job's current adapter; `UNTUNED` is the base model alone.

        Args:
            max_tokens: tokens of one forward pass. It changes speed and memory, not the numbers.
        """
        adapters = [self._adapter(job_id) for job_id in job_ids]
        sums = side_losses(self._runner, adapters, rows, max_tokens=max_tokens)
        return {
            job_id: self._runner.objective.row_losses(None if adapter is None else adapter.job, rows, of_adapter)
            for job_id, adapter, of_adapter in zip(job_ids, adapters, sums, strict=True)
        }

    def side_losses(self, job_id: str, rows: Sequence[TokenRow], *, max_tokens: int) -> NDArray[np.float64]:
        """Sums of token losses [rows, 2] under one adapter, of a pair's chosen and rejected answer.

        A plain row has its sum in the first place.
        """
        return side_losses(self._runner, [self._adapter(job_id)], rows, max_tokens=max_tokens)[0]

    def keep_best(self, job_id: str, val_loss: float) -> bool:
        """Set the current adapter aside if its validation loss is the lowest so far."""
        return self._of(job_id).keep_best(val_loss)

    def export(self, job_id: str, folder: Path, *, best: bool = True) -> None:
        """Write a job's adapter as a PEFT folder.

        Args:
            best: the adapter that `keep_best` set aside, the current one if there is none; False: the current one.

        Raises:
            EngineError: the adapter is not finite.
        """
        active = self._of(job_id)
        params_rW = active.best_or_current() if best else active.block.params_rW
        export_adapter(active, self._slots, params_rW, self._backbone.name, folder)

    def generate(
        self,
        prompts: Sequence[tuple[str | None, tuple[int, ...]]],
        *,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        max_rows: int | None = None,
        sampling: Sampling | None = None,
    ) -> list[tuple[int, ...]]:
        """Answers; each prompt names its job, None is the base model alone. See `generation.generate`."""
        return generate(
            self._backbone,
            self._routing,
            [(self._adapter(job_id or UNTUNED), ids) for job_id, ids in prompts],
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
            max_rows=max_rows,
            sampling=sampling,
            capture=self._can_capture,
        )

    def close(self) -> None:
        """Take the adapters off the backbone and forget all jobs."""
        uncompile_layers(self._backbone.model)
        keep_activations(self._backbone.model)
        detach(self._backbone.model)
        self._runner.close()
        self._jobs.clear()

    def _adapter(self, job_id: str) -> ActiveJob | None:
        return None if job_id == UNTUNED else self._of(job_id)

    def _of(self, job_id: str) -> ActiveJob:
        return self._jobs.of(job_id)
