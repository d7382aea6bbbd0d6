"""Loads a registered adapter on top of its base model. A copy of this file travels with every registered version.

It stands alone: torch, transformers and peft, nothing of ALTO. MLflow calls `_load_pyfunc`:

    mlflow.pyfunc.load_model("models:/NAME@champion").predict(pandas.DataFrame({"prompt": ["..."]}))
    mlflow.pyfunc.load_model(uri, model_config={"base_model": "/folder/of/the/base"})   # no network

The prompt is the text that the model reads, chat template included. A base model in a folder is checked against the
fingerprint of the one that the adapter was trained on.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

NUM_PROBES, PROBE_BYTES = 64, 65536
"""Parts of each weight file that a fingerprint reads: enough to tell models apart, quick for a hundred gigabytes."""


def fingerprint(folder: Path) -> str:
    """Sixteen digits over a model folder's layer sizes and parts of its weights; its name and place do not count."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as source:
            (header_bytes,) = struct.unpack("<Q", source.read(8))
            tensors = json.loads(source.read(header_bytes))
            tensors.pop("__metadata__", None)
            digest.update(json.dumps(tensors, sort_keys=True).encode())
            size = file.stat().st_size
            for probe in range(NUM_PROBES):
                source.seek(8 + header_bytes + probe * max(0, size - 8 - header_bytes - PROBE_BYTES) // NUM_PROBES)
                digest.update(source.read(PROBE_BYTES))
    return digest.hexdigest()[:16]


def _load_pyfunc(path: str, model_config: dict[str, Any]) -> ServedAdapter:
    return ServedAdapter(Path(path), model_config)


class ServedAdapter:
    """Base model and adapter, ready to answer.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors.
        config: `base_model` (hub id or folder), `base_revision`, `base_fingerprint`, `stop_token_ids`, `pad_token_id`
            and `max_new_tokens`, as the version was registered with and as the caller changed them.

    Raises:
        ValueError: the base model is another one than the adapter was trained on.
    """

    def __init__(self, folder: Path, config: dict[str, Any]):
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        base, self._config = str(config["base_model"]), config
        is_folder = Path(base).is_dir()
        expected = config.get("base_fingerprint")
        if is_folder and expected and fingerprint(Path(base)) != expected:
            raise ValueError(
                f"base_model {base}: got a model of fingerprint {fingerprint(Path(base))}, expected {expected}, "
                "the one that the adapter was trained on"
            )
        revision = None if is_folder else config.get("base_revision")
        self._tokenizer = AutoTokenizer.from_pretrained(base, revision=revision)
        model = AutoModelForCausalLM.from_pretrained(base, revision=revision, use_safetensors=True)
        self._model = PeftModel.from_pretrained(model, str(folder)).eval()

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> list[str]:
        """One answer for each entry of the column `prompt`; greedy, up to `max_new_tokens`."""
        import torch

        prompts = [str(prompt) for prompt in model_input["prompt"]]
        rows = [self._tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        longest = max(map(len, rows), default=0)
        pad = self._config["pad_token_id"]
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        settings = {**self._config, **(params or {})}
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=int(settings["max_new_tokens"]),
                eos_token_id=list(settings["stop_token_ids"]),
                pad_token_id=pad,
            )
        return [self._tokenizer.decode(row, skip_special_tokens=True) for row in out[:, longest:]]
