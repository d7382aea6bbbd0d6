"""From the data and model sections of a task file to a `TaskData`: read, check, tokenize, split, report.

Refused as a whole: a source without a usable row, a source of which more than half of the rows are unusable (a wrong
format or limit, most likely), and a split without a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alto_core.config import DataSection, ModelSection, SplitSection
from alto_core.data.formats import ROWS_LOOKED_AT, Kind, RowFormat, RowParts, choose_format, parse_row
from alto_core.data.notes import pair_notes, preparation_notes
from alto_core.data.pair_tokenization import PairTokenizer
from alto_core.data.preference_pairs import PreferencePair, parse_pair
from alto_core.data.report import DataReport, Reason, RowTally, SplitSummary, UnusableRowError, excerpt, left_out_table
from alto_core.data.row_source import SourceRow
from alto_core.data.rows import SplitData, TaskData, data_digest
from alto_core.data.source import is_file_source, read_source
from alto_core.data.splits import is_own_source, num_set_aside, set_aside, without_duplicates
from alto_core.data.tokenization import RowInput, RowTokenizer, TokenizedRow
from alto_core.data.tokenizer import ModelTokenizer, load_model_tokenizer
from alto_core.errors import DataError

DEFAULT_MAX_LENGTH = 2048
ROWS_PER_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One source of rows, named after the section of the task file that asks for it."""

    section: str
    name: str
    subset: str | None
    split: str
    limit: int | None


def prepare_data(data: DataSection, model: ModelSection) -> TaskData:
    """Prepare a data set for one model. Loads the tokenizer and the configuration, never weights.

    Raises:
        DataError: a source cannot be read, has no usable row or more than half unusable ones, a split would be empty,
            or `bad_rows: refuse` met an unusable row. The text names the file and row, or holds the table of reasons.
        ModelError: the tokenizer or configuration cannot be loaded, or no token could end an answer.
    """
    sources = _sources(data)
    tokenizer = load_model_tokenizer(model)
    train_rows = _read(sources["train"])
    first_rows = list(itertools.islice(train_rows, ROWS_LOOKED_AT))
    row_format = choose_format(data, first_rows, data.source)
    wanted_length = data.max_length or DEFAULT_MAX_LENGTH
    max_length = min(wanted_length, tokenizer.max_positions or wanted_length)
    row_tokenizer = RowTokenizer(
        tokenizer,
        use_template=_uses_template(data, row_format.kind, tokenizer),
        max_length=max_length,
        too_long=data.too_long,
        last_answer_only=row_format.kind == "preference",
    )
    pairs = PairTokenizer(row_tokenizer) if row_format.kind == "preference" else None
    reader = _RowReader(data, row_format, row_tokenizer, pairs)
    pools = {"train": reader.usable_rows(sources["train"], itertools.chain(first_rows, train_rows))}
    for section in ("validation", "test"):
        if section in sources:
            pools[section] = reader.usable_rows(sources[section], _read(sources[section]))
    split_rows = _split(data, pools, reader.tally, row_tokenizer)
    splits = tuple(_split_data(name, rows) for name, rows in split_rows.items())
    stop_token_ids = tuple(sorted(row_tokenizer.stop_token_ids))
    report = DataReport(
        row_format=row_format.kind,
        rows_read=reader.tally.rows_read,
        splits=tuple(_summary(split) for split in splits),
        left_out=reader.tally.left_out,
        ignored_columns=tuple(sorted(reader.ignored_columns)),
        notes=(
            *preparation_notes(data, tokenizer, row_tokenizer, max_length),
            *(pair_notes(splits, pairs) if pairs else ()),
        ),
    )
    return TaskData(
        train=splits[0],
        validation=splits[1],
        test=splits[2] if len(splits) == 3 else None,
        digest=data_digest(
            splits, stop_token_ids=stop_token_ids, pad_token_id=tokenizer.pad_token_id, max_length=max_length
        ),
        report=report,
        stop_token_ids=stop_token_ids,
        pad_token_id=tokenizer.pad_token_id,
        max_length=max_length,
    )


class _RowReader:
    """Reads, checks and tokenizes sources one after the other, with one tally and one range of row ids."""

    def __init__(
        self, data: DataSection, row_format: RowFormat, row_tokenizer: RowTokenizer, pairs: PairTokenizer | None
    ):
        self._refuses_bad_rows = data.bad_rows == "refuse"
        self._format, self._tokenizer = row_format, pairs or row_tokenizer
        self._parse: Callable[[Any, RowFormat], RowParts | PreferencePair] = parse_pair if pairs else parse_row
        self._next_row_id = 0
        self.tally = RowTally()
        self.ignored_columns: set[str] = set()

    def usable_rows(self, source: _Source, rows: Iterator[SourceRow]) -> list[TokenizedRow]:
        usable: list[TokenizedRow] = []
        self.tally.rows_read[source.section] = 0
        while chunk := tuple(itertools.islice(rows, ROWS_PER_CHUNK)):
            usable.extend(self._usable_of_chunk(source, chunk))
        self._check_share(source, len(usable))
        return usable

    def _usable_of_chunk(self, source: _Source, chunk: Sequence[SourceRow]) -> Iterator[TokenizedRow]:
        inputs: list[RowInput] = []
        parsed: list[SourceRow] = []
        for row in chunk:
            self.tally.count_read(source.section)
            row_id, self._next_row_id = self._next_row_id, self._next_row_id + 1
            try:
                if row.problem is not None:
                    raise row.problem
                parts = self._parse(row.content, self._format)
            except UnusableRowError as problem:
                self._leave_out(source, row, problem)
                continue
            self.ignored_columns |= self._format.ignored_columns(row.content)
            inputs.append(RowInput(row_id=row_id, origin=row.origin, parts=parts))
            parsed.append(row)
        for row, result in zip(parsed, self._tokenizer.tokenize(inputs), strict=True):
            if isinstance(result, UnusableRowError):
                self._leave_out(source, row, result)
            else:
                yield result

    def _leave_out(self, source: _Source, row: SourceRow, problem: UnusableRowError) -> None:
        if self._refuses_bad_rows:
            raise DataError(
                f"{row.origin}: {problem}: {excerpt(row.content)}. "
                "Mend or remove the row, or set `bad_rows: drop` to leave such rows out."
            )
        self.tally.leave_out(source.section, row.origin, problem, row.content)

    def _check_share(self, source: _Source, num_usable: int) -> None:
        num_read = self.tally.rows_read[source.section]
        if num_read == 0:
            raise DataError(f"{source.name}: no row in it. Expected at least a few rows of text.")
        if num_usable * 2 >= num_read and num_usable:
            return
        finding = "no usable row" if num_usable == 0 else f"only {num_usable} of {num_read} rows are usable"
        table = left_out_table(tuple(item for item in self.tally.left_out if item.source == source.section))
        lengths = any(item.reason in (Reason.TOO_LONG, Reason.NO_TRAINED_TOKEN) for item in self.tally.left_out)
        advice = "Mend the rows, or correct data.format and data.columns" + (
            ", or raise data.max_length." if lengths else "."
        )
        raise DataError(f"{source.name}: {finding}; at least half must be. {advice}\n{table}")


def _sources(data: DataSection) -> dict[str, _Source]:
    """The sources to read: the training source, and those of splits with rows of their own."""
    train = _Source(section="train", name=data.source, subset=data.subset, split=data.split, limit=data.limit)
    sources = {"train": train}
    if is_file_source(data.source) and (data.subset is not None or data.split != "train"):
        raise DataError("data.split and data.subset: got them with a file, which has neither. Remove them.")
    for section, split in (("validation", data.validation), ("test", data.test)):
        if split is None or not is_own_source(split):
            continue
        name = split.source or data.source
        if is_file_source(name) and split.split is not None:
            raise DataError(
                f"data.{section}.split: got {split.split!r} for {name}, which is a file and has no splits. Remove it."
            )
        subset = data.subset if name == data.source else None
        sources[section] = _Source(
            section=section, name=name, subset=subset, split=split.split or "train", limit=split.rows
        )
    return sources


def _read(source: _Source) -> Iterator[SourceRow]:
    return read_source(source.name, subset=source.subset, split=source.split, limit=source.limit)


def _uses_template(data: DataSection, kind: Kind, tokenizer: ModelTokenizer) -> bool:
    has_template = tokenizer.chat_template is not None
    if kind == "text":
        if data.chat_template:
            raise DataError("data.chat_template: got true with format text, which has no turns. Remove it.")
        return False
    if kind == "messages" and data.chat_template is False:
        raise DataError("data.chat_template: got false with format messages, which needs a template. Remove it.")
    if (kind == "messages" or data.chat_template) and not has_template:
        raise DataError(
            "data: the model's tokenizer has no chat template, and these rows need one. "
            "Choose an instruction-tuned model, or prompt/completion rows without `chat_template: true`."
        )
    return has_template if data.chat_template is None else data.chat_template


def _split(
    data: DataSection, pools: dict[str, list[TokenizedRow]], tally: RowTally, row_tokenizer: RowTokenizer
) -> dict[str, list[TokenizedRow]]:
    """Give every split its rows, test first; a row that stands in an earlier split is removed from the later ones."""
    remaining = pools["train"]
    num_usable = len(remaining)
    splits: dict[str, list[TokenizedRow]] = {}
    wanted: dict[str, SplitSection | None] = {"test": data.test, "validation": data.validation}
    for name, section in wanted.items():
        if section is None:
            continue
        if name in pools:
            splits[name] = pools[name]
            continue
        count = num_set_aside(section, num_usable)
        if count >= len(remaining):
            raise DataError(
                f"data.{name}: asks for {count} of {len(remaining)} usable rows, so no training row is left. "
                "Bring more rows, ask for fewer, or give the split a source of its own."
            )
        splits[name], remaining = set_aside(remaining, count, data.seed)
    splits["train"] = remaining
    held_out: list[TokenizedRow] = []
    for name in ("test", "validation", "train"):
        if name not in splits:
            continue
        splits[name], repeated = without_duplicates(splits[name], held_out)
        source = name if name in pools else "train"
        for row in repeated:
            problem = UnusableRowError(Reason.HELD_OUT_DUPLICATE, f"taken out of the {name} split")
            tally.leave_out(source, row.row.origin, problem, row_tokenizer.text(row.row.token_ids))
        if not splits[name]:
            raise DataError(f"data: the {name} split has no row left: all of its rows also stand in a held-out split.")
        held_out.extend(splits[name])
    return {name: splits[name] for name in ("train", "validation", "test") if name in splits}


def _split_data(name: str, rows: Sequence[TokenizedRow]) -> SplitData:
    return SplitData(
        name=name,
        rows=tuple(item.row for item in rows),
        generation_rows=tuple(item.generation_row for item in rows if item.generation_row is not None),
    )


def _summary(split: SplitData) -> SplitSummary:
    lengths = np.array([len(row.token_ids) for row in split.rows])
    median, p95 = np.percentile(lengths, [50, 95], method="nearest")
    return SplitSummary(
        name=split.name,
        num_rows=len(lengths),
        num_tokens=int(lengths.sum()),
        num_labels=sum(row.num_labels for row in split.rows),
        median_tokens=int(median),
        p95_tokens=int(p95),
        longest_tokens=int(lengths.max()),
    )
