"""From challenger to champion, with real adapters of a tiny model: every way that a promotion can go."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest

from alto_core.domain import RowLosses
from alto_core.engine.backbone import release_backbone
from alto_core.errors import StoreError, TrackingError
from alto_core.evaluation import SplitResult, held_out_digest
from alto_core.promotion import compare, promote, roll_back
from alto_core.registration import held_out
from alto_core.settings import Settings, load_settings
from alto_core.store import Store
from alto_core.tracking import Registry, Tracker
from alto_core.workspace import Workspace

Register = Callable[..., int]


@pytest.fixture
def register(workspace_home: Path, embedded: Settings, register_tiny: Register) -> Iterator[Register]:
    """Registers adapters in a workspace of this test alone."""
    yield register_tiny
    release_backbone()


@pytest.fixture(scope="module")
def undecided(home_with: Callable[..., Path]) -> Iterator[Path]:
    """A workspace with a weak champion and a strong challenger, for tests that leave the aliases where they are."""
    yield home_with(1, 40)
    release_backbone()


@pytest.fixture
def in_undecided(undecided: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_HOME", str(undecided))
    monkeypatch.setenv("ALTO_DEVICE", "cpu")


def retag(version: int, key: str, value: str) -> str:
    """Change a tag; returns what it held."""
    client = mlflow.MlflowClient(load_settings().mlflow_tracking_uri)
    before = client.get_model_version("model", str(version)).tags[key]
    client.set_model_version_tag("model", str(version), key, value)
    return before


def the_registry() -> Registry:
    return Tracker(load_settings()).registry


def champion() -> int | None:
    found = the_registry().find_if_any("model", "champion")
    return found and found.version


def test_a_better_challenger_serves_and_can_be_rolled_back(register: Register) -> None:
    assert (register(1), champion()) == (1, 1), "the first version is champion"
    assert (register(40), champion()) == (2, 1)
    with pytest.raises(TrackingError, match="got a champion without one before it"):
        roll_back("model", load_settings())

    decision = promote("model", load_settings())
    assert decision.judgement.outcome == "better"
    assert (decision.champion_before, decision.champion, decision.changed, champion()) == (1, 2, True, 2)
    difference = decision.judgement.difference
    assert difference is not None and difference.high < 0, "loss per token, lower is better"
    assert difference.num_rows == 8
    assert the_registry().find_if_any("model", "challenger") is None

    version = the_registry().find("model", "champion")
    tag = json.loads(version.tags["alto.promotion"])
    assert tag == json.loads(decision.as_json())
    assert tag["judgement"]["held_out_digest"] == version.tags["alto.held_out_digest"]
    client = mlflow.MlflowClient(load_settings().mlflow_tracking_uri)
    uri = client.get_run(version.run_id).info.artifact_uri
    assert json.loads(mlflow.artifacts.load_text(f"{uri}/promotions/model-v2.json")) == tag

    with pytest.raises(TrackingError, match=r"no version with alias 'challenger'.*The next winner"):
        promote("model", load_settings())
    back = roll_back("model", load_settings())
    assert (back.champion_before, back.champion, champion()) == (2, 1, 1)
    assert (
        json.loads(the_registry().version("model", 1).tags["alto.promotion"])["judgement"]["outcome"] == "rolled back"
    )
    with pytest.raises(TrackingError, match="without one before it"):
        roll_back("model", load_settings())

    mlflow.MlflowClient(load_settings().mlflow_tracking_uri).set_model_version_tag(
        "model", "1", "alto.previous_champion", "7"
    )
    with pytest.raises(TrackingError, match="find version 7 of model"):  # deleted meanwhile
        roll_back("model", load_settings())
    assert champion() == 1


def test_worse_and_equal_challengers_do_not_serve(register: Register) -> None:
    register(40)
    register(1)
    decision = promote("model", load_settings())
    assert (decision.judgement.outcome, decision.changed, champion()) == ("worse", False, 1)
    tag = json.loads(the_registry().version("model", 2).tags["alto.promotion"])
    assert tag["judgement"]["difference"]["low"] > 0
    register(40)  # the same weights as the champion's
    decision = promote("model", load_settings())
    assert decision.judgement.outcome == "within noise"
    assert decision.judgement.difference is not None
    assert abs(decision.judgement.difference.value) < 1e-6
    assert champion() == 1


@pytest.mark.usefixtures("in_undecided")
def test_a_gain_below_the_margin_is_no_gain() -> None:
    decision = promote("model", load_settings(), margin=100.0)
    assert (decision.judgement.outcome, champion()) == ("within noise", 1)
    assert "margin 100" in decision.judgement.reason
    for margin in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="margin of 0 or more"):
            promote("model", load_settings(), margin=margin)


def test_other_held_out_rows_are_compared_only_when_accepted(register: Register, tiny_rows: Path) -> None:
    register(1)
    data = {"source": str(tiny_rows), "validation": {"rows": 8}, "test": {"rows": 12}}
    register(40, data=data)
    decision = promote("model", load_settings())
    assert (decision.judgement.outcome, champion()) == ("other rows", 1)
    assert the_registry().version("model", 1).tags["alto.held_out_digest"] in decision.judgement.reason
    decision = promote("model", load_settings(), accept_other_rows=True)
    assert (decision.judgement.outcome, champion()) == ("better", 2)
    assert decision.judgement.difference is not None and decision.judgement.difference.num_rows == 12


def test_other_training_rows_with_the_same_held_out_ones_compare(
    register: Register, tiny_rows: Path, tmp_path: Path
) -> None:
    # Each task holds out the rows of one file; the second trains on fewer others.
    lines = tiny_rows.read_text().splitlines()
    (tmp_path / "test.jsonl").write_text("\n".join(lines[:10]))
    digests = []
    for count in (64, 40):
        (tmp_path / f"train-{count}.jsonl").write_text("\n".join(lines[10:count]))
        data = {
            "source": str(tmp_path / f"train-{count}.jsonl"),
            "validation": {"rows": 8},
            "test": {"source": str(tmp_path / "test.jsonl")},
        }
        register(1, data=data)
        digests.append(Workspace.open(Store(load_settings()).tasks()[0].task_id).data.digest)
    assert digests[0] != digests[1]
    assert promote("model", load_settings()).judgement.quantity == "loss"


def test_without_a_champion_the_challenger_becomes_it(register: Register) -> None:
    register(40)
    register(1)
    mlflow.MlflowClient(load_settings().mlflow_tracking_uri).delete_model_version("model", "1")
    decision = promote("model", load_settings())
    assert (decision.judgement.outcome, decision.champion_before, champion()) == ("first", None, 2)


@pytest.mark.usefixtures("in_undecided")
def test_an_adapter_of_another_base_model_is_not_promoted() -> None:
    before = retag(1, "alto.base_fingerprint", "0123456789abcdef")
    decision = promote("model", load_settings())
    assert (decision.judgement.outcome, champion()) == ("other base model", 1)
    retag(1, "alto.base_fingerprint", before)


def test_promotions_at_once_leave_one_champion(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    register(1)
    register(40)
    # Both have judged before either moves the alias.
    judged = threading.Barrier(2)
    make_champion = Registry.make_champion

    def wait_first(self: Registry, *args: Any, **kwargs: Any) -> None:
        judged.wait(60)
        make_champion(self, *args, **kwargs)

    monkeypatch.setattr(Registry, "make_champion", wait_first)
    # one engine at a time may use the backbone; the race that matters is the one for the alias
    evaluating, told = threading.Lock(), []
    import alto_core.promotion as promotion

    evaluate = promotion._evaluate

    def one_at_a_time(*args: Any) -> Any:
        with evaluating:
            return evaluate(*args)

    monkeypatch.setattr(promotion, "_evaluate", one_at_a_time)

    def run() -> None:
        try:
            told.append(promote("model", load_settings()).judgement.outcome)
        except TrackingError as error:
            told.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(text == "better" for text in told) == [False, True]
    assert any("moved meanwhile" in text for text in told)
    assert champion() == 2


@pytest.mark.usefixtures("in_undecided")
def test_a_task_from_elsewhere_is_told() -> None:
    before = retag(2, "alto.task_id", "elsewhere-1")
    with pytest.raises(StoreError, match="Promote it where it was tuned"):
        promote("model", load_settings())
    retag(2, "alto.task_id", before)


@pytest.mark.usefixtures("in_undecided")
def test_versions_carry_what_links_them_to_their_task() -> None:
    task_id = "tiny-1"
    workspace, tags = Workspace.open(task_id), the_registry().version("model", 1).tags
    assert tags["alto.task_id"] == task_id
    assert tags["alto.data_digest"] == workspace.data.digest
    assert tags["alto.held_out_digest"] == held_out_digest(held_out(workspace), workspace.data.stop_token_ids)
    assert len(tags["alto.base_fingerprint"]) == 16
    assert tags["alto.code_version"]


def result(scores: tuple[float, ...]) -> SplitResult:
    losses = RowLosses(loss_sums=(1.0,) * len(scores), num_labels=(1,) * len(scores))
    return SplitResult(job_id="a", split="test", losses=losses, metric="numeric", row_scores=scores)


@pytest.mark.parametrize(
    ("challenger", "champion", "margin", "outcome"),
    [
        ((1.0,) * 60 + (0.0,) * 40, (0.0,) * 60 + (1.0,) * 10 + (0.0,) * 30, 0.0, "better"),
        ((1.0,) * 60 + (0.0,) * 40, (0.0,) * 60 + (1.0,) * 10 + (0.0,) * 30, 0.6, "within noise"),
        ((1.0,) * 52 + (0.0,) * 48, (0.0,) * 50 + (1.0,) * 50, 0.0, "within noise"),
        ((0.0,) * 60 + (1.0,) * 10 + (0.0,) * 30, (1.0,) * 60 + (0.0,) * 40, 0.0, "worse"),
    ],
)
def test_a_metric_decides_where_there_is_one(
    challenger: tuple[float, ...], champion: tuple[float, ...], margin: float, outcome: str
) -> None:
    judgement = compare(result(challenger), result(champion), margin=margin, digest="d")
    assert (judgement.outcome, judgement.quantity) == (outcome, "numeric")
