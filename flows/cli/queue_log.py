"""What happens to tasks on one host, as lines of text: what `alto up` shows while it runs."""

from __future__ import annotations

from collections.abc import Iterator

from alto_core.settings import Settings
from alto_core.store import Queue, QueueEvent


class QueueLog:
    """Reads the queue's events from now on, each once; those of other hosts are left to them."""

    def __init__(self, settings: Settings, host_id: str):
        self._queue, self._host_id = Queue(settings), host_id
        self._last_event_id = self._queue.version()

    def new_lines(self) -> Iterator[str]:
        """One line per event since the last call."""
        for event in self._queue.events(after_id=self._last_event_id):
            self._last_event_id = event.event_id
            if event.host_id in (None, self._host_id):
                yield _line(event)


def _line(event: QueueEvent) -> str:
    """`17:04:11 UTC  tiny-1: claimed, GPU 0 of left, attempt 1`."""
    what = event.kind.replace("-", " ")
    return f"{event.at:%H:%M:%S} UTC  {event.task_id or event.host_id}: {what}, {event.text}"
