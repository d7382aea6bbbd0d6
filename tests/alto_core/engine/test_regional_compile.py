"""Compiling layers: how long it took, and what a later process knows of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.compiler.config
from torch import nn

from alto_core.engine.packed_attention import PackedRows
from alto_core.engine.regional_compile import compile_layers, compile_time, uncompile_layers


def test_compilation_is_timed_and_what_is_compiled_already_takes_none() -> None:
    doubled = torch.compile(lambda x: 2 * x, backend="eager")
    times = []
    for _ in range(2):
        with compile_time() as seconds:
            doubled(torch.ones(3))
        times.append(seconds[0])
    assert times[0] > 0 and times[1] == 0


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where torch writes its notes; layers are traced and not compiled, which takes no compiler."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.compiler.config, "job_id", None)
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager"))
    torch.compiler.reset()
    yield tmp_path / "dynamo"
    torch.compiler.reset()


def is_compiled_at(model: Any, num_tokens: int) -> bool:
    with compile_time() as seconds, torch.no_grad():
        model(torch.arange(num_tokens)[None], use_cache=False, packed_rows=PackedRows((num_tokens,), "cpu"))
    return seconds[0] > 0


def test_a_later_process_begins_with_code_for_any_number_of_tokens(tiny: Any, notes: Path) -> None:
    model = tiny.backbone().model
    compile_layers(model)
    assert [is_compiled_at(model, count) for count in (8, 12, 14)] == [True, True, False]
    uncompile_layers(model)
    torch.compiler.reset()  # all that a new process does not have
    compile_layers(model)
    assert [is_compiled_at(model, count) for count in (8, 12, 14)] == [True, False, False]
    uncompile_layers(model)


def test_each_model_has_notes_of_its_own_and_a_users_name_for_them_stays(
    tiny: Any, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for family in ("llama", "qwen3", "llama"):
        model = tiny.backbone(family).model
        compile_layers(model)
        names.append(torch.compiler.config.job_id)
        uncompile_layers(model)
    assert names[0] == names[2] != names[1]
    monkeypatch.setattr(torch.compiler.config, "job_id", "mine")
    compile_layers(model)
    assert torch.compiler.config.job_id == "mine"
    uncompile_layers(model)
