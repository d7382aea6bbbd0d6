"""Multiple choice by likelihood: the choice that the model finds likeliest after the prompt is its answer.

Nothing is generated, so a model that chats around its answer is judged by what it holds to be right. A choice counts
with its end token, so that `1` is not favoured over `10`; likelihoods are not divided by length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alto_core.data.rows import GenerationRow, TokenRow
from alto_core.domain import RowLosses


def choice_rows(
    prompts: Sequence[GenerationRow],
    rows: Sequence[TokenRow],
    choices: Sequence[str],
    encode: Callable[[str], Sequence[int]],
) -> list[TokenRow]:
    """Each prompt with each choice as its answer, prompt by prompt in the order of the choices.

    Args:
        prompts: of one split.
        rows: the token rows of the split; a row's last token ends its answer.
        choices: the answers to choose from.
        encode: text to token ids, without special tokens.
    """
    last_tokens = {row.row_id: row.token_ids[-1] for row in rows}
    made: list[TokenRow] = []
    for prompt in prompts:
        # the white space between prompt and answer is that of the data
        lead = prompt.reference[: len(prompt.reference) - len(prompt.reference.lstrip())]
        for number, choice in enumerate(choices):
            answer = (*encode(lead + choice), last_tokens[prompt.row_id])
            made.append(
                TokenRow(
                    row_id=len(made),
                    origin=f"{prompt.origin} choice {number + 1}",
                    token_ids=(*prompt.prompt_ids, *answer),
                    label_mask=(False,) * len(prompt.prompt_ids) + (True,) * len(answer),
                )
            )
    return made


def chosen(losses: RowLosses, choices: Sequence[str]) -> list[str]:
    """The likeliest choice of each prompt, from the losses of `choice_rows`; of equal ones the first."""
    answers = []
    for start in range(0, len(losses.loss_sums), len(choices)):
        of_prompt = losses.loss_sums[start : start + len(choices)]
        answers.append(choices[min(range(len(choices)), key=lambda i: of_prompt[i])])
    return answers


def unknown_choice(choices: Sequence[str], reference: str) -> str | None:
    """Why a reference is none of the choices; None where it is one."""
    return None if reference.strip() in choices else f"{reference.strip()[:40]!r} that is not among `choices`"
