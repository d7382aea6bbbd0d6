"""Tiny random models of every family, with rows and jobs for them: what the engine's tests share."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alto_core.config import ModelSection
from alto_core.data.rows import PairRow, TokenRow
from alto_core.domain import JobBudget, LoraJob, StepRecord
from alto_core.engine.backbone import Backbone, load_backbone, release_backbone
from alto_core.engine.engine import UNTUNED, Engine
from alto_core.engine.preference_objective import PreferenceObjective
from alto_core.preference import PreferenceOptions

VOCABULARY = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "smollm": lambda: transformers.LlamaConfig(**{**SMALL, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=5),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=5, query_pre_attn_scalar=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=5),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        scale_attn_by_inverse_layer_idx=True,
    ),
}
ALL_LINEAR = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


class Tiny:
    """Makes tiny models, rows and jobs. Tests take it as a fixture."""

    families = tuple(CONFIGS)
    vocabulary = VOCABULARY

    def __init__(self, root: Path):
        self._root = root

    def folder(self, family: str = "llama") -> Path:
        """The family's random model, written once."""
        target = self._root / family
        if not target.exists():
            torch.manual_seed(7)
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())
            # Wider than the usual 0.02, so that attention and LoRA paths matter in the logits.
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 2:
                        parameter.normal_(std=0.15)
            model.save_pretrained(target)
        return target

    def section(self, family: str = "llama", **changes: Any) -> ModelSection:
        return ModelSection(name=str(self.folder(family)), **changes)

    def backbone(self, family: str = "llama", *, device: str = "cpu", **changes: Any) -> Backbone:
        return load_backbone(self.section(family, **changes), device)

    def plain_model(self, family: str = "llama", **loading: Any) -> Any:
        """As transformers loads it, with its eager attention."""
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.folder(family), attn_implementation="eager", dtype=torch.float32, **loading
        ).eval()

    def targets(self, family: str = "llama") -> tuple[str, ...]:
        return ("c_attn", "c_fc", "c_proj") if family == "gpt2" else ALL_LINEAR

    def job(self, family: str = "llama", **changes: Any) -> LoraJob:
        fields: dict[str, Any] = {
            "learning_rate": 5e-3,
            "lora_rank": 4,
            "lora_alpha": 8.0,
            "adapter_batch_size": 3,
            "target_modules": self.targets(family),
            "seed": 1,
        }
        return LoraJob(**{**fields, **changes})

    def budget(self, steps: int = 10) -> JobBudget:
        return JobBudget(total_steps=steps, warmup_steps=1, eval_steps=(steps,))

    def engine(self, family: str = "llama", *, quantization: str = "none", **changes: Any) -> Engine:
        sizes = {"target_modules": self.targets(family), "num_slots": 6, "rank_rows": 80, **changes}
        return Engine(self.backbone(family, quantization=quantization), **sizes)

    def step(self, engine: Engine, rows_by_job: dict[str, list[TokenRow]]) -> tuple[StepRecord, ...]:
        """One joint step and what it measured."""
        engine.step(rows_by_job)
        return engine.take_records()

    def rows(self, count: int, *, seed: int = 0, shortest: int = 4, longest: int = 14) -> list[TokenRow]:
        """Random rows of uneven length whose end is trained."""
        draw = random.Random(seed)
        rows = []
        for i in range(count):
            length = draw.randint(shortest, longest)
            start = draw.randint(1, length - 1)
            token_ids = tuple(draw.randrange(3, VOCABULARY) for _ in range(length))
            mask = tuple(position >= start for position in range(length))
            rows.append(TokenRow(row_id=i, origin=f"rows:{i}", token_ids=token_ids, label_mask=mask))
        return rows

    def pairs(self, count: int, *, seed: int = 0) -> list[PairRow]:
        """Random preference pairs with prompts and answers of uneven length."""
        draw = random.Random(seed)
        pairs = []
        for i in range(count):
            prompt, chosen, rejected = draw.randint(1, 8), draw.randint(1, 6), draw.randint(1, 6)
            pairs.append(
                PairRow(
                    row_id=i,
                    origin=f"pairs:{i}",
                    token_ids=tuple(draw.randrange(3, VOCABULARY) for _ in range(prompt + chosen + rejected)),
                    label_mask=(False,) * prompt + (True,) * (chosen + rejected),
                    prompt_length=prompt,
                    rejected_start=prompt + chosen,
                )
            )
        return pairs

    @contextmanager
    def preferring(
        self,
        pairs: Sequence[PairRow],
        options: PreferenceOptions | None = None,
        *,
        family: str = "llama",
        share_prompts: bool = True,
        backbone: Backbone | None = None,
        **changes: Any,
    ) -> Iterator[Engine]:
        """An engine whose jobs prefer, with the reference of some pairs measured."""
        reference: dict[int, tuple[float, float]] = {}
        backbone = backbone or self.backbone(family)
        sizes = {"target_modules": self.targets(family), "num_slots": 6, "rank_rows": 80, **changes}
        with Engine(
            dataclasses.replace(backbone, shares_prompts=backbone.shares_prompts and share_prompts),
            objective=PreferenceObjective(options or PreferenceOptions(), reference, beta=0.1),
            **sizes,
        ) as engine:
            sums = engine.side_losses(UNTUNED, pairs, max_tokens=10**9).tolist()
            reference.update({pair.row_id: (a, b) for pair, (a, b) in zip(pairs, sums, strict=True)})
            yield engine

    def batch(self, job: LoraJob, step: int, rows: list[TokenRow]) -> list[TokenRow]:
        """The job's rows of one update, going round."""
        start = (step - 1) * job.rows_per_update
        return [rows[(start + i) % len(rows)] for i in range(job.rows_per_update)]

    def loss_sums(self, model: Any, rows: list[TokenRow]) -> list[torch.Tensor]:
        """Sum of token losses of each row, each run alone through transformers' own forward."""
        sums = []
        for row in rows:
            ids = torch.tensor([row.token_ids])
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
            sums.append(losses[torch.tensor(row.label_mask[1:])].sum())
        return sums


@pytest.fixture(scope="session")
def _tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("models"))


@pytest.fixture
def tiny(_tiny: Tiny) -> Iterator[Tiny]:
    yield _tiny
    release_backbone()
