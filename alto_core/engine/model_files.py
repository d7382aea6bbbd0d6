"""Reading a base model's configuration, and turning what transformers says about a bad one into a `ModelError`.

Loading weights is in `backbone`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from alto_core.config import ModelSection
from alto_core.errors import ModelError

LOADING_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, SafetensorError)
"""What transformers, safetensors and the hub client raise for a model that is missing, broken, or not supported."""


def load_config(section: ModelSection) -> Any:
    """The model's transformers configuration.

    Raises:
        ModelError: the model is missing, unreadable, needs code of its own, or is of a kind that cannot be tuned here.
    """
    if _looks_local(section.name) and not Path(section.name).is_dir():
        raise ModelError(
            f"model.name: got {section.name!r}, expected a folder that exists, or a hub id such as 'org/model'."
        )
    try:
        config = AutoConfig.from_pretrained(
            section.name, revision=section.revision, trust_remote_code=section.trust_remote_code
        )
    except LOADING_ERRORS as error:
        raise as_model_error(section, error) from error
    _refuse_unsupported(section, config)
    return config


def check_weight_files(section: ModelSection) -> None:
    """Look at the weight files of a model folder without reading the weights; a hub model's are checked by loading.

    Raises:
        ModelError: one of them is cut or damaged; names the file.
    """
    for file in sorted(Path(section.name).glob("*.safetensors")) if Path(section.name).is_dir() else ():
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"model.name: {file}: expected whole safetensors, got {error}. Copy it again.") from None


def as_model_error(section: ModelSection, error: BaseException) -> ModelError:
    """Say in the user's words why a model cannot be loaded."""
    said = " ".join(str(error).split())
    if "trust_remote_code" in said:
        why = "it brings Python code of its own, not run. Set `model.trust_remote_code: true` only if you trust it"
    elif "safetensors" in said and isinstance(error, OSError):
        why = f"its weights are not in safetensors format ({said[:200]}). Convert them; pickled weights are not loaded"
    elif not Path(section.name).exists() and isinstance(error, OSError):
        why = (
            "it is no local folder, and the hub gave nothing (no network, no such id, or no access). "
            f"Check the name, or download the model and name its folder ({said[:200]})"
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


def _looks_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1


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
