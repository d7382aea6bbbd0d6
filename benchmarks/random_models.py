"""Folders with models of real shapes and random weights, written as fast as memory takes them.

Every tensor is a piece of one pool of normal bfloat16 values, each layer's from another place in it, so that a model of
141 GB costs its copy and nothing else. The tokenizer is the tests', of single bytes; the vocabulary is the real one's,
so that embeddings and head cost what they cost.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import torch
from tiny_inputs import write_tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

MAX_POSITIONS = 8192
POOL_VALUES = 2**28
NUM_WRITERS = 16
ONE = b"\x80\x3f"
"""In bfloat16."""
BYTES = 2
"""Of a value."""
SHAPES = {
    # configuration, vocabulary, width, feed-forward width, layers, heads, heads of keys
    "llama-3.1-8b": (LlamaConfig, 128256, 4096, 14336, 32, 32, 8),
    "qwen2.5-7b": (Qwen2Config, 152064, 3584, 18944, 28, 28, 4),
    "qwen2.5-32b": (Qwen2Config, 152064, 5120, 27648, 64, 40, 8),
    "llama-3.1-70b": (LlamaConfig, 128256, 8192, 28672, 80, 64, 8),
}
TINY = (512, 32, 64, 2, 4, 2)
"""What replaces all but the kind of a shape, to try it on a CPU."""


def model_config(name: str, *, sizes: Sequence[int] | None = None, depth: float = 1.0) -> Any:
    """The transformers configuration of a shape, with all of its layers or a share of them; or of its kind alone.

    Args:
        sizes: other than the shape's, in the order of `SHAPES`.
        depth: share of the layers.
    """
    make, *own = SHAPES[name]
    vocabulary, hidden, intermediate, layers, heads, kv_heads = sizes or own
    return make(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=round(depth * layers),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )


def write_random_model(folder: Path, name: str, *, tiny: bool, depth: float = 1.0) -> Path:
    """The model of a shape in a folder; one that is there whole is left as it is.

    Raises:
        OSError: there is no room for it.
    """
    if (folder / "model.safetensors.index.json").exists():
        return folder
    config = model_config(name, sizes=TINY if tiny else None, depth=depth)
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(config).state_dict()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    needed, there = BYTES * sum(tensor.numel() for tensor in tensors.values()), shutil.disk_usage(folder).free
    if there < needed:
        raise OSError(f"{folder}: expected {needed / 1e9:.0f} GB free, got {there / 1e9:.0f}")
    write_tiny_model(folder)  # for its tokenizer
    (folder / "model.safetensors").unlink()
    config.save_pretrained(folder)
    num_values = min(POOL_VALUES, 2 * max(tensor.numel() for tensor in tensors.values()))
    pool = torch.randn(num_values, generator=torch.Generator().manual_seed(0)) * config.hidden_size**-0.5
    values = memoryview(pool.to(torch.bfloat16).view(torch.int16).numpy()).cast("B")
    files: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for key, tensor in tensors.items():
        layer = re.search(r"layers\.(\d+)\.", key)
        files[f"layer-{layer[1]}.safetensors" if layer else "outside.safetensors"][key] = tuple(tensor.shape)
    with ThreadPoolExecutor(NUM_WRITERS) as writers:
        starts = [BYTES * (i * 1_000_003 % num_values) for i in range(len(files))]
        list(writers.map(_write, (folder / file for file in files), files.values(), starts, [values] * len(files)))
    index = {"metadata": {}, "weight_map": {key: file for file, keys in files.items() for key in keys}}
    # last: it says that the rest is there
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _write(file: Path, shapes: Mapping[str, tuple[int, ...]], start: int, values: memoryview) -> None:
    """A safetensors file: the length of its header, the header, the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, shape in shapes.items():
        begin, end = end, end + BYTES * prod(shape)
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for key, shape in shapes.items():
            num_bytes = BYTES * prod(shape)
            if "norm" in key:
                out.write(ONE * (num_bytes // BYTES))
                continue
            for piece in _pieces(values, start, num_bytes):
                out.write(piece)
            start = (start + num_bytes) % len(values)


def _pieces(values: memoryview, start: int, num_bytes: int) -> Iterator[memoryview]:
    """So many bytes from `start` on; behind the end the pool begins anew."""
    while num_bytes:
        piece = values[start : start + num_bytes]
        yield piece
        num_bytes -= len(piece)
        start = 0
