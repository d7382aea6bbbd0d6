"""What `examine` finds on good and on broken machines."""

from __future__ import annotations

import dataclasses
import http.server
import importlib.metadata
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from alto_core import doctor
from alto_core.doctor import Check, Health, can_tune, examine
from alto_core.settings import Settings


def _by_name(checks: tuple[Check, ...]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.fixture
def fresh(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    return settings


@pytest.fixture
def server() -> Iterator[str]:
    """Answers 200 on /health and 404 elsewhere."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_a_fresh_machine_can_tune_and_nothing_is_made_on_it(fresh: Settings) -> None:
    checks = examine(fresh)
    assert can_tune(checks), [check for check in checks if check.health is Health.BROKEN]
    names = {
        "Python",
        "ALTO",
        "packages",
        "CPU",
        "GPU",
        "LoRA path",
        "ALTO_HOME",
        "free disk",
        "store",
        "MLflow",
        "Prefect",
    }
    assert names <= set(_by_name(checks))
    assert "torch" in _by_name(checks)["packages"].found
    assert not fresh.home.exists()


@pytest.mark.parametrize("url", ["postgresql://me:pw-123456@127.0.0.1:1/alto", "no address", "oracle+none://x"])
def test_a_store_that_cannot_be_reached_is_named_without_its_password(fresh: Settings, url: str) -> None:
    store = _by_name(examine(dataclasses.replace(fresh, store_address=url)))["store"]
    assert (store.health, store.remedy) == (Health.BROKEN, "Start that database, or unset ALTO_STORE_URL.")
    assert "pw-123456" not in store.found


def test_a_missing_package_is_named_with_the_command_that_mends_it(
    fresh: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ["no-such-package>=3", "typer>=99", "peft; extra == 'dev'"]
    )
    checks = _by_name(doctor.examine(fresh))
    assert checks["no-such-package"].health is Health.BROKEN
    assert checks["no-such-package"].remedy == "pip install 'no-such-package>=3'"
    assert checks["typer"].health is Health.NOTE
    assert "expected >=99" in checks["typer"].found
    assert "peft" not in checks


def test_a_home_that_cannot_be_written_is_broken(fresh: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = dataclasses.replace(fresh, home=Path("/proc/alto"))
    check = _by_name(examine(settings))["ALTO_HOME"]
    assert check.health is Health.BROKEN
    assert "ALTO_HOME" in check.remedy


def test_a_database_that_is_none_is_broken_and_a_real_one_is_fine(fresh: Settings) -> None:
    fresh.home.mkdir(parents=True)
    (fresh.home / "mlflow.db").write_bytes(b"this is no database" * 100)
    (fresh.home / "prefect").mkdir()
    sqlite3.connect(fresh.home / "prefect" / "prefect.db").close()
    checks = examine(fresh)
    assert _by_name(checks)["MLflow"].health is Health.BROKEN
    assert _by_name(checks)["Prefect"].health is Health.OK
    assert not can_tune(checks)


def test_a_server_that_answers_is_fine(fresh: Settings, server: str) -> None:
    settings = dataclasses.replace(fresh, mlflow_tracking_uri=server, prefect_api_url=f"{server}/api")
    checks = _by_name(examine(settings))
    assert checks["MLflow"].health is Health.OK
    assert checks["Prefect"].health is Health.BROKEN
    assert "404" in checks["Prefect"].found


def test_a_server_that_is_away_is_broken_and_its_password_is_not_shown(fresh: Settings) -> None:
    settings = dataclasses.replace(fresh, mlflow_tracking_uri="http://me:secret@127.0.0.1:9")
    check = _by_name(examine(settings))["MLflow"]
    assert check.health is Health.BROKEN
    assert "unset MLFLOW_TRACKING_URI" in check.remedy
    assert "secret" not in repr(check)


def test_a_gpu_that_is_wanted_but_not_there_is_broken(fresh: Settings) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    checks = examine(dataclasses.replace(fresh, device="cuda:3"))
    assert _by_name(checks)["GPU"].health is Health.BROKEN
