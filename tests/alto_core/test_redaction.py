"""No secret in a text that leaves the process, and nothing hidden that is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from alto_core.budget import job_budget
from alto_core.config import TuningTask, parse_task
from alto_core.domain import JobState, LoraJob, TaskState
from alto_core.errors import DataError, TaskFileError
from alto_core.redaction import has_login, without_secrets
from alto_core.settings import Settings, load_settings
from alto_core.store import EventDraft, JobUpdate, Store
from alto_core.tracking.description import as_params, as_tags

ENVIRON = {
    "HF_TOKEN": "hf_abcdefgh",
    "MLFLOW_TRACKING_PASSWORD": "open sesame",
    "PREFECT_API_AUTH_STRING": "alto:prefectpass",
    "ALTO_STORE_URL": "postgresql://alto:sla/sh@d@db/alto",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUt",
    "SHORT_TOKEN": "4",
    "NUM_TOKENS": "123456",
    "MONKEY": "banana1",
}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:secret@host:5000/x", "http://***@host:5000/x"),
        ("got postgresql://me:p%40ss@host/db, expected", "got postgresql://***@host/db, expected"),
        ("'https://hf_tok@host/a', 'http://b@c/d'", "'https://***@host/a', 'http://***@c/d'"),
        ("postgresql://host/db?user=me&password=pw&x=1", "postgresql://host/db?user=me&password=***&x=1"),
        ("https://s/x?X-Amz-Signature=ab12&api_key=q", "https://s/x?X-Amz-Signature=***&api_key=***"),
        ("token hf_abcdefgh, open sesame, wJalrXUt", "token ***, ***, ***"),
        ("alto:prefectpass and prefectpass", "*** and ***"),
        ("could not reach postgresql://alto:sla/sh@d@db/alto", "could not reach postgresql://***@db/alto"),
    ],
)
def test_a_secret_is_hidden(text: str, shown: str) -> None:
    assert without_secrets(text, ENVIRON) == shown


@pytest.mark.parametrize(
    "text",
    [
        "http://host:5000",
        "sqlite:////folder/mlflow.db",
        "lora_r=8, num_tokens=123456, tokens 4, banana1",
        "http://host/x?num_tokens=123456&lora_r=4",
        "me@example.org wrote <s>user@host</s>",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert without_secrets(text, ENVIRON) == text
    assert not has_login(text)


def test_errors_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    assert "hf_abcdefgh" not in str(DataError("hub data set x: 401 for hf_abcdefgh"))
    error = TaskFileError("data.source", got="https://me:pw@host/x", expected="a file")
    assert "me:pw" not in str(error)
    assert "https://***@host/x" in str(error)


def test_records_parameters_and_tags_hold_no_secret(settings: Settings, task_record: str) -> None:
    store, secret = Store(settings), "http://me:pw-12345@host/x"
    (job,) = store.jobs(task_record)
    store.append_events(task_record, [EventDraft(kind="warning", text=f"no answer from {secret}")])
    store.update_jobs(task_record, [JobUpdate(job_id=job.job_id, state=JobState.FAILED, reason=f"gone: {secret}")])
    store.end_task(task_record, TaskState.FAILED, f"{secret} is away")
    texts = [store.task(task_record).message, store.jobs(task_record)[0].reason, store.events(task_record)[0].text]
    texts += [as_params({"data": secret})[0].value, as_tags({"reason": secret})["reason"]]
    assert all("http://***@host/x" in text for text in texts), texts
    files = [path.read_bytes() for path in settings.home.rglob("*") if path.is_file()]
    assert files
    assert not any(b"pw-12345" in content for content in files)


@pytest.fixture
def task_record(settings: Settings, tiny_task: Callable[..., TuningTask]) -> str:
    """A task with one job."""
    task = tiny_task()
    job = LoraJob(learning_rate=1e-3, lora_rank=4, lora_alpha=8, adapter_batch_size=4, target_modules=("q_proj",))
    Store(settings).add_task("t-1", task, [job], {job.job_id: job_budget(job, task.budget, 64)})
    return "t-1"


def test_logins_leave_the_addresses_of_servers(tmp_path: Path) -> None:
    settings = load_settings(
        {
            "ALTO_HOME": str(tmp_path),
            "MLFLOW_TRACKING_URI": "https://alice:p%40ss@mlflow:5000/base",
            "PREFECT_API_URL": "http://alto:word@prefect/api",
            "ALTO_STORE_URL": "postgresql://alto:pw@db/alto",
        }
    )
    assert (settings.mlflow_tracking_uri, settings.prefect_api_url) == (
        "https://mlflow:5000/base",
        "http://prefect/api",
    )
    assert dict(settings.logins) == {
        "MLFLOW_TRACKING_USERNAME": "alice",
        "MLFLOW_TRACKING_PASSWORD": "p@ss",
        "PREFECT_API_AUTH_STRING": "alto:word",
    }
    assert all(secret not in repr(settings) for secret in ("p@ss", "word", "pw@"))


@pytest.mark.parametrize("field", ["model.name", "data.source", "init_adapter"])
def test_a_login_in_a_task_file_is_refused_and_not_repeated(field: str) -> None:
    content = {
        "name": "a",
        "model": {"name": "m"},
        "data": {"source": "x.jsonl"},
        "search_space": {"learning_rate": 1e-3, "lora_rank": 4},
        "budget": {"steps": 1},
    }
    section, _, name = field.rpartition(".")
    (content[section] if section else content)[name] = "https://me:pw-12345@host/x"  # type: ignore[index]
    with pytest.raises(TaskFileError, match=f"{field}: got .*no user or password inside an address") as caught:
        parse_task(content)
    assert "pw-12345" not in str(caught.value)


def test_a_key_for_a_token_is_unknown_and_its_value_is_not_repeated() -> None:
    with pytest.raises(TaskFileError, match=r"model\.hub_token: got an unknown key") as caught:
        parse_task({"name": "a", "model": {"name": "m", "hub_token": "hf_secret"}})
    assert "hf_secret" not in str(caught.value)
