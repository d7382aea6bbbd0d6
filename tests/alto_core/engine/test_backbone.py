"""Loading the base model: right dtype, frozen, one at a time; what is wrong with a model is said in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from alto_core.config import ModelSection
from alto_core.engine.backbone import check_rows_are_apart, load_backbone, release_backbone
from alto_core.engine.model_files import declared_name
from alto_core.engine.target_modules import linear_endings
from alto_core.errors import ModelError


@pytest.fixture
def copy(tiny: Any, tmp_path: Path) -> Path:
    """A copy of the tiny model, free to be damaged."""
    shutil.copytree(tiny.folder(), tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_backbone_is_frozen_in_eval_mode_and_of_the_asked_dtype(tiny: Any) -> None:
    for dtype, expected in (("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        backbone = tiny.backbone(dtype=dtype)
        assert backbone.dtype == expected
        assert not backbone.model.training
        assert all(p.dtype == expected and not p.requires_grad for p in backbone.model.parameters())
    assert (backbone.name, backbone.max_positions, len(backbone.layers)) == ("llama", 64, 14)


def test_the_last_model_is_kept_until_another_is_asked_for(tiny: Any) -> None:
    first = tiny.backbone()
    assert tiny.backbone() is first
    assert tiny.backbone(dtype="bfloat16") is not first
    again = tiny.backbone()
    assert again is not first
    release_backbone()
    assert tiny.backbone() is not again


def _missing_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def _not_finite(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "expected a folder that exists"),
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot load"),
        (lambda folder: edit_config(folder, model_type="no_such_kind"), "no_such_kind"),
        (lambda folder: edit_config(folder, hidden_size=64), "cannot load"),
        (lambda folder: edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4}), "is quantized"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot load.*not in safetensors format"),
        (_pickled, "cannot load.*not in safetensors format"),
        (_cut, "cannot load"),
        (_missing_tensor, r"lack 1 tensors.*'model.layers.1.mlp.up_proj.weight'"),
        (_not_finite, "not finite"),
    ],
    ids=[
        "no folder",
        "no config",
        "half a config",
        "kind",
        "shapes",
        "quantized",
        "no weights",
        "pickle",
        "cut",
        "tensor",
        "nan",
    ],
)
def test_a_broken_model_is_refused_in_words(copy: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(copy)
    with pytest.raises(ModelError, match=message) as caught:
        load_backbone(ModelSection(name=str(copy)), "cpu")
    assert str(caught.value).startswith("model.name: ")


def test_a_hub_id_without_network_is_refused_in_words() -> None:
    for check in (linear_endings, lambda section: load_backbone(section, "cpu")):
        with pytest.raises(ModelError, match=r"cannot load 'no-such-org/no-such-model'.*HF_HUB_OFFLINE is set"):
            check(ModelSection(name="no-such-org/no-such-model"))


def test_code_of_a_model_is_not_run_unless_asked_for(copy: Path) -> None:
    # Z3
    edit_config(
        copy, model_type="own_kind", auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    )
    (copy / "own.py").write_text(f"open({str(copy / 'it_ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match=r"not run. Set `model.trust_remote_code: true` only if you trust it"):
        load_backbone(ModelSection(name=str(copy)), "cpu")
    assert not (copy / "it_ran").exists()


@pytest.mark.parametrize(
    "config",
    [
        transformers.T5Config(vocab_size=32, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8),
        transformers.LlavaConfig(),
    ],
    ids=["encoder-decoder", "images"],
)
def test_models_that_are_no_text_decoders_are_refused(config: Any, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"encoder-decoder|only text models"):
        linear_endings(ModelSection(name=str(tmp_path)))


def test_models_whose_packed_rows_see_each_other_are_refused(tmp_path: Path) -> None:
    # T9: a state-space model carries its state across rows, BLOOM's attention ignores the interface.
    torch.manual_seed(0)
    mamba = transformers.MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1)
    bloom = transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)
    for config in (mamba, bloom):
        folder = tmp_path / config.model_type
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        with pytest.raises(ModelError, match=r"see each other|cannot load|does not hand"):
            load_backbone(ModelSection(name=str(folder)), "cpu")


def test_the_check_of_rows_finds_a_leak(tiny: Any) -> None:
    model = tiny.backbone().model
    check_rows_are_apart(model, "tiny")
    model.set_attn_implementation("sdpa")
    embed = model.get_input_embeddings()
    leak = embed.register_forward_hook(lambda _module, _args, out: out + 0.1 * out.mean(1, keepdim=True))
    with pytest.raises(ModelError, match="see each other"):
        check_rows_are_apart(model, "tiny")
    leak.remove()


def test_declared_name_is_never_a_path(copy: Path) -> None:
    section = ModelSection(name=str(copy))
    assert declared_name(ModelSection(name="org/model")) == "org/model"
    assert declared_name(section) == "model"
    edit_config(copy, _name_or_path="org/original")
    assert declared_name(section) == "org/original"
    for path in (str(copy), "../somewhere", "./here", "C:\\models\\x", "/mnt/models/x"):
        edit_config(copy, _name_or_path=path)
        assert declared_name(section) == "model"
