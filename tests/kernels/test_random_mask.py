"""Dropout masks: the stated hash, the stated probability, no dependence on anything else."""

from __future__ import annotations

import pytest
import torch

from kernels.random_mask import keep_mask, mix32, segment_seed

CPU = torch.device("cpu")
GOLDEN = 0x9E3779B9


def mask(**changes: float) -> torch.Tensor:
    values = {"seed": 7, "layer_index": 3, "num_tokens": 200, "width": 300, "dropout": 0.1, **changes}
    return keep_mask(**values, device=CPU)  # type: ignore[arg-type]


def test_mix32_gives_the_published_values() -> None:
    # lowbias32 by its own definition, computed by hand with unsigned C arithmetic.
    assert [mix32(x) for x in (0, 1, 2, 0xFFFFFFFF)] == [0, 1753845952, 3507691905, 1734902346]


def test_mask_is_the_stated_hash_bit_for_bit() -> None:
    seed, layer, dropout = 0xDEADBEEF, 11, 0.35
    got = mask(seed=seed, layer_index=layer, num_tokens=17, width=23, dropout=dropout)
    layer_seed = mix32(seed ^ mix32(layer + GOLDEN))
    expected = [
        [mix32(mix32(layer_seed + t) ^ mix32(i * GOLDEN)) >= round(dropout * 2**32) for i in range(23)]
        for t in range(17)
    ]
    assert got.tolist() == expected


@pytest.mark.parametrize("dropout", [0.05, 0.1, 0.5, 0.9])
def test_share_of_kept_elements_is_one_minus_dropout(dropout: float) -> None:
    kept = mask(dropout=dropout).double()
    standard_error = (dropout * (1 - dropout) / kept.numel()) ** 0.5
    assert abs(kept.mean().item() - (1 - dropout)) < 5 * standard_error
    # No row or column is special.
    for dim, count in ((0, 200), (1, 300)):
        spread = kept.mean(dim).sub(1 - dropout).abs().max().item()
        assert spread < 6 * (dropout * (1 - dropout) / count) ** 0.5


@pytest.mark.parametrize("change", [{"seed": 8}, {"layer_index": 4}])
def test_masks_of_other_seeds_and_layers_are_independent(change: dict[str, int]) -> None:
    both = (~mask(dropout=0.5) & ~mask(dropout=0.5, **change)).double().mean().item()
    assert abs(both - 0.25) < 0.01


def test_first_tokens_have_the_same_mask_however_many_follow() -> None:
    assert torch.equal(mask(num_tokens=5), mask(num_tokens=200)[:5])


def test_dropout_zero_keeps_everything_and_nearly_one_drops_nearly_everything() -> None:
    assert mask(dropout=0.0).all()
    assert mask(dropout=1 - 1e-12).double().mean() < 1e-3


def test_segment_seed_depends_on_each_part() -> None:
    base = {"job_seed": 1, "update": 2, "micro_step": 3}
    changed = [{**base, key: value} for key in base for value in (0, 9, 77)]
    changed += [{**base, "job_seed": seed} for seed in (-1, 1 + 2**40)]
    seeds = {segment_seed(**parts) for parts in (base, *changed)}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**32 for seed in seeds)
