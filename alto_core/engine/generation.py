"""Answers of many adapters in one running batch, each row with its own cache of keys and values.

Rows of one adapter lie side by side, so that one grouped operation serves all adapters of a layer. Rows that have
finished leave when there are enough of them, and prompts that wait take their slots and the pages of their caches, so
the batch stays full while there is work. `decoding` runs the passes, `row_states` chooses the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from alto_core.device import free_bytes
from alto_core.engine.active_job import ActiveJob
from alto_core.engine.backbone import Backbone
from alto_core.engine.cached_attention import KeyValuePages, pages_for
from alto_core.engine.decoding import AdapterRoutes, Decoder
from alto_core.engine.lora_linear import LoraRouting
from alto_core.engine.row_states import AnswerRules, NewRow, RowStates
from alto_core.engine.sampling import Sampling
from kernels.pages import PAGE_PLACES

MAX_ROWS = {"cpu": 256, "cuda": 16384}
"""Rows that generate side by side where the caller does not say and memory allows it."""
PROMPT_TOKENS = {"cpu": 2048, "cuda": 65536}
"""Tokens of one pass over prompts; a longer prompt gets a pass of its own."""
STEPS_BETWEEN_LOOKS = {"cpu": 1, "cuda": 8}
"""Looking which rows have finished makes the host wait for the device."""
CACHE_SHARE = 0.5
"""Of the free memory, for keys and values."""
LEAVING_SHARE = 1 / 16
"""Finished rows leave when they are this share of the batch: prompts are read several at a time."""

Prompt = tuple[ActiveJob | None, tuple[int, ...]]


@torch.no_grad()
def generate(
    backbone: Backbone,
    routing: LoraRouting,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    max_rows: int | None = None,
    sampling: Sampling | None = None,
    capture: bool = False,
) -> list[tuple[int, ...]]:
    """Continue each prompt with its adapter (None: the untuned model).

    Args:
        prompts: adapter and prompt tokens, at least one token each.
        max_new_tokens: of each answer; fewer where the model's positions end.
        stop_token_ids: the answer ends before the first of these.
        max_rows: that generate side by side, by default as many as memory and kind of device suggest. It changes
            speed and memory, not the answers.
        sampling: None takes the likeliest token each time.
        capture: replay steps from CUDA graphs; only on Triton kernels.

    Returns:
        New tokens of each prompt, in the order of `prompts`, without the stop token.

    Raises:
        ValueError: a prompt is empty.
    """
    if any(not ids for _, ids in prompts):
        raise ValueError("expected prompts of at least one token, but got an empty one")
    adapters = tuple({id(active): active for active, _ in prompts}.values())
    rows = _rows(prompts, adapters, max_new_tokens, backbone.max_positions)
    answers: list[tuple[int, ...]] = [()] * len(prompts)
    if rows:
        routes = AdapterRoutes(backbone, routing, adapters)
        rules = AnswerRules(max_new_tokens=max_new_tokens, stop_token_ids=tuple(stop_token_ids), sampling=sampling)
        num_slots = min(len(rows), max_rows or MAX_ROWS[backbone.device.type])
        for number, token_ids in _finished(backbone, routes, rows, rules, num_slots=num_slots, capture=capture):
            answers[number] = token_ids
    if capture:
        torch.cuda.empty_cache()  # what graphs used serves nobody else before
    return answers


def _finished(
    backbone: Backbone,
    routes: AdapterRoutes,
    rows: Sequence[_Row],
    rules: AnswerRules,
    *,
    num_slots: int,
    capture: bool,
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Number and answer of every row, as they finish."""
    kind, queue = backbone.device.type, deque(rows)
    cache = KeyValuePages(_num_pages(rows, num_slots, _max_places(backbone)))
    states = RowStates(num_slots, max(pages_for(row.places) for row in rows), rules, backbone.device)
    with Decoder(backbone, routes, cache, states, capture=capture) as decoder:
        batch = _Batch(decoder, states, cache, routes.count)
        while queue or batch.has_rows:
            batch.admit(queue, PROMPT_TOKENS[kind])
            batch.advance(STEPS_BETWEEN_LOOKS[kind])
            yield from batch.take_finished()


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One prompt on its way through the batch."""

    number: int
    """Among the caller's prompts."""
    adapter: int
    """Rows of equal adapters lie side by side, in this order."""
    prompt_ids: tuple[int, ...]
    room: int
    """Most tokens of its answer."""

    @property
    def places(self) -> int:
        """What it may take in a cache."""
        return len(self.prompt_ids) + self.room


def _rows(
    prompts: Sequence[Prompt], adapters: Sequence[ActiveJob | None], max_new_tokens: int, max_positions: int | None
) -> list[_Row]:
    """Short prompts first, of all adapters together, so that pages last for more rows at first."""
    places = {id(active): i for i, active in enumerate(adapters)}
    rows = []
    for number, (active, ids) in enumerate(prompts):
        room = max_new_tokens if max_positions is None else min(max_new_tokens, max_positions - len(ids))
        if room > 0:
            rows.append(_Row(number=number, adapter=places[id(active)], prompt_ids=tuple(ids), room=room))
    return sorted(rows, key=lambda row: row.places)


def _max_places(backbone: Backbone) -> int:
    """Tokens of all rows together whose keys and values fit."""
    config = backbone.model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    place_bytes = 2 * config.num_hidden_layers * heads * width * backbone.dtype.itemsize
    return int(CACHE_SHARE * free_bytes(backbone.device) / place_bytes)


def _num_pages(rows: Sequence[_Row], num_slots: int, max_places: int) -> int:
    """Pages that rows in all slots may take, as far as they fit; enough for any single row."""
    most = sorted((pages_for(row.places) for row in rows), reverse=True)[:num_slots]
    return max(most[0], min(sum(most), max_places // PAGE_PLACES))


class _Batch:
    """The rows that generate now, each in a slot."""

    def __init__(self, decoder: Decoder, states: RowStates, cache: KeyValuePages, num_adapters: int):
        self._decoder, self._states, self._cache, self._num_adapters = decoder, states, cache, num_adapters
        self._rows: dict[int, tuple[_Row, NewRow]] = {}
        """By slot, those that have ended included until they are taken out."""
        self._free_slots = list(range(states.num_slots))
        self._stored = np.zeros(states.num_slots, np.int64)
        """Places that each row has filled."""

    @property
    def has_rows(self) -> bool:
        return bool(self._rows)

    def admit(self, queue: deque[_Row], max_tokens: int) -> None:
        """Take the next prompts, as many as there are slots and pages for, and choose their first tokens."""
        new = []
        while queue and self._free_slots and self._cache.num_free >= pages_for(queue[0].places):
            row = queue.popleft()
            pages = self._cache.take(pages_for(row.places))
            slot = self._free_slots.pop()
            placed = NewRow(slot=slot, prompt_ids=row.prompt_ids, room=row.room, pages=pages)
            self._rows[slot], self._stored[slot] = (row, placed), len(row.prompt_ids)
            new.append(slot)
        for slots in self._passes(self._by_adapter(new), max_tokens):
            tokens = [0] * self._num_adapters
            for slot in slots:
                tokens[self._rows[slot][0].adapter] += len(self._rows[slot][0].prompt_ids)
            self._decoder.read_prompts([self._rows[slot][1] for slot in slots], tokens)

    def advance(self, steps_between_looks: int) -> None:
        """Choose token after token for all rows, until enough of them have ended."""
        slots = self._by_adapter(self._rows)
        adapters = np.array([self._rows[slot][0].adapter for slot in slots])
        self._decoder.arrange(slots, np.bincount(adapters, minlength=self._num_adapters).tolist())
        most, end = int(self._stored[slots].max()), max(self._rows[slot][0].places for slot in slots)
        num_steps = 0
        while self._states.have_ended()[slots].sum() < LEAVING_SHARE * len(slots):
            for _ in range(steps_between_looks):
                num_steps += 1
                self._decoder.step(min(most + num_steps, end))
        self._stored[slots] += num_steps

    def take_finished(self) -> list[tuple[int, tuple[int, ...]]]:
        """Number and answer of each row that has ended; slots and pages are free again."""
        has_ended = self._states.have_ended()
        slots = [slot for slot in self._rows if has_ended[slot]]
        finished = []
        for slot, token_ids in zip(slots, self._states.answers(slots), strict=True):
            row, placed = self._rows.pop(slot)
            self._cache.give_back(placed.pages)
            self._free_slots.append(slot)
            finished.append((row.number, token_ids))
        return finished

    def _by_adapter(self, slots: Iterable[int]) -> list[int]:
        return sorted(slots, key=lambda slot: self._rows[slot][0].adapter)

    def _passes(self, slots: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Slots of the rows of each pass over prompts."""
        passes: list[list[int]] = []
        tokens = 0
        for slot in slots:
            length = len(self._rows[slot][0].prompt_ids)
            tokens += length
            if not passes or tokens > max_tokens:
                passes.append([])
                tokens = length
            passes[-1].append(slot)
        return passes
