"""TRL's DPO on the same model, pairs and adapter: the same tokens, losses, rewards and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from alto_core.config import DataSection, ModelSection, SplitSection
from alto_core.data.prepare import prepare_data
from alto_core.data.rows import PairRow
from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.backbone import load_backbone, release_backbone
from alto_core.engine.engine import UNTUNED, Engine
from alto_core.engine.preference_objective import PreferenceObjective
from alto_core.preference import PreferenceOptions

TARGETS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
JOB = LoraJob(
    learning_rate=1e-2,
    lora_rank=4,
    lora_alpha=8.0,
    adapter_batch_size=4,
    target_modules=TARGETS,
    max_grad_norm=0.0,
    beta=0.3,
)
PAIRS = [
    {"prompt": "what is up? ", "chosen": "the sky", "rejected": "no"},
    {"prompt": "b: ", "chosen": "b", "rejected": "something else altogether"},
    {"prompt": "and this one, ", "chosen": "yes, this one", "rejected": "yes, that one"},
    {"prompt": "last ", "chosen": "word", "rejected": "words"},
]
CASES: dict[str, tuple[PreferenceOptions, dict[str, Any]]] = {
    "sigmoid": (PreferenceOptions(), {"loss_type": ["sigmoid"]}),
    "hinge": (PreferenceOptions(loss="hinge"), {"loss_type": ["hinge"]}),
    # TRL divides by the answers' lengths in these two.
    "ipo": (PreferenceOptions(loss="ipo", length_normalised=True), {"loss_type": ["ipo"]}),
    "normalised": (PreferenceOptions(length_normalised=True), {"loss_type": ["sigmoid_norm"]}),
    "with an SFT term": (
        PreferenceOptions(sft_weight=0.7),
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]},
    ),
}


@pytest.fixture(scope="module")
def pairs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[PairRow]:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    (folder / "held-out.jsonl").write_text(json.dumps({"prompt": "held out ", "chosen": "a", "rejected": "b"}))
    section = DataSection(
        source=str(folder / "train.jsonl"),
        format="preference",
        validation=SplitSection(source=str(folder / "held-out.jsonl")),
    )
    rows = prepare_data(section, ModelSection(name=str(tiny_model))).train.rows
    found = [row for row in rows if isinstance(row, PairRow)]
    assert len(found) == 4
    return found


@pytest.fixture(scope="module")
def trained(tiny_model: Path, pairs: list[PairRow], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that is away from the reference, as a PEFT folder."""
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    with engine_over(tiny_model, pairs, PreferenceOptions()) as engine:
        engine.step({JOB.job_id: pairs})
        engine.export(JOB.job_id, folder, best=False)
    return folder


def engine_over(
    tiny_model: Path, pairs: list[PairRow], options: PreferenceOptions, start: Path | None = None
) -> Engine:
    reference: dict[int, tuple[float, float]] = {}
    engine = Engine(
        load_backbone(ModelSection(name=str(tiny_model)), "cpu"),
        target_modules=TARGETS,
        num_slots=1,
        rank_rows=JOB.lora_rank,
        objective=PreferenceObjective(options, reference, beta=0.1),
    )
    sums = engine.side_losses(UNTUNED, pairs, max_tokens=1024).tolist()
    reference.update({pair.row_id: (chosen, rejected) for pair, (chosen, rejected) in zip(pairs, sums, strict=True)})
    engine.admit(JOB, JobBudget(total_steps=9, warmup_steps=1, eval_steps=(9,)), init_adapter=start)
    return engine


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")  # TRL's and accelerate's own
def test_losses_rewards_and_gradients_are_those_of_trl(
    tiny_model: Path, pairs: list[PairRow], trained: Path, tmp_path: Path, case: str
) -> None:
    options, settings = CASES[case]
    with engine_over(tiny_model, pairs, options, trained) as engine:
        engine.step({JOB.job_id: pairs})
        (record,) = engine.take_records()
        active = engine._of(JOB.job_id)
        gradients = {
            f"base_model.model.{layer.name}": (a_rI.clone(), b_rO.clone())
            for layer, a_rI, b_rO in engine._slots.by_layer(active.block.grads_rW, active.layers)
        }
    release_backbone()

    trainer = trl_trainer(tiny_model, trained, tmp_path, settings)
    batch = trainer.data_collator(list(trainer.train_dataset))
    longest = batch["input_ids"].shape[1]
    for i, pair in enumerate(pairs):
        for side, row in zip(pair.sides, (i, i + len(pairs)), strict=True):
            padding = longest - len(side.token_ids)
            assert batch["input_ids"][row].tolist() == [*side.token_ids, *[0] * padding]
            assert batch["completion_mask"][row].bool().tolist() == [*side.label_mask, *[False] * padding]
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()

    assert record.train_loss == pytest.approx(loss.item(), abs=1e-5)
    assert record.grad_norm > 1e-2
    if case in ("sigmoid", "hinge", "with an SFT term"):
        told = {name: sum(values) / len(values) for name, values in trainer._metrics["train"].items()}
        assert record.measures["train_margin"] == pytest.approx(told["rewards/margins"], abs=1e-5)
        assert record.measures["train_chosen_reward"] == pytest.approx(told["rewards/chosen"], abs=1e-5)
        assert record.measures["train_accuracy"] == pytest.approx(told["rewards/accuracies"])
    for name, (a_rI, b_rO) in gradients.items():
        layer = trainer.model.get_submodule(name)
        for found, expected in ((a_rI, layer.lora_A.default.weight.grad), (b_rO, layer.lora_B.default.weight.grad.T)):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)


def trl_trainer(tiny_model: Path, adapter: Path, folder: Path, settings: dict[str, Any]) -> Any:
    """TRL's trainer over the base model with this adapter, its reference the base model alone."""
    import datasets
    import peft
    import transformers
    import trl

    arguments = trl.DPOConfig(
        output_dir=str(folder),
        beta=JOB.beta,
        per_device_train_batch_size=len(PAIRS),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    config = peft.LoraConfig.from_pretrained(adapter)
    config.inference_mode = False
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    trainer = trl.DPOTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(PAIRS),
        processing_class=transformers.AutoTokenizer.from_pretrained(tiny_model),
        # A new adapter, filled afterwards: of one that is loaded TRL takes a copy as the reference.
        peft_config=config,
    )
    tensors = peft.utils.load_peft_weights(adapter, device="cpu")
    peft.utils.set_peft_model_state_dict(trainer.model, tensors)
    return trainer
