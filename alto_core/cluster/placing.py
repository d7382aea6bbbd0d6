"""One look of the scheduler: plan what waits, keep the plan, say what starts now and who has to make room."""

from __future__ import annotations

from alto_core.cluster.situation import Situation, kept_plan, read_situation
from alto_core.queue_states import QueueState, StopRequest
from alto_core.scheduling.admission import admit
from alto_core.scheduling.effort import PlannerOptions
from alto_core.scheduling.instance import Instance, Placement, Plan
from alto_core.scheduling.planner import ESTIMATE_SLACK, make_plan
from alto_core.scheduling.preemption import tasks_to_preempt
from alto_core.settings import Settings
from alto_core.store import Queue

SECONDS_TO_PLAN = 1.0
"""Of searching per look; a look comes with every arrival and every end."""


def plan_now(settings: Settings) -> tuple[Situation, Plan]:
    """The plan of this moment. Nothing is written."""
    situation = read_situation(settings)
    # with no GPU free nothing can start, and the next end brings a better plan than any search now
    seconds = SECONDS_TO_PLAN if situation.num_free_gpus else 0.0
    plan = make_plan(
        situation.requests,
        situation.hosts,
        situation.running,
        usage=situation.usage,
        options=PlannerOptions(seconds=seconds, slack=ESTIMATE_SLACK),
    )
    return situation, plan


def place_tasks(settings: Settings, reason: str) -> tuple[Placement, ...]:
    """Plan, keep the plan, ask low-priority tasks to make room where a deadline needs it.

    Returns:
        What starts now. The rest stays in the plan, and is planned anew at the next look.
    """
    situation, plan = plan_now(settings)
    queue = Queue(settings)
    queue.keep_plan(kept_plan(plan, situation, reason))
    for task_id in _victims(situation, plan):
        queue.request_stop(task_id, StopRequest.PREEMPT)
    queue.close()
    return plan.starting_now


def _victims(situation: Situation, plan: Plan) -> tuple[str, ...]:
    if not plan.tardiness:
        return ()
    refused = {refusal.task_id for refusal in plan.refusals}
    requests = [request for request in situation.requests if request.task_id not in refused]
    ends = {placement.task_id: placement.end for placement in plan.placements}
    late = [
        request.task_id
        for request in requests
        if request.deadline is not None and ends[request.task_id] > request.deadline
    ]
    stoppable = {
        task_id: entry.demand.priority
        for task_id, entry in situation.entries.items()
        if entry.state is QueueState.RUNNING
    }
    if any(entry.stop is StopRequest.PREEMPT for entry in situation.entries.values()):
        return ()  # room is being made already
    tasks, _ = admit(requests, situation.hosts)
    instance = Instance(hosts=situation.hosts, waiting=tasks, running=situation.running, usage=situation.usage)
    return tasks_to_preempt(instance, stoppable, late)
