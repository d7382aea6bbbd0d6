"""Where this machine keeps what ALTO writes, and which services it talks to. Read from the environment, nowhere else.

| variable | meaning | default |
| --- | --- | --- |
| `ALTO_HOME` | folder of the embedded databases, artifacts and checkpoints | `.alto` in the current folder |
| `ALTO_DEVICE` | `cpu`, `cuda` or `cuda:N` | `cuda` where there is one, else `cpu` |
| `ALTO_CUDA_GRAPH` | `0`: on a GPU run a step's operations one by one instead of replaying a CUDA graph | `1` |
| `ALTO_STORE_URL` | database of tasks, queue and hosts, e.g. `postgresql://...` | an SQLite file under `ALTO_HOME` |
| `ALTO_LEASE_SECONDS` | how long a host or a run may be silent before its tasks go to others | 60 |
| `ALTO_CHECKPOINT_SECONDS` | between two checkpoints: about what a task loses when its process is killed | 60 |
| `MLFLOW_TRACKING_URI` | MLflow server; unset: an SQLite file under `ALTO_HOME` | unset |
| `ALTO_TRACKING_WAIT_SECONDS` | how long the end of a task waits for an MLflow that is away | 300 |
| `PREFECT_API_URL` | Prefect server; unset: an embedded one whose database lies under `ALTO_HOME` | unset |

A login inside the addresses of MLflow and Prefect (`http://user:password@host`) is taken out of them and handed on in
the variables that both have for it, so that no address that is logged or shown holds one.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from alto_core.containment import inside
from alto_core.errors import TaskFileError

MIN_LEASE_SECONDS = 5.0
"""A run says that it lives every second; a shorter silence can be a busy disk."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The folders and addresses of one ALTO installation."""

    home: Path
    device: str | None
    mlflow_tracking_uri: str
    prefect_api_url: str | None
    cuda_graph: bool = True
    store_address: str | None = field(default=None, repr=False)
    """May hold a password, which its database driver needs there."""
    lease_seconds: float = 60.0
    checkpoint_seconds: float = 60.0
    tracking_wait_seconds: float = 300.0
    logins: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of MLflow and Prefect with the logins that stood in their addresses."""

    @property
    def store_url(self) -> str:
        return self.store_address or f"sqlite:///{self.home / 'store.db'}"

    @property
    def has_embedded_mlflow(self) -> bool:
        """Whether MLflow is an SQLite file, and no server."""
        return self.mlflow_tracking_uri.startswith("sqlite:///")

    @property
    def artifacts(self) -> Path:
        return self.home / "artifacts"

    @property
    def tasks_folder(self) -> Path:
        """Where each task has its folder."""
        return self.home / "tasks"

    def task_folder(self, task_id: str) -> Path:
        """Folder of one task's data summary, checkpoints, adapters and report.

        Raises:
            StoreError: the id is none, or a symbolic link leads out of the home.
        """
        return inside(self.tasks_folder, task_id)

    def make_home(self) -> None:
        """Make the home where there is none, for its owner alone: it holds rows of data sets, databases and logs."""
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings. Creates nothing.

    Raises:
        TaskFileError: a variable has a value that it cannot have; named after the variable.
    """
    env = os.environ if environ is None else environ
    home = Path(env.get("ALTO_HOME") or ".alto").expanduser().resolve()
    mlflow_uri, mlflow_user, mlflow_password = _split_login(env.get("MLFLOW_TRACKING_URI") or "")
    prefect_url, prefect_user, prefect_password = _split_login(env.get("PREFECT_API_URL") or "")
    logins: dict[str, str] = {}
    if mlflow_user:
        logins |= {"MLFLOW_TRACKING_USERNAME": mlflow_user, "MLFLOW_TRACKING_PASSWORD": mlflow_password}
    if prefect_user:
        logins["PREFECT_API_AUTH_STRING"] = f"{prefect_user}:{prefect_password}"
    return Settings(
        home=home,
        device=env.get("ALTO_DEVICE") or None,
        mlflow_tracking_uri=mlflow_uri or f"sqlite:///{home / 'mlflow.db'}",
        prefect_api_url=prefect_url or None,
        logins=logins,
        cuda_graph=_switch("ALTO_CUDA_GRAPH", env.get("ALTO_CUDA_GRAPH") or "1"),
        store_address=env.get("ALTO_STORE_URL") or None,
        lease_seconds=_seconds("ALTO_LEASE_SECONDS", env.get("ALTO_LEASE_SECONDS") or "60", MIN_LEASE_SECONDS),
        checkpoint_seconds=_seconds("ALTO_CHECKPOINT_SECONDS", env.get("ALTO_CHECKPOINT_SECONDS") or "60", 0),
        tracking_wait_seconds=_seconds("ALTO_TRACKING_WAIT_SECONDS", env.get("ALTO_TRACKING_WAIT_SECONDS") or "300", 0),
    )


def _split_login(url: str) -> tuple[str, str, str]:
    """An http(s) address without its login, the user and the password. Other addresses stay as they are."""
    parts = urllib.parse.urlsplit(url)
    login, at, host = parts.netloc.rpartition("@")
    if parts.scheme not in ("http", "https") or not at:
        return url, "", ""
    user, _, password = login.partition(":")
    return parts._replace(netloc=host).geturl(), urllib.parse.unquote(user), urllib.parse.unquote(password)


def _switch(name: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise TaskFileError(name, got=value, expected="0 or 1")
    return value == "1"


TELEMETRY_OFF = {
    "DO_NOT_TRACK": "true",  # Prefect's client, and MLflow
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",  # hub client, transformers, datasets
    "HF_UPDATE_DOWNLOAD_COUNTS": "false",  # datasets reports each use of a packaged loader
}
"""What the libraries would tell their makers, turned off."""


def prepare_environment(settings: Settings, environ: MutableMapping[str, str] | None = None) -> None:
    """Set what the libraries read at import: no telemetry, the embedded Prefect under `ALTO_HOME`, time for its start.

    A variable that is already set stays as it is, but for a login in an address, which moves to variables of its own.
    Creates `ALTO_HOME`, without which Prefect cannot make its folder. Call it before torch, prefect or mlflow are
    imported.
    """
    settings.make_home()
    env = os.environ if environ is None else environ
    defaults = TELEMETRY_OFF | {
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_HOME": str(settings.home / "prefect"),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        # Doubling pauses, four minutes in all: a server that restarts must not end a run.
        "PREFECT_CLIENT_MAX_RETRIES": "7",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "TOKENIZERS_PARALLELISM": "false",
        # Idle threads sleep instead of spinning: on two shared cores a training step is four times faster.
        "OMP_WAIT_POLICY": "PASSIVE",
        # torch takes memory in huge pages, which spares page faults.
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    for name, value in defaults.items():
        env.setdefault(name, value)
    env.update(settings.logins)
    if "MLFLOW_TRACKING_USERNAME" in settings.logins:
        env["MLFLOW_TRACKING_URI"] = settings.mlflow_tracking_uri
    if "PREFECT_API_AUTH_STRING" in settings.logins:
        assert settings.prefect_api_url is not None
        env["PREFECT_API_URL"] = settings.prefect_api_url


def _seconds(name: str, text: str, least: float) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not least <= seconds <= 3600:
        raise TaskFileError(name, got=text, expected=f"{least:g} to 3600 seconds")
    return seconds
