"""`alto plan`: the plan of this moment, in the terminal and as a picture."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from alto_core import wording
from alto_core.cluster.gantt import bars_of, gantt_page, gantt_svg, gantt_text
from alto_core.cluster.placing import plan_now
from alto_core.cluster.situation import kept_plan
from alto_core.errors import TaskFileError
from alto_core.settings import load_settings
from alto_core.store import KeptPlan
from flows.cli.output import console_for, dump


def run_plan(*, out: Path | None, as_json: bool) -> None:
    """Plan the queue as it is now and show it. Nothing is dispatched.

    Raises:
        TaskFileError: `out` is neither SVG nor HTML.
    """
    if out is not None and out.suffix not in (".svg", ".html"):
        raise TaskFileError("--out", got=out.name, expected="a name that ends in .svg or .html")
    situation, found = plan_now(load_settings())
    plan = kept_plan(found, situation, "alto plan")
    bars = bars_of(plan.placements, plan.at)
    if out is not None:
        content = gantt_svg(bars) if out.suffix == ".svg" else gantt_page(bars, _summary(plan), plan.refusals)
        out.write_text(content, encoding="utf-8")
    if as_json:
        print(dump({"event": "cluster-plan", **vars(plan), "placements": [vars(p) for p in plan.placements]}))
        return
    console = console_for()
    for line in gantt_text(bars, width=console.size.width):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(_summary(plan), style="dim"), soft_wrap=True)
    for task_id, reason in plan.refusals.items():
        console.print(Text.assemble((task_id, "bold red"), f" cannot be planned: {reason}"), soft_wrap=True)
    if out is not None:
        console.print(str(out), soft_wrap=True)


def _summary(plan: KeptPlan) -> str:
    if not plan.placements:
        return "Nothing to plan."
    late = f", deadlines missed by {wording.duration(plan.tardiness)} in sum" if plan.tardiness else ""
    how = f"; by {plan.method}, {plan.solve_seconds:.1f} s" if plan.method else ""  # none where nothing waits
    return (
        f"all done in {wording.duration(plan.makespan)} at the latest, at most {wording.share(plan.gap, digits=1)} "
        f"above the best plan{late}{how}"
    )
