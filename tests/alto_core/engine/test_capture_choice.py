"""Which captured pass serves which shape, and when another is captured: a rule over token counts, without a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from alto_core.engine import capture_choice
from alto_core.engine.capture_choice import MAX_GRAPHS, CaptureChoice, PassKind, capture_tokens
from alto_core.engine.pass_inputs import PassShape


@pytest.fixture
def choice_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CaptureChoice]:
    """A choice for which filling up so many tokens costs as much as a capture."""

    def make(worth_tokens: int = 1000) -> CaptureChoice:
        monkeypatch.setattr(capture_choice, "capture_tokens", lambda _: worth_tokens)
        return CaptureChoice(num_parameters=1, num_slots=4, max_lora_rank=8, max_row_tokens=64)

    return make


def shape(tokens: int, **fields: Any) -> PassShape:
    sizes = {"labels": tokens // 2, "rows": 2, "segments": 2, "longest_row": 64, "lora_rank": 8, "has_dropout": False}
    return PassShape(tokens=tokens, **{**sizes, **fields})


def test_a_bucket_is_captured_once_and_a_kind_for_itself(choice_of: Callable[..., CaptureChoice]) -> None:
    choice = choice_of()
    assert choice.choose(PassKind.UPDATE, shape(100)).must_capture
    again = choice.choose(PassKind.UPDATE, shape(128))
    assert not again.must_capture and again.shape.tokens == 128
    assert choice.choose(PassKind.LOSSES, shape(100)).must_capture


def test_smaller_passes_are_filled_up_until_that_has_cost_a_capture(choice_of: Callable[..., CaptureChoice]) -> None:
    choice = choice_of(worth_tokens=1000)
    choice.choose(PassKind.UPDATE, shape(512))
    made = [choice.choose(PassKind.UPDATE, shape(256)) for _ in range(5)]
    assert [one.must_capture for one in made] == [False, False, False, True, False], (
        "256 tokens are filled up each time"
    )
    assert [one.shape.tokens for one in made] == [512, 512, 512, 256, 256]


def test_the_bucket_is_captured_that_would_have_saved_most(choice_of: Callable[..., CaptureChoice]) -> None:
    choice = choice_of(worth_tokens=2400)
    choice.choose(PassKind.UPDATE, shape(1024))
    sizes = (960, 192, 128, 128, 256, 192, 960)
    made = [choice.choose(PassKind.UPDATE, shape(tokens)) for tokens in sizes]
    # The second 128 has room for itself alone: one of 192 would have saved more, and then one of 256 even more.
    assert [one.shape.tokens for one in made] == [1024, 1024, 1024, 1024, 256, 256, 1024]
    assert [one.must_capture for one in made].count(True) == 1


def test_what_a_capture_is_worth_grows_with_the_model_slower_than_its_products() -> None:
    tiny, small, large = (capture_tokens(parameters) for parameters in (10**6, 135 * 10**6, 8 * 10**9))
    assert large < small < tiny and small < 59 * large
    assert large > 10**3 and tiny < 10**6


def test_one_that_is_too_small_in_something_else_is_captured_anew_with_room(
    choice_of: Callable[..., CaptureChoice],
) -> None:
    choice = choice_of()
    first = choice.choose(PassKind.UPDATE, shape(128, labels=10))
    second = choice.choose(PassKind.UPDATE, shape(128, labels=110))
    assert second.must_capture and second.forgotten == (first.key,) == (second.key,)
    assert second.shape.labels > first.shape.labels
    assert not choice.choose(PassKind.UPDATE, shape(128, labels=10)).must_capture


def test_the_one_used_longest_ago_makes_room(choice_of: Callable[..., CaptureChoice]) -> None:
    choice = choice_of(worth_tokens=1)
    buckets = [*range(64, 1024, 64), *range(1024, 2048, 128), *range(2048, 4096, 256)][:MAX_GRAPHS]
    made = [choice.choose(PassKind.UPDATE, shape(tokens)) for tokens in reversed(buckets)]
    assert all(one.must_capture for one in made)
    assert not choice.choose(PassKind.UPDATE, shape(buckets[-1])).must_capture, "the first is used again"
    assert choice.choose(PassKind.UPDATE, shape(8192)).forgotten == (made[1].key,)


def test_what_was_not_captured_after_all_is_chosen_again(choice_of: Callable[..., CaptureChoice]) -> None:
    choice = choice_of()
    choice.forget(choice.choose(PassKind.UPDATE, shape(128)).key)
    assert choice.choose(PassKind.UPDATE, shape(128)).must_capture
    choice.clear()
    assert choice.choose(PassKind.UPDATE, shape(128)).must_capture
