"""Small model folders (configuration and tokenizer, no weights) in the manners of real model families."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GPT2Config, LlamaConfig, PreTrainedTokenizerFast

CORPUS = [
    "the quick brown fox jumps over the lazy dog. what is the answer? the answer is the quick fox.",
    "system user assistant prompt completion question: how many? answer: 42 or 12 or 7, yes or no.",
    "user\nassistant\nsystem\n hello there, good morning. bye now! i am a fox, you are a dog.",
] * 3

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like CHATML, with marks that transformers makes its own assistant mask from.
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen3's manner: reasoning is dropped from all turns but the last, which gets an empty one where it has none.
QWEN3 = (
    "{% for m in messages %}{% set c = m['content'] %}{% if m['role'] == 'assistant' %}"
    "{% set parts = c.split('</think>') %}{% set answer = parts[-1].lstrip('\n') %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.last %}{{ '<think>\n' + (parts[0].split('<think>')[-1].strip('\n')"
    " if parts | length > 1 else '') + '\n</think>\n\n' }}{% endif %}{{ answer + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# A system turn is refused, as is a wrong order; plain-text marks; end token with a space before it.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
# Turn marks that the tokenizer does not call special.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role'])"
    " + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Ends the whole chat with a second end token when no answer is asked for.
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
ALPACA = (
    "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
# Turns begin with a mark and end with none.
MARKERS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Only the last answer is ended, and turns are marked by plain text.
LATE_END = (
    "{% for m in messages %}{{ ' Q: ' + m['content'] + ' A:' if m['role'] == 'user' else ' ' + m['content'] }}"
    "{% if loop.last and m['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
)
# Earlier answers are left away.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|im_end|>' }}"
    "{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_end|>' }}{% endif %}"
)
UNSTABLE = (
    "{{ messages | length }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_core(special: Sequence[str], added: Sequence[str] = ()) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_tokens([AddedToken(token, normalized=False) for token in added])
    return core


def metaspace_core(special: Sequence[str]) -> Tokenizer:
    """The older Llama and Mistral manner: blanks become U+2581 and one is put in front."""
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=tokens, show_progress=False)
    core.train_from_iterator([text.replace("\n", " ") for text in CORPUS], trainer)
    layout = json.loads(core.to_str())
    layout["added_tokens"] = [token for token in layout["added_tokens"] if token["content"] in special]
    return Tokenizer.from_str(json.dumps(layout))


ModelFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """`model_folder(family, **config)` writes a model folder without weights and returns it."""

    def make(family: str, **config: Any) -> Path:
        folder = tmp_path_factory.mktemp(family)
        tokenizer = _tokenizer(family)
        tokenizer.save_pretrained(folder)
        vocab_size = config.pop("vocab_size", len(tokenizer))
        if family == "gpt2":
            sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "bos_token_id": 0, "eos_token_id": 0}
            GPT2Config(vocab_size=vocab_size, **sizes, **config).save_pretrained(folder)
        else:
            sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
            LlamaConfig(vocab_size=vocab_size, **sizes, **config).save_pretrained(folder)
        return folder

    return make


def _tokenizer(family: str) -> PreTrainedTokenizerFast:
    chat = ("<|im_start|>", "<|im_end|>")
    match family:
        case "gpt2":
            core = byte_level_core(["<|endoftext|>"])
            return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
        case "chatml" | "marked" | "qwen3" | "unstable" | "forgetful":
            core = byte_level_core(["<|endoftext|>", *chat], added=["<think>", "</think>"])
            template = {
                "chatml": CHATML,
                "marked": CHATML_MARKED,
                "qwen3": QWEN3,
                "unstable": UNSTABLE,
                "forgetful": FORGETFUL,
            }[family]
            return _with_template(core, template, eos_token="<|endoftext|>")
        case "llama3":
            core = byte_level_core(
                ["<|begin|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
            )
            core.post_processor = processors.TemplateProcessing(
                single="<|begin|> $A", special_tokens=[("<|begin|>", core.token_to_id("<|begin|>"))]
            )
            return _with_template(core, LLAMA3, bos_token="<|begin|>", eos_token="<|end_of_text|>")
        case "mistral":
            core = metaspace_core(["<unk>", "<s>", "</s>"])
            core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
            return _with_template(core, MISTRAL, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
        case "gemma":
            core = byte_level_core(["<bos>", "<eos>"], added=["<start_of_turn>", "<end_of_turn>"])
            return _with_template(core, GEMMA, bos_token="<bos>", eos_token="<eos>")
        case "phi3":
            core = byte_level_core(["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"])
            return _with_template(core, PHI3, eos_token="<|endoftext|>")
        case "alpaca":
            return _with_template(byte_level_core(["</s>"]), ALPACA, eos_token="</s>")
        case "markers":
            core = byte_level_core(["</s>", "<|user|>", "<|assistant|>"])
            return _with_template(core, MARKERS, eos_token="</s>")
        case "late_end":
            return _with_template(byte_level_core(["</s>"]), LATE_END, eos_token="</s>")
        case "unigram":
            pieces = [("<unk>", 0.0), ("</s>", 0.0), *((character, -5.0) for character in "abc </s>")]
            core = Tokenizer(models.Unigram(list(dict(pieces).items()), unk_id=0))
            core.add_special_tokens(["<unk>", "</s>"])
            return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
        case "no_end_token":
            return PreTrainedTokenizerFast(tokenizer_object=byte_level_core([]))
    raise AssertionError(family)


def _with_template(core: Tokenizer, template: str, **tokens: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **tokens)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """`write_lines(rows, name)` writes a JSON-lines file; a text or bytes goes in as it is."""

    def write(rows: Sequence[Any], name: str = "train.jsonl") -> Path:
        lines = [
            row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
            for row in rows
        ]
        path = tmp_path / name
        path.write_bytes(b"\n".join(lines) + b"\n")
        return path

    return write
