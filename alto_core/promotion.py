"""From challenger to champion: both answer the same held-out rows, and the better one serves.

A challenger wins only where it is better by more than the margin outside the 95 % interval of the paired difference;
within noise the champion stays. Every decision is kept with its numbers, as a tag of the challenger's version and as an
artifact of its run. `roll_back` undoes the last promotion.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from alto_core.engine.backbone import load_backbone
from alto_core.engine.engine import Engine
from alto_core.engine.export import adapter_job
from alto_core.errors import EngineError, StoreError, TrackingError
from alto_core.evaluation import SplitResult, evaluate_adapters, held_out_digest, loss_difference, score_difference
from alto_core.outcomes import Interval
from alto_core.registration import held_out
from alto_core.settings import Settings
from alto_core.task_engine import measure_references, objective_of
from alto_core.tracking import CHALLENGER, CHAMPION, OWNER, PREVIOUS_TAG, RegisteredAdapter, Registry, Tracker
from alto_core.workspace import Workspace

BASE_TAGS = ("alto.base_model", "alto.base_revision", "alto.base_fingerprint")


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """How a challenger stands against a champion."""

    outcome: str
    """`better`, `within noise` or `worse`; without a comparison `first`, `other rows`, `other base model` or
    `rolled back`."""
    reason: str
    """One sentence with the numbers in it."""
    quantity: str | None = None
    """`loss`, where lower is better, or the name of a metric, where higher is."""
    margin: float | None = None
    challenger_value: float | None = None
    champion_value: float | None = None
    difference: Interval | None = None
    """Challenger minus champion, paired."""
    held_out_digest: str | None = None

    @property
    def promotes(self) -> bool:
        return self.outcome in ("first", "better")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What became of a registered model's champion."""

    name: str
    version: int
    """The version in question: the challenger, or the one that a rollback brought back."""
    champion_before: int | None
    champion: int | None
    """Now."""
    at: str
    """UTC."""
    judgement: Judgement

    @property
    def changed(self) -> bool:
        return self.champion != self.champion_before

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)


def promote(name: str, settings: Settings, *, margin: float = 0.0, accept_other_rows: bool = False) -> Decision:
    """Hold the challenger of a registered model against its champion, and let the better one be champion.

    Args:
        name: registered model.
        settings: where MLflow and the tasks are.
        margin: by how much the challenger must be better, in the units of the metric (or nats per token).
        accept_other_rows: compare on the challenger's held-out rows even where the champion was held out others, some
            of which it may have been trained on.

    Raises:
        TrackingError: there is no challenger, or an alias moved meanwhile.
        StoreError: the challenger's rows are not in this ALTO home.
        OwnerError: the challenger is someone else's.
        ValueError: the margin is negative.
    """
    if not margin >= 0:
        raise ValueError(f"expected a margin of 0 or more, but got {margin}")
    registry = Tracker(settings).registry
    challenger, champion = registry.find(name, CHALLENGER), registry.find_if_any(name, CHAMPION)
    registry.person.require_owner(challenger.tags.get(OWNER), f"challenger {challenger.uri}", "promote")
    judgement = _judge(registry, challenger, champion, settings, margin, accept_other_rows)
    before = None if champion is None else champion.version
    decision = Decision(
        name=name,
        version=challenger.version,
        champion_before=before,
        champion=challenger.version if judgement.promotes else before,
        at=_now(),
        judgement=judgement,
    )
    if judgement.promotes:
        registry.make_champion(challenger, instead_of=champion, decision=decision.as_json(), previous=champion)
    else:
        registry.keep_decision(challenger, decision.as_json())
    return decision


def roll_back(name: str, settings: Settings) -> Decision:
    """Make the version champion that was it before the present one.

    Raises:
        TrackingError: there is no champion, no earlier one, or it was deleted.
        OwnerError: the champion is someone else's.
    """
    registry = Tracker(settings).registry
    champion = registry.find(name, CHAMPION)
    registry.person.require_owner(champion.tags.get(OWNER), f"champion {champion.uri}", "roll back")
    earlier = champion.tags.get(PREVIOUS_TAG)
    if earlier is None:
        raise TrackingError(
            f"{name} version {champion.version}: got a champion without one before it, expected one that was promoted. "
            "Set the alias by hand in MLflow, if another version is to serve."
        )
    restored = registry.version(name, int(earlier))
    reason = f"version {restored.version} serves again instead of version {champion.version}"
    decision = Decision(
        name=name,
        version=restored.version,
        champion_before=champion.version,
        champion=restored.version,
        at=_now(),
        judgement=Judgement(outcome="rolled back", reason=reason),
    )
    registry.make_champion(restored, instead_of=champion, decision=decision.as_json())
    return decision


def compare(challenger: SplitResult, champion: SplitResult, *, margin: float, digest: str) -> Judgement:
    """Judge two adapters by the same held-out rows: by the metric where there is one, else by the loss. Pure.

    Args:
        digest: of the rows.

    Raises:
        EngineError: the metric failed on the answers of one of them.
    """
    fault = challenger.metric_fault or champion.metric_fault
    if fault:
        raise EngineError(f"nothing was promoted, the two cannot be compared: {fault}")
    if challenger.metric is None:
        quantity, difference = "loss", loss_difference(challenger.losses, champion.losses)
        ours, theirs = challenger.losses.mean, champion.losses.mean
        gain_low, gain_high = -difference.high, -difference.low
    else:
        quantity, difference = challenger.metric, score_difference(challenger.row_scores, champion.row_scores)
        ours, theirs = (sum(scores) / len(scores) for scores in (challenger.row_scores, champion.row_scores))
        gain_low, gain_high = difference.low, difference.high
    outcome = "better" if gain_low > margin else "worse" if gain_high < 0 else "within noise"
    reason = (
        f"{outcome} on {difference.num_rows} held-out rows: {quantity} {ours:.4f} against {theirs:.4f}, "
        f"difference {difference}, margin {margin:g}"
    )
    return Judgement(
        outcome=outcome,
        reason=reason,
        quantity=quantity,
        margin=margin,
        challenger_value=ours,
        champion_value=theirs,
        difference=difference,
        held_out_digest=digest,
    )


def _judge(
    registry: Registry,
    challenger: RegisteredAdapter,
    champion: RegisteredAdapter | None,
    settings: Settings,
    margin: float,
    accept_other_rows: bool,
) -> Judgement:
    if champion is None:
        return Judgement(outcome="first", reason=f"there is no champion, so version {challenger.version} becomes it")
    for tag in BASE_TAGS:
        ours, theirs = challenger.tags.get(tag, ""), champion.tags.get(tag, "")
        if ours != theirs:
            reason = (
                f"{tag} is {ours!r}, the champion's is {theirs!r}: whatever serves the champion cannot serve it. "
                "Give tasks of another base model a registry_name of their own"
            )
            return Judgement(outcome="other base model", reason=reason)
    workspace = _workspace(challenger, settings)
    digest = held_out_digest(held_out(workspace), workspace.data.stop_token_ids)
    champion_digest = champion.tags.get("alto.held_out_digest")
    if champion_digest != digest and not accept_other_rows:
        reason = (
            f"its held-out rows are {digest}, the champion's {champion_digest}: the champion may have been trained on "
            "some of them. Accept other rows if it was not"
        )
        return Judgement(outcome="other rows", reason=reason, held_out_digest=digest)
    results = _evaluate(registry, workspace, (challenger, champion))
    return compare(results[0], results[1], margin=margin, digest=digest)


def _workspace(challenger: RegisteredAdapter, settings: Settings) -> Workspace:
    workspace = Workspace(challenger.tags.get("alto.task_id", ""), settings)
    try:
        workspace.store.task(workspace.task_id)
    except StoreError as error:
        raise StoreError(
            f"{challenger.uri}: its held-out rows lie with task {workspace.task_id!r}, which is not in "
            f"{settings.home}. Promote it where it was tuned."
        ) from error
    return workspace


def _evaluate(
    registry: Registry, workspace: Workspace, adapters: tuple[RegisteredAdapter, ...]
) -> tuple[SplitResult, ...]:
    """The adapters as the registry holds them, in shared batches on the held-out rows of one task."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = [registry.download(adapter, Path(temporary) / str(adapter.version)) for adapter in adapters]
        jobs = [adapter_job(folder, number) for number, folder in enumerate(folders)]
        with Engine(
            load_backbone(workspace.task.model, workspace.device),
            target_modules=sorted({name for job in jobs for name in job.target_modules}),
            num_slots=len(jobs),
            rank_rows=sum(job.lora_rank for job in jobs),
            objective=objective_of(workspace),
        ) as engine:
            measure_references(workspace, engine)
            for job, folder in zip(jobs, folders, strict=True):
                engine.load_adapter(job, folder)
            return evaluate_adapters(
                engine,
                workspace.data,
                held_out(workspace),
                [job.job_id for job in jobs],
                evaluation=workspace.task.evaluation,
                codec=workspace.codec,
            )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
