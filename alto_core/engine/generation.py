"""Answers of many adapters in one running batch, each row with its own cache of keys and values.

Rows of one adapter lie side by side, so that one grouped operation serves all adapters of a layer. A row that has
finished leaves: when enough have, the batch is put together anew without them and with prompts that wait, so the
batch stays full while there is work. `cached_attention` holds the caches, `sampling` the choice of tokens.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alto_core.device import free_bytes
from alto_core.engine.active_job import ActiveJob
from alto_core.engine.backbone import Backbone, packed_logits
from alto_core.engine.cached_attention import CachedRows, KeyValueCache, aligned, using_caches
from alto_core.engine.lora_linear import LoraRouting
from alto_core.engine.packed_attention import PackedRows
from alto_core.engine.sampling import Sampling, drawn, likeliest
from kernels.segments import SegmentSpec, make_segments

MAX_ROWS = {"cpu": 256, "cuda": 16384}
"""Rows that generate side by side where the caller does not say and memory allows it."""
PROMPT_TOKENS = {"cpu": 2048, "cuda": 65536}
"""Tokens of one pass over prompts; a longer prompt gets a pass of its own."""
STEPS_BETWEEN_LOOKS = {"cpu": 1, "cuda": 8}
"""Looking which rows have finished makes the host wait for the device."""
CACHE_SHARE = 0.5
"""Of the free memory, for keys and values."""
LEAVING_SHARE = 0.25
"""Finished rows leave when they are this share of the batch: putting it together copies the caches of the others."""

Prompt = tuple[ActiveJob | None, tuple[int, ...]]


@torch.inference_mode()
def generate(
    backbone: Backbone,
    routing: LoraRouting,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    max_rows: int | None = None,
    sampling: Sampling | None = None,
) -> list[tuple[int, ...]]:
    """Continue each prompt with its adapter (None: the untuned model).

    Args:
        prompts: adapter and prompt tokens, at least one token each.
        max_new_tokens: of each answer; fewer where the model's positions end.
        stop_token_ids: the answer ends before the first of these.
        max_rows: that generate side by side, by default as many as memory and kind of device suggest. It changes
            speed and memory, not the answers.
        sampling: None takes the likeliest token each time.

    Returns:
        New tokens of each prompt, in the order of `prompts`, without the stop token.

    Raises:
        ValueError: a prompt is empty.
    """
    if any(not ids for _, ids in prompts):
        raise ValueError("expected prompts of at least one token, but got an empty one")
    kind = backbone.device.type
    queue = _Queue(
        _rows(prompts, max_new_tokens, backbone.max_positions), max_rows or MAX_ROWS[kind], _max_places(backbone)
    )
    answers: list[tuple[int, ...]] = [()] * len(prompts)
    batch = _Batch(backbone, (), max_new_tokens, tuple(stop_token_ids), sampling)
    with using_caches(backbone.model):
        while True:
            new = queue.take(batch.open_rows)
            batch = batch.changed(new)
            if not batch.rows:
                return answers
            batch.read_prompts(routing, new, PROMPT_TOKENS[kind])
            batch.advance(routing, STEPS_BETWEEN_LOOKS[kind])
            for number, token_ids in batch.finished():
                answers[number] = token_ids


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One prompt on its way through the batch."""

    number: int
    """Among the caller's prompts."""
    active: ActiveJob | None
    adapter: int
    """Rows of equal adapters lie side by side, in this order."""
    prompt_ids: tuple[int, ...]
    room: int
    """Most tokens of its answer."""

    @property
    def places(self) -> int:
        """What it may take in a cache."""
        return len(self.prompt_ids) + self.room


def _rows(prompts: Sequence[Prompt], max_new_tokens: int, max_positions: int | None) -> list[_Row]:
    """Short prompts first, of all adapters together, so that rows of one batch are of like length."""
    adapters = {id(active): i for i, active in enumerate({id(a): a for a, _ in prompts}.values())}
    rows = []
    for number, (active, ids) in enumerate(prompts):
        room = max_new_tokens if max_positions is None else min(max_new_tokens, max_positions - len(ids))
        if room > 0:
            rows.append(
                _Row(number=number, active=active, adapter=adapters[id(active)], prompt_ids=tuple(ids), room=room)
            )
    return sorted(rows, key=lambda row: row.places)


def _max_places(backbone: Backbone) -> int:
    """Tokens of all rows together whose keys and values fit."""
    config = backbone.model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    place_bytes = 2 * config.num_hidden_layers * heads * width * backbone.dtype.itemsize
    return int(CACHE_SHARE * free_bytes(backbone.device) / place_bytes)


class _Queue:
    """Prompts that wait, and how many more the batch takes."""

    def __init__(self, rows: Sequence[_Row], max_rows: int, max_places: int):
        self._waiting, self._max_rows, self._max_places = deque(rows), max_rows, max_places

    def take(self, open_rows: Sequence[_Row]) -> list[_Row]:
        """The next prompts, as many as fit beside the open rows; at least one into an empty batch."""
        taken: list[_Row] = []
        longest = max((row.places for row in open_rows), default=0)
        while self._waiting:
            count = len(open_rows) + len(taken) + 1
            longest = max(longest, self._waiting[0].places)
            if count > 1 and (count > self._max_rows or count * aligned(longest) > self._max_places):
                break
            taken.append(self._waiting.popleft())
        return taken


class _Batch:
    """The rows that generate now, by adapter, with all that is known of each on the device.

    `positions_B` is the place of a row's last token, which the next pass reads; `counts_B` the tokens of its answer.
    """

    def __init__(
        self,
        backbone: Backbone,
        rows: Sequence[_Row],
        max_new_tokens: int,
        stop_token_ids: tuple[int, ...],
        sampling: Sampling | None,
    ):
        self.rows = tuple(rows)
        self._backbone, self._max_new_tokens, self._sampling = backbone, max_new_tokens, sampling
        self._stop_token_ids = stop_token_ids
        self._has_ended = [False] * len(self.rows)
        """As of the last look."""
        self._cache = KeyValueCache(len(self.rows), max((row.places for row in self.rows), default=0))
        self._filled = 0
        device, count = backbone.device, len(self.rows)
        self._stops = torch.tensor(stop_token_ids, dtype=torch.long, device=device)
        self._tokens_B = torch.zeros(count, dtype=torch.long, device=device)
        self._positions_B = torch.tensor([len(row.prompt_ids) - 1 for row in self.rows], dtype=torch.long).to(device)
        self._rooms_B = torch.tensor([row.room for row in self.rows], dtype=torch.long).to(device)
        self._counts_B = torch.zeros_like(self._tokens_B)
        self._ended_B = torch.zeros(count, dtype=torch.bool, device=device)
        # one column more than an answer has, where ended rows write what nobody reads
        self._answers_BM = torch.zeros(count, max_new_tokens + 1, dtype=torch.long, device=device)
        self._draws_BM = self._draws().to(device)

    @property
    def open_rows(self) -> tuple[_Row, ...]:
        return tuple(row for row, ended in zip(self.rows, self._has_ended, strict=True) if not ended)

    def changed(self, new: Sequence[_Row]) -> _Batch:
        """The batch without the rows that have ended and with new ones."""
        if not new and not any(self._has_ended):
            return self
        place = {row.number: i for i, row in enumerate(self.rows)}
        rows = sorted((*self.open_rows, *new), key=lambda row: row.adapter)
        other = _Batch(self._backbone, rows, self._max_new_tokens, self._stop_token_ids, self._sampling)
        targets = [i for i, row in enumerate(rows) if row.number in place]
        kept = [place[rows[i].number] for i in targets]
        if kept:
            other._filled = min(self._filled, other._cache.capacity)
            self._cache.move_to(other._cache, kept, targets, other._filled)
        source_N = torch.tensor(kept, dtype=torch.long, device=self._backbone.device)
        target_N = torch.tensor(targets, dtype=torch.long, device=self._backbone.device)
        for name in ("_tokens_B", "_positions_B", "_counts_B", "_answers_BM"):
            getattr(other, name)[target_N] = getattr(self, name)[source_N]
        return other

    def read_prompts(self, routing: LoraRouting, new: Sequence[_Row], max_tokens: int) -> None:
        """Fill the caches of new rows, and choose their first tokens."""
        numbers = {row.number for row in new}
        for places in _passes([(i, row) for i, row in enumerate(self.rows) if row.number in numbers], max_tokens):
            self._read(routing, places)
        self._look()

    def advance(self, routing: LoraRouting, steps_between_looks: int) -> None:
        """Choose token after token for all rows, until enough of them have ended."""
        places_B = torch.arange(len(self.rows), device=self._backbone.device)
        segments, layers = _routes([(row, 1) for row in self.rows])
        with routing.use(make_segments(segments, self._backbone.device), layers):
            while sum(self._has_ended) < LEAVING_SHARE * len(self.rows):
                for _ in range(steps_between_looks):
                    self._step(places_B)
                self._look()

    def finished(self) -> list[tuple[int, tuple[int, ...]]]:
        """Number and answer of each row that has ended."""
        ended = [i for i, has_ended in enumerate(self._has_ended) if has_ended]
        index_N = torch.tensor(ended, dtype=torch.long, device=self._backbone.device)
        counts, answers = self._counts_B[index_N].tolist(), self._answers_BM[index_N].tolist()
        return [
            (self.rows[i].number, tuple(token_ids[:count]))
            for i, count, token_ids in zip(ended, counts, answers, strict=True)
        ]

    def _draws(self) -> Tensor:
        """float32 [B, M]; [B, 0] where nothing is drawn."""
        if self._sampling is None:
            return torch.zeros(len(self.rows), 0)
        draws = torch.zeros(len(self.rows), self._max_new_tokens)
        for i, row in enumerate(self.rows):
            draws[i] = torch.from_numpy(self._sampling.draws(row.prompt_ids, self._max_new_tokens))
        return draws

    def _read(self, routing: LoraRouting, places: Sequence[int]) -> None:
        device, rows = self._backbone.device, [self.rows[i] for i in places]
        lengths = tuple(len(row.prompt_ids) for row in rows)
        ids_T = torch.tensor([token for row in rows for token in row.prompt_ids]).to(device)
        positions_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
        layout = CachedRows(
            cache=self._cache,
            rows_T=torch.tensor(places).repeat_interleave(torch.tensor(lengths)).to(device),
            positions_T=positions_T,
            prompts=PackedRows(lengths, device),
            longest=max(lengths),
        )
        segments, layers = _routes(list(zip(rows, lengths, strict=True)))
        last_N = torch.tensor(lengths).cumsum(0).to(device) - 1
        with routing.use(make_segments(segments, device), layers):
            logits_NV = self._logits(ids_T, positions_T, layout, last_N)
        self._filled = max(self._filled, layout.longest)
        self._choose(logits_NV, torch.tensor(places).to(device))

    def _step(self, places_B: Tensor) -> None:
        """Read every row's last token and choose the next one. Rows that have ended repeat theirs."""
        self._filled = min(self._filled + 1, self._cache.capacity)
        layout = CachedRows(
            cache=self._cache, rows_T=places_B, positions_T=self._positions_B, prompts=None, longest=self._filled
        )
        logits_BV = self._logits(self._tokens_B, self._positions_B, layout, places_B)
        self._choose(logits_BV, places_B)

    def _logits(self, ids_T: Tensor, positions_T: Tensor, layout: CachedRows, kept_N: Tensor) -> Tensor:
        # the model hands the layout on unseen; it is read by `cached_attention`, which stands in its attention layers
        with self._backbone.passing(gradients=False):
            return packed_logits(self._backbone.model, ids_T, positions_T, layout, kept_N)  # type: ignore[arg-type]

    def _choose(self, logits_NV: Tensor, places_N: Tensor) -> None:
        counts_N, ended_N = self._counts_B[places_N], self._ended_B[places_N]
        if self._sampling is None:
            token_N = likeliest(logits_NV)
        else:
            draw_N = self._draws_BM[places_N, counts_N.clamp(max=self._max_new_tokens - 1)]
            token_N = drawn(logits_NV, draw_N, self._sampling)
        self._answers_BM[places_N, counts_N.masked_fill(ended_N, self._max_new_tokens)] = token_N
        stops_N = ended_N | torch.isin(token_N, self._stops)
        counts_N = counts_N + ~stops_N
        self._counts_B[places_N] = counts_N
        self._ended_B[places_N] = ended_N = stops_N | (counts_N >= self._rooms_B[places_N])
        self._tokens_B[places_N] = token_N
        self._positions_B[places_N] += ~ended_N

    def _look(self) -> None:
        self._has_ended = self._ended_B.tolist()


def _passes(rows: Sequence[tuple[int, _Row]], max_tokens: int) -> list[list[int]]:
    """Places of the rows of each pass over prompts."""
    passes: list[list[int]] = []
    tokens = 0
    for place, row in rows:
        tokens += len(row.prompt_ids)
        if not passes or tokens > max_tokens:
            passes.append([])
            tokens = len(row.prompt_ids)
        passes[-1].append(place)
    return passes


def _routes(rows: Sequence[tuple[_Row, int]]) -> tuple[list[SegmentSpec], list[frozenset[int]]]:
    """Segments of neighbouring rows of one adapter, with so many tokens each; and the layers that each adapter has."""
    segments, layers = [], []
    for _, group in itertools.groupby(rows, key=lambda pair: pair[0].adapter):
        members = list(group)
        active, tokens = members[0][0].active, sum(count for _, count in members)
        segments.append(SegmentSpec(num_tokens=tokens) if active is None else active.segment(tokens))
        layers.append(frozenset[int]() if active is None else active.layer_indices)
    return segments, layers
