"""Adapters as artifacts of their jobs."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from alto_core.domain import JobState
from alto_core.errors import TrackingError
from alto_core.tracking import Tracker


def test_an_adapter_becomes_an_artifact_of_its_job(
    tracker: Tracker, open_runs: Any, adapter: Path, tmp_path: Path
) -> None:
    runs, (job_id,) = open_runs(1)
    uri = runs.log_adapter(job_id, adapter)
    runs.flush()
    assert uri == f"runs:/{runs.job_run_ids[job_id]}/adapter"
    copy = tracker._connection.client.download_artifacts(runs.job_run_ids[job_id], "adapter", str(tmp_path))
    assert (Path(copy) / "adapter_model.safetensors").read_bytes() == b"\1" * 1000


def test_a_folder_that_is_no_adapter_is_refused(open_runs: Any, adapter: Path, tmp_path: Path) -> None:
    runs, (job_id,) = open_runs(1)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(TrackingError, match=r"no adapter_model\.safetensors"):
        runs.log_adapter(job_id, adapter)
    with pytest.raises(TrackingError, match="expected an exported PEFT adapter"):
        runs.log_adapter(job_id, tmp_path / "nowhere")


def test_an_upload_that_did_not_arrive_whole_is_told(
    tracker: Tracker, open_runs: Any, adapter: Path, monkeypatch: Any
) -> None:
    runs, (job_id,) = open_runs(1)
    monkeypatch.setattr(tracker._connection.client, "log_artifacts", lambda *args: None)
    runs.log_adapter(job_id, adapter)
    runs.set_job_state(job_id, JobState.FINISHED)
    with pytest.raises(TrackingError, match="got None bytes"):
        runs.flush()
    run = tracker._connection.client.get_run(runs.job_run_ids[job_id])
    assert run.info.status == "FAILED"  # it must not look complete


def test_an_upload_waits_for_a_full_disk_and_the_jobs_end_waits_for_the_upload(
    tracker: Tracker, open_runs: Any, adapter: Path, monkeypatch: Any
) -> None:
    runs, (job_id,) = open_runs(1)
    client, run_id = tracker._connection.client, runs.job_run_ids[job_id]
    upload, seen = client.log_artifacts, list[str]()

    def log_artifacts(*args: Any) -> None:
        seen.append(client.get_run(run_id).info.status)
        if len(seen) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        upload(*args)

    monkeypatch.setattr(client, "log_artifacts", log_artifacts)
    runs.log_adapter(job_id, adapter)
    runs.set_job_state(job_id, JobState.FINISHED)
    runs.flush()
    assert seen == ["RUNNING"] * 3
    assert client.get_run(run_id).info.status == "FINISHED"
    assert len(client.list_artifacts(run_id, "adapter")) == 2
