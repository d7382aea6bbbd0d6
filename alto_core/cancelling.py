"""One job of a task is cancelled while the others go on: a person asks, the task's own process does it.

The request is an event in the store. Whoever trains the task looks for requests at each evaluation and ends the job by
a verdict like any other, so that a run that is resumed ends it too.
"""

from __future__ import annotations

from alto_core.domain import JobState, Verdict
from alto_core.errors import StoreError
from alto_core.ownership import Person
from alto_core.store import EventDraft, Store

EVENT = "cancel-asked"


def ask_to_cancel_job(store: Store, task_id: str, job_id: str, by: Person) -> None:
    """Ask for the end of one job. It ends at the next evaluation of its task, also where it waits for a slot.

    Raises:
        StoreError: there is no such task, or the job has ended.
        OwnerError: the task is someone else's.
    """
    task = store.task(task_id)
    by.require_owner(task.owner, f"task {task_id}", "cancel a job of")
    states = {record.job_id: record.state for record in store.jobs(task_id)}
    if states[job_id].is_end:
        raise StoreError(f"job {job_id} of task {task_id}: got a {states[job_id]} job to cancel, expected an open one")
    reason = f"cancelled by {by.name or 'a person'}"
    store.append_events(task_id, [EventDraft(kind=EVENT, job_id=job_id, text=reason)])


class CancelRequests:
    """Of one task, read on from where the last look ended."""

    def __init__(self, task_id: str, store: Store):
        self._task_id, self._store = task_id, store
        self._reasons: dict[str, str] = {}
        self._seen = 0

    def reasons(self) -> dict[str, str]:
        """Why jobs are to end, by job id."""
        for event in self._store.events(self._task_id, self._seen):
            self._seen = event.event_id
            if event.kind == EVENT and event.job_id is not None:
                self._reasons[event.job_id] = event.text
            elif event.kind == "revived" and event.job_id is not None:
                self._reasons.pop(event.job_id, None)  # asked of the job before it ended otherwise
        return self._reasons


def cancelled(job_id: str, step: int, reason: str) -> Verdict:
    """The end of a job by request."""
    return Verdict(job_id=job_id, state=JobState.CANCELLED, step=step, reason=reason, evidence={})
