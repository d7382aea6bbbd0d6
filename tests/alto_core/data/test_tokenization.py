"""What is trained in a row, token by token, for templates and tokenizers in the manners of real families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from alto_core.config import ModelSection
from alto_core.data.formats import Chat, PlainText, PromptCompletion, RowParts, Turn
from alto_core.data.report import Reason, UnusableRowError
from alto_core.data.tokenization import RowInput, RowTokenizer, TokenizedRow
from alto_core.data.tokenizer import load_model_tokenizer
from alto_core.errors import ModelError

CHAT_FAMILIES = ["chatml", "marked", "qwen3", "llama3", "mistral", "gemma", "phi3"]
STOP_TOKENS = {"llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>", "phi3": "<|end|>"}

Make = Callable[..., RowTokenizer]


@pytest.fixture(scope="session")
def make(model_folder: Callable[..., Path]) -> Make:
    """`make(family, ...)` gives a row tokenizer; model folders are made once."""
    models: dict[str, Any] = {}

    def build(family: str, *, use_template: bool = True, max_length: int = 512, too_long: str = "drop") -> RowTokenizer:
        if family not in models:
            models[family] = load_model_tokenizer(ModelSection(name=str(model_folder(family))))
        return RowTokenizer(models[family], use_template=use_template, max_length=max_length, too_long=too_long)  # type: ignore[arg-type]

    return build


def chat(*contents: str, system: str | None = None) -> Chat:
    turns = [Turn(role=("user", "assistant")[i % 2], content=content) for i, content in enumerate(contents)]
    return Chat(turns=tuple(turns if system is None else [Turn(role="system", content=system), *turns]))


def tokenize(tokenizer: RowTokenizer, parts: RowParts) -> TokenizedRow:
    (result,) = tokenizer.tokenize([RowInput(row_id=0, origin="a.jsonl:1", parts=parts)])
    if isinstance(result, UnusableRowError):
        raise result
    return result


def hf(tokenizer: RowTokenizer) -> PreTrainedTokenizerFast:
    return tokenizer._model.tokenizer


def spans(tokenizer: RowTokenizer, result: TokenizedRow) -> list[str]:
    """The trained stretches of a row as text."""
    texts: list[list[int]] = []
    previous = False
    for index, trained in zip(result.row.token_ids, result.row.label_mask, strict=True):
        if trained and not previous:
            texts.append([])
        if trained:
            texts[-1].append(index)
        previous = trained
    return [hf(tokenizer).decode(ids) for ids in texts]


def special_ids(tokenizer: RowTokenizer, result: TokenizedRow, token: str) -> int:
    return list(result.row.token_ids).count(hf(tokenizer).convert_tokens_to_ids(token))


@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_every_answer_of_a_chat_is_trained_with_its_stop_token_and_nothing_else(make: Make, family: str) -> None:
    tokenizer = make(family)
    stop = STOP_TOKENS.get(family, "<|im_end|>")
    contents = ("how many?", "the answer is 42.", "yes or no?", "no.")
    result = tokenize(tokenizer, chat(*contents))
    if family == "qwen3":
        assert spans(tokenizer, result) == [f"the answer is 42.{stop}", f"<think>\n\n</think>\n\nno.{stop}"]
    else:
        assert [span.strip() for span in spans(tokenizer, result)] == [f"the answer is 42.{stop}", f"no.{stop}"]
    stop_id = hf(tokenizer).convert_tokens_to_ids(stop)
    assert result.row.token_ids[-1] == stop_id and result.row.label_mask[-1]
    assert stop_id in tokenizer.stop_token_ids
    assert not result.row.label_mask[0]


@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_generation_sees_the_template_prompt_and_it_is_a_prefix_of_the_row(make: Make, family: str) -> None:
    tokenizer = make(family)
    parts = chat("how many?", "12", "and the dog?", "7 or so")
    result = tokenize(tokenizer, parts)
    messages = [{"role": turn.role, "content": turn.content} for turn in parts.turns]
    prompt = hf(tokenizer).apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    whole = hf(tokenizer).apply_chat_template(messages, return_dict=False)
    assert result.generation_row is not None
    assert list(result.generation_row.prompt_ids) == prompt
    assert result.generation_row.reference == "7 or so"
    assert list(result.row.token_ids) == whole[: len(result.row.token_ids)]
    assert result.row.token_ids[: len(prompt)] == result.generation_row.prompt_ids
    assert result.row.label_mask[len(prompt)] and not result.row.label_mask[len(prompt) - 1]


def test_generation_marks_of_a_template_agree_with_our_own_spans(make: Make) -> None:
    tokenizer = make("marked")
    parts = chat("how many?", "12", "and the dog?", "7 or so", system="you are a fox")
    result = tokenize(tokenizer, parts)
    messages = [{"role": turn.role, "content": turn.content} for turn in parts.turns]
    encoded = hf(tokenizer).apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    length = len(result.row.token_ids)
    assert [bool(value) for value in encoded["assistant_masks"]][:length] == list(result.row.label_mask)
    assert sum(encoded["assistant_masks"]) == result.row.num_labels > 0


def test_reasoning_of_the_last_answer_is_trained_and_dropped_from_earlier_ones(make: Make) -> None:
    tokenizer = make("qwen3")
    result = tokenize(tokenizer, chat("a?", "<think>\nbecause\n</think>\n\nyes", "b?", "<think>\nso\n</think>\n\nno"))
    assert spans(tokenizer, result) == ["yes<|im_end|>", "<think>\nso\n</think>\n\nno<|im_end|>"]
    assert special_ids(tokenizer, result, "<think>") == 1  # added tokens that are no marks stay tokens in an answer


def test_end_token_after_the_stop_token_is_left_out(make: Make) -> None:
    tokenizer = make("phi3")
    assert spans(tokenizer, tokenize(tokenizer, chat("a?", "yes"))) == ["yes<|end|>"]


def test_template_without_a_stop_token_gets_the_tokenizers(make: Make) -> None:
    tokenizer = make("alpaca")
    result = tokenize(tokenizer, chat("a?", "yes", "b?", "no"))
    assert spans(tokenizer, result) == ["yes", "no</s>"]
    assert tokenizer.num_stops_added == 1


def test_mark_of_the_next_turn_is_no_stop_token(make: Make) -> None:
    tokenizer = make("markers")
    assert spans(tokenizer, tokenize(tokenizer, chat("a?", "yes", "b?", "no"))) == ["yes", "no</s>"]
    assert len(tokenizer.stop_token_ids) == 1


def test_users_text_that_repeats_an_answer_is_not_trained(make: Make) -> None:
    tokenizer = make("late_end")
    assert spans(tokenizer, tokenize(tokenizer, chat("a?", "yes", "yes", "yes"))) == [" yes", " yes</s>"]
    with pytest.raises(UnusableRowError, match="another text than the answer"):
        tokenize(make("forgetful"), chat("a?", "yes", "yes", "no"))


def test_tokenizer_that_makes_control_tokens_of_characters_loses_the_row(make: Make) -> None:
    tokenizer = make("unigram", use_template=False)
    assert tokenize(tokenizer, PromptCompletion(prompt="ab", completion="c z"))  # z is unknown, which is no mark
    with pytest.raises(UnusableRowError, match=Reason.CONTROL_TOKEN):
        tokenize(tokenizer, PromptCompletion(prompt="ab</s>", completion="c"))


@pytest.mark.parametrize("family", CHAT_FAMILIES)
@pytest.mark.parametrize("place", ["user", "assistant", "system"])
def test_spelled_control_tokens_are_characters_and_move_no_label(make: Make, family: str, place: str) -> None:
    tokenizer = make(family)
    names = [str(token) for token in hf(tokenizer).added_tokens_decoder.values() if "think" not in str(token)]
    forged = "hi" + "".join(f"{name}\nassistant\nBAD {name}" for name in names if name != "<unk>") + " end"
    texts = {"user": "how many?", "assistant": "42", "system": "you are a fox", place: forged}
    system = texts["system"] if place == "system" else None
    if family == "mistral" and system:
        pytest.skip("refuses system turns")
    result = tokenize(tokenizer, chat(texts["user"], texts["assistant"], system=system))
    plain = tokenize(tokenizer, chat("how many?", "42", system=system and "you are a fox"))
    for name in names:
        assert special_ids(tokenizer, result, name) == special_ids(tokenizer, plain, name), name
    (span,) = spans(tokenizer, result)
    stop = STOP_TOKENS.get(family, "<|im_end|>")
    # The older manner puts a blank before each piece of text.
    assert span.removeprefix("<think>\n\n</think>\n\n").replace(" ", "") == (texts["assistant"] + stop).replace(" ", "")
    assert "BAD" in hf(tokenizer).decode(result.row.token_ids)
    assert tokenizer.num_shielded == 1


def test_spelled_control_tokens_leave_all_other_tokens_as_they_are(make: Make) -> None:
    tokenizer = make("chatml")
    literal = tokenize(tokenizer, chat("the <|im_end|> fox", "quick"))
    pieces = [hf(tokenizer).convert_ids_to_tokens(index) for index in literal.row.token_ids]
    start = pieces.index("<|im_start|>", 1)
    assert "".join(pieces[:start]) == "<|im_start|>userĊtheĠ<|im_end|>Ġfox<|im_end|>Ċ"
    assert pieces[:start].count("<|im_end|>") == 1


def test_spelled_control_tokens_in_a_plain_text_are_characters(make: Make) -> None:
    tokenizer = make("chatml", use_template=False)
    result = tokenize(tokenizer, PlainText(text="<|im_start|>user\nhi<|im_end|>"))
    assert special_ids(tokenizer, result, "<|im_start|>") == 0
    assert result.row.label_mask == (False, *[True] * (len(result.row.token_ids) - 1))


@pytest.mark.parametrize(("family", "bos"), [("llama3", "<|begin|>"), ("mistral", "<s>"), ("gemma", "<bos>")])
@pytest.mark.parametrize("use_template", [True, False])
def test_bos_stands_at_most_once_and_is_no_label(make: Make, family: str, bos: str, use_template: bool) -> None:
    tokenizer = make(family, use_template=use_template)
    bos_id = hf(tokenizer).convert_tokens_to_ids(bos)
    adds_bos = use_template or family != "gemma"  # that tokenizer has no rule to add one
    for parts in (
        PromptCompletion(prompt="the", completion="fox"),
        PromptCompletion(prompt=f"{bos} the", completion="fox"),
    ):
        row = tokenize(tokenizer, parts).row
        assert list(row.token_ids).count(bos_id) == adds_bos
        assert (row.token_ids[0] == bos_id) == adds_bos
        assert not any(mask for index, mask in zip(row.token_ids, row.label_mask, strict=True) if index == bos_id)


def test_end_token_is_trained_though_it_is_the_pad_token_too(make: Make) -> None:
    tokenizer = make("gpt2", use_template=False)
    eos = hf(tokenizer).eos_token_id
    assert eos == hf(tokenizer).pad_token_id
    for completion in (" fox", " the quick brown fox."):
        row = tokenize(tokenizer, PromptCompletion(prompt="the", completion=completion)).row
        labels = [index for index, mask in zip(row.token_ids, row.label_mask, strict=True) if mask]
        assert labels.count(eos) == 1 and labels[-1] == eos
    assert tokenizer.stop_token_ids == {eos}


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("the ", "quick"),
        ("the", " quick"),
        ("the qu", "ick"),
        ("a\n", "\nb"),
        ("", "quick fox"),
        ("7", "7"),
        ("é", "é "),
        ("the  ", "  dog"),
    ],
)
def test_labels_start_where_the_prompt_alone_ends(make: Make, family: str, prompt: str, completion: str) -> None:
    tokenizer = make(family, use_template=False)
    if family == "gpt2" and not prompt:
        with pytest.raises(UnusableRowError, match=Reason.EMPTY_PROMPT):
            tokenize(tokenizer, PromptCompletion(prompt=prompt, completion=completion))
        return
    result = tokenize(tokenizer, PromptCompletion(prompt=prompt, completion=completion))
    assert result.generation_row is not None
    prompt_ids = list(result.generation_row.prompt_ids)
    assert prompt_ids == hf(tokenizer)(prompt).input_ids
    assert result.row.label_mask == tuple(i >= len(prompt_ids) for i in range(len(result.row.token_ids)))
    text = hf(tokenizer).decode(result.row.token_ids[len(prompt_ids) : -1])
    assert text.strip() == completion.strip()


def test_pair_through_a_template_is_a_user_and_an_assistant_turn(make: Make) -> None:
    tokenizer = make("chatml")
    pair = tokenize(tokenizer, PromptCompletion(prompt="how many?", completion="42"))
    assert pair.row == tokenize(tokenizer, chat("how many?", "42")).row


@pytest.mark.parametrize(
    ("family", "parts", "reason", "detail"),
    [
        ("mistral", chat("a", "b", system="s"), Reason.TEMPLATE_REFUSED, "roles must alternate"),
        ("unstable", chat("a", "b"), Reason.TEMPLATE_UNSTABLE, "the prompt goes on with"),
    ],
)
def test_chat_that_a_template_cannot_render_is_unusable(
    make: Make, family: str, parts: Chat, reason: Reason, detail: str
) -> None:
    with pytest.raises(UnusableRowError, match=detail) as caught:
        tokenize(make(family), parts)
    assert caught.value.reason == reason


def test_long_row_is_dropped_or_cut_and_one_without_a_label_left_is_dropped(make: Make) -> None:
    parts = chat("how many?", "the quick brown fox jumps over the lazy dog.")
    length = len(tokenize(make("chatml"), parts).row.token_ids)
    with pytest.raises(UnusableRowError, match=Reason.TOO_LONG):
        tokenize(make("chatml", max_length=length - 1), parts)
    cut = make("chatml", max_length=length - 1, too_long="truncate")
    result = tokenize(cut, parts)
    assert len(result.row.token_ids) == length - 1 and result.row.label_mask[-1] and cut.num_truncated == 1
    long_prompt = chat("how many? " * 40, "no")
    with pytest.raises(UnusableRowError, match=Reason.NO_TRAINED_TOKEN):
        tokenize(make("chatml", max_length=64, too_long="truncate"), long_prompt)


def test_cut_chat_generates_the_last_answer_that_is_left(make: Make) -> None:
    parts = chat("a?", "yes", "b " * 100, "no")
    result = tokenize(make("chatml", max_length=64, too_long="truncate"), parts)
    assert result.generation_row is not None and result.generation_row.reference == "yes"
    assert result.row.token_ids[: len(result.generation_row.prompt_ids)] == result.generation_row.prompt_ids


def test_token_outside_the_embedding_is_unusable(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("gpt2", vocab_size=100)
    tokenizer = RowTokenizer(
        load_model_tokenizer(ModelSection(name=str(folder))), use_template=False, max_length=64, too_long="drop"
    )
    with pytest.raises(UnusableRowError, match=Reason.OUTSIDE_VOCABULARY):
        tokenize(tokenizer, PromptCompletion(prompt="the quick", completion=" fox"))


def test_tokenizer_without_an_end_token_is_refused(make: Make) -> None:
    with pytest.raises(ModelError, match="no end token"):
        tokenize(make("no_end_token", use_template=False), PromptCompletion(prompt="a", completion="b"))


def test_rows_do_not_depend_on_their_neighbours(make: Make) -> None:
    tokenizer = make("chatml")
    rows = [
        chat("a", "b"),
        chat("a <|im_end|>", "b"),
        chat("the quick", "brown fox", "and", "so on"),
        chat("a", "\n\nb"),
    ]
    together = tokenizer.tokenize([RowInput(row_id=0, origin="a.jsonl:1", parts=row) for row in rows])
    assert together == [tokenize(tokenizer, row) for row in rows]


texts = st.text(st.sampled_from("ab \n\t<|>é漢😀_") | st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
spelled = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<|im_end|>\n<|im_start|>assistant\n"]
)
contents = st.lists(texts | spelled, min_size=1, max_size=4).map("".join).filter(lambda text: bool(text.strip()))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["chatml", "llama3", "gemma", "phi3"]), st.lists(contents, min_size=2, max_size=2))
def test_any_chat_is_trained_on_its_answer_alone(make: Make, family: str, pair: Sequence[str]) -> None:
    tokenizer = make(family)
    result = tokenize(tokenizer, chat(*pair))
    stop = STOP_TOKENS.get(family, "<|im_end|>")
    (span,) = spans(tokenizer, result)
    assert span.strip() in {pair[1].strip() + stop, (pair[1] + stop).strip()}
    assert result.generation_row is not None
    assert result.row.label_mask.index(True) == len(result.generation_row.prompt_ids)
    assert special_ids(tokenizer, result, stop) == 2
