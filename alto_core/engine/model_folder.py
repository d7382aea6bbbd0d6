"""The files of a model folder: all there, and whole? Imports neither torch nor transformers, so it answers at once.

A model on the hub is checked by loading it.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from alto_core.errors import ModelError

FOLDER = "a folder as transformers saves it: config.json, *.safetensors and tokenizer.json"


def check_model_folder(name: str) -> None:
    """Look whether a model's folder is there, with a configuration. A name that can be a hub id passes.

    Raises:
        ModelError: there is no such folder, or it is none of a model.
    """
    folder = Path(name)
    if not folder.is_dir():
        if _looks_local(name):
            raise ModelError(
                f"model.name: got {name!r}, expected a folder that exists, or a hub id such as 'org/model'."
            )
        return
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"model.name: {folder} holds an adapter, expected a model. Name the model that it was trained on, and "
                "this folder as `init_adapter` if jobs are to start from it."
            )
        raise ModelError(f"model.name: {folder} holds no config.json, expected {FOLDER}.")


def check_weight_files(name: str) -> None:
    """Look at the weight files of a model's folder without reading the weights. A name that is no folder passes.

    Raises:
        ModelError: one of them is missing, cut or damaged, or all are of another format; names the file.
    """
    folder = Path(name)
    if not folder.is_dir():
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for ending in ("bin", "pt", "pth", "gguf") for path in folder.glob(f"*.{ending}"))
        cure = "Convert it; pickled weights are not loaded" if others else "Copy the weights there"
        raise ModelError(
            f"model.name: {folder} holds no *.safetensors{f' but {others[0]}' if others else ''}, expected the weights "
            f"in safetensors format. {cure}."
        )
    absent = _listed(folder / "model.safetensors.index.json") - {file.name for file in files}
    if absent:
        raise ModelError(f"model.name: {folder} lacks {min(absent)}, which its index lists. Copy it there.")
    for file in files:
        try:
            with safe_open(file, "np"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"model.name: {file}: expected whole safetensors, got {error}. Copy it again.") from None


def _looks_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _listed(index: Path) -> set[str]:
    """Names of the files over which the weights are spread; none where they are in one."""
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"model.name: {index}: expected an index of weights, got {error}. Copy it again.") from None
