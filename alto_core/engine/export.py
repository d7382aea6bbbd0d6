"""Adapters in PEFT's folder format: written for others to load, and read back.

An exported folder holds adapter_model.safetensors and adapter_config.json, nothing of the optimizer and no path of this
machine. It loads with `PeftModel.from_pretrained` and gives the logits it had in training.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from alto_core.domain import LoraJob
from alto_core.engine.active_job import ActiveJob
from alto_core.engine.serving import PREFIX
from alto_core.engine.slots import AdapterSlots
from alto_core.engine.target_modules import LinearLayer
from alto_core.errors import EngineError, ModelError
from alto_core.whole_files import whole_folder

MAX_ALPHA = 1e30
"""Above it, as for NaN, no scale can be meant."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

logger = logging.getLogger(__name__)


def export_adapter(active: ActiveJob, slots: AdapterSlots, params_rW: Tensor, base_name: str, folder: Path) -> None:
    """Write one adapter. `folder` appears whole, or stays as it was.

    Args:
        active: whose adapter it is.
        params_rW: its rank rows, the current ones or those of the best step.
        base_name: name of the base model, a hub id or a folder's own name.

    Raises:
        EngineError: the adapter holds a value that is not finite.
    """
    # One large copy to the host, then NumPy: hundreds of small copies would each wait for the device, or wake torch's
    # threads, which on a host of many cores takes far longer than the copy.
    host_rW = params_rW.cpu()
    arrays = {}
    changes_something = False
    for layer, a_rI, b_rO in slots.by_layer(host_rW, active.layers):
        a_name, b_name = _names(layer)
        arrays[a_name], arrays[b_name] = np.ascontiguousarray(a_rI.numpy()), np.ascontiguousarray(b_rO.numpy().T)
        changes_something |= bool(arrays[b_name].any())
    broken = next((name for name, array in arrays.items() if not np.isfinite(array).all()), None)
    if broken:
        raise EngineError(
            f"{active.job.job_id}: expected a finite adapter, got NaN or infinity in {broken}. It is not exported."
        )
    if not changes_something:
        logger.warning("%s: every lora_B is zero, the exported adapter changes nothing", active.job.job_id)
    with whole_folder(folder) as target:
        save_arrays(arrays, target / WEIGHTS, metadata={"format": "pt"})
        # Some of the layers that the endings match are named one by one.
        targets = active.job.target_modules if active.job.layer_share == 1 else [layer.name for layer in active.layers]
        is_conv1d = any(layer.is_conv1d for layer in active.layers)
        config = _config(active.job, base_name, targets, is_conv1d=is_conv1d)
        (target / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


def read_adapter(active: ActiveJob, slots: AdapterSlots, folder: Path) -> float:
    """Fill a job's rank rows from a PEFT folder.

    Returns:
        The scale that the adapter was trained with.

    Raises:
        ModelError: the folder is no plain LoRA adapter, or its rank or layers are not the job's.
    """
    config = _read_config(folder)
    _check_config(config, active.job, folder)
    for name, target, tensor in _matched(active.layers, slots, active.block.params_rW, read_tensors(folder), folder):
        if tensor.shape != target.shape:
            raise ModelError(
                f"{folder}: expected {name} of shape {tuple(target.shape)}, got {tuple(tensor.shape)}. "
                "It fits another model."
            )
        if not np.isfinite(tensor.numpy()).all():
            raise ModelError(f"{folder}: expected a finite adapter, got NaN or infinity in {name}.")
        target.copy_(tensor)
    return float(config["lora_alpha"]) / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])


def adapter_job(folder: Path, number: int = 0) -> LoraJob:
    """The job that an adapter folder can be loaded as, for evaluation and generation.

    Args:
        folder: a PEFT folder.
        number: tells apart jobs of adapters with equal settings, which would have equal ids.

    Raises:
        ModelError: the folder is no plain LoRA adapter, or its layers are named by a pattern.
    """
    config = _read_config(folder)
    rank, modules = config.get("r"), config.get("target_modules")
    names = modules if isinstance(modules, list) and all(isinstance(name, str) for name in modules) else []
    if type(rank) is not int or rank < 1 or not names:
        raise ModelError(
            f"{folder}: got r={rank!r:.80} and target_modules={modules!r:.200}, expected a rank and a list of names."
        )
    _check_alpha(config, folder)
    job = LoraJob(
        learning_rate=0.0,
        lora_rank=rank,
        lora_alpha=config.get("lora_alpha", 0),
        use_rslora=bool(config.get("use_rslora")),
        adapter_batch_size=1,
        target_modules=tuple(sorted(names)),
        seed=number,
    )
    _check_config(config, job, folder)
    return job


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter folder, in float32.

    Raises:
        ModelError: its weights are missing, pickled, or damaged.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        hint = (
            " Its weights are pickled, which is not loaded; save them as safetensors."
            if path.with_suffix(".bin").exists()
            else ""
        )
        raise ModelError(f"{folder}: expected a file {WEIGHTS}, got none.{hint}")
    try:
        return {name: tensor.to(torch.float32) for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: expected whole safetensors, got {error}.") from None


def pad_rank(folder: Path, lora_rank: int) -> None:
    """Fill an adapter up with zeros to a larger rank, in place. Its outputs stay the same, and so does its scale.

    Raises:
        ModelError: the folder is no plain LoRA adapter.
    """
    job, config, tensors = adapter_job(folder), _read_config(folder), read_tensors(folder)
    missing = lora_rank - job.lora_rank
    assert missing >= 0
    padded = {
        name: functional.pad(tensor, (0, 0, 0, missing) if ".lora_A." in name else (0, missing)).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(padded, folder / WEIGHTS, metadata={"format": "pt"})
    changes = {"r": lora_rank, "lora_alpha": job.scale * lora_rank, "use_rslora": False}
    (folder / CONFIG).write_text(json.dumps({**config, **changes}, indent=2), encoding="utf-8")


def _config(job: LoraJob, base_name: str, targets: Sequence[str], *, is_conv1d: bool) -> dict[str, Any]:
    # Where the rank rows are not what the job calls its rank, its scale is written as plain alpha / r.
    is_as_given = job.rank_rows == job.lora_rank
    alpha = job.lora_alpha if is_as_given else job.scale * job.rank_rows
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": None,
        "r": job.rank_rows,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "use_rslora": job.use_rslora and is_as_given,
        "lora_dropout": job.dropout,
        "target_modules": list(targets),
        "fan_in_fan_out": is_conv1d,
        "bias": "none",
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder}: expected a PEFT adapter folder with {CONFIG}, got none.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: expected readable JSON, got {error}.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(config).__name__}.")
    return config


def _check_alpha(config: dict[str, Any], folder: Path) -> None:
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < MAX_ALPHA:
        raise ModelError(f"{folder}: got lora_alpha={alpha!r:.80}, expected a number.")


def _check_config(config: dict[str, Any], job: LoraJob, folder: Path) -> None:
    expected = {"peft_type": "LORA", "r": job.rank_rows}
    for field, value in expected.items():
        if config.get(field) != value:
            raise ModelError(f"{folder}: got {field}={config.get(field)!r}, expected {value!r}, as in {job.job_id}.")
    _check_alpha(config, folder)
    for field in (
        "use_dora",
        "lora_bias",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
        "trainable_token_indices",
    ):
        if config.get(field):
            raise ModelError(f"{folder}: got {field}={config[field]!r}, expected a plain LoRA adapter without it.")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{folder}: got bias={config['bias']!r}, expected 'none'.")


def _matched(
    layers: Sequence[LinearLayer], slots: AdapterSlots, params_rW: Tensor, saved: dict[str, Tensor], folder: Path
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each saved tensor with its place; every one must have a place, and every place a tensor."""
    for layer, a_rI, b_rO in slots.by_layer(params_rW, layers):
        for name, target in zip(_names(layer), (a_rI, b_rO.T), strict=True):
            if name not in saved:
                raise ModelError(
                    f"{folder}: expected a tensor {name!r}, got none. Its target_modules differ from the job's."
                )
            yield name, target, saved.pop(name)
    if saved:
        raise ModelError(f"{folder}: got a tensor {min(saved)!r} for a layer that the job does not adapt.")


def _names(layer: LinearLayer) -> tuple[str, str]:
    return f"{PREFIX}{layer.name}.lora_A.weight", f"{PREFIX}{layer.name}.lora_B.weight"
