"""A job's whole training state on disk, and back: adapter, moments, step, best adapter so far.

    FOLDER/step-00000012/   params, exp_avg, exp_avg_sq, best (safetensors), state.json, last the marker complete.json

The marker holds a checksum of every other file. The two newest states are kept; `load_checkpoint` takes the newest
whole one and says so when a newer one is damaged. Nothing is pickled. Dropout and row order are functions of the step,
so no random state is needed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from alto_core.domain import LoraJob
from alto_core.engine.active_job import ActiveJob
from alto_core.engine.slots import AdapterSlots
from alto_core.engine.target_modules import LinearLayer
from alto_core.engine.whole_folder import whole_folder
from alto_core.errors import EngineError

FORMAT = 1
MARKER = "complete.json"
NUM_KEPT = 2

logger = logging.getLogger(__name__)


def save_checkpoint(active: ActiveJob, slots: AdapterSlots, folder: Path) -> None:
    """Write a job's state under `folder`. A state still being written never counts, and takes no older one's place."""
    with whole_folder(folder / f"step-{active.step:08d}") as target:
        for name, buffer_rW in _buffers(active).items():
            save_file(_tensors(slots, buffer_rW, active.layers), target / f"{name}.safetensors")
        state = {
            "format": FORMAT,
            "job": dataclasses.asdict(active.job),
            "step": active.step,
            "best_step": active.best_step,
            "best_val_loss": active.best_val_loss,
        }
        (target / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        checksums = {path.name: _checksum(path) for path in sorted(target.iterdir())}
        (target / MARKER).write_text(json.dumps({"sha256": checksums}, indent=1), encoding="utf-8")
    for old in _states(folder)[NUM_KEPT:]:
        shutil.rmtree(old)


def load_checkpoint(active: ActiveJob, slots: AdapterSlots, folder: Path) -> None:
    """Fill a fresh job from the newest whole state under `folder`.

    Raises:
        EngineError: there is no whole state, it is another job's, or a tensor is missing, too many, or misshapen.
    """
    state_folder = _newest_whole(folder)
    state = _read_state(state_folder / "state.json")
    _check_job(state, active.job, state_folder)
    active.step, active.best_step, active.best_val_loss = state["step"], state["best_step"], state["best_val_loss"]
    for name, buffer_rW in _buffers(active).items():
        path = state_folder / f"{name}.safetensors"
        if not path.is_file():
            raise EngineError(f"checkpoint {state_folder}: expected a file {path.name}, got none. Restart the job.")
        try:
            saved = load_file(path)
        except (SafetensorError, OSError) as error:
            raise EngineError(f"checkpoint {path}: expected whole safetensors, got {error}. Restart the job.") from None
        _fill(slots, buffer_rW, active.layers, saved, path)
    active.block.publish()


def _buffers(active: ActiveJob) -> dict[str, Tensor]:
    block = active.block
    buffers = {"params": block.params_rW, "exp_avg": block.exp_avg_rW, "exp_avg_sq": block.exp_avg_sq_rW}
    return buffers if active.best_step is None else {**buffers, "best": block.best_rW}


def _tensors(slots: AdapterSlots, buffer_rW: Tensor, layers: Sequence[LinearLayer]) -> dict[str, Tensor]:
    """By layer and side, so that an engine with other adapted layers can read it. B stays transposed, as in memory."""
    named = {}
    for layer, a_rI, b_rO in slots.by_layer(buffer_rW.cpu(), layers):
        named[f"{layer.name}.lora_A"], named[f"{layer.name}.lora_B"] = a_rI.contiguous(), b_rO.contiguous()
    return named


def _fill(
    slots: AdapterSlots, buffer_rW: Tensor, layers: Sequence[LinearLayer], saved: dict[str, Tensor], path: Path
) -> None:
    for layer, a_rI, b_rO in slots.by_layer(buffer_rW, layers):
        for name, target in ((f"{layer.name}.lora_A", a_rI), (f"{layer.name}.lora_B", b_rO)):
            if name not in saved:
                raise EngineError(f"checkpoint {path}: expected a tensor {name!r}, got none. Restart the job.")
            tensor = saved.pop(name)
            if tensor.shape != target.shape or tensor.dtype != target.dtype:
                raise EngineError(
                    f"checkpoint {path}: expected {name!r} as {target.dtype} {tuple(target.shape)}, "
                    f"got {tensor.dtype} {tuple(tensor.shape)}. Restart the job."
                )
            target.copy_(tensor)
    if saved:
        raise EngineError(
            f"checkpoint {path}: got a tensor {min(saved)!r} that this job does not have. Restart the job."
        )


def _read_state(path: Path) -> dict[str, Any]:
    """What stands beside the tensors, each field of its type."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        best_step, best_val_loss = state["best_step"], state["best_val_loss"]
        is_sound = (
            type(state["step"]) is int
            and isinstance(state["job"], dict)
            and (best_step is None or (type(best_step) is int and type(best_val_loss) in (int, float)))
        )
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise EngineError(f"checkpoint {path}: expected a job and its steps, got {error!r}. Restart the job.") from None
    if not is_sound:
        raise EngineError(f"checkpoint {path}: expected a job and its steps, got other values. Restart the job.")
    return dict(state)


def _check_job(state: dict[str, Any], job: LoraJob, folder: Path) -> None:
    if state.get("format") != FORMAT:
        raise EngineError(f"checkpoint {folder}: got format {state.get('format')}, expected {FORMAT}. Restart the job.")
    wanted = json.loads(json.dumps(dataclasses.asdict(job)))
    for field, expected in wanted.items():
        if state["job"].get(field) != expected:
            raise EngineError(
                f"checkpoint {folder}: got a job with {field}={state['job'].get(field)!r}, expected {expected!r}. "
                "It belongs to another job."
            )


def _states(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def _newest_whole(folder: Path) -> Path:
    states = _states(folder)
    for state_folder in states:
        fault = _fault(state_folder)
        if fault is None:
            return state_folder
        logger.warning("checkpoint %s is damaged (%s); trying the one before it", state_folder, fault)
    raise EngineError(f"checkpoint {folder}: expected a whole state, got {len(states)} damaged ones. Restart the job.")


def _fault(state_folder: Path) -> str | None:
    """What is wrong with a state; None when it is whole."""
    try:
        checksums = dict(json.loads((state_folder / MARKER).read_text(encoding="utf-8"))["sha256"].items())
    except FileNotFoundError:
        return f"no {MARKER}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError) as error:
        return f"{MARKER}: {error}"
    for name, expected in checksums.items():
        path = state_folder / name
        if path.parent != state_folder or path.is_symlink():
            return f"{MARKER} names {name!r}, which is no file of its own"
        if not path.is_file():
            return f"no {name}"
        if _checksum(path) != expected:
            return f"{name} is cut or changed"
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
