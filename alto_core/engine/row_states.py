"""All that is known on the device of the rows that generate, by slot, and how it changes with each chosen token.

Passes name the slots of their rows, so rows may come, go and change places in the pass while everything stays where it
is. One slot more belongs to no row: it has ended forever, and fills up passes of fixed size.

Shape suffixes: R slots and the one that belongs to no row, N rows of a pass, M pages of a row at most, A tokens of an
answer and a column where ended rows write what nobody reads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alto_core.engine.cached_attention import SPARE_PAGE
from alto_core.engine.sampling import Sampling, drawn, likeliest
from kernels.pages import PAGE_PLACES


@dataclass(frozen=True, kw_only=True)
class AnswerRules:
    """What is asked of every answer."""

    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    sampling: Sampling | None
    """None: the likeliest token each time."""


@dataclass(frozen=True, kw_only=True)
class NewRow:
    """A row whose prompt is read next."""

    slot: int
    prompt_ids: tuple[int, ...]
    room: int
    """Most tokens of its answer."""
    pages: Sequence[int]


class RowStates:
    """Tensors of all slots.

    Args:
        num_slots: rows at a time.
        max_pages: of any row.
        rules: of all answers.
        device: where the tensors lie.
    """

    def __init__(self, num_slots: int, max_pages: int, rules: AnswerRules, device: torch.device):
        self.num_slots, self._rules, self._device = num_slots, rules, device
        count, length = num_slots + 1, rules.max_new_tokens
        self.tokens_R = torch.zeros(count, dtype=torch.long, device=device)
        """Each row's last token, which the next pass reads."""
        self.positions_R = torch.zeros_like(self.tokens_R)
        """Of that token in its row."""
        self.ended_R = torch.ones(count, dtype=torch.bool, device=device)
        self.pages_RM = torch.full((count, max_pages), SPARE_PAGE, dtype=torch.int32, device=device)
        self._counts_R = torch.zeros_like(self.tokens_R)
        self._rooms_R = torch.zeros_like(self.tokens_R)
        self._answers_RA = torch.zeros(count, length + 1, dtype=torch.long, device=device)
        self._draws_RA = torch.zeros(count, 0 if rules.sampling is None else length, device=device)
        self._stops = torch.tensor(rules.stop_token_ids, dtype=torch.long, device=device)

    @property
    def max_places(self) -> int:
        """That any row can have."""
        return int(self.pages_RM.shape[1]) * PAGE_PLACES

    @property
    def no_row(self) -> int:
        """The slot that belongs to none."""
        return self.num_slots

    def begin(self, rows: Sequence[NewRow]) -> Tensor:
        """Take rows into their slots; gives these, int64 [N]."""
        slots_N = torch.tensor([row.slot for row in rows]).to(self._device)
        pages_NM = np.full((len(rows), self.pages_RM.shape[1]), SPARE_PAGE, np.int32)
        for i, row in enumerate(rows):
            pages_NM[i, : len(row.pages)] = row.pages
        self.pages_RM[slots_N] = torch.from_numpy(pages_NM).to(self._device)
        self.positions_R[slots_N] = torch.tensor([len(row.prompt_ids) - 1 for row in rows]).to(self._device)
        self._rooms_R[slots_N] = torch.tensor([row.room for row in rows]).to(self._device)
        self._counts_R[slots_N], self.ended_R[slots_N] = 0, False
        if self._rules.sampling is not None:
            length = self._rules.max_new_tokens
            draws = np.stack([self._rules.sampling.draws(row.prompt_ids, length) for row in rows])
            self._draws_RA[slots_N] = torch.from_numpy(draws).to(self._device)
        return slots_N

    def choose(self, logits_NV: Tensor, slots_N: Tensor) -> None:
        """Choose the next token of each row of a pass; those that have ended stay as they are. Waits for nothing."""
        counts_N, ended_N = self._counts_R[slots_N], self.ended_R[slots_N]
        length = self._rules.max_new_tokens
        if self._rules.sampling is None:
            token_N = likeliest(logits_NV)
        else:
            draw_N = self._draws_RA[slots_N, counts_N.clamp(max=length - 1)]
            token_N = drawn(logits_NV, draw_N, self._rules.sampling)
        self._answers_RA[slots_N, counts_N.masked_fill(ended_N, length)] = token_N
        # not `isin`, which waits for the device where there are many stop tokens
        stops_N = ended_N | (token_N[:, None] == self._stops).any(dim=1)
        counts_N = counts_N + ~stops_N
        ended_N = stops_N | (counts_N >= self._rooms_R[slots_N])
        self._counts_R[slots_N] = counts_N
        self.ended_R[slots_N] = ended_N
        self.tokens_R[slots_N] = token_N
        self.positions_R[slots_N] += ~ended_N

    def have_ended(self) -> NDArray[np.bool_]:
        """Of each slot, whether its row has ended. Waits for the device."""
        return self.ended_R[: self.num_slots].cpu().numpy()

    def answers(self, slots: Sequence[int]) -> list[tuple[int, ...]]:
        """What the rows in these slots have answered so far. Waits for the device."""
        slots_N = torch.tensor(slots, dtype=torch.long).to(self._device)
        counts = self._counts_R[slots_N].tolist()
        answers = self._answers_RA[slots_N, : max(counts, default=0)].cpu().numpy()
        return [tuple(row[:count].tolist()) for row, count in zip(answers, counts, strict=True)]
