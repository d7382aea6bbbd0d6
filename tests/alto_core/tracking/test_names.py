"""Names for MLflow: accepted by MLflow itself, turned back exactly, never two in one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name, _validate_param_name, _validate_tag_name

from alto_core.errors import TrackingError
from alto_core.tracking.names import clean_name, original_name

ODD_NAMES = [
    "loss@1",
    "timing(s)/gen",
    "a,b",
    "lora_r=8",
    "[x]",
    "../../evil",
    "/etc/x",
    "a//b",
    ".",
    "..",
    "a/./b",
    "a:b",
    "é",
    "a\nb",
    "a/",
]


@pytest.mark.parametrize("name", ["train_loss", "alto.state", "exact match", "gpu-0/memory"])
def test_a_plain_name_stays(name: str) -> None:
    assert clean_name(name) == name


@pytest.mark.parametrize("name", ODD_NAMES)
def test_an_odd_name_is_taken_by_mlflow_and_comes_back(name: str) -> None:
    clean = clean_name(name)
    for validate in (_validate_metric_name, _validate_param_name, _validate_tag_name):
        validate(clean)
    assert original_name(clean) == name


@given(st.lists(st.text(min_size=1, max_size=20), unique=True, max_size=20))
def test_names_never_clash_and_all_come_back(names: list[str]) -> None:
    clean = [clean_name(name) for name in names]
    assert len(set(clean)) == len(names)
    assert [original_name(name) for name in clean] == names
    for name in clean:
        _validate_metric_name(name)


@pytest.mark.parametrize("name", ["", "x" * 251, "@" * 100])
def test_a_name_that_cannot_be_kept_is_refused(name: str) -> None:
    with pytest.raises(TrackingError, match="1 to 250"):
        clean_name(name)
