"""Which captured pass runs a pass of some shape, and when another one is worth a capture.

Passes are captured by bucket of token counts. A capture takes a good part of a second, so passes are filled up to a
larger captured one until a capture would have paid for itself, and then the bucket is captured that would have saved
most. The choice knows shapes alone and holds no graph, so the same choices can be played through before a task runs.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

from alto_core.engine.pass_inputs import PassShape

MAX_GRAPHS = 24
"""Captured passes that are kept; the one that was used longest ago goes first."""
CAPTURE_SECONDS = 0.6
"""What a capture takes, about: 0.3 to 1 as models go."""
FLOPS = 5e14
"""At which a GPU trains, about, where the model's products are what takes the time."""
NARROW_TOKEN_SECONDS = 2.5e-6
"""What a trained token takes beside the products; most of its time in a narrow model."""
FREE_SEGMENTS = 64
"""Up to so many a pass has room for a segment of every slot."""
ROW_STEP = 64
"""Longest rows of captured passes are a multiple of this."""


class PassKind(enum.Enum):
    """What a pass does."""

    LOSSES = "losses"
    """Forward alone."""
    GRADIENTS = "gradients"
    """Forward and backward; gradients are added to what is there."""
    UPDATE = "update"
    """Forward, backward and the update; gradients replace what is there. Needs the joint optimizer."""


PassKey: TypeAlias = tuple[PassKind, int, bool, bool, int]
"""Kind, bucket of token counts, whether there is dropout, whether A and B have learning rates of their own, and the
lowest layer with adapters."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The captured pass that runs a pass."""

    key: PassKey
    shape: PassShape
    must_capture: bool
    """It is to be captured first."""
    forgotten: tuple[PassKey, ...] = ()
    """Captured passes that make room for it."""


class CaptureChoice:
    """Keeps the shapes of an engine's captured passes.

    Args:
        num_parameters: of the model.
        num_slots: of the engine.
        max_lora_rank: of any job.
        max_row_tokens: of any row, as far as it is known; a longer one makes captured passes be captured anew.
    """

    def __init__(self, *, num_parameters: int, num_slots: int, max_lora_rank: int, max_row_tokens: int):
        self._num_slots, self._max_lora_rank, self._longest_row = num_slots, max_lora_rank, max_row_tokens
        self._capture_tokens = capture_tokens(num_parameters)
        self._shapes: dict[PassKey, PassShape] = {}
        """Of captured passes, in the order of their last use."""
        self._filled: dict[PassKey, Counter[int]] = {}
        """Passes that were filled up to a captured one, by bucket, as far as they are still its own."""

    def choose(self, kind: PassKind, needed: PassShape, *, has_sides: bool = False) -> Choice:
        """The captured pass for the needed shape. One that must be captured counts as captured from now on."""
        key = (kind, bucket(needed.tokens), needed.has_dropout, has_sides, needed.lowest_layer)
        chosen = self._fitting(key, needed)
        if chosen is not None and (chosen == key or not self._is_worth_a_capture(key, chosen)):
            shape = self._shapes.pop(chosen)
            self._shapes[chosen] = shape  # last in the order of use
            return Choice(key=chosen, shape=shape, must_capture=False)
        too_small, forgotten = self._shapes.pop(key, None), []
        if too_small is not None:
            forgotten.append(key)
        if len(self._shapes) >= MAX_GRAPHS:
            oldest = next(iter(self._shapes))
            self.forget(oldest)
            forgotten.append(oldest)
        shape = self._shapes[key] = self._roomy(needed, too_small)
        return Choice(key=key, shape=shape, must_capture=True, forgotten=tuple(forgotten))

    def forget(self, key: PassKey) -> None:
        """It was not captured after all, or is not kept any more."""
        del self._shapes[key]
        self._filled.pop(key, None)

    def clear(self) -> None:
        """Nothing is captured any more."""
        self._shapes.clear()
        self._filled.clear()

    def _fitting(self, key: PassKey, needed: PassShape) -> PassKey | None:
        """The smallest captured pass of the kind that holds the needed one: mostly that of its own bucket."""
        if key in self._shapes and self._shapes[key].holds(needed):
            return key
        fitting = [
            other
            for other, shape in self._shapes.items()
            if (other[0], other[2:]) == (key[0], key[2:]) and shape.holds(needed)
        ]
        return min(fitting, key=lambda other: other[1], default=None)

    def _is_worth_a_capture(self, key: PassKey, chosen: PassKey) -> bool:
        """Whether a captured pass of this bucket would have paid for itself, and no other would have saved more.

        A rule over token counts, not over measured times: the same task makes the same choices again.
        """
        filled = self._filled.setdefault(chosen, Counter())
        filled[key[1]] += 1
        saved = {
            tokens: (chosen[1] - tokens) * sum(count for other, count in filled.items() if other <= tokens)
            for tokens in filled
        }
        if saved[key[1]] < max(self._capture_tokens, *saved.values()):
            return False
        for tokens in [tokens for tokens in filled if tokens <= key[1]]:
            del filled[tokens]  # they go to the new one from now on
        return True

    def _roomy(self, needed: PassShape, earlier: PassShape | None) -> PassShape:
        """A shape that holds this pass, whatever the earlier one held, and passes that are a little larger."""
        tokens = bucket(needed.tokens)
        self._longest_row = max(self._longest_row, needed.longest_row)
        longest = -(-self._longest_row // ROW_STEP) * ROW_STEP
        labels, rows = bucket(needed.labels), needed.rows + needed.rows // 8 + -(-tokens // longest)
        # Empty segments cost nothing: room for all jobs that may ever come.
        segments = max(
            1 << (needed.segments - 1).bit_length(), min(1 << (self._num_slots - 1).bit_length(), FREE_SEGMENTS)
        )
        shared, pairs = (bucket(count) if count else 0 for count in (needed.shared_tokens, needed.pairs))
        if earlier is not None:  # it was too small: a little more than what is needed now
            labels, rows = bucket(needed.labels + needed.labels // 8), rows + needed.rows // 8
            labels, rows = max(labels, earlier.labels), max(rows, earlier.rows)
            segments = max(segments, earlier.segments)
            shared, pairs = max(shared, earlier.shared_tokens), max(pairs, earlier.pairs)
        return PassShape(
            tokens=tokens,
            labels=min(labels, tokens),
            rows=rows,
            segments=segments,
            longest_row=longest,
            lora_rank=self._max_lora_rank,
            has_dropout=needed.has_dropout,
            shared_tokens=shared,
            pairs=pairs,
            lowest_layer=needed.lowest_layer,
        )


def capture_tokens(num_parameters: int) -> float:
    """Tokens that a model of so many parameters is trained on in the time of a capture."""
    return CAPTURE_SECONDS / (4 * num_parameters / FLOPS + NARROW_TOKEN_SECONDS)


def bucket(count: int) -> int:
    """The count rounded up: to multiples of 64 up to 1024, then in eight steps to each octave."""
    step = max(64, 1 << max(0, count.bit_length() - 4))
    return max(step, -(-count // step) * step)
