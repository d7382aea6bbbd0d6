"""An adapter folder as MLflow keeps it: the adapter's own files, and what MLflow needs to load it in two ways.

The files of the adapter stay at the top, so that PEFT reads the downloaded folder as it is. The base model is a name
with its revision and fingerprint, never a copy and never a path of the machine that trained.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from alto_core.tracking import served_adapter

LOADER = "alto_served_adapter"
"""Module name of the loader's copy."""
ADAPTER_PLACE = "."
"""In the package; MLflow looks into `peft` unless told."""


@dataclass(frozen=True, kw_only=True)
class ServingFacts:
    """What answering with an adapter takes besides its weights."""

    base_model: str
    """Hub id, or the name that the base model's folder goes by."""
    base_revision: str | None
    base_fingerprint: str | None
    """Of a base model in a folder; see `served_adapter.fingerprint`."""
    stop_token_ids: tuple[int, ...]
    pad_token_id: int
    max_new_tokens: int
    example_prompt: str
    """As the model reads it, chat template included."""


@contextmanager
def packaged(folder: Path, facts: ServingFacts) -> Iterator[Path]:
    """A temporary folder with the adapter, an MLmodel file with signature and input example, and the loader."""
    with tempfile.TemporaryDirectory() as temporary:
        loader = Path(temporary) / f"{LOADER}.py"
        shutil.copyfile(served_adapter.__file__, loader)
        target = Path(temporary) / "model"
        with warnings.catch_warnings():
            # about MLflow's own type hints, when its pyfunc module is imported, and its own use of pandas
            warnings.simplefilter("ignore")
            _save(target, loader, facts)
        for file in folder.iterdir():
            shutil.copyfile(file, target / file.name)
        yield target


def _save(target: Path, loader: Path, facts: ServingFacts) -> None:
    # here, since it takes seconds and registering is the only use
    import mlflow.pyfunc
    import pandas as pd
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    logging.getLogger("mlflow.pyfunc").setLevel(logging.WARNING)  # its news would land in the live display
    # it warns that PEFT is not installed, which whoever serves the adapter needs and training does not
    logging.getLogger("mlflow.utils.requirements_utils").setLevel(logging.ERROR)
    config = {k: v for k, v in dataclasses.asdict(facts).items() if k != "example_prompt" and v is not None}
    model = Model()
    model.add_flavor("transformers", **_as_pipeline(facts))
    mlflow.pyfunc.save_model(
        str(target),
        mlflow_model=model,
        loader_module=LOADER,
        code_paths=[str(loader)],
        signature=ModelSignature(
            inputs=Schema([ColSpec("string", "prompt")]),
            outputs=Schema([ColSpec("string")]),
            params=ParamSchema([ParamSpec("max_new_tokens", "long", facts.max_new_tokens)]),
        ),
        input_example=pd.DataFrame({"prompt": [facts.example_prompt]}),
        model_config={**config, "stop_token_ids": list(facts.stop_token_ids)},
        pip_requirements=_requirements(),
        metadata={"base_model": facts.base_model, "base_revision": facts.base_revision, "kind": "lora"},
    )


def _as_pipeline(facts: ServingFacts) -> dict[str, Any]:
    """What `mlflow.transformers.load_model` reads: a base model and its tokenizer elsewhere, the adapter here.

    MLflow itself writes this only for a loaded PEFT model. A folder is named by whoever loads, as `base_model_path`.
    """
    flavor = {
        "task": "text-generation",
        "instance_type": "TextGenerationPipeline",
        "pipeline_model_type": "AutoModelForCausalLM",
        "source_model_name": facts.base_model,
        "peft_adaptor": ADAPTER_PLACE,
    }
    if facts.base_fingerprint is not None:
        return {**flavor, "local_base_model_path": facts.base_model, "components": []}
    revision = facts.base_revision or "main"
    tokenizer = {
        "tokenizer_type": "AutoTokenizer",
        "tokenizer_name": facts.base_model,
        "tokenizer_revision": revision,
    }
    return {**flavor, "source_model_revision": revision, **tokenizer, "components": ["tokenizer"]}


def _requirements() -> list[str]:
    """What the loader imports, in the versions that are installed here."""
    wanted = []
    for package in ("torch", "transformers", "peft", "safetensors", "pandas"):
        try:
            wanted.append(f"{package}=={version(package).partition('+')[0]}")
        except PackageNotFoundError:
            wanted.append(package)
    return wanted
