"""How the next token is chosen from logits: the likeliest one, or one drawn at random.

A draw depends on the seed, the prompt and the position in the answer alone, never on what else is in the batch; and all
adapters get the same draws for the same prompt, so that their answers compare.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


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
    probability_NV, token_NV = (logits_NV.float() / sampling.temperature).softmax(dim=-1).sort(dim=-1, descending=True)
    reached_NV = probability_NV.cumsum(dim=-1)
    # the token that crosses top_p still belongs to it
    probability_NV = probability_NV.masked_fill(reached_NV - probability_NV >= sampling.top_p, 0.0)
    reached_NV = probability_NV.cumsum(dim=-1)
    place_N = (reached_NV <= draws_N[:, None] * reached_NV[:, -1:]).sum(dim=-1)
    last_N = (probability_NV > 0).sum(dim=-1) - 1
    return token_NV.gather(1, torch.minimum(place_N, last_N)[:, None])[:, 0]
