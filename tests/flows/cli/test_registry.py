"""`alto promote`, `alto rollback` and `alto export`, on registered adapters of a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from alto_core.engine.backbone import release_backbone
from flows.cli.app import app


@pytest.fixture(scope="module")
def home(home_with: Callable[..., Path]) -> Iterator[Path]:
    yield home_with(1, 40)
    release_backbone()


@pytest.fixture
def alto(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command in a workspace with a weak champion and a strong challenger."""
    monkeypatch.setenv("ALTO_HOME", str(home))
    monkeypatch.setenv("ALTO_DEVICE", "cpu")
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def last_object(result: Result) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return content


def test_a_challenger_is_kept_promoted_and_rolled_back(alto: Callable[..., Result]) -> None:
    kept = alto("promote", "model", "--margin", "50")
    assert kept.exit_code == 0, kept.output
    assert "model: version 1 serves, as before" in kept.stdout
    assert "version 2: within noise on 8 held-out rows: loss" in kept.stdout

    promoted = last_object(alto("promote", "model", "--json"))
    assert (promoted["event"], promoted["changed"], promoted["champion"]) == ("promotion", True, 2)
    assert promoted["judgement"]["difference"]["high"] < 0

    again = alto("promote", "model")
    assert again.exit_code == 6
    assert "got no version with alias 'challenger'" in again.stderr

    back = alto("rollback", "model")
    assert back.exit_code == 0, back.output
    assert "model: version 1 serves" in back.stdout
    none = alto("rollback", "model", "--json")
    assert none.exit_code == 6
    assert last_object(none)["kind"] == "TrackingError"


def test_an_export_says_what_it_wrote_and_checked(alto: Callable[..., Result], tmp_path: Path) -> None:
    plain = alto("export", "model/2", str(tmp_path / "plain"))
    assert plain.exit_code == 0, plain.output
    assert f"model version 2 is in {tmp_path / 'plain'}" in plain.stdout
    assert "rank 4, served by vLLM with --max-lora-rank 8" in plain.stdout
    assert "checked: it changes what its base model says" in plain.stdout

    both = last_object(alto("export", "model/2", str(tmp_path / "both"), "--merged", "--pad-rank", "--json"))
    assert (both["event"], both["lora_rank"], both["max_lora_rank"], both["warnings"]) == ("export", 8, 8, [])
    assert (Path(both["merged_folder"]) / "model.safetensors").is_file()

    taken = alto("export", "model/2", str(tmp_path / "plain"))
    assert taken.exit_code == 4
    assert "expected a new or an empty one" in taken.stderr


def test_a_margin_below_zero_is_a_usage_error(alto: Callable[..., Result]) -> None:
    assert alto("promote", "model", "--margin", "-1").exit_code == 2
