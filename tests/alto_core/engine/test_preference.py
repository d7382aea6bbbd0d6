"""DPO through the joint step: a prompt that stands once, mixed batches that begin at ln 2, jobs that do not meet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from alto_core.data.packing import pack_rows
from alto_core.data.rows import PairRow
from alto_core.domain import LoraJob, StepRecord
from alto_core.engine.engine import UNTUNED, Engine
from alto_core.errors import EngineError
from alto_core.preference import PairLosses, PreferenceOptions

BIG = 10**9


def move(engine: Engine, job_id: str, *, seed: int = 5, std: float = 0.05) -> None:
    """Away from the reference, so that margins are not 0 and A gets a gradient."""
    active, draw = engine._of(job_id), torch.Generator().manual_seed(seed)
    for _, _, b_rO in engine._slots.by_layer(active.block.params_rW, active.layers):
        b_rO.copy_(std * torch.randn(b_rO.shape, generator=draw))


def gradient(engine: Engine, job_id: str) -> torch.Tensor:
    return engine._of(job_id).block.grads_rW.clone()


def test_a_shared_prompt_lies_once_in_the_pack(tiny: Any) -> None:
    (pair,) = tiny.pairs(1, seed=3)
    chosen, rejected = pair.sides
    shared, apart = pack_rows([[pair]]), pack_rows([[pair]], share_prompts=False)
    assert shared.num_tokens == apart.num_tokens - pair.prompt_length == len(pair.token_ids)
    assert shared.row_prefixes == (0, pair.prompt_length)
    assert apart.row_lengths == (len(chosen.token_ids), len(rejected.token_ids))
    assert shared.longest_row == apart.longest_row == pair.longest_side
    # The same labels, each predicted from the same token at the same position.
    assert shared.label_ids_P.tolist() == apart.label_ids_P.tolist()
    for of in (shared, apart):
        assert of.label_rows_P.tolist() == [0] * chosen.num_labels + [1] * rejected.num_labels
    for values in ("position_ids_T", "token_ids_T"):
        found, expected = (getattr(of, values)[of.label_positions_P].tolist() for of in (shared, apart))
        assert found == expected


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gpt2"])
def test_a_shared_prompt_changes_no_log_probability(tiny: Any, family: str) -> None:
    pairs = tiny.pairs(5)
    model = tiny.plain_model(family)
    with torch.no_grad():
        expected = [[float(x) for x in tiny.loss_sums(model, list(pair.sides))] for pair in pairs]
    for share_prompts, max_tokens in itertools.product((True, False), (1, 40, BIG)):
        with tiny.preferring(pairs, family=family, share_prompts=share_prompts) as engine:
            sums = engine.side_losses(UNTUNED, pairs, max_tokens=max_tokens)
        torch.testing.assert_close(torch.tensor(sums), torch.tensor(expected).double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_a_shared_prompt_changes_no_gradient(tiny: Any, family: str) -> None:
    pairs = tiny.pairs(6)
    jobs = [tiny.job(family, lora_rank=2, beta=0.5), tiny.job(family, lora_rank=4, beta=0.1, adapter_batch_size=2)]
    found = []
    for share_prompts in (True, False):
        with tiny.preferring(pairs, family=family, share_prompts=share_prompts) as engine:
            for job in jobs:
                engine.admit(job, tiny.budget())
                move(engine, job.job_id)
            records = tiny.step(engine, {jobs[0].job_id: pairs[:3], jobs[1].job_id: pairs[3:]})
            found.append(([gradient(engine, job.job_id) for job in jobs], records))
    (shared, shared_records), (apart, apart_records) = found
    for first, second in zip(shared, apart, strict=True):
        assert first.abs().max() > 1e-3
        torch.testing.assert_close(first, second, atol=2e-6, rtol=1e-4)
    for first, second in zip(shared_records, apart_records, strict=True):
        assert first.train_loss == pytest.approx(second.train_loss, abs=1e-6)
        assert first.measures == pytest.approx(second.measures, abs=1e-5)
        assert first.num_tokens < second.num_tokens


def test_every_job_of_a_mixed_batch_begins_at_ln_2_with_no_margin(tiny: Any) -> None:
    pairs = tiny.pairs(20)
    jobs = [
        tiny.job(lora_rank=rank, beta=beta, adapter_batch_size=size)
        for rank, beta, size in ((1, 0.01, 1), (4, 0.1, 2), (8, 0.5, 4), (16, 2.0, 8))
    ]
    with tiny.preferring(pairs) as engine:
        for job in jobs:
            engine.admit(job, tiny.budget())
        records = tiny.step(engine, {job.job_id: pairs[: job.adapter_batch_size] for job in jobs})
    for record in records:
        assert record.train_loss == pytest.approx(math.log(2), abs=1e-5)
        for name in ("train_margin", "train_chosen_reward", "train_rejected_reward"):
            assert record.measures[name] == pytest.approx(0.0, abs=1e-4)
        assert record.measures["train_accuracy"] == 0.5
        assert record.grad_norm > 0


OPTIONS = [
    PreferenceOptions(),
    PreferenceOptions(label_smoothing=0.2),
    PreferenceOptions(loss="hinge"),
    PreferenceOptions(loss="ipo", length_normalised=True),
    PreferenceOptions(sft_weight=0.7, length_normalised=True),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_losses_and_gradients_are_those_of_plain_torch(tiny: Any, options: PreferenceOptions) -> None:
    # The twin: transformers and PEFT's formula by hand, one sequence at a time, autograd through everything.
    pairs, job = tiny.pairs(4), tiny.job(beta=0.3, adapter_batch_size=4, max_grad_norm=0.0)
    with tiny.preferring(pairs, options) as engine:
        engine.admit(job, tiny.budget())
        move(engine, job.job_id)
        tensors = engine_tensors(engine, job)
        losses = engine.evaluate([job.job_id], pairs, max_tokens=BIG)[job.job_id]
        (record,) = tiny.step(engine, {job.job_id: pairs})
        found = gradient(engine, job.job_id)
        expected, loss = by_plain_torch(tiny, engine, job, tensors, pairs, options)
    assert record.train_loss == pytest.approx(loss, abs=2e-5)
    assert losses.mean == pytest.approx(loss, abs=2e-5)
    assert losses.num_labels == (1,) * 4
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-3)


def engine_tensors(engine: Engine, job: LoraJob) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each layer by the layer's name."""
    active = engine._of(job.job_id)
    return {
        layer.name: (a_rI.clone().requires_grad_(), b_rO.clone().requires_grad_())
        for layer, a_rI, b_rO in engine._slots.by_layer(active.block.params_rW, active.layers)
    }


def by_plain_torch(
    tiny: Any,
    engine: Engine,
    job: LoraJob,
    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]],
    pairs: Sequence[PairRow],
    options: PreferenceOptions,
) -> tuple[torch.Tensor, float]:
    """Gradient in the layout of the job's rank rows, and loss."""
    frozen, tuned = tiny.plain_model(), tiny.plain_model()
    for name, (a_rI, b_rO) in tensors.items():
        layer = tuned.get_submodule(name)

        def with_adapter(module: Any, inputs: Any, output: Any, a: Any = a_rI, b: Any = b_rO) -> torch.Tensor:
            return output + job.scale * (inputs[0] @ a.T) @ b

        layer.register_forward_hook(with_adapter)
    terms, nll, chosen_tokens = [], 0.0, 0
    for pair in pairs:
        logps = [-torch.stack(tiny.loss_sums(model, list(pair.sides))) for model in (tuned, frozen)]
        labels = torch.tensor([side.num_labels for side in pair.sides])
        gains = (logps[0] - logps[1].detach()) / (labels if options.length_normalised else 1)
        margin = gains[0] - gains[1]
        scaled = job.beta * margin
        terms.append(
            {
                "sigmoid": -(1 - options.label_smoothing) * functional.logsigmoid(scaled)
                - options.label_smoothing * functional.logsigmoid(-scaled),
                "hinge": (1 - scaled).clamp(min=0),
                "ipo": (margin - 1 / (2 * job.beta)) ** 2,
            }[options.loss]
        )
        nll, chosen_tokens = nll - logps[0][0], chosen_tokens + int(labels[0])
    loss = torch.stack(terms).mean() + options.sft_weight * nll / chosen_tokens
    loss.backward()
    active = engine._of(job.job_id)
    expected = torch.zeros_like(active.block.grads_rW)
    for layer, a_rI, b_rO in engine._slots.by_layer(expected, active.layers):
        a_rI.copy_(tensors[layer.name][0].grad)
        b_rO.copy_(tensors[layer.name][1].grad)
    return expected, loss.item()


def curve(tiny: Any, jobs: Sequence[LoraJob], pairs: Sequence[PairRow], steps: int = 4, **sizes: Any) -> list[Any]:
    """Records of the first job over some steps, trained beside the others."""
    records: list[StepRecord] = []
    with tiny.preferring(pairs, **sizes) as engine:
        for job in jobs:
            engine.admit(job, tiny.budget())
        for step in range(1, steps + 1):
            made = tiny.step(engine, {job.job_id: tiny.batch(job, step, list(pairs)) for job in jobs})
            records.append(made[0])
    return [(record.train_loss, record.grad_norm, *record.measures.values()) for record in records]


def test_a_job_alone_equals_the_same_job_among_others(tiny: Any) -> None:
    pairs, job = tiny.pairs(12), tiny.job(beta=0.5, learning_rate=2e-2)
    others = [tiny.job(lora_rank=rank, beta=1 / rank, adapter_batch_size=rank, seed=rank) for rank in (2, 5, 7)]
    alone = curve(tiny, [job], pairs)
    for among in (curve(tiny, [job, *others], pairs), curve(tiny, [job, *others], pairs, max_pass_tokens=1)):
        for first, second in zip(alone, among, strict=True):
            assert first == pytest.approx(second, abs=1e-4, rel=1e-4)
    assert abs(alone[-1][0] - math.log(2)) > 0.05


def test_gradient_accumulation_equals_one_large_batch(tiny: Any) -> None:
    pairs = tiny.pairs(6)
    large = tiny.job(beta=0.5, adapter_batch_size=6)
    small = tiny.job(beta=0.5, adapter_batch_size=2, gradient_accumulation=3)
    options = PreferenceOptions(sft_weight=0.5)
    for first, second in zip(*(curve(tiny, [job], pairs, options=options) for job in (large, small)), strict=True):
        assert first == pytest.approx(second, abs=1e-4, rel=1e-4)


def test_resumed_equals_unbroken(tiny: Any, tmp_path: Path) -> None:
    pairs, job = tiny.pairs(9), tiny.job(beta=0.5, dropout=0.1)
    unbroken = curve(tiny, [job], pairs, steps=6)
    resumed: list[Any] = []
    for steps in (range(1, 4), range(4, 7)):
        with tiny.preferring(pairs) as engine:  # measures its reference anew, as a run that lost its files would
            if steps[0] == 1:
                engine.admit(job, tiny.budget())
            else:
                engine.restore(job, tiny.budget(), tmp_path)
            for step in steps:
                (record,) = tiny.step(engine, {job.job_id: tiny.batch(job, step, pairs)})
                resumed.append((record.train_loss, record.grad_norm, *record.measures.values()))
            engine.save(job.job_id, tmp_path)
    assert resumed == unbroken


def test_a_job_that_is_not_finite_leaves_its_neighbours_bit_for_bit(tiny: Any) -> None:
    pairs = tiny.pairs(3)
    jobs = [tiny.job(lora_rank=rank, beta=0.5) for rank in (2, 3, 4)]
    states = []
    for damage in (False, True):
        with tiny.preferring(pairs) as engine:
            for job in jobs:
                engine.admit(job, tiny.budget())
            if damage:
                engine._of(jobs[1].job_id).block.params_rW.fill_(float("nan"))
            records = [tiny.step(engine, {job.job_id: pairs for job in jobs}) for _ in range(2)][-1]
            states.append([engine._of(job.job_id).block.params_rW.clone() for job in jobs])
    assert math.isnan(records[1].train_loss)
    for whole, damaged in zip(states[0][::2], states[1][::2], strict=True):
        assert torch.equal(whole, damaged)


def test_the_untuned_model_has_no_margin_to_the_last_digit(tiny: Any) -> None:
    pairs = tiny.pairs(5)
    with tiny.preferring(pairs) as engine:
        losses = engine.evaluate([UNTUNED], pairs, max_tokens=20)[UNTUNED]
    assert isinstance(losses, PairLosses)
    assert losses.rewards() == ((0.0,) * 5, (0.0,) * 5)
    assert losses.loss_sums == pytest.approx([math.log(2)] * 5)


def test_pairs_without_a_reference_are_refused(tiny: Any) -> None:
    pairs, job = tiny.pairs(2), tiny.job(beta=0.1)
    with tiny.preferring(pairs[:1]) as engine:
        engine.admit(job, tiny.budget())
        with pytest.raises(EngineError, match=r"pairs:1: the reference's"):
            engine.step({job.job_id: pairs})
