"""Who may change what. That MLflow is asked, and enforces its part, is tested with real servers in test_logins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from alto_core.config import TuningTask
from alto_core.errors import OwnerError, TaskFileError
from alto_core.ownership import Person

ALICE, ADMIN, NOBODY = Person(name="alice"), Person(name="root", is_admin=True), Person()


@pytest.mark.parametrize(
    ("person", "owner"), [(ALICE, "alice"), (ADMIN, "alice"), (NOBODY, "alice"), (ALICE, None)], ids=str
)
def test_owners_admins_and_everybody_without_logins_may_change_a_task(person: Person, owner: str | None) -> None:
    person.require_owner(owner, "task a-1", "cancel")


def test_another_user_may_not() -> None:
    with pytest.raises(OwnerError, match="task a-1: got alice, who asks to cancel it, expected its owner bob"):
        ALICE.require_owner("bob", "task a-1", "cancel")


def test_a_task_gets_the_owner_who_is_logged_in(tiny_task: Callable[..., TuningTask]) -> None:
    assert ALICE.as_owner(tiny_task()).owner == "alice"
    assert ALICE.as_owner(tiny_task(owner="alice")).owner == "alice"
    assert ADMIN.as_owner(tiny_task(owner="bob@example.org")).owner == "bob@example.org"
    assert ADMIN.as_owner(tiny_task()).owner == "root"
    assert NOBODY.as_owner(tiny_task(owner="bob")).owner == "bob"
    with pytest.raises(TaskFileError, match=r"owner: got bob, expected alice, as you are logged in to MLflow"):
        ALICE.as_owner(tiny_task(owner="bob"))
