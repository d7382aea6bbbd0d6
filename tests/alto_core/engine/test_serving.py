"""What servers take: ranks, formats, names."""

from __future__ import annotations

from typing import Any

import pytest

from alto_core.engine.serving import serving_problems, smallest_max_rank

NAMES = ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",)


@pytest.mark.parametrize(
    ("lora_rank", "limit"),
    [
        (1, 1),
        (4, 8),
        (8, 8),
        (24, 32),
        (48, 64),
        (100, 128),
        (129, 256),
        (257, 320),
        (512, 512),
        (513, None),
        (0, None),
    ],
)
def test_the_smallest_legal_limit_of_a_rank(lora_rank: int, limit: int | None) -> None:
    # X1: 48 or 4 is no limit that vLLM can be started with.
    assert smallest_max_rank(lora_rank) == limit


@pytest.mark.parametrize(
    ("config", "names", "told"),
    [
        ({}, NAMES, None),
        ({"r": 0}, NAMES, "rank is 0"),
        ({"r": 1024}, NAMES, "at most 512"),
        ({"use_dora": True}, NAMES, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, NAMES, "modules_to_save"),
        ({"trainable_token_indices": [1]}, NAMES, "token embeddings"),
        ({"rank_pattern": {"q_proj": 4}}, NAMES, "rank_pattern"),
        ({"lora_bias": True}, NAMES, "lora_bias"),
        ({"bias": "all"}, NAMES, "bias='all'"),
        ({}, ("base_model.model.lm_head.lora_A.weight",), "adapts lm_head"),
        ({}, ("base_model.model.model.embed_tokens.lora_embedding_A",), "adapts embed_tokens"),
        ({}, ("model.layers.0.self_attn.q_proj.lora_A.weight",), "skip it without a word"),
    ],
)
def test_what_servers_refuse_is_told(config: dict[str, Any], names: tuple[str, ...], told: str | None) -> None:
    problems = serving_problems({"r": 8, "bias": "none", "modules_to_save": None, **config}, names)
    assert len(problems) == (told is not None)
    assert told is None or told in problems[0]
