"""From the end of a run to the next dispatch: through Prefect's trigger, and with a scheduler that waits.

    python benchmarks/plan_replan.py

A real Prefect server with its workers on this machine; the queue, the planner and the dispatch are the real ones. Runs
only hold their GPUs for a few seconds instead of training. Times are those of the queue's own log.
"""

from __future__ import annotations

import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
from bars import record_bar
from plan_cases import PACKAGES, made_hosts, write_rows

NUM_TASKS, NUM_GPUS = 16, 2
DAY_SECONDS, DAY_TASKS = 86_400, 200
LIMIT_SECONDS = 900


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="alto-replan-", ignore_cleanup_errors=True) as folder:
        os.environ |= {
            "ALTO_HOME": folder,
            "ALTO_DEVICE": "cpu",
            "ALTO_LEASE_SECONDS": "600",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]),
        }
        measure(Path(folder))


def measure(folder: Path) -> None:
    from alto_core.settings import load_settings, prepare_environment

    settings = load_settings()
    prepare_environment(settings)
    from flows.cli.services import RunningProcess, RunningService
    from flows.cli.ui import embedded_services
    from flows.cli.up import worker_process

    server = next(s for s in embedded_services(settings, 5099, 4299) if s.name == "Prefect")
    running: list[RunningProcess] = [RunningService(server)]
    try:
        running[0].wait_until_up()  # type: ignore[attr-defined]
        os.environ["PREFECT_API_URL"] = f"{server.url}/api"
        from flows.deployments import CONTROL_POOL, deploy_control, pool_name
        from flows.host import HostAgent

        deploy_control()
        deploy_stand_in()
        running += [RunningProcess(worker_process(settings, pool)) for pool in (CONTROL_POOL, pool_name("left"))]
        triggered = chain("triggered", lambda: None)
        scheduling = schedule_seconds()
        running[1].stop()
        agent = HostAgent(settings, host_id="left", gpus=range(NUM_GPUS), gpu_bytes=0)
        waiting = chain("waiting", agent.plan)
    finally:
        for process in reversed(running):
            process.stop()
    rows = [
        {"path": name, "seconds": round(seconds, 2)}
        for name, values in (("trigger", triggered), ("first line", scheduling), ("waiting scheduler", waiting))
        for seconds in values
    ]
    write_rows("plan_replan", rows)
    replan, dispatch, awake = (float(np.percentile(values, 95)) for values in (triggered, scheduling, waiting))
    print(f"end of a run to the next dispatch, p95: {replan:.1f} s by trigger, {awake:.1f} s by a waiting scheduler")
    print(f"from the scheduler's first line: {dispatch:.2f} s")
    for name, seconds in (("trigger", replan), ("waiting scheduler", awake)):
        print(f"a day of {DAY_TASKS} tasks: {idle_share(math.ceil(seconds)):.2%} of the GPU time by {name}")
    record_bar("plan.replan_p95_seconds", replan, target="<= 10", unit="s", packages=(*PACKAGES, "prefect"))
    record_bar(
        "plan.solve_and_dispatch_p95_seconds", dispatch, target="<= 2", unit="s", packages=(*PACKAGES, "prefect")
    )


def deploy_stand_in() -> None:
    """A flow of the same name, so that the triggers match, which trains nothing."""
    from plan_replan_flow import hold
    from prefect.flows import EntrypointType

    from flows.deployments import deploy_host, pool_name

    deploy_host("left")
    hold.to_deployment("left", work_pool_name=pool_name("left"), entrypoint_type=EntrypointType.MODULE_PATH).apply()


def chain(name: str, look: Callable[[], None]) -> list[float]:
    """Let tasks follow each other on a few GPUs; returns for each end the seconds until its GPU was claimed again."""
    from prefect.deployments import run_deployment

    from alto_core.config import parse_task
    from alto_core.settings import load_settings
    from alto_core.store import Demand, Fleet, Queue, Store

    settings = load_settings()
    queue, store = Queue(settings), Store(settings)
    Fleet(settings).join("left", gpus=range(NUM_GPUS), gpu_bytes=0, work_pool="alto-left")
    first = len(queue.events())
    for i in range(NUM_TASKS):
        content = {
            "name": name,
            "model": {"name": "none"},
            "data": {"source": "none"},
            "search_space": {"learning_rate": 1e-3, "lora_rank": 8},
            "budget": {"steps": 1},
        }
        store.add_task(f"{name}-{i}", parse_task(content))
        queue.submit(f"{name}-{i}", Demand(num_gpus=1, expected_seconds=5.0))
    if name == "triggered":
        run_deployment("schedule/schedule", parameters={"reason": "start"}, timeout=0, as_subflow=False)
    deadline = time.monotonic() + LIMIT_SECONDS
    while queue.entries():
        if time.monotonic() > deadline:
            sys.exit(f"not done after {LIMIT_SECONDS} s: {queue.entries()}")
        look()
        time.sleep(0.5)
    free_since: dict[str, datetime] = {}
    waits, gpu_of = [], {}
    for event in queue.events()[first:]:
        if event.kind == "claimed":
            gpu_of[event.task_id] = gpu = event.text.split(" of ")[0]
            if gpu in free_since:
                waits.append((event.at - free_since.pop(gpu)).total_seconds())
        elif event.kind == "released":
            free_since[gpu_of[event.task_id]] = event.at
    return waits


def schedule_seconds() -> list[float]:
    """From the beginning of each scheduling flow run to the claims that it made."""
    from prefect.client.orchestration import get_client

    from alto_core.settings import load_settings
    from alto_core.store import Queue

    claims = [event.at for event in Queue(load_settings()).events() if event.kind == "claimed"]
    with get_client(sync_client=True) as client:
        runs = [run for run in client.read_flow_runs(limit=200) if run.name.startswith("schedule:") and run.start_time]
    spans = []
    for run in runs:
        end = run.end_time or run.start_time
        spans += [(at - run.start_time).total_seconds() for at in claims if run.start_time <= at <= end]
    return spans


def idle_share(latency_seconds: int) -> float:
    """GPU time lost to this latency in a day of tasks on four hosts."""
    from alto_core.scheduling.effort import PlannerOptions
    from alto_core.scheduling.simulator import SimulatedTask, planned, simulate

    draw = random.Random(0)
    tasks = []
    for i in range(DAY_TASKS):
        estimate = math.ceil(3600 * draw.lognormvariate(0, 0.5))
        tasks.append(
            SimulatedTask(
                task_id=f"t{i}",
                num_gpus=draw.choices((1, 2, 4, 8), (0.5, 0.25, 0.15, 0.1))[0],
                estimated_seconds=estimate,
                true_seconds=math.ceil(estimate * draw.uniform(0.25, 1)),
                arrival=draw.randrange(DAY_SECONDS),
            )
        )
    options = PlannerOptions(seconds=0)
    return simulate(tasks, made_hosts(4), planned(options), latency_seconds=latency_seconds).latency_share


if __name__ == "__main__":
    main()
