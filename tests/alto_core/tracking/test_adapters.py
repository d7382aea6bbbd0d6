"""Adapters as artifacts and as registered versions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest

from alto_core.errors import TrackingError
from alto_core.tracking import Tracker
from alto_core.tracking.adapters import check_alias


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/tiny", "r": 8}))
    (folder / "adapter_model.safetensors").write_bytes(b"\1" * 1000)
    return folder


def change(adapter: Path) -> Path:
    (adapter / "adapter_model.safetensors").write_bytes(b"\2" * 1000)
    return adapter


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_an_adapter_becomes_an_artifact_of_its_job(
    tracker: Tracker, open_runs: Any, adapter: Path, tmp_path: Path
) -> None:
    runs, (job_id,) = open_runs(1)
    uri = runs.log_adapter(job_id, adapter)
    assert uri == f"runs:/{runs.job_run_ids[job_id]}/adapter"
    copy = tracker._connection.client.download_artifacts(runs.job_run_ids[job_id], "adapter", str(tmp_path))
    assert (Path(copy) / "adapter_model.safetensors").read_bytes() == b"\1" * 1000


def test_a_folder_that_is_no_adapter_is_refused(open_runs: Any, adapter: Path, tmp_path: Path) -> None:
    runs, (job_id,) = open_runs(1)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(TrackingError, match=r"no adapter_model\.safetensors"):
        runs.log_adapter(job_id, adapter)
    with pytest.raises(TrackingError, match="expected an exported PEFT adapter"):
        runs.register(name="demo", job_id=job_id, adapter_folder=tmp_path / "nowhere")


def test_an_upload_that_did_not_arrive_whole_is_told(
    tracker: Tracker, open_runs: Any, adapter: Path, monkeypatch: Any
) -> None:
    runs, (job_id,) = open_runs(1)
    monkeypatch.setattr(tracker._connection.client, "log_artifacts", lambda *args: None)
    with pytest.raises(TrackingError, match="got None bytes"):
        runs.log_adapter(job_id, adapter)


def test_the_first_version_is_champion_and_the_next_challenger(tracker: Tracker, open_runs: Any, adapter: Path) -> None:
    runs, (a, b, c) = open_runs(3)
    tags = {"alto.data_digest": "d1", "alto.exact_match": "0.9"}
    first = runs.register(name="demo", job_id=a, adapter_folder=adapter, tags=tags, input_example="Reverse: a b")
    assert (first.version, first.aliases) == (1, ("champion",))
    assert first.tags["alto.exact_match"] == "0.9"
    assert first.tags["alto.job_id"] == a
    assert first.tags["alto.task_id"] == "demo-1"
    assert first.run_id == runs.job_run_ids[a]
    second = runs.register(name="demo", job_id=b, adapter_folder=change(adapter))
    third = runs.register(name="demo", job_id=c, adapter_folder=adapter)
    assert (second.aliases, third.version, third.aliases) == (("challenger",), 3, ("challenger",))
    assert tracker.registered_adapter("demo").version == 1
    assert tracker.registered_adapter("demo", "challenger").version == 3

    uri = tracker._connection.client.get_model_version_download_uri("demo", "1")
    path = mlflow.artifacts.download_artifacts(uri, tracking_uri=tracker._connection.uri)
    assert (Path(path) / "adapter_model.safetensors").read_bytes() == b"\1" * 1000
    assert (Path(path) / "input_example.txt").read_text() == "Reverse: a b"
    # the adapter and nothing else: no base model comes along
    assert folder_bytes(Path(path)) < folder_bytes(adapter) + 2000


def test_registering_again_makes_no_second_version(tracker: Tracker, open_runs: Any, adapter: Path) -> None:
    runs, (job_id,) = open_runs(1)
    first = runs.register(name="demo", job_id=job_id, adapter_folder=adapter)
    again = tracker.task_runs("demo-1").register(name="demo", job_id=job_id, adapter_folder=adapter)
    assert again == first
    assert runs.register(name="demo", job_id=job_id, adapter_folder=change(adapter)).version == 2


def test_a_deleted_champion_is_told_and_not_replaced_unasked(tracker: Tracker, open_runs: Any, adapter: Path) -> None:
    runs, (a, b) = open_runs(2)
    runs.register(name="demo", job_id=a, adapter_folder=adapter)
    second = runs.register(name="demo", job_id=b, adapter_folder=change(adapter))
    tracker._connection.client.delete_model_version("demo", "1")
    with pytest.raises(TrackingError, match=r"no version with alias 'champion'.*challenger"):
        tracker.registered_adapter("demo")
    assert tracker.registered_adapter("demo", "challenger") == second


def test_an_unknown_model_is_told(tracker: Tracker) -> None:
    with pytest.raises(TrackingError, match="it has none"):
        tracker.registered_adapter("nothing")


@pytest.mark.parametrize("name", ["../evil", "a/b", "a:b", "", "a' or '1"])
def test_a_model_name_that_is_a_path_is_refused(open_runs: Any, adapter: Path, name: str) -> None:
    runs, (job_id,) = open_runs(1)
    with pytest.raises(TrackingError, match="registry_name"):
        runs.register(name=name, job_id=job_id, adapter_folder=adapter)


@pytest.mark.parametrize("alias", ["latest", "LATEST", "v2", "V2", "12", "Champion", "CHALLENGER", "", "a b", "../x"])
def test_reserved_and_misleading_aliases_are_refused(alias: str) -> None:
    with pytest.raises(TrackingError, match="champion"):
        check_alias(alias)


@pytest.mark.parametrize("alias", ["champion", "challenger", "staging"])
def test_other_aliases_are_fine(alias: str) -> None:
    check_alias(alias)


def test_a_failed_registration_leaves_no_version_and_works_later(
    tracker: Tracker, open_runs: Any, adapter: Path, monkeypatch: Any, make: SimpleNamespace
) -> None:
    runs, (job_id,) = open_runs(1)
    client = tracker._connection.client

    def disk_full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(client, "log_model_artifacts", disk_full)
    with pytest.raises(TrackingError, match="No space left"):
        runs.register(name="demo", job_id=job_id, adapter_folder=adapter)
    assert not client.search_model_versions("name='demo'")
    monkeypatch.undo()
    assert runs.register(name="demo", job_id=job_id, adapter_folder=adapter).aliases == ("champion",)
