"""Every metric: what counts as right, what does not, and what is refused before training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from alto_core.config import EvaluationSection, parse_task
from alto_core.data.rows import GenerationRow, TokenRow
from alto_core.domain import RowLosses
from alto_core.errors import TaskFileError
from alto_core.evaluation import check_metric, text_metric
from alto_core.evaluation.multiple_choice import choice_rows, chosen
from alto_core.evaluation.preference import preference_scores

GSM8K = "She has 3 left. So 3 * 6 = <<3*6=18>>18 dollars.\n#### 1,018"


def section(**fields: Any) -> EvaluationSection:
    return EvaluationSection(**fields)


def row(reference: str, row_id: int = 0) -> GenerationRow:
    return GenerationRow(row_id=row_id, prompt_ids=(5, 6), reference=reference, origin="rows.jsonl:3")


@pytest.mark.parametrize(
    ("fields", "answer", "reference", "score"),
    [
        ({"metric": "exact_match"}, "a, b", "a, b", 1),
        ({"metric": "exact_match"}, " a,  b\n", "a, b", 1),
        ({"metric": "exact_match"}, "a b", "a, b", 0),
        ({"metric": "exact_match"}, "A", "a", 0),
        ({"metric": "exact_match"}, "", "a", 0),
        ({"metric": "numeric"}, "so it is\n#### 1018", GSM8K, 1),
        ({"metric": "numeric"}, "#### 1,018.0", GSM8K, 1),
        ({"metric": "numeric"}, "####1018", GSM8K, 1),
        ({"metric": "numeric"}, "#### 1018\n\nQuestion: ...\n#### 5", GSM8K, 1),
        ({"metric": "numeric"}, "#### 5\n#### 1018", GSM8K, 0),
        ({"metric": "numeric"}, "The answer is 1018.", GSM8K, 0),
        ({"metric": "numeric"}, "1018", GSM8K, 0),
        ({"metric": "numeric"}, "#### -1018", GSM8K, 0),
        ({"metric": "numeric"}, "#### 10180", GSM8K, 0),
        ({"metric": "numeric"}, "####", GSM8K, 0),
        ({"metric": "numeric"}, "", GSM8K, 0),
        ({"metric": "numeric"}, "#### -0.5", "-.5", 1),
        ({"metric": "numeric"}, "#### 7", " 7 ", 1),
        ({"metric": "regex", "pattern": r"Answer: (\w+)"}, "hm. Answer: yes!", "Answer: yes", 1),
        ({"metric": "regex", "pattern": r"Answer: (\w+)"}, "Answer: no", "Answer: yes", 0),
        ({"metric": "regex", "pattern": r"Answer: (\w+)"}, "yes", "Answer: yes", 0),
        ({"metric": "regex", "pattern": r"Answer: (\w+)"}, "Answer: yes", " yes\n", 1),
        ({"metric": "regex", "pattern": r"[A-D]"}, "I take C, not D", "C", 1),
        ({"metric": "regex", "pattern": r"x(y)?"}, "x", "x", 0),
        ({"metric": "rouge_l"}, "the cat sat", "the cat sat", 1),
        ({"metric": "rouge_l"}, "The cat sat", "the cat on a mat sat", 2 / 3),
        ({"metric": "rouge_l"}, "", "the cat", 0),
        ({"metric": "bleu"}, "the cat sat on the mat", "the cat sat on the mat", 1),
        ({"metric": "bleu"}, "a dog", "the cat sat on the mat", 0),
        ({"metric": "bleu"}, "the cat sat", "the cat sat on the mat", 0.3679),
    ],
)
def test_what_a_metric_counts(fields: dict[str, Any], answer: str, reference: str, score: float) -> None:
    metric = text_metric(section(**fields))
    assert metric is not None
    assert metric.score(answer, reference) == pytest.approx(score, abs=1e-3)


def test_a_users_function_runs_only_where_the_task_file_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "own_metric.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "def shorter(answer, reference):\n    return len(answer) < len(reference)\n"
        "def wrong(answer, reference):\n    return 7\nnumber = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TaskFileError, match=r"evaluation.function: got own_metric:shorter.*allow_function: true"):
        text_metric(section(metric="function", function="own_metric:shorter"))
    assert not marker.exists(), "nothing was imported"

    def allowed(name: str) -> EvaluationSection:
        return section(metric="function", function=f"own_metric:{name}", allow_function=True)

    metric = text_metric(allowed("shorter"))
    assert metric is not None
    assert (metric.score("a", "ab"), metric.score("ab", "a")) == (1.0, 0.0)
    with pytest.raises(TaskFileError, match=r"got 7 from own_metric:wrong.*a number from 0 to 1"):
        text_metric(allowed("wrong")).score("a", "b")  # type: ignore[union-attr]
    for name, message in (("nothing", "cannot be imported"), ("number", "a int, expected a function")):
        with pytest.raises(TaskFileError, match=message):
            text_metric(allowed(name))
    sys.modules.pop("own_metric")


@pytest.mark.parametrize(("metric", "module"), [("rouge_l", "rouge_score"), ("bleu", "sacrebleu")])
def test_a_missing_library_is_told_with_its_remedy(metric: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TaskFileError, match=rf"{metric}, whose library {module} is not installed.*text-metrics"):
        check_metric(section(metric=metric), {"validation": [row("a")]})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metric": "regex"}, "`pattern` with `metric: regex`"),
        ({"metric": "exact_match", "pattern": "a"}, "`pattern` with `metric: regex`, and with no other"),
        ({"metric": "regex", "pattern": "("}, "a regular expression in `pattern`"),
        ({"metric": "multiple_choice"}, "`choices` with `metric: multiple_choice`"),
        ({"metric": "multiple_choice", "choices": ["a"]}, "at least 2"),
        ({"metric": "multiple_choice", "choices": ["a", "a"]}, "without repetition"),
        ({"metric": "function"}, "`function` with"),
        ({"metric": "exact_match", "allow_function": True}, "only beside `function`"),
        ({"choose_by": "metric"}, "a `metric` to choose by"),
        ({"metric": "exact_match", "top_p": 0.5}, "only with a `temperature`"),
        ({"metric": "exact_match", "temperature": -1.0}, "greater than or equal to 0"),
        ({"metric": "accuracy"}, "'exact_match', 'numeric'"),
    ],
)
def test_a_wrong_evaluation_section_is_refused(fields: dict[str, Any], message: str) -> None:
    content = {
        "name": "t",
        "model": {"name": "m"},
        "data": {"source": "d.jsonl"},
        "search_space": {"learning_rate": 1e-3, "lora_rank": 8},
        "budget": {"steps": 4},
        "evaluation": fields,
    }
    with pytest.raises(TaskFileError, match=message):
        parse_task(content)


@pytest.mark.parametrize(
    ("fields", "reference", "message"),
    [
        ({"metric": "numeric"}, "about three", "rows.jsonl:3 a reference without a number"),
        ({"metric": "multiple_choice", "choices": ["A", "B"]}, " C", "'C' that is not among `choices`"),
    ],
)
def test_a_reference_that_nothing_can_reach_is_refused(fields: dict[str, Any], reference: str, message: str) -> None:
    with pytest.raises(TaskFileError, match=message):
        check_metric(section(**fields), {"test": [row(reference)]})


def test_a_metric_without_prompts_is_refused() -> None:
    with pytest.raises(TaskFileError, match="test split has a prompt"):
        check_metric(section(metric="exact_match"), {"validation": [row("a")], "test": []})
    check_metric(section(), {"test": []})


def test_choices_follow_the_prompt_as_the_data_writes_them_and_end_as_rows_end() -> None:
    rows = [TokenRow(row_id=4, origin="r", token_ids=(5, 6, 70, 2), label_mask=(False, False, True, True))]
    made = choice_rows([row(" yes", row_id=4)], rows, ["yes", "no"], lambda text: [ord(c) for c in text])
    assert [r.token_ids for r in made] == [
        (5, 6, *map(ord, " yes"), 2),
        (5, 6, *map(ord, " no"), 2),
    ]
    assert made[1].label_mask == (False, False, True, True, True, True)
    losses = RowLosses(loss_sums=(3.0, 2.5, 1.0, 1.0), num_labels=(5, 4, 5, 4))
    assert chosen(losses, ["yes", "no"]) == ["no", "yes"]


def test_preferences_count_the_likelier_answer_and_with_the_untuned_model_what_training_moved() -> None:
    def losses(*sums: float) -> RowLosses:
        return RowLosses(loss_sums=sums, num_labels=(3,) * len(sums))

    good, bad = losses(1.0, 5.0, 2.0), losses(2.0, 4.0, 2.0)
    assert preference_scores(good, bad) == (1.0, 0.0, 0.5)
    before = (losses(1.0, 9.0, 2.0), losses(3.0, 4.0, 2.0))
    assert preference_scores(good, bad, untuned=before) == (0.0, 1.0, 0.5)
