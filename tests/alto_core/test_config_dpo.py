"""`objective: dpo` in a task file: its defaults, what it refuses, the jobs it makes, what it measures."""

from __future__ import annotations

import math
from typing import Any

import pytest

from alto_core.config import DPO_LEARNING_RATES, parse_task, with_changes
from alto_core.domain import RowLosses
from alto_core.errors import TaskFileError
from alto_core.evaluation.preference import pair_scores, preference_measures
from alto_core.preference import PairLosses, PreferenceOptions
from alto_core.search_space import expand_search_space

GOOD: dict[str, Any] = {
    "name": "prefers",
    "model": {"name": "some/model"},
    "objective": "dpo",
    "data": {"source": "some/pairs", "validation": {"rows": 16}},
    "search_space": {"lora_rank": 8},
    "budget": {"epochs": 1},
}


def jobs_of(content: dict[str, Any]) -> list[Any]:
    task = parse_task(content)
    return list(expand_search_space(task.search_space, ["q_proj"], task.betas))


def test_a_minimal_file_prefers_with_the_usual_settings() -> None:
    task = parse_task(GOOD)
    assert (task.data.format, task.evaluation.metric) == ("preference", "preference")
    assert task.betas == (0.1,)
    assert [job.learning_rate for job in jobs_of(GOOD)] == DPO_LEARNING_RATES
    # A change goes through the same checks, and finds what the first one filled in.
    assert with_changes(task, ["dpo.loss=ipo"]).dpo.options == PreferenceOptions(loss="ipo")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dpo": {"beta": 0}}, "dpo.beta"),
        ({"dpo": {"beta": [0.1, 0.1]}}, "values without repetition"),
        ({"dpo": {"loss": "sigmod"}}, "dpo.loss"),
        ({"dpo": {"label_smoothing": 0.5}}, "dpo.label_smoothing"),
        ({"dpo": {"label_smoothing": 0.1, "loss": "ipo"}}, "`label_smoothing` only with `loss: sigmoid`"),
        ({"dpo": {"sft_weight": -1}}, "dpo.sft_weight"),
        ({"dpo": {"length_normalized": True}}, "dpo.length_normalized"),
        ({"objective": "ppo"}, "objective"),
        ({"objective": "sft", "dpo": {}}, "a `dpo` section only with `objective: dpo`"),
        ({"data": {"source": "s", "format": "text"}}, "got dpo with text"),
        ({"objective": "sft", "data": {"source": "s", "format": "preference"}}, "got sft with preference"),
        ({"objective": "sft", "evaluation": {"metric": "preference"}}, "only with `objective: dpo`"),
        ({"data": {"source": "s", "columns": {"chosen": "rejected", "rejected": "chosen"}}}, "the other way round"),
        ({"data": {"source": "s", "columns": {"chosen": "rejected"}}}, "two columns for `chosen` and `rejected`"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    content = {**GOOD, "search_space": {"learning_rate": 1e-4, "lora_rank": 8}, **changes}
    with pytest.raises(TaskFileError) as failure:
        parse_task(content)
    assert message in str(failure.value)


def test_supervised_tuning_still_asks_for_its_learning_rate() -> None:
    with pytest.raises(TaskFileError, match=r"search_space\.learning_rate"):
        parse_task({**GOOD, "objective": "sft"})


def test_beta_is_a_dimension_of_every_search() -> None:
    betas = {"dpo": {"beta": [0.05, 0.5]}}
    grid = {**GOOD, **betas, "search_space": {"learning_rate": [1e-4, 1e-3], "lora_rank": 8}}
    assert {(job.learning_rate, job.beta) for job in jobs_of(grid)} == {
        (rate, beta) for rate in (1e-4, 1e-3) for beta in (0.05, 0.5)
    }
    listed = {**GOOD, **betas, "search_space": {"strategy": "list", "jobs": [{"learning_rate": 1e-4, "lora_rank": 8}]}}
    assert [job.beta for job in jobs_of(listed)] == [0.05, 0.5]
    drawn = {"strategy": "random", "learning_rate": 1e-4, "lora_rank": [8, 16], "num_jobs": 4}
    assert len({job.job_id for job in jobs_of({**GOOD, **betas, "search_space": drawn})}) == 4


def test_jobs_without_a_beta_keep_the_ids_and_parameters_they_had() -> None:
    task = parse_task({**GOOD, "objective": "sft", "search_space": {"learning_rate": 1e-4, "lora_rank": 8}})
    (job,) = expand_search_space(task.search_space, ["q_proj"], task.betas)
    assert job.job_id == "lr0.0001-r8-b8-fab0ca"
    assert "beta" not in job.params()


def side(*sums: float, labels: int = 2) -> RowLosses:
    return RowLosses(loss_sums=sums, num_labels=(labels,) * len(sums))


def pair_losses(**changes: Any) -> PairLosses:
    """Three pairs: the first gains, the second loses, the third is likelier rejected but gains."""
    fields: dict[str, Any] = {
        "loss_sums": (0.5, 0.9, 0.6),
        "num_labels": (1, 1, 1),
        "chosen": side(1.0, 5.0, 6.0),
        "rejected": side(4.0, 4.0, 4.0, labels=4),
        "reference": (side(2.0, 4.0, 8.0), side(3.0, 4.0, 5.0, labels=4)),
        "beta": 0.5,
    }
    return PairLosses(**{**fields, **changes})


def test_what_an_evaluation_of_pairs_tells_beside_its_loss() -> None:
    losses = pair_losses()
    assert losses.rewards() == ((0.5, -0.5, 1.0), (-0.5, 0.0, 0.5))
    assert pair_scores(losses, "preference") == (1.0, 0.0, 1.0)
    assert pair_scores(losses, "preference_likelihood") == (1.0, 0.0, 0.0)
    told = preference_measures(losses)
    assert told["val_accuracy"] == pytest.approx(2 / 3)
    assert told["val_accuracy_low"] < 2 / 3 < told["val_accuracy_high"]
    assert told["val_likelihood_accuracy"] == pytest.approx(1 / 3)
    assert (told["val_chosen_reward"], told["val_rejected_reward"]) == pytest.approx((1 / 3, 0.0))
    assert told["val_margin"] == pytest.approx(1 / 3)
    assert losses.mean == pytest.approx(2.0 / 3)
    assert losses.token_loss_sums == (5.0, 9.0, 10.0)
    assert preference_measures(side(1.0)) == {}


def test_normalised_lengths_count_per_token() -> None:
    losses = pair_losses(length_normalised=True)
    assert losses.rewards() == ((0.25, -0.25, 0.5), (-0.125, 0.0, 0.125))
    # 6 nats over two tokens against 4 over four.
    assert pair_scores(losses, "preference_likelihood") == (1.0, 0.0, 0.0)


def test_a_job_that_is_no_number_has_no_accuracy_to_show_off() -> None:
    nan = math.nan
    told = preference_measures(pair_losses(chosen=side(nan, nan, nan), rejected=side(nan, nan, nan, labels=4)))
    assert told["val_accuracy"] == 0.0
    assert math.isnan(told["val_margin"])
