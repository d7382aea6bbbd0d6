"""What all tests share: a quiet environment, a workspace of their own, the quickstart's real model."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

from alto_core.settings import Settings, load_settings, prepare_environment

REPOSITORY = Path(__file__).resolve().parents[1]

# Before prefect or mlflow are imported by any test module.
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
prepare_environment(load_settings({"ALTO_HOME": str(REPOSITORY / ".pytest_cache" / "alto")}))


def _load_prepare_quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "prepare_quickstart", REPOSITORY / "examples" / "prepare_quickstart.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A fresh workspace on the CPU."""
    return load_settings({"ALTO_HOME": str(tmp_path / "alto"), "ALTO_DEVICE": "cpu"})


@pytest.fixture(scope="session")
def quickstart_folder() -> Path:
    """The quickstart's model and rows, made once and kept between runs."""
    folder = REPOSITORY / "quickstart"
    prepare = _load_prepare_quickstart()
    prepare.convert_model(folder / "model")
    prepare.write_rows(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_folder(quickstart_folder: Path) -> Path:
    """SmolLM2-135M-Instruct in fp32, a real pretrained model."""
    return quickstart_folder / "model"
