"""Adapters as versions of registered models, and who holds which alias."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest

from alto_core.errors import TrackingError
from alto_core.tracking import Registry, ServingFacts, Tracker, connection, packaging
from alto_core.tracking.packaging import packaged
from alto_core.tracking.registry import check_alias

FACTS = ServingFacts(
    base_model="org/tiny",
    base_revision=None,
    base_fingerprint=None,
    stop_token_ids=(2,),
    pad_token_id=0,
    max_new_tokens=9,
    example_prompt="Reverse: a b",
)


def change(adapter: Path, byte: int = 2) -> Path:
    (adapter / "adapter_model.safetensors").write_bytes(bytes([byte]) * 1000)
    return adapter


def register(runs: Any, job_id: str, adapter: Path, name: str = "demo", **tags: str) -> Any:
    return runs.register(name=name, job_id=job_id, adapter_folder=adapter, tags=tags, facts=FACTS)


@pytest.fixture
def registry(tracker: Tracker) -> Registry:
    return tracker.registry


def test_what_a_killed_registration_left_behind_is_removed(
    tracker: Tracker, registry: Registry, open_runs: Any, adapter: Path
) -> None:
    """K6: registered once, and no logged model stays half made; another job's is not touched."""
    runs, (a, b) = open_runs(2)
    client = registry._connection.client
    for job_id in (a, b):
        client.create_logged_model(runs.experiment_id, name="demo", source_run_id=runs.job_run_ids[job_id])
    assert register(runs, a, adapter).version == 1
    assert register(runs, a, adapter).version == 1
    left = client.search_logged_models([runs.experiment_id])
    states = sorted((model.source_run_id == runs.job_run_ids[a], model.status.value) for model in left)
    assert states == [(False, "PENDING"), (True, "READY")]


def test_a_name_may_have_a_dot(registry: Registry, open_runs: Any, adapter: Path) -> None:
    runs, (a,) = open_runs(1)
    assert register(runs, a, adapter, name="llama-3.1-8b").version == 1
    assert registry.find("llama-3.1-8b", "champion").version == 1


def test_packages_that_only_serving_needs_are_missed_in_silence(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packaging, "_requirements", lambda: ["a-package-for-serving==1.0"])
    with packaged(adapter, FACTS) as folder:
        assert "a-package-for-serving==1.0" in (folder / "requirements.txt").read_text()
    assert "mismatch" not in "".join(capfd.readouterr())


def test_the_first_version_is_champion_and_the_next_challenger(
    tracker: Tracker, registry: Registry, open_runs: Any, adapter: Path, tmp_path: Path
) -> None:
    runs, (a, b, c) = open_runs(3)
    first = register(runs, a, adapter, **{"alto.data_digest": "d1", "alto.exact_match": "0.9"})
    assert (first.version, first.aliases) == (1, ("champion",))
    assert first.tags["alto.exact_match"] == "0.9"
    assert first.tags["alto.job_id"] == a
    assert first.tags["alto.task_id"] == "demo-1"
    assert first.run_id == runs.job_run_ids[a]
    second = register(runs, b, change(adapter))
    third = register(runs, c, change(adapter, 3))
    assert (second.aliases, third.version, third.aliases) == (("challenger",), 3, ("challenger",))
    assert registry.find("demo", "champion").version == 1
    assert registry.find("demo", "challenger").version == 3

    folder = registry.download(first, tmp_path / "copy")
    assert (folder / "adapter_model.safetensors").read_bytes() == b"\1" * 1000
    # M7: the adapter, its loader and descriptions, and no base model
    assert sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()) == [
        "MLmodel",
        "adapter_config.json",
        "adapter_model.safetensors",
        "code/alto_served_adapter.py",
        "conda.yaml",
        "input_example.json",
        "python_env.yaml",
        "requirements.txt",
        "serving_input_example.json",
    ]
    described = mlflow.models.Model.load(str(folder))
    assert described.signature.inputs.input_names() == ["prompt"]
    assert described.metadata["base_model"] == "org/tiny"
    assert sorted(described.flavors) == ["python_function", "transformers"]
    assert json.loads((folder / "input_example.json").read_text())["data"] == [["Reverse: a b"]]
    assert str(tmp_path) not in (folder / "MLmodel").read_text()


def test_registering_again_makes_no_second_version(tracker: Tracker, open_runs: Any, adapter: Path) -> None:
    runs, (job_id,) = open_runs(1)
    first = register(runs, job_id, adapter)
    assert register(tracker.task_runs("demo-1"), job_id, adapter) == first
    assert register(runs, job_id, change(adapter)).version == 2


def test_a_job_whose_losses_were_no_numbers_can_be_registered(
    registry: Registry, open_runs: Any, make: SimpleNamespace, adapter: Path
) -> None:
    # M1: MLflow takes no model at a step whose metric is no number, in some of its ways.
    runs, (job_id,) = open_runs(1)
    runs.log_steps([replace(record, train_loss=math.nan) for record in make.steps(job_id, 1, 4)])
    runs.log_evaluations([make.evaluation(job_id, 4, (math.inf,))])
    runs.flush()
    assert register(runs, job_id, adapter).aliases == ("champion",)
    assert registry.find("demo", "champion").run_id == runs.job_run_ids[job_id]


def test_a_registration_that_died_before_its_alias_is_completed(
    tracker: Tracker, registry: Registry, open_runs: Any, adapter: Path, monkeypatch: Any
) -> None:
    runs, (job_id,) = open_runs(1)
    with monkeypatch.context() as patch:
        patch.setattr(tracker._connection.client, "set_registered_model_alias", lambda *args: None)
        with pytest.raises(TrackingError, match="got no alias back"):
            register(runs, job_id, adapter)
    assert register(runs, job_id, adapter).aliases == ("champion",)


def test_a_deleted_champion_is_told_and_not_replaced_unasked(
    tracker: Tracker, registry: Registry, open_runs: Any, adapter: Path
) -> None:
    # M8: the alias goes with its version.
    runs, (a, b) = open_runs(2)
    register(runs, a, adapter)
    second = register(runs, b, change(adapter))
    tracker._connection.client.delete_model_version("demo", "1")
    with pytest.raises(TrackingError, match=r"no version with alias 'champion'.*challenger"):
        registry.find("demo", "champion")
    assert registry.find_if_any("demo", "champion") is None
    assert registry.find("demo", "challenger") == second


def test_an_unknown_model_and_version_are_told(registry: Registry, open_runs: Any, adapter: Path) -> None:
    with pytest.raises(TrackingError, match="it has none"):
        registry.find("nothing", "champion")
    assert registry.find_if_any("nothing", "champion") is None
    runs, (job_id,) = open_runs(1)
    register(runs, job_id, adapter)
    with pytest.raises(TrackingError, match="find version 7 of demo"):
        registry.version("demo", 7)


@pytest.mark.parametrize("name", ["../evil", "a/b", "a:b", "", "a' or '1"])
def test_a_model_name_that_is_a_path_is_refused(open_runs: Any, adapter: Path, name: str) -> None:
    runs, (job_id,) = open_runs(1)
    with pytest.raises(TrackingError, match="registry_name"):
        register(runs, job_id, adapter, name=name)


@pytest.mark.parametrize("alias", ["latest", "LATEST", "v2", "V2", "12", "Champion", "CHALLENGER", "", "a b", "../x"])
def test_reserved_and_misleading_aliases_are_refused(alias: str) -> None:
    with pytest.raises(TrackingError, match="champion"):
        check_alias(alias)


@pytest.mark.parametrize("alias", ["champion", "challenger", "staging"])
def test_other_aliases_are_fine(alias: str) -> None:
    check_alias(alias)


def test_a_failed_registration_leaves_no_version_and_works_later(
    tracker: Tracker, open_runs: Any, adapter: Path, monkeypatch: Any
) -> None:
    runs, (job_id,) = open_runs(1)
    client = tracker._connection.client

    def disk_full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(client, "log_model_artifacts", disk_full)
    with pytest.raises(TrackingError, match="No space left"):
        register(runs, job_id, adapter)
    assert not client.search_model_versions("name='demo'")
    monkeypatch.undo()
    assert register(runs, job_id, adapter).aliases == ("champion",)


def test_the_champion_changes_in_one_step_and_the_decision_is_kept(
    tracker: Tracker, registry: Registry, open_runs: Any, adapter: Path, monkeypatch: Any
) -> None:
    runs, (a, b) = open_runs(2)
    first, second = register(runs, a, adapter), register(runs, b, change(adapter))
    client = tracker._connection.client
    with monkeypatch.context() as patch:
        patch.setattr(client, "set_registered_model_alias", _refuse)
        with pytest.raises(TrackingError, match="set an alias"):
            registry.make_champion(second, instead_of=first, decision="{}", previous=first)
    assert registry.find("demo", "champion").version == 1, "the old champion stays on failure"
    registry.make_champion(second, instead_of=first, decision='{"why": "better"}', previous=first)
    champion = registry.find("demo", "champion")
    assert (champion.version, champion.aliases) == (2, ("champion",))
    assert registry.find_if_any("demo", "challenger") is None
    assert champion.tags["alto.previous_champion"] == "1"
    assert json.loads(champion.tags["alto.promotion"]) == {"why": "better"}
    text = mlflow.artifacts.load_text(client.get_run(second.run_id).info.artifact_uri + "/promotions/demo-v2.json")
    assert json.loads(text) == {"why": "better"}


def _refuse(*args: Any) -> None:
    raise mlflow.exceptions.MlflowException("refused", error_code=mlflow.protos.databricks_pb2.INVALID_PARAMETER_VALUE)


def test_of_two_promotions_at_once_one_wins_and_the_other_is_told(
    registry: Registry, open_runs: Any, adapter: Path
) -> None:
    runs, (a, b) = open_runs(2)
    first, second = register(runs, a, adapter), register(runs, b, change(adapter))
    told: list[str] = []
    barrier = threading.Barrier(4)

    def promote() -> None:
        barrier.wait()
        try:
            registry.make_champion(second, instead_of=first, decision="{}", previous=first)
            told.append("done")
        except TrackingError as error:
            told.append(str(error))

    threads = [threading.Thread(target=promote) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told.count("done") == 1
    assert sum("moved meanwhile" in text and "Nothing was changed" in text for text in told) == 3
    assert registry.find("demo", "champion").version == 2


def test_a_challenger_that_a_newer_one_replaced_is_not_promoted(
    registry: Registry, open_runs: Any, adapter: Path
) -> None:
    runs, (a, b, c) = open_runs(3)
    first, second = register(runs, a, adapter), register(runs, b, change(adapter))
    register(runs, c, change(adapter, 3))
    with pytest.raises(TrackingError, match="moved meanwhile"):
        registry.make_champion(second, instead_of=first, decision="{}")
    assert registry.find("demo", "champion") == first
