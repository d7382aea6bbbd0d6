"""Exported versions: stock PEFT folders that give what was registered, with a card that says what to know."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import peft
import pytest
import torch
from huggingface_hub import constants as hub_constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from alto_core.delivery import export_version
from alto_core.engine.backbone import release_backbone
from alto_core.errors import ModelError, TrackingError
from alto_core.registration import held_out, serving_facts
from alto_core.settings import load_settings
from alto_core.task_engine import open_engine
from alto_core.tracking import Registry
from alto_core.tracking.packaging import packaged
from alto_core.workspace import Workspace

pytestmark = [
    pytest.mark.usefixtures("in_home"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]


@pytest.fixture(scope="module")
def home(home_with: Callable[..., Path]) -> Iterator[Path]:
    """Version 1 has learned something, version 2 nothing at all."""
    yield home_with(40, 0)
    release_backbone()


@pytest.fixture
def in_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_HOME", str(home))
    monkeypatch.setenv("ALTO_DEVICE", "cpu")


def ids() -> torch.Tensor:
    rows = held_out(Workspace.open("tiny-1")).rows
    return torch.tensor([max((row.token_ids for row in rows), key=len)])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids()).logits  # type: ignore[no-any-return]


def base(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def test_the_champion_loads_in_peft_and_says_what_to_know(tiny_model: Path, tmp_path: Path) -> None:
    delivery = export_version("model@champion", tmp_path / "out", load_settings())
    assert (delivery.adapter.version, delivery.lora_rank, delivery.max_lora_rank) == (1, 4, 8)
    assert delivery.warnings == ()
    assert any("gives the losses that it had at registration (4 held-out rows)" in check for check in delivery.checks)
    assert sorted(f.name for f in delivery.folder.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    card = (delivery.folder / "README.md").read_text()
    assert "--max-lora-rank 8" in card and "task tiny-1" in card
    for file in ("README.md", "adapter_config.json"):
        assert str(tiny_model.parent) not in (delivery.folder / file).read_text(), "no path of this machine"

    tuned = logits(peft.PeftModel.from_pretrained(base(tiny_model), delivery.folder))
    assert (tuned - logits(base(tiny_model))).abs().max() > 0.1
    registered = Workspace.open("tiny-1")
    own = registered.job_folder(registered.result.winner or "") / "adapter"
    assert (
        load_file(own / "adapter_model.safetensors").keys()
        == load_file(delivery.folder / "adapter_model.safetensors").keys()
    )


def test_the_merged_model_needs_no_peft(tiny_model: Path, tmp_path: Path) -> None:
    delivery = export_version("model/1", tmp_path / "out", load_settings(), merged=True)
    assert delivery.merged_folder is not None
    tuned = logits(peft.PeftModel.from_pretrained(base(tiny_model), delivery.folder))
    merged = AutoModelForCausalLM.from_pretrained(delivery.merged_folder, dtype=torch.float32)
    assert (logits(merged) - tuned).abs().max() < 1e-4
    assert AutoTokenizer.from_pretrained(delivery.merged_folder).encode("ab") == AutoTokenizer.from_pretrained(
        tiny_model
    ).encode("ab")
    assert [f.suffix for f in delivery.merged_folder.iterdir() if f.stat().st_size > 50_000] == [".safetensors"]


def test_a_padded_adapter_gives_the_same(tiny_model: Path, tmp_path: Path) -> None:
    plain = export_version("model", tmp_path / "plain", load_settings())
    padded = export_version("model", tmp_path / "padded", load_settings(), padded=True)
    config = json.loads((padded.folder / "adapter_config.json").read_text())
    assert (plain.lora_rank, padded.lora_rank, config["r"], config["lora_alpha"]) == (4, 8, 8, 16)
    models = [peft.PeftModel.from_pretrained(base(tiny_model), d.folder) for d in (plain, padded)]
    assert (logits(models[0]) - logits(models[1])).abs().max() < 1e-5


def test_an_adapter_that_changes_nothing_is_told(tmp_path: Path) -> None:
    delivery = export_version("model@challenger", tmp_path / "out", load_settings())
    assert delivery.warnings == ("it changes nothing: every lora_B is zero",)
    assert "Warning: it changes nothing" in (delivery.folder / "README.md").read_text()


def _changed(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Any:
    download = Registry.download

    def changed(self: Registry, *args: Any) -> Path:
        folder = download(self, *args)
        save_file(change(load_file(folder / "adapter_model.safetensors")), folder / "adapter_model.safetensors")
        return folder

    return changed


def test_an_adapter_that_no_longer_is_what_was_registered_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Registry, "download", _changed(lambda t: {k: 0.3 * v for k, v in t.items()}))
    (warning,) = export_version("model", tmp_path / "out", load_settings()).warnings
    assert "at registration they were" in warning


def test_an_adapter_whose_names_fit_no_layer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # X3: servers would load it, skip every tensor, and answer as the base model does.
    renamed = _changed(lambda t: {k.replace("model.layers", "language_model.layers"): v for k, v in t.items()})
    monkeypatch.setattr(Registry, "download", renamed)
    with pytest.raises(ModelError, match="expected a tensor"):
        export_version("model", tmp_path / "out", load_settings())
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ModelError, match="expected a new or an empty one"):
        export_version("model", tmp_path, load_settings())
    assert [f.name for f in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nothing@champion", "got no version with alias"),
        ("model@latest", "neither `latest`"),
        ("model/9", "find version 9"),
        ("model/one", "expected NAME@ALIAS, NAME/VERSION or NAME"),
        ("../model@champion", "expected 1 to 64 letters"),
    ],
)
def test_a_reference_to_nothing_is_told(reference: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match=message):
        export_version(reference, tmp_path / "out", load_settings())


@pytest.fixture
def by_name_without_network(in_home: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # as a user sets it who loads a model by its name
    monkeypatch.setenv("MLFLOW_TRACKING_URI", load_settings().mlflow_tracking_uri)

    def no_network(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", no_network)


@pytest.mark.usefixtures("by_name_without_network")
def test_mlflow_loads_it_by_name_and_answers_without_a_network(tiny_model: Path, tmp_path: Path) -> None:
    loaded = mlflow.pyfunc.load_model("models:/model@champion", model_config={"base_model": str(tiny_model)})
    workspace = Workspace.open("tiny-1")
    prompts = held_out(workspace).generation_rows[:3]
    answers = loaded.predict(pd.DataFrame({"prompt": [workspace.codec.spell(row.prompt_ids) for row in prompts]}))
    (job_id, job), *_ = workspace.jobs.items()
    with open_engine(workspace, [job_id], num_slots=1) as engine:
        engine.load_adapter(job, workspace.job_folder(job_id) / "adapter")
        generated = engine.generate(
            [(job_id, row.prompt_ids) for row in prompts],
            max_new_tokens=workspace.task.evaluation.max_new_tokens,
            stop_token_ids=workspace.data.stop_token_ids,
        )
    assert answers == [workspace.codec.decode(token_ids) for token_ids in generated]
    assert loaded.predict(loaded.input_example) == answers[:1]
    assert len(loaded.predict(loaded.input_example, params={"max_new_tokens": 1})[0]) <= 1

    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    tensors = load_file(other / "model.safetensors")
    save_file({k: v + 0.01 for k, v in tensors.items()}, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="the one that the adapter was trained on"):
        mlflow.pyfunc.load_model("models:/model@champion", model_config={"base_model": str(other)})


def piped(pipeline: Any, prompts: list[str], stop_token_ids: tuple[int, ...]) -> list[str]:
    """What a text generation pipeline of transformers answers greedily."""
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": list(stop_token_ids)}
    answers = pipeline(prompts, return_full_text=False, add_special_tokens=False, **options)
    return [answer["generated_text"] for (answer,) in answers]


@pytest.mark.usefixtures("by_name_without_network")
def test_mlflow_loads_it_as_a_pipeline_of_transformers_too(tiny_model: Path) -> None:
    workspace = Workspace.open("tiny-1")
    prompts = [workspace.codec.spell(row.prompt_ids) for row in held_out(workspace).generation_rows[:3]]
    served = mlflow.pyfunc.load_model("models:/model@champion", model_config={"base_model": str(tiny_model)})
    expected = served.predict(pd.DataFrame({"prompt": prompts}), params={"max_new_tokens": 6})
    where = {"base_model_path": str(tiny_model), "tokenizer": str(tiny_model)}
    pipeline = mlflow.transformers.load_model("models:/model@champion", **where)
    assert isinstance(pipeline.model, peft.PeftModel)
    assert piped(pipeline, prompts, workspace.data.stop_token_ids) == expected
    assert piped(pipeline.__class__(model=base(tiny_model), tokenizer=pipeline.tokenizer), prompts, ()) != expected


@pytest.mark.usefixtures("by_name_without_network")
def test_an_adapter_of_a_hub_model_finds_the_base_and_its_revision_in_the_hubs_cache(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace.open("tiny-1")
    adapter = workspace.job_folder(workspace.result.winner or "") / "adapter"
    revision = "7" * 40
    shutil.copytree(tiny_model, tmp_path / "models--org--tiny" / "snapshots" / revision)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path))
    facts = dataclasses.replace(
        serving_facts(workspace), base_model="org/tiny", base_revision=revision, base_fingerprint=None
    )
    prompts = [workspace.codec.spell(row.prompt_ids) for row in held_out(workspace).generation_rows[:3]]
    with packaged(adapter, facts) as folder:
        served = mlflow.pyfunc.load_model(str(folder))
        expected = served.predict(pd.DataFrame({"prompt": prompts}), params={"max_new_tokens": 6})
        pipeline = mlflow.transformers.load_model(str(folder))
        assert piped(pipeline, prompts, workspace.data.stop_token_ids) == expected
