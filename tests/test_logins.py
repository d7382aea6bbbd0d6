"""docs/security.md with real servers: its commands are run, a task is tuned behind logins and TLS, secrets looked for.

Every process may talk to this machine alone; what tries to reach another is refused and fails the test.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from typer.testing import CliRunner

from alto_core.config import TuningTask
from alto_core.errors import OwnerError, TaskFileError, TrackingError
from alto_core.preparation import create_task, plan_task
from alto_core.promotion import promote, roll_back
from alto_core.queue_states import Priority
from alto_core.settings import load_settings
from alto_core.store import Demand, Queue, Store
from alto_core.tracking import CHAMPION, Tracker
from flows.cli.app import app

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
PASSWORDS = {"admin": "admin-password/1", "alice": "alice-p@ss:word", "bob": "bob-password-1"}
PREFECT_LOGIN = "alto:prefect-pass-word"
HUB_TOKEN = "hf_NotARealTokenButLongEnough"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@dataclass
class Servers:
    """MLflow and Prefect as the page says, with TLS before them where nginx is installed."""

    folder: Path
    environ: dict[str, str]
    """Of every process, servers and clients."""
    mlflow: str
    mlflow_plain: str
    prefect: str

    @property
    def refused(self) -> str:
        """Connections to other machines that were tried."""
        log = Path(self.environ["LOOPBACK_ONLY_LOG"])
        return log.read_text() if log.exists() else ""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def command(beginning: str) -> str:
    """The one command line of the page that begins so."""
    (line,) = [line for block in blocks("sh") for line in block.splitlines() if line.startswith(beginning)]
    return line


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if requests.get(url, timeout=5, verify=str(log.with_name("alto.pem"))).ok:
                return
        except requests.RequestException:
            time.sleep(0.3)
    raise AssertionError(f"no answer from {url}: {log.read_text()}")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("logins")
    ports = {name: free_port() for name in ("mlflow", "prefect", "mlflow-tls", "prefect-tls")}
    (folder / "auth.ini").write_text(blocks("ini")[0])
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "PREFECT_", "HF_"))}
    environ = {
        **{name: value for name, value in clean.items() if name not in ("DO_NOT_TRACK", "CI", "ALTO_HOME")},
        "PYTHONPATH": f"{REPOSITORY / 'tests' / 'loopback_only'}:{REPOSITORY}",
        "LOOPBACK_ONLY_LOG": str(folder / "refused.log"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
    }
    secrets = {
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"),
        "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORDS["admin"],
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "any long random text",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "PREFECT_SERVER_API_AUTH_STRING": PREFECT_LOGIN,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_HOME": str(folder / "prefect"),
    }
    running = []

    def start(line: str, url: str) -> tuple[str, subprocess.Popen[bytes], Path]:
        words = shlex.split(line)
        log = folder / f"{words[0]}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                words, cwd=folder, env=environ | secrets, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        running.append(process)
        return url, process, log

    try:
        mlflow, prefect = f"http://127.0.0.1:{ports['mlflow']}", f"http://127.0.0.1:{ports['prefect']}"
        mlflow_line = command("mlflow server").replace("--port 5000", f"--port {ports['mlflow']}")
        prefect_line = command("prefect server").replace("--port 4200", f"--port {ports['prefect']}")
        waiting = [start(mlflow_line, f"{mlflow}/health"), start(prefect_line, f"{prefect}/api/health")]
        found = Servers(folder, environ, mlflow, mlflow, f"{prefect}/api")
        make_certificate(folder)
        if shutil.which("nginx"):
            (folder / "nginx.conf").write_text(proxy_configuration(folder, ports))
            found.mlflow, found.prefect = (
                f"https://localhost:{ports[f'{name}-tls']}{path}"
                for name, path in (("mlflow", ""), ("prefect", "/api"))
            )
            environ |= dict.fromkeys(
                ("MLFLOW_TRACKING_SERVER_CERT_PATH", "PREFECT_API_SSL_CERT_FILE"), str(folder / "alto.pem")
            )
        for server in waiting:
            wait_for(*server)
        if shutil.which("nginx"):
            wait_for(*start(f"nginx -c {folder}/nginx.conf -p {folder}", f"{found.mlflow}/health"))
        for user in ("alice", "bob"):
            line = command("curl -u admin").replace("http://127.0.0.1:5000", mlflow).replace("alice", user)
            line = line.replace('"..."', json.dumps(PASSWORDS[user]))
            subprocess.run(["bash", "-c", line], env=environ | secrets, check=True, capture_output=True, timeout=60)
        yield found
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            process.wait(30)


def make_certificate(folder: Path) -> None:
    line = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    words = [*line.split(), "-keyout", str(folder / "alto.key"), "-out", str(folder / "alto.pem")]
    subprocess.run(words, check=True, capture_output=True, timeout=60)


def proxy_configuration(folder: Path, ports: dict[str, int]) -> str:
    """The page's, with the names, ports and files of this test; in the foreground, writing into the test's folder."""
    text = blocks("nginx")[0].replace("/etc/ssl", str(folder))
    for name, port in (("mlflow", "5000"), ("prefect", "4200")):
        text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{ports[name]}", 1)
        text = text.replace("listen 443 ssl", f"listen 127.0.0.1:{ports[f'{name}-tls']} ssl", 1)
        text = text.replace(f"{name}.example.org", "localhost")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    text = text.replace("http {", f"http {{ access_log off; {temporary}")
    user = "user root; " if os.geteuid() == 0 else ""  # else its workers become nobody, who may not write there
    return f"daemon off; {user}pid {folder}/nginx.pid; error_log {folder}/nginx-error.log;\n{text}"


def with_login(url: str, login: str) -> str:
    user, _, password = login.partition(":")
    return url.replace("://", f"://{user}:{requests.utils.quote(password, safe='')}@")


@pytest.fixture
def as_user(servers: Servers, workspace_home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`as_user("bob")`: what follows in this process is bob's, in one workspace that all share."""

    def become(name: str) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", servers.mlflow_plain)
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", name)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORDS[name])

    return become


def test_one_task_behind_logins_and_tls_shows_no_secret_and_calls_nobody(
    servers: Servers, tmp_path: Path, tiny_model: Path, tiny_rows: Path
) -> None:
    task = {
        "name": "guarded",
        "model": {"name": str(tiny_model)},
        "data": {"source": str(tiny_rows), "validation": {"rows": 8}},
        "search_space": {"learning_rate": [1e-3, 1e-2], "lora_rank": 2, "adapter_batch_size": 4},
        "budget": {"steps": 6, "eval_interval_fraction": 0.5, "gate_warmup_fraction": 0.5},
    }
    (tmp_path / "task.yaml").write_text(json.dumps(task))
    environ = servers.environ | {
        "ALTO_HOME": str(tmp_path / "alto"),
        "ALTO_DEVICE": "cpu",
        "MLFLOW_TRACKING_URI": with_login(servers.mlflow, f"alice:{PASSWORDS['alice']}"),
        "PREFECT_API_URL": with_login(servers.prefect, PREFECT_LOGIN),
        "PREFECT_LOGGING_LEVEL": "DEBUG",
        "HF_TOKEN": HUB_TOKEN,
    }
    words = [sys.executable, "-c", "from flows.cli.app import main; main()", "tune", "task.yaml", "--plain"]
    done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert servers.refused == ""

    said = (done.stdout + done.stderr).encode()
    texts = {"output": said, **contents(tmp_path / "alto"), **contents(servers.folder)}
    assert sum(b"guarded-1" in text for text in texts.values()) > 3, "the run left traces to look through"
    assert [name for name in texts if name.endswith((".pkl", ".pickle", ".pt", ".bin"))] == []
    assert oct((tmp_path / "alto").stat().st_mode)[-3:] == "700"
    for secret in (PASSWORDS["alice"], PREFECT_LOGIN.partition(":")[2], HUB_TOKEN):
        spellings = [secret, requests.utils.quote(secret, safe=""), f"alice:{secret}", f"alto:{secret}"]
        wanted = [s.encode() for s in spellings[:2]] + [base64.b64encode(s.encode()) for s in spellings[2:]]
        hits = [name for name, text in texts.items() if any(spelling in text for spelling in wanted)]
        assert hits == []


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".key"}


def test_who_is_not_logged_in_is_refused(
    servers: Servers, workspace_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requests.get(f"{servers.mlflow_plain}/api/2.0/mlflow/experiments/search", timeout=20).status_code == 401
    certificate = str(servers.folder / "alto.pem")
    answer = requests.post(f"{servers.prefect}/flow_runs/filter", json={}, timeout=20, verify=certificate)
    assert answer.status_code == 401
    monkeypatch.setenv("MLFLOW_TRACKING_URI", servers.mlflow_plain)
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TrackingError, match="MLFLOW_TRACKING_USERNAME"):
        _ = Tracker(load_settings()).person
    with pytest.raises(TrackingError, match="MLFLOW_TRACKING_USERNAME"):
        Tracker(load_settings()).task_runs("nobodys-1")


def test_the_proxy_passes_on_only_the_names_that_mlflow_knows(servers: Servers) -> None:
    if servers.mlflow == servers.mlflow_plain:
        pytest.skip("needs nginx")
    login, certificate = ("alice", PASSWORDS["alice"]), str(servers.folder / "alto.pem")
    url = f"{servers.mlflow}/api/2.0/mlflow/users/current"
    known = requests.get(url, auth=login, verify=certificate, timeout=20)
    strange = requests.get(url, auth=login, verify=certificate, timeout=20, headers={"Host": "evil.example.com"})
    assert (known.status_code, strange.status_code) == (200, 403)


def test_a_task_belongs_to_who_submits_it_and_nobody_else_may_stop_it(
    as_user: Callable[[str], None], tiny_task: Callable[..., TuningTask]
) -> None:
    as_user("alice")
    plan = plan_task(tiny_task())
    create_task(plan, "hers-1", load_settings())
    store, queue = Store(load_settings()), Queue(load_settings())
    queue.submit("hers-1", Demand(num_gpus=1, expected_seconds=60, priority=Priority.NORMAL))
    assert store.task("hers-1").owner == "alice"

    def alto(*arguments: str) -> Any:
        return CliRunner().invoke(app, list(arguments))

    as_user("bob")
    for verb in ("cancel", "pause", "unpause"):
        result = alto(verb, "hers-1")
        assert result.exit_code == OwnerError.exit_code
        assert f"got bob, who asks to {verb} it, expected its owner alice" in result.stderr
    with pytest.raises(TaskFileError, match=r"owner: got alice, expected bob"):
        create_task(plan_task(tiny_task(owner="alice")), "forged-1", load_settings())
    create_task(plan, "his-1", load_settings())  # the same model and data, in an experiment of his own
    result = alto("clone", "hers-1", "--json")
    assert result.exit_code == 0, result.output
    assert store.task(json.loads(result.stdout)["task_id"]).owner == "bob"

    as_user("alice")
    assert alto("pause", "hers-1").exit_code == 0
    as_user("admin")
    assert alto("cancel", "hers-1").exit_code == 0
    told = [event.text for event in queue.events(task_id="hers-1") if event.kind.startswith("asked-to")]
    assert told == ["waiting, by alice", "paused, by admin"]


def test_only_the_owner_moves_an_alias_and_a_host_registers_in_the_owners_name(
    as_user: Callable[[str], None], register_tiny: Callable[..., int], tiny_task: Callable[..., TuningTask]
) -> None:
    as_user("alice")
    create_task(plan_task(tiny_task(owner="alice")), "hers-2", load_settings())  # makes the experiment hers
    as_user("admin")  # as a host of the cluster
    sections = {"owner": "alice", "registry_name": "served"}
    assert [register_tiny(steps, **sections) for steps in (1, 30)] == [1, 2]

    as_user("bob")
    registry = Tracker(load_settings()).registry
    with pytest.raises(OwnerError, match="got bob, who asks to promote it, expected its owner alice"):
        promote("served", load_settings())
    first, second = registry.version("served", 1), registry.version("served", 2)
    with pytest.raises(TrackingError, match=r"refused it .*ermission denied"):  # MLflow's own word, without our check
        registry.make_champion(second, instead_of=first, decision="{}")
    assert registry.find("served", CHAMPION).version == 1

    as_user("alice")
    assert promote("served", load_settings()).champion == 2
    as_user("bob")
    with pytest.raises(OwnerError, match="got bob, who asks to roll back it"):
        roll_back("served", load_settings())
    as_user("alice")
    assert roll_back("served", load_settings()).champion == 1
