"""The jobs that hold a slot of an engine: how one comes in, with which adapter, and leaves.

Shape suffixes: W one job's parameters, r ranks, I layer inputs, O layer outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.active_job import ActiveJob
from alto_core.engine.adapter_plan import LayerMeasure, block_of, plan_adapter
from alto_core.engine.backbone import Backbone
from alto_core.engine.checkpoint import load_checkpoint
from alto_core.engine.export import read_adapter
from alto_core.engine.initialization import AdapterStarts
from alto_core.engine.slots import AdapterSlots
from alto_core.engine.target_modules import LinearLayer, select_layers
from alto_core.errors import EngineError, ModelError

Fill = Callable[[ActiveJob], None]
"""Writes the adapter of a job that has just got its slot."""


class Residents:
    """The jobs in the slots of one engine.

    Args:
        backbone: that they adapt.
        slots: to give away.
        measures: of the task's layers, by name; empty where no job needs them.
        max_lora_rank: rank rows of any job.
    """

    def __init__(
        self, backbone: Backbone, slots: AdapterSlots, measures: Mapping[str, LayerMeasure], *, max_lora_rank: int
    ):
        self._backbone, self._slots, self._measures, self._max_lora_rank = backbone, slots, measures, max_lora_rank
        self._starts = AdapterStarts(backbone.model, measures)
        self._active: dict[str, ActiveJob] = {}

    @property
    def job_ids(self) -> tuple[str, ...]:
        return tuple(self._active)

    def of(self, job_id: str) -> ActiveJob:
        """One of them.

        Raises:
            EngineError: it holds no slot.
        """
        if job_id not in self._active:
            raise EngineError(f"job {job_id!r} holds no slot; those that do: {', '.join(self._active) or 'none'}.")
        return self._active[job_id]

    def fits(self, job: LoraJob, rank_start: int | None) -> bool:
        """Whether a slot and enough neighbouring rank rows are free; those from `rank_start` on, if given."""
        return job.rank_rows <= self._max_lora_rank and self._slots.find(job.rank_rows, rank_start) is not None

    def admit(self, job: LoraJob, budget: JobBudget, init_adapter: Path | None, rank_start: int | None) -> None:
        """With the adapter that the job begins with; see `Engine.admit`."""

        def fill(active: ActiveJob) -> None:
            parts = tuple(self._slots.by_layer(active.block.params_rW, active.layers))
            if init_adapter is None:
                for adapted, (_, a_rI, b_rO) in zip(active.plan, parts, strict=True):
                    self._starts.fill(job, adapted, a_rI, b_rO)
            else:
                trained_scale = read_adapter(active, self._slots, init_adapter)
                for _, _, b_rO in parts:
                    b_rO.mul_(trained_scale / job.scale)
            active.block.publish()

        self._take_in(job, budget, rank_start, fill)

    def restore(
        self, job: LoraJob, budget: JobBudget, folder: Path, step: int | None, rank_start: int | None
    ) -> ActiveJob:
        """With a saved state; see `Engine.restore`."""
        return self._take_in(
            job, budget, rank_start, lambda active: load_checkpoint(active, self._slots, folder, step=step)
        )

    def load_adapter(self, job: LoraJob, folder: Path) -> None:
        """With an exported adapter, not to be trained; see `Engine.load_adapter`.

        Raises:
            EngineError: the job is here already, or does not fit.
            ModelError: the folder is not this job's adapter.
        """

        def fill(active: ActiveJob) -> None:
            trained_scale = read_adapter(active, self._slots, folder)
            if abs(trained_scale - job.scale) > 1e-6 * job.scale:
                raise ModelError(
                    f"{folder}: got an adapter of scale {trained_scale:g}, expected {job.scale:g}, as in {job.job_id}."
                )
            active.block.publish()

        self._take_in(job, None, None, fill)

    def evict(self, job_id: str) -> None:
        """Zero its rank rows and free them."""
        self._slots.give_back(self.of(job_id).block)
        del self._active[job_id]

    def clear(self) -> None:
        """Forget all jobs; the slots go as well."""
        self._active.clear()

    def _take_in(self, job: LoraJob, budget: JobBudget | None, rank_start: int | None, fill: Fill) -> ActiveJob:
        active = self._place(job, budget, rank_start)
        try:
            fill(active)
        except BaseException:
            self.evict(job.job_id)
            raise
        return active

    def _place(self, job: LoraJob, budget: JobBudget | None, rank_start: int | None) -> ActiveJob:
        if job.job_id in self._active:
            raise EngineError(f"job {job.job_id} holds a slot already.")
        layers = select_layers(self._backbone.layers, job.target_modules)
        plan = plan_adapter(job, layers, self._measures)
        known = {layer.index for layer in self._slots.layers}
        if not plan or any(adapted.layer.index not in known for adapted in plan):
            raise ModelError(
                f"job {job.job_id}: got target_modules {list(job.target_modules)}, "
                "expected layers that the engine adapts."
            )
        if not self.fits(job, rank_start):
            raise EngineError(
                f"job {job.job_id} of {job.rank_rows} rank rows does not fit. Evict another, or make the engine larger."
            )
        ratios = job.side_ratios
        active = ActiveJob(
            job=job,
            budget=budget,
            block=self._slots.take(job.rank_rows, rank_start),
            plan=plan,
            lowest_layer=self._lowest_layer(plan[0].layer),
            side_ratios_W=None if ratios == (1.0, 1.0) else self._slots.by_side(*ratios),
        )
        self._active[job.job_id] = active
        return active

    def _lowest_layer(self, first: LinearLayer) -> int:
        """Where backward may end for a job: whole decoder layers count, lest passes be captured for little."""
        return 0 if block_of(first) == block_of(self._slots.layers[0]) else first.index
