"""A base model with one adapter added into its weights: a plain transformers folder that needs no PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alto_core.config import ModelSection
from alto_core.engine.export import adapter_job, read_tensors
from alto_core.engine.model_files import LOADING_ERRORS, as_model_error
from alto_core.engine.serving import PREFIX
from alto_core.engine.target_modules import find_linear_layers, select_layers
from alto_core.errors import ModelError


@torch.inference_mode()
def write_merged(section: ModelSection, adapter: Path, target: Path) -> None:
    """Write base plus adapter, in the base's own dtype, as safetensors with its tokenizer.

    Args:
        section: the base model.
        adapter: a PEFT folder of plain LoRA on linear layers.
        target: a folder, made here.

    Raises:
        ModelError: the base cannot be loaded, or the adapter does not fit it.
    """
    job, tensors = adapter_job(adapter), read_tensors(adapter)
    model, tokenizer = _load(section)
    for layer in select_layers(find_linear_layers(model), job.target_modules):
        weight = model.get_submodule(layer.name).weight
        name = f"{PREFIX}{layer.name}"
        try:
            a_rI, b_Or = tensors.pop(f"{name}.lora_A.weight"), tensors.pop(f"{name}.lora_B.weight")
        except KeyError as error:
            raise ModelError(f"{adapter}: expected a tensor {error}, got none. It fits another model.") from None
        delta_OI = job.scale * (b_Or @ a_rI)
        merged = weight.float() + (delta_OI.T if layer.is_conv1d else delta_OI)
        weight.copy_(merged.to(weight.dtype))
    if tensors:
        raise ModelError(f"{adapter}: got a tensor {min(tensors)!r} for a layer that {section.name!r} does not have.")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _load(section: ModelSection) -> tuple[Any, Any]:
    options = {"revision": section.revision, "trust_remote_code": section.trust_remote_code}
    try:
        model = AutoModelForCausalLM.from_pretrained(section.name, dtype="auto", use_safetensors=True, **options)
        return model, AutoTokenizer.from_pretrained(section.name, **options)
    except LOADING_ERRORS as error:
        raise as_model_error(section, error) from error
