"""A job's whole training state on disk, and back: adapter, moments, step, best adapter so far.

    FOLDER/step-00000012/   params, exp_avg, exp_avg_sq, best (safetensors), state.json, last the marker complete.json

There is no `best` while none is known, or where the parameters of this very step are the best. `state_folders` keeps
the newest states and tells which are whole; `load_checkpoint` takes the newest whole one. Nothing is pickled. Row
order, learning rate and dropout are functions of the step, and the detectors' counts are read off the curve, so the
step stands for data cursor, schedule and all random states.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor

from alto_core.domain import LoraJob
from alto_core.engine.active_job import ActiveJob
from alto_core.engine.slots import AdapterSlots
from alto_core.engine.state_folders import mark_whole, newest_whole, prune, state_folder
from alto_core.engine.target_modules import LinearLayer
from alto_core.errors import EngineError
from alto_core.whole_files import whole_folder

FORMAT = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class JobSnapshot:
    """A job's training state at one step, copied to host memory: what comes after does not change it."""

    job: LoraJob
    step: int
    best_step: int | None
    best_val_loss: float | None
    tensors: Mapping[str, Mapping[str, Tensor]]
    """Of each file, by layer and side."""

    @property
    def num_bytes(self) -> int:
        """Of all tensors; what writing it takes on disk, but for a few kB."""
        return sum(tensor.nbytes for named in self.tensors.values() for tensor in named.values())


def take_snapshot(active: ActiveJob, slots: AdapterSlots) -> JobSnapshot:
    """Copy a job's state to the host. The only part of a checkpoint that training waits for."""
    return JobSnapshot(
        job=active.job,
        step=active.step,
        best_step=active.best_step,
        best_val_loss=active.best_val_loss,
        tensors={name: _tensors(slots, buffer_rW, active.layers) for name, buffer_rW in _buffers(active).items()},
    )


def write_snapshot(snapshot: JobSnapshot, folder: Path, *, keep_from: int | None = None) -> None:
    """Write a state under `folder`. A state still being written never counts, and takes no older one's place.

    Args:
        snapshot: what to write.
        folder: the job's states.
        keep_from: states of this step and later stay, besides the two newest; None: the two newest alone.

    Raises:
        EngineError: it could not be written, for example because the disk is full; older states are as they were.
    """
    target = state_folder(folder, snapshot.step)
    try:
        with whole_folder(target) as temporary:
            _write_files(snapshot, temporary)
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"checkpoint {target}: {snapshot.num_bytes} bytes could not be written ({error}), {_free_bytes(folder)} "
            "are free there. The states before it are as they were. Make room, then resume the task."
        ) from error
    prune(folder, keep_from=keep_from)


def load_checkpoint(active: ActiveJob, slots: AdapterSlots, folder: Path, *, step: int | None = None) -> None:
    """Fill a fresh job from the newest whole state under `folder`.

    Args:
        active: the job.
        slots: its buffers.
        folder: its states.
        step: take no state that is newer; None: any.

    Raises:
        EngineError: there is no whole state, it is another job's, or a tensor is missing, too many, or misshapen.
    """
    whole = newest_whole(folder, step)
    state = _read_state(whole / "state.json")
    _check_job(state, active.job, whole)
    active.step, active.best_step, active.best_val_loss = state["step"], state["best_step"], state["best_val_loss"]
    for name, buffer_rW in _buffers(active).items():
        path = whole / f"{name}.safetensors"
        if not path.is_file():
            raise EngineError(f"checkpoint {whole}: expected a file {path.name}, got none. Restart the job.")
        try:
            saved = load_file(path)
        except (SafetensorError, OSError) as error:
            raise EngineError(f"checkpoint {path}: expected whole safetensors, got {error}. Restart the job.") from None
        _fill(slots, buffer_rW, active.layers, saved, path)
    if active.best_step == active.step:
        active.block.best_rW.copy_(active.block.params_rW)
    active.block.publish()


def _buffers(active: ActiveJob) -> dict[str, Tensor]:
    """What a state has a file of, by its name."""
    block = active.block
    buffers = {"params": block.params_rW, "exp_avg": block.exp_avg_rW, "exp_avg_sq": block.exp_avg_sq_rW}
    return buffers if active.best_step in (None, active.step) else {**buffers, "best": block.best_rW}


def _tensors(slots: AdapterSlots, buffer_rW: Tensor, layers: Sequence[LinearLayer]) -> dict[str, Tensor]:
    """A copy, by layer and side: an engine with other adapted layers can read it. B stays transposed, as in memory."""
    named = {}
    for layer, a_rI, b_rO in slots.by_layer(buffer_rW.to("cpu", copy=True), layers):
        named[f"{layer.name}.lora_A"], named[f"{layer.name}.lora_B"] = a_rI, b_rO
    return named


def _write_files(snapshot: JobSnapshot, target: Path) -> None:
    for name, tensors in snapshot.tensors.items():
        contiguous = {key: np.ascontiguousarray(tensor.numpy()) for key, tensor in tensors.items()}
        save_file(contiguous, target / f"{name}.safetensors")
    state = {
        "format": FORMAT,
        "job": dataclasses.asdict(snapshot.job),
        "step": snapshot.step,
        "best_step": snapshot.best_step,
        "best_val_loss": snapshot.best_val_loss,
    }
    (target / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    mark_whole(target)


def _fill(
    slots: AdapterSlots, buffer_rW: Tensor, layers: Sequence[LinearLayer], saved: dict[str, Tensor], path: Path
) -> None:
    host_rW = buffer_rW.to("cpu", copy=True)  # the device is sent one large copy, not hundreds of small ones
    # NumPy copies without waking torch's threads, which on a host of many cores takes far longer than the copy.
    for layer, a_rI, b_rO in slots.by_layer(host_rW, layers):
        for name, target in ((f"{layer.name}.lora_A", a_rI), (f"{layer.name}.lora_B", b_rO)):
            if name not in saved:
                raise EngineError(f"checkpoint {path}: expected a tensor {name!r}, got none. Restart the job.")
            tensor = saved.pop(name)
            if tensor.shape != target.shape or tensor.dtype != target.dtype:
                raise EngineError(
                    f"checkpoint {path}: expected {name!r} as {target.dtype} {tuple(target.shape)}, "
                    f"got {tensor.dtype} {tuple(tensor.shape)}. Restart the job."
                )
            np.copyto(target.numpy(), tensor.numpy())
    buffer_rW.copy_(host_rW)
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
    # A state of an earlier version lacks the fields that came later; its job has their defaults.
    saved = {f.name: f.default for f in dataclasses.fields(job)} | state["job"]
    for field, expected in wanted.items():
        if saved[field] != expected:
            raise EngineError(
                f"checkpoint {folder}: got a job with {field}={saved[field]!r}, expected {expected!r}. "
                "It belongs to another job."
            )


def _free_bytes(folder: Path) -> int:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free
