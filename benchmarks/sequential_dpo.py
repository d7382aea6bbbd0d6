"""DPO one job after the other, as a user of PEFT writes it: the yardstick of bench_dpo.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.dpo_setting import BETA, TARGETS, Setting, seconds_of, steps_of


def time_sequential(setting: Setting, data: Any) -> dict[str, float]:
    """Seconds that all jobs take one after the other, from the time of a step of each batch size."""
    totals: dict[str, float] = {}
    found: dict[str, float] = {}
    rank = sorted({job.lora_rank for job in setting.jobs})[len({job.lora_rank for job in setting.jobs}) // 2]
    for batch in sorted({job.adapter_batch_size for job in setting.jobs}):
        steps = sum(steps_of(job, data) for job in setting.jobs if job.adapter_batch_size == batch)
        for method, seconds in time_one_job(setting, data, rank, batch).items():
            found[f"sequential_{method}_step_{batch}_seconds"] = seconds
            totals[method] = totals.get(method, 0.0) + steps * seconds
    return {**found, **{f"sequential_{method}_seconds": total for method, total in totals.items()}}


def time_one_job(setting: Setting, data: Any, rank: int, batch: int) -> dict[str, float]:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    is_gpu = setting.device == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=dtype, attn_implementation="sdpa")
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model.to(setting.device), config)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=is_gpu, capturable=is_gpu)
    rows = data.train.rows
    batches = [rows[start : start + batch] for start in range(0, max(1, len(rows) - batch), batch)][:16]
    longest = -(-max(row.longest_side for row in rows) // 8) * 8

    def log_probabilities(ids: Any, mask: Any) -> Any:
        logits = adapted(input_ids=ids, use_cache=False).logits[:, :-1].float()
        tokens = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
        return (tokens * mask[:, 1:]).sum(1)

    def step(ids: Any, mask: Any) -> None:
        with torch.no_grad(), adapted.disable_adapter():
            reference = log_probabilities(ids, mask)
        chosen, rejected = (log_probabilities(ids, mask) - reference).chunk(2)
        loss = -torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    padded = [_padded(part, max(row.longest_side for row in part), setting.device) for part in batches]
    found = {"eager": seconds_of(lambda i: step(*padded[i % len(padded)]), setting)}
    if is_gpu:
        from benchmarks.lora_methods import capture

        static = _padded(batches[0], longest, setting.device)
        graph = capture(lambda: step(*static))
        found["graphed"] = seconds_of(lambda _: graph.replay(), setting)
        graph.reset()
        del adapted, model
        torch.cuda.empty_cache()
    return found


def _padded(pairs: Sequence[Any], length: int, device: str) -> tuple[Any, Any]:
    """Chosen sides, then rejected ones, as ids and answer masks [2 batch, length]."""
    import torch

    sides = [pair.sides[number] for number in (0, 1) for pair in pairs]
    ids = torch.zeros(len(sides), length, dtype=torch.long)
    mask = torch.zeros(len(sides), length)
    for i, side in enumerate(sides):
        ids[i, : len(side.token_ids)] = torch.tensor(side.token_ids)
        mask[i, : len(side.token_ids)] = torch.tensor(side.label_mask).float()
    return ids.to(device), mask.to(device)
