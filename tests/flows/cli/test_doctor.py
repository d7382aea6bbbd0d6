"""`alto doctor`: what was found on this machine, in words, as JSON and as an exit code."""

from __future__ import annotations

import json

import pytest

from .conftest import Invoke


def test_a_machine_that_can_tune_is_told_so(invoke: Invoke) -> None:
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip().endswith("A tune would work here.")
    assert "ok      Python" in result.stdout


def test_what_is_broken_comes_with_its_remedy_and_exits_with_1(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_DEVICE", "cuda:7")
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "broken  GPU" in result.stdout and "unset ALTO_DEVICE" in result.stdout
    assert "A tune would fail here." in result.stdout
    as_json = invoke("doctor", "--json")
    (content,) = map(json.loads, as_json.stdout.splitlines())
    assert (as_json.exit_code, content["event"], content["ok"]) == (1, "doctor", False)
    assert {check["name"] for check in content["checks"] if check["health"] == "broken"} == {"GPU"}
