"""transformers looks for a hub package named `kernels`; ours must not be taken for it."""

from __future__ import annotations

import kernels


def test_transformers_does_not_mistake_our_package_for_the_hub_package() -> None:
    from transformers.utils.import_utils import is_kernels_available

    assert kernels.__version__ == "0.0.0"
    is_kernels_available.cache_clear()
    assert is_kernels_available() is False


def test_attention_by_name_still_works_beside_our_package() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attn_implementation="sdpa",
    )
    assert LlamaForCausalLM(config).config._attn_implementation == "sdpa"
