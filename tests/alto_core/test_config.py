"""Task files: what is accepted, and what a wrong field says."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from alto_core.config import load_task, parse_task, with_changes
from alto_core.errors import TaskFileError

GOOD: dict[str, Any] = {
    "name": "reversal",
    "model": {"name": "some/model"},
    "data": {"source": "some/data", "validation": {"rows": 16}},
    "search_space": {"learning_rate": [1e-4, 1e-3], "lora_rank": [8, 16]},
    "budget": {"epochs": 1},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """`GOOD` with one field set, the path as in an error message."""
    content = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    place = content
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    return content


def test_a_misspelled_key_is_named_rather_than_the_one_that_is_missing_for_it() -> None:
    space = {"learning_rates": 1e-4, **{k: v for k, v in GOOD["search_space"].items() if k != "learning_rate"}}
    with pytest.raises(TaskFileError, match=r"search_space\.learning_rates: got an unknown key"):
        parse_task({**GOOD, "search_space": space})


def test_a_minimal_file_is_enough() -> None:
    task = parse_task(GOOD)
    assert task.registered_model == "reversal"
    assert task.early_exit.preset == "guarded"
    assert task.search_space.strategy == "grid"


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("search_space.lora_rank", 0, "search_space.lora_rank[0]"),
        ("search_space.lora_rank", [8, -4], "search_space.lora_rank[1]"),
        ("search_space.lora_rank", 2.7, "search_space.lora_rank[0]"),
        ("search_space.lora_rank", True, "search_space.lora_rank[0]"),
        ("search_space.lora_rank", 4096, "search_space.lora_rank[0]"),
        ("search_space.lora_rank", [8, 8], "search_space.lora_rank"),
        ("search_space.lora_rank", [], "search_space.lora_rank"),
        ("search_space.lora_rank", "8", "search_space.lora_rank[0]"),
        ("search_space.lora_rank", None, "search_space.lora_rank[0]"),
        ("search_space.lora_alpha", 0, "search_space.lora_alpha[0]"),
        ("search_space.lora_alpha", -8, "search_space.lora_alpha[0]"),
        ("search_space.lora_alpha", float("nan"), "search_space.lora_alpha[0]"),
        ("search_space.lora_alpha", True, "search_space.lora_alpha[0]"),
        ("search_space.dropout", 1.0, "search_space.dropout[0]"),
        ("search_space.dropout", -0.1, "search_space.dropout[0]"),
        ("search_space.dropout", float("nan"), "search_space.dropout[0]"),
        ("search_space.learning_rate", 0, "search_space.learning_rate[0]"),
        ("search_space.learning_rate", -1e-4, "search_space.learning_rate[0]"),
        ("search_space.learning_rate", float("nan"), "search_space.learning_rate[0]"),
        ("search_space.learning_rate", float("inf"), "search_space.learning_rate[0]"),
        ("search_space.learning_rate", "1e-4", "search_space.learning_rate[0]"),
        ("search_space.adapter_batch_size", 0, "search_space.adapter_batch_size[0]"),
        ("search_space.gradient_accumulation", 0, "search_space.gradient_accumulation[0]"),
        ("search_space.weight_decay", -0.1, "search_space.weight_decay[0]"),
        ("search_space.lr_schedule", "lin", "search_space.lr_schedule[0]"),
        ("search_space.learning_rte", 1e-4, "search_space.learning_rte"),
        ("search_space.strategy", "gird", "search_space"),
        ("budget.epochs", 0, "budget.epochs"),
        ("budget.steps", 10, "budget"),
        ("budget.gate_warmup_fraction", 1.0, "budget.gate_warmup_fraction"),
        ("early_exit.preset", "strict", "early_exit.preset"),
        ("evaluation.choose_by", "metric", "evaluation"),
        ("data.validation", {"rows": 3, "share": 0.1}, "data.validation"),
        ("data.validation", {"rows": 0}, "data.validation.rows"),
        ("name", "../evil", "name"),
        ("name", "a b", "name"),
        ("name", "", "name"),
        ("registry_name", "a/../b", "registry_name"),
        ("owner", "/etc", "owner"),
        ("model.name", "", "model.name"),
        ("model.dtype", "int8", "model.dtype"),
        ("model.trust_remote_code", "yes", "model.trust_remote_code"),
        ("max_slots", 0, "max_slots"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(path: str, value: Any, field: str) -> None:
    with pytest.raises(TaskFileError) as caught:
        parse_task(changed(path, value), file="task.yaml")
    assert caught.value.field == field
    assert str(caught.value).startswith(f"task.yaml: {field}: got ")
    assert "expected" in str(caught.value)


@pytest.mark.parametrize("name", ["name", "model", "data", "search_space", "budget"])
def test_a_missing_section_is_named(name: str) -> None:
    content = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(TaskFileError, match=f"^{name}: got nothing"):
        parse_task(content)


def test_both_alphas_are_refused() -> None:
    content = changed("search_space.lora_alpha", 16)
    content["search_space"]["alpha_over_rank"] = 2
    with pytest.raises(TaskFileError, match="only one of `lora_alpha` and `alpha_over_rank`"):
        parse_task(content)


def test_a_range_of_rates_needs_random_search() -> None:
    content = changed("search_space.learning_rate", {"min": 1e-5, "max": 1e-3})
    with pytest.raises(TaskFileError, match="strategy: random"):
        parse_task(content)
    content["search_space"] |= {"strategy": "random", "num_jobs": 4}
    assert parse_task(content).search_space.strategy == "random"


def test_equal_tasks_have_equal_digests_and_others_do_not() -> None:
    assert parse_task(GOOD).digest == parse_task(copy.deepcopy(GOOD)).digest
    assert parse_task(GOOD).digest != parse_task(changed("budget.epochs", 2)).digest


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "task.yaml"
    file.write_text(text)
    return file


def test_numbers_in_scientific_notation_are_numbers(tmp_path: Path) -> None:
    text = yaml.safe_dump(GOOD).replace("0.0001", "1e-4").replace("0.001", "1E-3")
    assert "1e-4" in text
    space = load_task(write(tmp_path, text)).search_space
    assert space.learning_rate == [1e-4, 1e-3]  # type: ignore[union-attr]


def test_paths_are_taken_from_the_files_folder_and_hub_ids_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    content = copy.deepcopy(GOOD) | {"model": {"name": "folder"}, "init_adapter": "./adapter"}
    content["data"] = {"source": "rows.jsonl", "validation": {"source": "org/set", "split": "validation"}}
    task = load_task(write(tmp_path, yaml.safe_dump(content)))
    assert task.model.name == str(tmp_path / "folder")
    assert task.init_adapter == str(tmp_path / "adapter")
    assert task.data.source == str(tmp_path / "rows.jsonl")
    assert task.data.validation.source == "org/set"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "valid YAML"),
        ("- 1\n- 2\n", "a mapping of fields"),
        ("", "a mapping of fields"),
        ("name: a\nname: b\n", "stands twice"),
        ("name: !!python/object/apply:os.system [true]\n", "valid YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TaskFileError, match=message):
        load_task(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("name: a: b\n", 1, "quotes"),
        ("name: a\nbudget:\n\tepochs: 1\n", 3, "Indent with spaces."),
        ("name: a\nmodel: {name: b\ndata:\n", 3, "the bracket that line 2 opens"),
        ("name: 'it's mine'\n", 1, "quotes and the indentation"),
        ("name: a\nowner: b\nname: c\n", 3, "stands twice"),
    ],
    ids=["colon", "tab", "bracket", "quotes", "twice"],
)
def test_broken_yaml_is_told_in_one_line_with_the_place_and_the_cure(
    tmp_path: Path, text: str, line: int, hint: str
) -> None:
    with pytest.raises(TaskFileError) as caught:
        load_task(write(tmp_path, text))
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / 'task.yaml'}:{line}: file: got a line that YAML cannot read (")
    assert hint in said and "\n" not in said


def test_a_wrong_value_is_found_by_its_line(tmp_path: Path) -> None:
    text = yaml.safe_dump(changed("search_space.lora_rank", [4, "sixteen"]), sort_keys=False)
    line = text.splitlines().index("  - sixteen") + 1
    with pytest.raises(TaskFileError, match=rf"task.yaml:{line}: search_space.lora_rank\[1\]: got 'sixteen'"):
        load_task(write(tmp_path, text))
    with pytest.raises(TaskFileError, match=r"task.yaml: name: got nothing"):
        load_task(write(tmp_path, text.replace("name: ", "# ", 1)))


@pytest.mark.parametrize(
    ("path", "meant"),
    [("budgets", "budget"), ("data.sources", "source"), ("search_space.learning_rat", "learning_rate")],
)
def test_a_misspelled_key_is_told_what_was_meant(path: str, meant: str) -> None:
    with pytest.raises(TaskFileError, match=f"{path}: got an unknown key, expected a known one. Perhaps `{meant}`?"):
        parse_task(changed(path, [1]))


def test_a_value_where_a_section_belongs_is_shown_the_section(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"model: got 'org/m', expected a section of fields.*`model: {name: ...}`"):
        parse_task(changed("model", "org/m"))
    with pytest.raises(TaskFileError, match=r"model: got nothing, expected a section of fields"):
        parse_task(changed("model", None))


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("name", "con", "a name that every file system takes"),
        ("registry_name", "model.", "a name that every file system takes"),
        ("cluster.deadline", "2030-01-31T18:00:00", "a date and a time with a time zone"),
        ("cluster.deadline", "soon", "a date and a time with a time zone"),
        ("cluster.num_gpus", 0, "a whole number of at least 1, or `auto`"),
        ("data.source", "a\0b", "a name without a NUL character"),
    ],
)
def test_a_value_that_means_trouble_later_is_refused_at_once(path: str, value: Any, expected: str) -> None:
    with pytest.raises(TaskFileError, match=re.escape(f"expected {expected}")):
        parse_task(changed(path, value))


def test_a_moment_is_kept_in_utc_however_it_was_written() -> None:
    texts = ("2030-01-31T18:00:00+01:00", "2030-01-31T17:00:00Z")
    moments = {parse_task(changed("cluster.deadline", text)).cluster.deadline for text in texts}
    assert moments == {"2030-01-31T17:00:00+00:00"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("budget.epochs", "expected key=value"),
        ("budget.epochs=[", "expected a value in YAML"),
        ("name.x=1", "no section"),
    ],
)
def test_a_change_that_is_none_is_refused(change: str, message: str) -> None:
    with pytest.raises(TaskFileError, match=message):
        with_changes(parse_task(GOOD), [change])


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="no such file"):
        load_task(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskFileError, match="UTF-8"):
        load_task(tmp_path / "binary.yaml")
    with pytest.raises(TaskFileError, match="readable"):
        load_task(tmp_path)
