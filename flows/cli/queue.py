"""`alto queue`: what runs, what waits, and the hosts."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.table import Table
from rich.text import Text

from alto_core import wording
from alto_core.queue_states import QueueState
from alto_core.settings import Settings, load_settings
from alto_core.store import Fleet, HostRecord, KeptPlan, Queue, QueueEntry
from flows.cli.output import console_for, dump
from flows.cli.tables import bare_table

STATE_STYLES = {QueueState.RUNNING: "cyan", QueueState.CLAIMED: "cyan", QueueState.PAUSED: "yellow"}


def run_queue(*, as_json: bool) -> None:
    """Print the tasks that have not ended in the order of their places in the latest plan, and the hosts."""
    settings = load_settings()
    queue = Queue(settings)
    entries, plan, hosts = queue.entries(), queue.latest_plan(), Fleet(settings).hosts()
    starts = {} if plan is None else {placement.task_id: placement.start for placement in plan.placements}
    never = datetime.max.replace(tzinfo=UTC)
    entries = tuple(sorted(entries, key=lambda entry: (not entry.state.holds_gpus, starts.get(entry.task_id, never))))
    if as_json:
        for entry in entries:
            print(dump({"event": "queued", **_entry_object(entry, plan)}))
        for host in hosts:
            print(dump({"event": "host", **vars(host)}))
        return
    console = console_for()
    if not entries:
        console.print("The queue is empty. `alto submit FILE` adds a task.")
    else:
        console.print(_entry_table(entries, plan, hosts))
    console.print()
    console.print(_host_table(hosts) if hosts else "No host has joined. `alto up` starts one.")


def place_in_queue(task_id: str, settings: Settings) -> str | None:
    """Where a task stands, in words, for one that is in the queue; None for others."""
    queue = Queue(settings)
    entry = queue.open_entry(task_id)
    if entry is None:
        return None
    return f"in the queue: {entry.state}, {_where(entry, queue.latest_plan(), Fleet(settings).hosts())}"


def _entry_object(entry: QueueEntry, plan: KeptPlan | None) -> dict:
    place = next((p for p in plan.placements if p.task_id == entry.task_id), None) if plan else None
    return {
        "task_id": entry.task_id,
        "owner": entry.owner,
        "state": entry.state,
        "priority": entry.demand.priority,
        "deadline": entry.demand.deadline,
        "num_gpus": entry.demand.num_gpus,
        "expected_seconds": entry.demand.expected_seconds,
        "host_id": entry.host_id if entry.state.holds_gpus else None,
        "gpus": entry.gpus,
        "attempt": entry.attempt,
        "stop": entry.stop,
        "planned_start": place and place.start,
        "planned_end": place and place.end,
        "refusal": plan.refusals.get(entry.task_id) if plan else None,
    }


def _entry_table(entries: tuple[QueueEntry, ...], plan: KeptPlan | None, hosts: tuple[HostRecord, ...]) -> Table:
    table = bare_table()
    for name in ("task", "owner", "state", "priority", "GPUs", "where and when"):
        table.add_column(name, no_wrap=name != "where and when", justify="right" if name == "GPUs" else "left")
    for entry in entries:
        state = f"{entry.state}, asked to {entry.stop}" if entry.stop else str(entry.state)
        table.add_row(
            Text(entry.task_id),
            Text(entry.owner),
            Text(state, style=STATE_STYLES.get(entry.state, "")),
            Text(str(entry.demand.priority)),
            str(entry.demand.num_gpus),
            Text(_where(entry, plan, hosts)),
        )
    return table


def _where(entry: QueueEntry, plan: KeptPlan | None, hosts: tuple[HostRecord, ...]) -> str:
    """Where a task runs and for how long yet, or what it waits for."""
    content, now = _entry_object(entry, plan), datetime.now(UTC)
    gpus = f"{entry.host_id}, GPU {', '.join(map(str, entry.gpus))}"
    if entry.state is QueueState.CLAIMED:
        return f"{gpus}; its run starts"
    if entry.state is QueueState.RUNNING:
        end = content["planned_end"]
        if end is None:
            return gpus
        return f"{gpus}; at most {wording.duration((end - now).total_seconds())} left" if end > now else f"{gpus}; late"
    if entry.state is QueueState.PAUSED:
        return f"until `alto unpause {entry.task_id}`"
    if all(host.is_lost for host in hosts):
        return "until a host is there: `alto up` starts one"
    if content["refusal"]:
        return f"cannot be planned: {content['refusal']}"
    start = content["planned_start"]
    if start is None:
        return "not planned yet"
    return (
        f"starts in {wording.duration((start - now).total_seconds())} at the latest" if start > now else "starts next"
    )


def _host_table(hosts: tuple[HostRecord, ...]) -> Table:
    table = bare_table()
    for name in ("host", "state", "GPUs", "last heard of"):
        table.add_column(name)
    for host in hosts:
        held = "  ".join(f"{gpu}: {holder or 'free'}" for gpu, holder in host.holders.items())
        silent = (datetime.now(UTC) - host.heartbeat_at).total_seconds()
        state = Text("gone", style="yellow") if host.is_lost else Text("there", style="green")
        table.add_row(Text(host.host_id), state, Text(held), f"{wording.duration(silent)} ago")
    return table
