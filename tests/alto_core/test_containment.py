"""Names from outside never lead out of their folder (Z1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from alto_core.cleaning import stored_states
from alto_core.config import parse_task
from alto_core.containment import inside
from alto_core.domain import TaskState
from alto_core.errors import StoreError, TaskFileError, TrackingError
from alto_core.settings import Settings, load_settings, prepare_environment
from alto_core.store import Store
from alto_core.tracking.adapters import adapter_files
from alto_core.workspace import Workspace

ESCAPES = [
    "../../evil", "/etc/x", "a/../../b", "a%2f..%2fb", "a\x00b", "..", ".", "", "a\\b", ".hidden", "a\nb", "a b",
    "\u202eevil", "\uff0e\uff0e", "a/b", "~root", "a" * 200,
]  # fmt: skip


@pytest.mark.parametrize("name", ESCAPES, ids=repr)
def test_a_name_that_is_none_makes_no_path(settings: Settings, name: str) -> None:
    workspace = Workspace("good-1", settings)
    for use in (settings.task_folder, workspace.job_folder, lambda n: Workspace(n, settings).folder):
        with pytest.raises(StoreError, match="got no name of a folder"):
            use(name)
    with pytest.raises(StoreError, match="got no name"):
        Workspace(name, settings).data  # noqa: B018 - reading it is the test


@pytest.mark.parametrize("name", [*ESCAPES, "con", "NUL", "aux.b", "com1", "ends."], ids=repr)
@pytest.mark.parametrize("field", ["name", "registry_name"])
def test_a_task_file_with_such_a_name_is_refused(name: str, field: str) -> None:
    content = {
        "name": "a",
        "model": {"name": "m"},
        "data": {"source": "x.jsonl"},
        "search_space": {"learning_rate": 1e-3, "lora_rank": 4},
        "budget": {"steps": 1},
    }
    with pytest.raises(TaskFileError, match=f"{field}: got"):
        parse_task({**content, field: name})


def test_a_symbolic_link_out_of_the_home_is_not_followed(settings: Settings, tmp_path: Path, tiny_task) -> None:  # type: ignore[no-untyped-def]
    outside = tmp_path / "outside"
    (outside / "jobs").mkdir(parents=True)
    (settings.home / "tasks").mkdir(parents=True)
    (settings.home / "tasks" / "linked-1").symlink_to(outside)
    with pytest.raises(StoreError, match="got a symbolic link that leads to"):
        settings.task_folder("linked-1")
    folder = settings.task_folder("good-1")
    folder.mkdir()
    for part in ("data", "jobs"):
        (folder / part).symlink_to(outside)
    workspace = Workspace("good-1", settings)
    with pytest.raises(StoreError, match="symbolic link"):
        workspace.job_folder("lr0.001-r4-b4-abcdef")
    with pytest.raises(StoreError, match="symbolic link"):
        workspace.data  # noqa: B018
    Store(settings).add_task("linked-1", tiny_task())
    Store(settings).end_task("linked-1", TaskState.FAILED, "x")
    assert stored_states(settings, "linked-1") == []


def test_a_link_inside_and_a_home_behind_a_link_are_fine(tmp_path: Path) -> None:
    (tmp_path / "disk" / "tasks" / "real").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "tasks" / "alias").symlink_to(tmp_path / "disk" / "tasks" / "real")
    assert inside(tmp_path / "home" / "tasks", "alias") == tmp_path / "home" / "tasks" / "alias"


def test_an_adapter_with_a_symbolic_link_is_not_registered(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").symlink_to("/etc/hostname")
    with pytest.raises(TrackingError, match="got the symbolic link adapter_model"):
        adapter_files(tmp_path)


def test_a_new_home_is_its_owners_alone_and_an_old_one_stays_as_it_is(tmp_path: Path) -> None:
    new, shared = (load_settings({"ALTO_HOME": str(tmp_path / name)}) for name in ("new", "shared"))
    shared.home.mkdir(mode=0o770)
    shared.home.chmod(0o770)
    for settings in (new, shared):
        prepare_environment(settings, {})
    assert [oct(settings.home.stat().st_mode & 0o777) for settings in (new, shared)] == ["0o700", "0o770"]
