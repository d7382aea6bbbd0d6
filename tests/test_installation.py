"""The pinned environments: versions, hashes, and what make does with them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def _pins(text: str) -> dict[str, str]:
    found = re.finditer(r"^([A-Za-z0-9._-]+)==([^ \\;\n]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", pin[1]).lower(): pin[2] for pin in found}


def _read(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def _make(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", *words]
    return subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | environ, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_lock_has_every_pinned_version_and_a_hash_of_each() -> None:
    pins, lock = _pins(_read("constraints.txt")), _pins(_read("requirements.lock"))
    assert {name: lock.get(name) for name in pins} == pins, "run: make lock"
    entries = re.split(r"\n(?=[A-Za-z0-9])", _read("requirements.lock") + "\n" + _read("requirements-build.lock"))
    assert [entry for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry)] == []


def test_a_locked_install_takes_nothing_without_a_hash() -> None:
    locked = _make("--dry-run", "--always-make", "LOCKED=1", ".venv/dev.stamp").stdout
    plain = _make("--dry-run", "--always-make", ".venv/dev.stamp").stdout
    installs = [line for line in locked.splitlines() if "pip install" in line]
    assert len(installs) == 3
    assert all("--require-hashes" in line for line in installs[:2])
    assert installs[2].endswith("--no-deps --no-build-isolation -e .")
    assert "--require-hashes" not in plain
    assert "-c constraints.txt -e '.[quickstart,postgres,dev]'" in plain


def test_an_audit_without_a_network_says_so() -> None:
    nowhere = dict.fromkeys(("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"), "http://127.0.0.1:9")
    done = _make("audit", **nowhere, NO_PROXY="", no_proxy="")
    assert done.returncode != 0
    assert "make audit asks pypi.org, which gives no answer here" in done.stderr
    assert "run it on a machine with a network" in done.stderr
    assert "Traceback" not in done.stderr
