"""Which adapter wins: validation rows pick it; test rows are for it alone, and the untuned model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from alto_core.data.rows import SplitData
from alto_core.domain import JobState, Score
from alto_core.errors import EngineError
from alto_core.evaluation import score_adapters
from alto_core.store import EventDraft
from alto_core.workspace import Workspace

CANDIDATE_STATES = (JobState.FINISHED, JobState.OVERFITTING)
"""A job that trained to its end, or had to be stopped past its best: its best adapter is a result."""


def evaluate_task(workspace: Workspace, *, num_slots: int) -> tuple[str, tuple[Score, ...]]:
    """Score the candidates, pick the winner, score it and the untuned model on the test rows.

    Returns:
        The winner's job id, and all scores: the candidates' on `validation`, then winner and untuned model on `test`.

    Raises:
        EngineError: no job left an adapter to evaluate.
    """
    ended = workspace.ended_as(*CANDIDATE_STATES)
    candidates = [job_id for job_id in ended if (workspace.job_folder(job_id) / "adapter").is_dir()]
    if not candidates:
        states = ", ".join(sorted({record.state for record in workspace.records().values()}))
        raise EngineError(
            f"no job left an adapter to evaluate: all ended as {states}. Lower search_space.learning_rate, or look at "
            "the curves in the report."
        )
    data = workspace.data
    scores = score_jobs(workspace, data.validation, candidates, num_slots=num_slots)
    winner = pick_winner(scores, workspace.task.evaluation.choose_by)
    if data.test is not None:
        scores += score_jobs(workspace, data.test, [winner, None], num_slots=num_slots)
    _record(workspace, winner, scores)
    return winner, scores


def pick_winner(scores: Sequence[Score], choose_by: str) -> str:
    """The candidate with the lowest loss, or the highest metric; ties go to the lower loss, then to the job id."""

    def key(score: Score) -> tuple[float, float, str]:
        metric = -score.metric_value.value if choose_by == "metric" and score.metric_value else 0.0
        return metric, score.loss, score.job_id or ""

    winner = min(scores, key=key).job_id
    assert winner is not None
    return winner


def describe_score(score: Score) -> str:
    """One line for people."""
    whose = score.job_id or "untuned model"
    metric = f", {score.metric} {score.metric_value}" if score.metric_value else ""
    return f"{whose} on {score.split}: loss {score.loss:.4f}{metric}"


def score_jobs(
    workspace: Workspace,
    split: SplitData,
    job_ids: Sequence[str | None],
    *,
    num_slots: int,
    folders: Mapping[str, Path] | None = None,
) -> tuple[Score, ...]:
    """Score in groups of as many adapters as there are slots; the untuned model (None) needs none.

    Args:
        folders: jobs whose best adapter is `adapter` in another folder than the job's own.
    """
    places = folders or {}
    scores: list[Score] = []
    group_size = max(num_slots, 2)
    for start in range(0, len(job_ids), group_size):
        group = job_ids[start : start + group_size]
        adapters = [job_id for job_id in group if job_id is not None]
        with workspace.engine(adapters, num_slots=len(adapters)) as engine:
            for job_id in adapters:
                folder = places.get(job_id, workspace.job_folder(job_id))
                engine.load_adapter(workspace.jobs[job_id], folder / "adapter")
            scores += score_adapters(
                engine,
                workspace.data,
                split,
                group,
                metric=workspace.task.evaluation.metric,
                max_new_tokens=workspace.task.evaluation.max_new_tokens,
                decode=workspace.decode,
            )
    return tuple(scores)


def _record(workspace: Workspace, winner: str, scores: tuple[Score, ...]) -> None:
    with workspace.tracked() as runs:
        runs.log_scores(scores)
    workspace.update_result(winner=winner, scores=scores)
    workspace.store.set_task_fields(workspace.task_id, winner_job_id=winner)
    workspace.store.append_events(
        workspace.task_id,
        [
            EventDraft(kind="score", job_id=score.job_id, text=describe_score(score), numbers={"loss": score.loss})
            for score in scores
        ],
    )
