"""Whether servers of LoRA adapters take an adapter as it is, told from its configuration and tensor names alone.

The limits are those of vLLM, the strictest of the common ones: a server is started with one of a few largest ranks, and
plain LoRA on linear layers inside the model is all that it loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

VLLM_MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM accepts as `--max-lora-rank`."""
PREFIX = "base_model.model."
_REFUSED_FIELDS = {
    "use_dora": "DoRA, which vLLM does not load",
    "modules_to_save": "whole modules trained beside the adapter (modules_to_save), which vLLM refuses",
    "trainable_token_indices": "trained token embeddings, which vLLM does not load",
    "rank_pattern": "ranks that differ by layer (rank_pattern); vLLM needs the largest as its limit",
    "layer_replication": "repeated layers (layer_replication), which vLLM does not load",
    "lora_bias": "biases inside LoRA (lora_bias), which vLLM refuses",
}
_HEAD_AND_EMBEDDINGS = ("lm_head", "embed_tokens", "wte", "wpe", "embed_out")


def smallest_max_rank(lora_rank: int) -> int | None:
    """The lowest `--max-lora-rank` that serves a rank; None above the highest."""
    return next((limit for limit in VLLM_MAX_RANKS if 0 < lora_rank <= limit), None)


def serving_problems(config: Mapping[str, Any], tensor_names: Iterable[str]) -> tuple[str, ...]:
    """What a server would refuse or silently leave out, one sentence each; empty where it serves as it is."""
    problems = []
    lora_rank = config.get("r")
    if not isinstance(lora_rank, int) or lora_rank < 1:
        problems.append(f"its rank is {lora_rank!r}, expected 1 or more")
    elif smallest_max_rank(lora_rank) is None:
        problems.append(f"its rank is {lora_rank}, vLLM serves at most {VLLM_MAX_RANKS[-1]}")
    problems += [f"it has {what}" for field, what in _REFUSED_FIELDS.items() if config.get(field)]
    if config.get("bias", "none") != "none":
        problems.append(f"it trains biases (bias={config['bias']!r}), which vLLM refuses")
    names = tuple(tensor_names)
    for part in _HEAD_AND_EMBEDDINGS:
        if any(f".{part}." in name for name in names):
            problems.append(f"it adapts {part}, which servers load only with settings of their own")
    foreign = next((name for name in names if not name.startswith(PREFIX)), None)
    if foreign is not None:
        problems.append(f"its tensor {foreign} does not begin with {PREFIX!r}: servers skip it without a word")
    return tuple(problems)
