"""Reading a base model's configuration, and turning what transformers says about a bad one into a `ModelError`.

Loading weights is in `backbone`; `model_folder` looks whether a folder's files are there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig

from alto_core.config import ModelSection
from alto_core.engine.model_folder import check_model_folder
from alto_core.errors import ModelError
from alto_core.hub import go_offline_without_hub

LOADING_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, SafetensorError)
"""What transformers, safetensors and the hub client raise for a model that is missing, broken, or not supported."""


def load_config(section: ModelSection) -> Any:
    """The model's transformers configuration.

    Raises:
        ModelError: the model is missing, unreadable, needs code of its own, or is of a kind that cannot be tuned here.
    """
    check_model_folder(section.name)
    hub_is_away = "" if Path(section.name).is_dir() else go_offline_without_hub()
    try:
        config = AutoConfig.from_pretrained(
            section.name, revision=section.revision, trust_remote_code=section.trust_remote_code
        )
    except LOADING_ERRORS as error:
        raise as_model_error(section, error, hub_is_away=hub_is_away) from error
    _refuse_unsupported(section, config)
    return config


def as_model_error(section: ModelSection, error: BaseException, *, hub_is_away: str = "") -> ModelError:
    """Say in the user's words why a model cannot be loaded.

    Args:
        section: names the model.
        error: what was raised.
        hub_is_away: why the hub cannot be reached, where that is known.
    """
    said = " ".join(str(error).split()).rstrip(".")
    if "trust_remote_code" in said:
        why = "it brings Python code of its own, not run. Set `model.trust_remote_code: true` only if you trust it"
    elif "safetensors" in said and isinstance(error, OSError):
        why = f"its weights are not in safetensors format ({said[:200]}). Convert them; pickled weights are not loaded"
    elif not Path(section.name).exists() and isinstance(error, OSError):
        silence = hub_is_away or f"the hub gave nothing (no such id, or no access: {said[:200]})"
        why = (
            f"there is no such folder (a relative one is looked for beside the task file), and {silence}. "
            "Check the name, or download the model and name its folder"
        )
    else:
        why = f"{type(error).__name__}: {said[:400]}"
    return ModelError(f"model.name: cannot load {section.name!r}: {why}.")


def declared_name(section: ModelSection) -> str:
    """What exported adapters name as their base: the hub id, or what a local folder calls its model. Never a path."""
    folder = Path(section.name)
    if not folder.is_dir():
        return section.name
    try:
        declared = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("_name_or_path")
    except (OSError, ValueError):
        declared = None
    is_hub_id = isinstance(declared, str) and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", declared)
    return str(declared) if is_hub_id else folder.resolve().name


def _refuse_unsupported(section: ModelSection, config: Any) -> None:
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "is an encoder-decoder; only decoders that predict the next token can be tuned"
    elif getattr(config, "quantization_config", None) is not None:
        reason = "is quantized; name the unquantized model"
    elif getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        reason = "takes images or sound; only text models can be tuned"
    if reason:
        raise ModelError(f"model.name: {section.name!r} ({config.model_type}) {reason}.")
