"""How the next token is chosen from logits: the likeliest one, or one drawn at random.

A draw depends on the seed, the prompt and the position in the answer alone, never on what else is in the batch; and all
adapters get the same draws for the same prompt, so that their answers compare.

Shape suffixes: N rows, n those of them that are looked at together, V vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MAX_SORTED = 1 << 25
"""Probabilities that are sorted at a time, which takes some 40 bytes for each."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Draw from the model's distribution instead of taking the likeliest token."""

    temperature: float = 1.0
    """Divides the logits; above 0."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability; in (0, 1]."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature > 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"expected temperature above 0 and top_p in (0, 1], but got {self}")

    def draws(self, prompt_ids: Sequence[int], count: int) -> np.ndarray:
        """float32 [count] in [0, 1): one for each token of the answer to a prompt."""
        key = zlib.crc32(np.array(prompt_ids, dtype="<i4").tobytes())
        return np.random.default_rng([self.seed, key]).random(count, dtype=np.float32)


def likeliest(logits_NV: Tensor) -> Tensor:
    """Greedy choice; of equal logits the first."""
    return logits_NV.argmax(dim=-1)


def drawn(logits_NV: Tensor, draws_N: Tensor, sampling: Sampling) -> Tensor:
    """The token in which each draw falls, when the probabilities lie side by side, the largest first."""
    num_rows = max(1, MAX_SORTED // logits_NV.shape[1])
    parts = zip(logits_NV.split(num_rows), draws_N.split(num_rows), strict=True)
    return torch.cat([_drawn(logits_nV, draws_n, sampling) for logits_nV, draws_n in parts])


def _drawn(logits_nV: Tensor, draws_n: Tensor, sampling: Sampling) -> Tensor:
    probability_nV, token_nV = (logits_nV.float() / sampling.temperature).softmax(dim=-1).sort(dim=-1, descending=True)
    reached_nV = probability_nV.cumsum(dim=-1)
    # the token that crosses top_p still belongs to it
    probability_nV = probability_nV.masked_fill(reached_nV - probability_nV >= sampling.top_p, 0.0)
    reached_nV = probability_nV.cumsum(dim=-1)
    place_n = (reached_nV <= draws_n[:, None] * reached_nV[:, -1:]).sum(dim=-1)
    last_n = (probability_nV > 0).sum(dim=-1) - 1
    return token_nV.gather(1, torch.minimum(place_n, last_n)[:, None])[:, 0]
