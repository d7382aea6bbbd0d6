"""A model's tokenizer and the limits that its configuration sets: positions, embedding rows, end and pad token.

Loads the tokenizer and the configuration, never weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alto_core.config import ModelSection
from alto_core.errors import ModelError, first_line


@dataclass(frozen=True, kw_only=True)
class ModelTokenizer:
    """What turning text into tokens needs to know of a model."""

    tokenizer: Any
    """A fast transformers tokenizer (`PreTrainedTokenizerFast`)."""
    num_embeddings: int
    """Token ids are below it."""
    max_positions: int | None
    """Longest row the model was made for; None where the configuration names no limit."""
    eos_token_id: int | None

    @property
    def chat_template(self) -> str | None:
        """The template that chats are rendered with, where there is one."""
        try:
            template = self.tokenizer.get_chat_template()
        except ValueError:  # none, or several of which none is the default
            return None
        assert isinstance(template, str)
        return template

    @property
    def pad_token_id(self) -> int:
        """An existing token of the model: its own pad token, else the end token, else the first."""
        for candidate in (self.tokenizer.pad_token_id, self.eos_token_id):
            if candidate is not None and 0 <= candidate < self.num_embeddings:
                return int(candidate)
        return 0

    @property
    def leading_ids(self) -> tuple[int, ...]:
        """What the tokenizer itself puts before a plain text: mostly nothing, or one BOS token."""
        core = self.tokenizer.backend_tokenizer
        plain = core.encode("a", add_special_tokens=False).ids
        framed = core.encode("a", add_special_tokens=True).ids
        position = next((i for i in range(len(framed)) if framed[i : i + len(plain)] == plain), 0)
        return tuple(framed[:position])


def load_model_tokenizer(model: ModelSection) -> ModelTokenizer:
    """Load the tokenizer and the configuration of a model.

    Raises:
        ModelError: no such folder or hub id, damaged files, code of its own that was not allowed, or no fast tokenizer.
    """
    path = Path(model.name)
    if path.is_absolute() and not path.is_dir():
        raise ModelError(f"model.name: got {model.name}, which is no folder. Expected a model folder, or a hub id.")
    # transformers takes seconds to import, and reading a task file does not need it.
    from transformers import AutoConfig, AutoTokenizer

    config = _load(AutoConfig, model, "configuration")
    tokenizer = _load(AutoTokenizer, model, "tokenizer")
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"model.name: {model.name} has the tokenizer {type(tokenizer).__name__}, which is not a fast one. "
            "Expected a tokenizer.json; save one with transformers' convert_slow_tokenizer."
        )
    text_config = config.get_text_config()
    num_embeddings = getattr(text_config, "vocab_size", None)
    if not isinstance(num_embeddings, int):
        raise ModelError(
            f"model.name: the configuration of {model.name} names no vocab_size. Expected a causal language model."
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    eos_token_id = tokenizer.eos_token_id
    return ModelTokenizer(
        tokenizer=tokenizer,
        num_embeddings=num_embeddings,
        max_positions=positions if isinstance(positions, int) and positions > 0 else None,
        eos_token_id=None if eos_token_id is None else int(eos_token_id),
    )


def _load(auto_class: Any, model: ModelSection, what: str) -> Any:
    try:
        return auto_class.from_pretrained(
            model.name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:  # tokenizers raises bare Exception for a damaged file
        finding = first_line(error)
        if what == "tokenizer" and Path(model.name).is_dir() and not (Path(model.name) / "tokenizer.json").is_file():
            finding = "the folder holds no tokenizer.json"
        raise ModelError(
            f"model.name: the {what} of {model.name} cannot be loaded: {finding}. "
            "Expected a folder with config.json and tokenizer.json, or a hub id and a network."
        ) from error
