"""The documentation holds: made parts are current, links lead somewhere, task files and code are real."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from alto_core import settings
from alto_core.config import parse_task
from alto_core.config.yaml_text import read_yaml
from tests.pages import CODE_SPAN, DOCS, FENCE, PAGES, REPOSITORY, blocks

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def make_reference() -> ModuleType:
    script = DOCS / "make_reference.py"
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_made_parts_of_all_pages_are_as_the_code_has_them() -> None:
    module = make_reference()
    made = dict(module.pages())
    assert {file.name for file in made} == {
        "README.md",
        "cli.md",
        "limits.md",
        "newcomer.md",
        "settings.md",
        "task-file.md",
        "tracking.md",
    }
    for file, page in made.items():
        assert file.read_text(encoding="utf-8") == page, f"{file.name} is old; run: python docs/make_reference.py"


def test_every_variable_that_the_settings_read_is_in_their_table() -> None:
    code = Path(settings.__file__).read_text(encoding="utf-8")
    read = set(re.findall(r'env\.get\("(\w+)"\)', code))
    listed = set(re.findall(r"^\| `(\w+)` \|", settings.__doc__ or "", re.MULTILINE))
    assert read == listed


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and mkdocs name them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_lead_to_what_is_there(page: Path) -> None:
    text = CODE_SPAN.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name}: {target} leads nowhere"
        assert file.resolve().is_relative_to(DOCS) or page.parent == REPOSITORY, (
            f"{page.name}: {target} is not on the site"
        )
        assert not anchor or anchor in anchors(file), f"{page.name}: {target} names no heading of {file.name}"


WHOLE: dict[str, Any] = {
    "name": "whole",
    "model": {"name": "model"},
    "data": {"source": "rows.jsonl"},
    "search_space": {"learning_rate": 1e-4, "lora_rank": 8},
    "budget": {"steps": 1},
}


def test_every_task_file_in_the_documentation_is_one() -> None:
    """One with a name is whole; sections alone stand for a task that has them."""
    found = [(block.page, read_yaml(block.text)) for block in blocks() if block.language == "yaml"]
    assert sum("name" in content for _, content in found) >= 2
    for page, content in found:
        parse_task(content if "name" in content else WHOLE | content, file=page)


def test_python_in_the_documentation_compiles() -> None:
    found = [block for block in blocks() if block.language == "python"]
    assert len(found) >= 5
    for block in found:
        ast.parse(block.text, block.page)


class _Loads(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        wanted = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}.get(tag)
        self.addresses += [value for name, value in attrs if name == wanted and value]


def test_the_site_builds_without_a_warning_and_its_pages_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    built = sorted(tmp_path.glob("*.html"))
    assert {page.stem for page in DOCS.glob("*.md")} <= {page.stem for page in built}
    for page in built:
        loads = _Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        assert [address for address in loads.addresses if re.match(r"[a-z]+:|//", address)] == []
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", style.read_text(encoding="utf-8"))
