"""A real browser looks at a finished quickstart: MLflow, Prefect, and the report on screen, phone and paper.

`ALTO_UPDATE_PICTURES=1` puts the screenshots into docs/images.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alto_core.domain import JobState, TaskState
from alto_core.registration import serving_facts
from alto_core.settings import Settings, load_settings
from alto_core.store import JobRecord, Store, TaskRecord
from alto_core.tracking import Tracker
from alto_core.workspace import Workspace

REPOSITORY = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ALTO = Path(sys.executable).with_name("alto")
WIDE, PHONE, PAPER = ({"width": width, "height": height} for width, height in ((1400, 1000), (390, 844), (690, 976)))
"""In CSS pixels; paper is A4 within its margins."""
NO_ASSISTANT = "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"
"""MLflow opens it over a quarter of the first page that a browser sees."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.smollm2,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"),
]


def finished_quickstart(settings: Settings) -> TaskRecord | None:
    if not (settings.home / "store.db").exists():
        return None
    finished = [t for t in Store(settings).tasks() if t.name == "word-reversal" and t.state is TaskState.FINISHED]
    return finished[0] if finished else None


def environment_of(home: Path) -> dict[str, str]:
    """For a process in this workspace, with Prefect's database in it and not where the tests have theirs."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return others | {"ALTO_HOME": str(home), "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def home(quickstart_folder: Path) -> Path:
    """A workspace with a finished quickstart: what `make quickstart` left, or a run of our own."""
    left = REPOSITORY / ".alto"
    if finished_quickstart(load_settings({"ALTO_HOME": str(left)})):
        return left
    own = REPOSITORY / ".pytest_cache" / "quickstart-home"
    if not finished_quickstart(load_settings({"ALTO_HOME": str(own)})):
        command = [str(ALTO), "tune", "examples/quickstart.yaml", "--plain"]
        subprocess.run(command, cwd=REPOSITORY, env=environment_of(own), check=True)
    return own


@pytest.fixture(scope="module")
def record(home: Path) -> TaskRecord:
    found = finished_quickstart(load_settings({"ALTO_HOME": str(home)}))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def jobs(home: Path, record: TaskRecord) -> tuple[JobRecord, ...]:
    return Store(load_settings({"ALTO_HOME": str(home)})).jobs(record.task_id)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def challenger(home: Path, record: TaskRecord) -> int:
    """A second version of the registered model: another finished job of the task."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALTO_HOME", str(home))
        workspace = Workspace.open(record.task_id)
        registry = Tracker(workspace.settings).registry
        found = registry.find_if_any(workspace.task.registered_model, "challenger")
        if found is not None:
            return found.version
        other = next(j for j in workspace.ended_as(JobState.FINISHED) if j != record.winner_job_id)
        with workspace.tracked() as runs:
            facts = serving_facts(workspace)
            folder = workspace.job_folder(other) / "adapter"
            name = workspace.task.registered_model
            return runs.register(name=name, job_id=other, adapter_folder=folder, tags={}, facts=facts).version


@pytest.fixture(scope="module")
def links(home: Path, challenger: int) -> Iterator[dict[str, str]]:
    """`alto ui` with both servers up; the links it prints, by their labels."""
    command = [str(ALTO), "ui", "--mlflow-port", str(free_port()), "--prefect-port", str(free_port())]
    with subprocess.Popen(command, env=environment_of(home), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        found: dict[str, str] = {}
        try:
            for line in child.stdout:
                if match := re.match(r"(\S.*?)\s{2,}(http\S+)", line):
                    found[match[1]] = match[2]
                if "flow run" in line:
                    break
            yield found
        finally:
            child.send_signal(signal.SIGTERM)
            child.stdout.read()
            assert child.wait(60) == 0


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = browser.new_page(viewport=WIDE)
        page.add_init_script(NO_ASSISTANT)
        yield page
        browser.close()


def take_picture(page: Any, name: str, **options: Any) -> None:
    """Into docs/images when asked to, else where it shows that the page can be painted. A palette makes it small."""
    from PIL import Image

    picture = Image.open(io.BytesIO(page.screenshot(**options))).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE).save(picture_folder(is_kept=True) / f"{name}.png", optimize=True)


def picture_folder(*, is_kept: bool = False) -> Path:
    """Where pictures go; those for the documentation only when asked to."""
    asked = is_kept and os.environ.get("ALTO_UPDATE_PICTURES")
    folder = REPOSITORY / ("docs/images" if asked else ".pytest_cache/pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_the_quickstart_ended_jobs_early_and_beat_the_untuned_model(
    home: Path, record: TaskRecord, jobs: tuple[JobRecord, ...]
) -> None:
    from alto_core.result import TaskResult

    assert len(jobs) >= 9
    assert len({job.job.learning_rate for job in jobs}) >= 3
    assert sum(job.state in (JobState.UNDERPERFORMING, JobState.DIVERGING, JobState.OVERFITTING) for job in jobs) >= 3
    result = TaskResult.from_dict(record.result or {})
    tuned, untuned = result.score(result.winner, "test"), result.score(None, "test")
    assert tuned and untuned and tuned.metric_value and untuned.metric_value
    assert tuned.metric_value.num_rows >= 200
    assert tuned.metric_value.low > untuned.metric_value.high + 0.2
    assert result.tracking_share is not None


def test_mlflow_compares_all_jobs(page: Any, links: dict[str, str], jobs: tuple[JobRecord, ...]) -> None:
    page.goto(links["its jobs compared"])
    page.get_by_text("Parallel Coordinates").first.wait_for(timeout=60_000)
    for job in jobs[:3]:
        page.get_by_text(job.job_id).first.wait_for(timeout=30_000)
    metrics = page.get_by_role("combobox").last
    metrics.click()  # it takes no text before
    metrics.fill("best_val_loss")
    metrics.press("Enter")
    page.get_by_text("Run details").first.click()  # closes the list
    page.get_by_text("Run details").first.click()
    page.locator("svg text", has_text="best_val_loss").first.wait_for(timeout=30_000)
    page.wait_for_timeout(1_000)  # its lines are drawn one after another
    take_picture(page, "mlflow-compare")


def test_mlflow_shows_the_task_with_its_numbers_and_the_machine(
    page: Any, links: dict[str, str], record: TaskRecord
) -> None:
    page.goto(links[record.task_id])
    page.get_by_text("best_val_loss").first.wait_for(timeout=60_000)
    page.get_by_text("samples_saved").first.wait_for(timeout=30_000)
    page.screenshot(path=picture_folder() / "mlflow-task.png")
    page.get_by_text("System metrics", exact=True).first.click()
    page.get_by_text("cpu_utilization_percentage").first.wait_for(timeout=30_000)


def test_mlflow_shows_the_registered_versions_with_their_aliases(
    page: Any, links: dict[str, str], challenger: int
) -> None:
    page.goto(links["its registered model"])
    for text in ("champion", "challenger", f"Version {challenger}"):
        page.get_by_text(text).first.wait_for(timeout=60_000)
    take_picture(page, "mlflow-registry")


def test_prefect_shows_the_stages_of_the_run(page: Any, links: dict[str, str], record: TaskRecord) -> None:
    page.goto(links["its flow run"])
    page.get_by_text(f"tune {record.task_id}").first.wait_for(timeout=60_000)
    page.get_by_text("Completed").first.wait_for(timeout=30_000)
    page.get_by_text("Artifacts", exact=True).first.click()
    for artifact in ("Summary", "Profile", "Report"):
        page.get_by_text(f"{artifact} of {record.task_id}").first.wait_for(timeout=30_000)
    page.wait_for_timeout(3_000)  # the timeline is drawn on a canvas, which no locator sees
    take_picture(page, "prefect-run")
    page.get_by_text("Task Runs", exact=True).first.click()
    for stage in ("profile", "warmup", "gate", "continue", "evaluate", "register"):
        page.get_by_text(stage, exact=True).first.wait_for(timeout=30_000)


def test_the_report_opens_without_a_network(page: Any, record: TaskRecord, jobs: tuple[JobRecord, ...]) -> None:
    assert record.report_path
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(Path(record.report_path).as_uri())
    for job in jobs:
        assert page.get_by_text(job.job_id).count() > 0
    assert page.locator("svg").count() >= 3
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    for heading in ("Learning rate and rank", "Answers", "Leaderboard", "Decisions"):
        assert page.get_by_role("heading", name=heading, exact=True).count() == 1
    assert sideways(page, "document.querySelector('.scroll')") == 0, "the leaderboard fits a wide page"
    page.screenshot(path=picture_folder() / "report-whole.png", full_page=True)
    take_picture(page, "report", full_page=True, clip=box_of(page, "Winner against the untuned model", "Loss curves"))


def test_the_report_reads_on_a_phone_and_on_paper(page: Any, record: TaskRecord) -> None:
    page.set_viewport_size(PHONE)
    page.goto(Path(record.report_path or "").as_uri())
    assert sideways(page, "document.documentElement") == 0, "nothing but a table of its own scrolls sideways"
    page.screenshot(path=picture_folder() / "report-phone-whole.png", full_page=True)
    take_picture(page, "report-phone", full_page=True, clip=box_of(page, "Loss curves", "Loss curves"))
    page.pdf(path=picture_folder() / "report.pdf", format="A4")
    assert (picture_folder() / "report.pdf").stat().st_size > 10_000
    page.set_viewport_size(PAPER)
    page.emulate_media(media="print")
    assert sideways(page, "document.documentElement") == 0, "nothing is cut off at the edge of the paper"
    take_picture(page, "report-print", full_page=True, clip=box_of(page, "Leaderboard", "Leaderboard"))
    page.emulate_media(media="screen")
    page.set_viewport_size(WIDE)


def sideways(page: Any, element: str) -> int:
    """CSS pixels by which an element's content is wider than it."""
    wider: int = page.evaluate(f"{element}.scrollWidth - {element}.clientWidth")
    return wider


def box_of(page: Any, first: str, last: str) -> dict[str, float]:
    """Where the sections of the report from this heading to that one stand, for a picture of them alone."""
    sections = [
        page.locator("section", has=page.get_by_role("heading", name=name, exact=True)) for name in (first, last)
    ]
    top, bottom = (section.bounding_box() for section in sections)
    margin = 14
    return {
        "x": top["x"] - margin,
        "y": top["y"],
        "width": top["width"] + 2 * margin,
        "height": bottom["y"] + bottom["height"] - top["y"] + margin,
    }
