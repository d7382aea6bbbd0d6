"""Presets by name, overrides by name, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest

from alto_core.domain import JobBudget
from alto_core.early_exit import (
    PRESETS,
    AshaRules,
    GuardedRules,
    HalvingRules,
    MedianRules,
    PaperRules,
    gate_fractions,
    make_policy,
)
from alto_core.errors import TaskFileError

DOCS = Path(__file__).parents[3] / "docs" / "early-exit.md"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_go_by_their_names(preset):
    assert make_policy(preset, {}).name == preset


def test_overrides_change_their_constant_alone():
    policy = make_policy("paper", {"select_ratio": 0.5, "p_div": 3})
    assert policy.rules == PaperRules(select_ratio=0.5, p_div=3)
    assert make_policy("guarded", {"last_rung_fraction": 0.2}).rungs(0.05) == (0.1, 0.2)


def test_gates_of_short_budgets_that_fall_together_are_one():
    """Of 4 steps 5, 10 and 20 % are the first; the quarter that goes on there must not be quartered again."""
    policy = make_policy("guarded", {})

    def gates(*totals: int) -> tuple[float, ...]:
        budgets = [JobBudget(total_steps=total, warmup_steps=1, eval_steps=(total,)) for total in totals]
        return gate_fractions(policy, 0.05, budgets)

    assert gates(100) == (0.05, 0.1, 0.2, 0.4)
    assert gates(4) == (0.05, 0.4)
    assert gates(2) == (0.05,)
    assert gates(4, 100) == (0.05, 0.1, 0.2, 0.4)


@pytest.mark.parametrize(
    ("preset", "name", "value", "expected"),
    [
        ("paper", "select_ratio", 0, "a number in (0, 1]"),
        ("paper", "select_ratio", 1.5, "a number in (0, 1]"),
        ("paper", "alpha", math.nan, "a number in (0, 1]"),
        ("paper", "tau_gap", math.inf, "a number in [0, inf)"),
        ("paper", "tau_gap", -0.1, "a number in [0, inf)"),
        ("paper", "w", 1, "a whole number in [2, inf)"),
        ("paper", "w", 2.5, "a whole number in [2, inf)"),
        ("paper", "p_ovf", 0, "a whole number in [1, inf)"),
        ("paper", "p_ovf", True, "a whole number in [1, inf)"),
        ("guarded", "tie_ratio", 1.1, "a number in [0, 1]"),
        ("paper", "tie_ratio", 0.5, "one of alpha, w, tau_slope"),
        ("none", "alpha", 0.5, "no override"),
    ],
)
def test_wrong_overrides_are_refused_by_name(preset, name, value, expected):
    with pytest.raises(TaskFileError) as caught:
        make_policy(preset, {name: value})
    assert caught.value.field == f"early_exit.overrides.{name}"
    assert expected in caught.value.expected


def test_an_unknown_preset_is_refused():
    with pytest.raises(TaskFileError, match=r"one of guarded, paper, asha, .*none"):
        make_policy("hyperband", {})


@pytest.mark.parametrize(
    ("preset", "rules"), [("successive_halving", HalvingRules()), ("asha", AshaRules()), ("median", MedianRules())]
)
def test_every_constant_of_the_comparisons_stands_in_the_docs_with_its_default(preset, rules):
    rows = re.findall(r"^\| ([^|]+) \| `(\w+)` \| [^|]+ \| ([\d.]+) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name: float(value) for presets, name, value in rows if f"`{preset}`" in presets}
    assert documented == dataclasses.asdict(rules)


@pytest.mark.parametrize("rules", [PaperRules(), GuardedRules()])
def test_every_constant_stands_in_the_docs_with_its_default(rules):
    text = DOCS.read_text(encoding="utf-8")
    section = text.split("## Preset `guarded`")[0 if isinstance(rules, PaperRules) else 1]
    documented = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([\d.]+) \|", section, flags=re.MULTILINE))
    assert {name: float(value) for name, value in documented.items()} == dataclasses.asdict(rules)
