"""The whole-model benchmark goes on after an exhausted memory, and only after that."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_backbone import BARS, attempt, plan, ran_out_of_memory
from benchmarks.kernel_bars import TARGETS


def fail(error: Exception) -> None:
    raise error


def test_only_an_exhausted_memory_is_passed_over() -> None:
    assert attempt(lambda: 3) == 3
    assert attempt(lambda: fail(torch.OutOfMemoryError("too much"))) is None
    with pytest.raises(RuntimeError, match="wrong shape"):
        attempt(lambda: fail(RuntimeError("wrong shape")))


def test_an_error_that_followed_from_an_exhausted_memory_counts_as_one() -> None:
    try:
        try:
            fail(torch.OutOfMemoryError("too much"))
        finally:
            fail(RuntimeError("the capture cannot be ended"))
    except RuntimeError as error:
        assert ran_out_of_memory(error)
    assert not ran_out_of_memory(RuntimeError("the capture cannot be ended"))


def test_every_case_has_a_bar_and_whole_rows_of_tokens() -> None:
    assert set(BARS.values()) <= set(TARGETS)
    for case in BARS:
        _, tokens, _ = plan(case)
        assert len(tokens) in (16, 32)
        assert all(count and count % 192 == 0 for count in tokens)
