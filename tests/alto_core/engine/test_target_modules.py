"""Which layers a task may adapt is checked on the model's structure, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from alto_core.config import ModelSection
from alto_core.engine.target_modules import check_target_modules, find_linear_layers, linear_endings, select_layers
from alto_core.errors import ModelError, TaskFileError


@pytest.mark.parametrize("family", ["llama", "smollm", "qwen2", "mistral", "gemma2", "gemma3", "gpt2"])
def test_all_linear_is_every_linear_layer_but_the_head(tiny: Any, family: str) -> None:
    assert linear_endings(tiny.section(family)) == tuple(sorted(tiny.targets(family)))


def test_structure_alone_is_enough(tmp_path: Path) -> None:
    # No weights, no tokenizer: an 8B configuration answers in a moment.
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    config.save_pretrained(tmp_path)
    section = ModelSection(name=str(tmp_path))
    assert check_target_modules(section, ["q_proj", "mlp.down_proj"], lora_ranks=[8, 256]) == {
        "q_proj": 32,
        "mlp.down_proj": 32,
    }


@pytest.mark.parametrize(
    ("family", "endings", "message"),
    [
        ("llama", ["q_proj", "v_porj"], r"'v_porj', which matches no linear layer.*expected one of: down_proj"),
        ("gpt2", ["q_proj"], r"'q_proj', which matches no linear layer.*expected one of: c_attn, c_fc, c_proj"),
        ("llama", ["proj"], "'proj'"),
        ("llama", ["self_attn"], "'self_attn'"),
        ("llama", ["q_proj", "lm_head"], "'lm_head', the model's output head or an embedding"),
        ("smollm", ["lm_head"], "head or an embedding"),
        ("llama", ["embed_tokens"], "head or an embedding"),
        ("gpt2", ["wte"], "head or an embedding"),
        ("gpt2", ["wpe"], "head or an embedding"),
    ],
)
def test_names_that_adapt_nothing_are_refused(tiny: Any, family: str, endings: list[str], message: str) -> None:
    # C3, C5
    with pytest.raises(ModelError, match=message):
        check_target_modules(tiny.section(family), endings)


def test_count_of_matches_is_given_per_entry(tiny: Any) -> None:
    assert check_target_modules(tiny.section("gpt2"), ["c_proj", "attn.c_proj", "h.1.mlp.c_fc"]) == {
        "c_proj": 4,
        "attn.c_proj": 2,
        "h.1.mlp.c_fc": 1,
    }


def test_rank_larger_than_a_layer_is_refused_naming_the_field(tiny: Any) -> None:
    # C1: peft accepts rank 4096 on width 32. k_proj is 32 -> 16 here.
    with pytest.raises(
        TaskFileError, match=r"search_space.lora_rank: got 17, expected at most 16, .*k_proj \(32 -> 16\)"
    ):
        check_target_modules(tiny.section(), ["q_proj", "k_proj"], lora_ranks=[4, 17])
    check_target_modules(tiny.section(), ["q_proj"], lora_ranks=[32])


def test_layers_keep_their_number_whatever_is_selected(tiny: Any) -> None:
    layers = find_linear_layers(tiny.plain_model("gpt2"))
    assert [layer.index for layer in layers] == list(range(8))
    assert [layer.index for layer in select_layers(layers, ["c_fc"])] == [2, 6]
    fused = layers[0]
    assert (fused.name, fused.d_in, fused.d_out, fused.is_conv1d) == ("transformer.h.0.attn.c_attn", 32, 96, True)
