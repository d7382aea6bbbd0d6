"""Which adapter wins: validation rows pick it; test rows are for it alone, and the untuned model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from alto_core import wording
from alto_core.data.rows import SplitData
from alto_core.domain import EARLY_EXITS, JobState
from alto_core.engine.adapter_parallel import AnyEngine
from alto_core.errors import EngineError
from alto_core.evaluation import (
    SplitResult,
    evaluate_adapters,
    generate_answers,
    loss_difference,
    score_difference,
    write_answers,
)
from alto_core.outcomes import AnswerSample, Comparison, Score
from alto_core.report import count_samples, job_rows
from alto_core.store import EventDraft
from alto_core.task_engine import open_engine
from alto_core.tracking import TaskRuns
from alto_core.workspace import Workspace

NUM_SAMPLES = 6
NUM_CHECK_ROWS = 4


def evaluate_task(workspace: Workspace, *, num_slots: int) -> tuple[str, tuple[Score, ...]]:
    """Evaluate the candidates, pick the winner, evaluate it and the untuned model on the test rows.

    What an earlier run of the task found stands.

    Returns:
        The winner's job id, and all scores: the candidates' on `validation`, then winner and untuned model on `test`.

    Raises:
        EngineError: no job left an adapter to evaluate.
    """
    result = workspace.result
    if result.winner is not None:
        return result.winner, result.scores
    candidates = jobs_that_may_win(workspace)
    if not candidates:
        states = ", ".join(sorted({record.state for record in workspace.records().values()}))
        raise EngineError(
            f"no job left an adapter to evaluate: all ended as {states}. Lower search_space.learning_rate, or look at "
            "the curves in the report."
        )
    data = workspace.data
    _announce(workspace, data.validation, candidates)
    results = _evaluate(workspace, data.validation, candidates, num_slots=num_slots)
    winner = pick_winner([result.score() for result in results], workspace.task.evaluation.choose_by)
    if data.test is not None:
        _announce(workspace, data.test, [winner, None])
        results += _evaluate(workspace, data.test, [winner, None], num_slots=num_slots)
    scores = tuple(result.score() for result in results)
    _record(workspace, winner, results, scores, _samples(workspace, winner, results))
    return winner, scores


def jobs_that_may_win(workspace: Workspace) -> tuple[str, ...]:
    """Ids of the ended jobs whose best adapters are there and are results; see `JobState.may_win`."""
    gates = workspace.result.gates[:1]
    ranked = {entry.job_id for gate in gates for entry in gate.entries if entry.gate_rank is not None}
    return tuple(
        job_id
        for job_id, record in workspace.records().items()
        if record.state.may_win(was_ranked=job_id in ranked) and (workspace.job_folder(job_id) / "adapter").is_dir()
    )


def pick_winner(scores: Sequence[Score], choose_by: str) -> str:
    """The candidate with the lowest loss, or the highest metric; ties go to the lower loss, then to the job id."""

    def key(score: Score) -> tuple[float, float, str]:
        # where the metric failed, behind all others
        metric = -score.metric_value.value if score.metric_value else math.inf
        return metric if choose_by == "metric" else 0.0, score.loss, score.job_id or ""

    winner = min(scores, key=key).job_id
    assert winner is not None
    return winner


def compare_with_others(winner: str, results: Sequence[SplitResult]) -> tuple[Comparison, ...]:
    """The winner against everybody else of the same split, by loss and by the metric where there is one."""
    comparisons = []
    own = {result.split: result for result in results if result.job_id == winner}
    for other in results:
        if other.job_id == winner:
            continue
        mine = own[other.split]
        differences = {"loss": loss_difference(mine.losses, other.losses)}
        if mine.metric is not None and mine.row_scores and other.row_scores:
            differences[mine.metric] = score_difference(mine.row_scores, other.row_scores)
        comparisons += [
            Comparison(job_id=winner, other_id=other.job_id, split=other.split, quantity=quantity, difference=value)
            for quantity, value in differences.items()
        ]
    return tuple(comparisons)


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
    """Scores of jobs' best adapters on a split; None is the untuned model. Records nothing.

    Args:
        num_slots: so many adapters are evaluated at a time.
        folders: jobs whose best adapter is `adapter` in another folder than the job's own.
    """
    results = _evaluate(workspace, split, job_ids, num_slots=num_slots, folders=folders)
    return tuple(result.score() for result in results)


def _announce(workspace: Workspace, split: SplitData, job_ids: Sequence[str | None]) -> None:
    """Say what is measured now: generating answers takes minutes without a GPU."""
    adapters = wording.plural(sum(job_id is not None for job_id in job_ids), "adapter")
    untuned = " and the untuned model" if None in job_ids else ""
    text = f"{adapters}{untuned} on {wording.plural(len(split.rows), f'{split.name} row')}"
    workspace.store.append_events(workspace.task_id, [EventDraft(kind="scoring", text=text)])


def _evaluate(
    workspace: Workspace,
    split: SplitData,
    job_ids: Sequence[str | None],
    *,
    num_slots: int,
    folders: Mapping[str, Path] | None = None,
) -> list[SplitResult]:
    """In groups of as many adapters as there are slots; the untuned model (None) needs none."""
    group_size = max(num_slots, 2)
    results: list[SplitResult] = []
    for start in range(0, len(job_ids), group_size):
        group = job_ids[start : start + group_size]
        with _engine_with(workspace, group, folders or {}) as engine:
            results += evaluate_adapters(
                engine,
                workspace.data,
                split,
                group,
                evaluation=workspace.task.evaluation,
                codec=workspace.codec,
            )
    return results


@contextmanager
def _engine_with(
    workspace: Workspace, job_ids: Sequence[str | None], folders: Mapping[str, Path]
) -> Iterator[AnyEngine]:
    """An engine that holds the best adapter of each job; the untuned model needs no slot."""
    adapters = [job_id for job_id in job_ids if job_id is not None]
    with open_engine(workspace, adapters, num_slots=len(adapters)) as engine:
        for job_id in adapters:
            folder = folders.get(job_id, workspace.job_folder(job_id))
            engine.load_adapter(workspace.jobs[job_id], folder / "adapter")
        yield engine


def _samples(workspace: Workspace, winner: str, results: Sequence[SplitResult]) -> tuple[AnswerSample, ...]:
    """Answers to the first prompts of the last split; generated here where the metric asked for none."""
    data = workspace.data
    split = data.test or data.validation
    rows = split.generation_rows[:NUM_SAMPLES]
    if not rows:
        return ()
    known = {result.job_id: result.answers for result in results if result.split == split.name}
    if not (known.get(winner) and known.get(None)):
        evaluation = workspace.task.evaluation
        with _engine_with(workspace, [winner], {}) as engine:
            ours, untuned = generate_answers(
                engine, data, split, [winner, None], evaluation=evaluation, codec=workspace.codec, num_rows=len(rows)
            )
        known = {winner: ours, None: untuned}
    return tuple(
        AnswerSample(
            split=split.name,
            prompt=workspace.codec.decode(row.prompt_ids),
            reference=row.reference,
            winner=known[winner][i],
            untuned=known[None][i],
        )
        for i, row in enumerate(rows)
    )


def _record(
    workspace: Workspace,
    winner: str,
    results: Sequence[SplitResult],
    scores: tuple[Score, ...],
    samples: tuple[AnswerSample, ...],
) -> None:
    data = workspace.data
    with workspace.tracked() as runs:
        runs.log_scores(scores)
        _log_summary(workspace, runs)
        for split in (data.validation, data.test):
            of_split = [result for result in results if split and result.split == split.name and result.answers]
            if split and of_split:
                file = workspace.folder / "answers" / f"{split.name}.parquet"
                write_answers(of_split, split, file)
                runs.log_artifact(file, "answers")
    workspace.store.set_task_fields(workspace.task_id, winner_job_id=winner)
    events = [
        EventDraft(kind="score", job_id=score.job_id, text=describe_score(score), numbers={"loss": score.loss})
        for score in scores
    ]
    workspace.store.append_events(workspace.task_id, [*events, *_warnings(winner, results)])
    last = [result for result in results if result.job_id == winner][-1]
    # the last word: a run that dies before it evaluates again
    workspace.update_result(
        winner=winner,
        scores=scores,
        comparisons=compare_with_others(winner, results),
        check_losses=last.losses.token_loss_sums[:NUM_CHECK_ROWS],
        samples=samples,
    )


def _log_summary(workspace: Workspace, runs: TaskRuns) -> None:
    """What the task's own run shows in tables and charts, where its jobs' curves are not."""
    jobs = job_rows(workspace.store.jobs(workspace.task_id))
    samples = count_samples(jobs, num_train_rows=workspace.result.num_train_rows)
    profile = workspace.store.profile(workspace.task_id)
    losses = [row.best_val_loss for row in jobs if row.best_val_loss is not None]
    runs.log_task_summary(
        survivors=sum(row.state is JobState.FINISHED for row in jobs),
        exited=sum(row.state in EARLY_EXITS for row in jobs),
        samples_saved=samples.saved_share,
        tokens_per_second=profile.tokens_per_second if profile else 0.0,
        best_val_loss=min(losses, default=None),
    )


def _warnings(winner: str, results: Sequence[SplitResult]) -> list[EventDraft]:
    """Metrics that failed; an adapter that changes nothing, which scores what the untuned model does, to the digit."""
    warnings = [
        EventDraft(
            kind="warning", job_id=result.job_id, text=f"no {result.metric} on {result.split}: {result.metric_fault}"
        )
        for result in results
        if result.metric_fault
    ]
    losses = {result.job_id: result.losses for result in results if result.split == "test"}
    if winner in losses and losses[winner] == losses.get(None):
        text = f"{winner} changes nothing: every test row has the loss that it has with the untuned model"
        warnings.append(EventDraft(kind="warning", job_id=winner, text=text))
    return warnings
