"""The hosts of the cluster and their GPUs: who is there, who was heard of last when, who holds what."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sqlmodel import Session, col, select

from alto_core.errors import StoreError
from alto_core.store.database import StorePart
from alto_core.store.queue_records import HostRecord
from alto_core.store.queue_rows import log_event
from alto_core.store.tables import GpuRow, HostRow
from alto_core.wording import plural


class Fleet(StorePart):
    """The hosts of one store.

    Raises:
        StoreError: the database cannot be opened.
    """

    def join(self, host_id: str, *, gpus: Sequence[int], gpu_bytes: int, work_pool: str) -> None:
        """Add a host, or bring it back; GPUs that it no longer has go when no task holds them.

        Raises:
            StoreError: a task holds a GPU that is to go.
        """
        with self._database.writing() as session:
            row = session.get(HostRow, host_id) or HostRow(host_id=host_id, work_pool=work_pool, heartbeat_at=_now())
            row.work_pool, row.gpu_bytes, row.heartbeat_at, row.is_lost = work_pool, gpu_bytes, _now(), False
            session.add(row)
            session.flush()
            known = {gpu.gpu: gpu for gpu in _gpu_rows(session, host_id)}
            for index in sorted(set(known) - set(gpus)):
                if known[index].task_id is not None:
                    raise StoreError(
                        f"host {host_id}: got GPUs {sorted(gpus)}, expected GPU {index} too, which task "
                        f"{known[index].task_id} holds. Wait for it, or run `alto cancel {known[index].task_id}`."
                    )
                session.delete(known[index])
            for index in sorted(set(gpus) - set(known)):
                session.add(GpuRow(host_id=host_id, gpu=index))
            log_event(session, "host-joined", plural(len(set(gpus)), "GPU"), host_id=host_id)

    def beat(self, host_id: str) -> bool:
        """A sign of life. Returns False when the host is not known or was taken for lost: it has to join again."""
        with self._database.writing() as session:
            row = session.get(HostRow, host_id)
            if row is None or row.is_lost:
                return False
            row.heartbeat_at = _now()
            session.add(row)
            return True

    def lose(self, host_id: str, *, silent_since: datetime) -> bool:
        """Take a host for lost unless it was heard of after that moment. Returns whether this call did it."""
        with self._database.writing() as session:
            row = session.get(HostRow, host_id)
            if row is None or row.is_lost or row.heartbeat_at > silent_since:
                return False
            row.is_lost = True
            session.add(row)
            log_event(session, "host-lost", f"silent since {row.heartbeat_at:%H:%M:%S} UTC", host_id=host_id)
            return True

    def leave(self, host_id: str) -> None:
        """A host that stops gets no further task."""
        with self._database.writing() as session:
            row = session.get(HostRow, host_id)
            if row is not None and not row.is_lost:
                row.is_lost = True
                session.add(row)
                log_event(session, "host-left", "stopped", host_id=host_id)

    def hosts(self) -> tuple[HostRecord, ...]:
        """All hosts, lost ones included, by name."""
        with self._database.reading() as session:
            return tuple(
                HostRecord(
                    **row.model_dump(), holders={gpu.gpu: gpu.task_id for gpu in _gpu_rows(session, row.host_id)}
                )
                for row in session.exec(select(HostRow).order_by(col(HostRow.host_id)))
            )

    def silent(self, seconds: float) -> tuple[HostRecord, ...]:
        """Hosts that count as there but were not heard of for so long."""
        since = _now() - timedelta(seconds=seconds)
        return tuple(host for host in self.hosts() if not host.is_lost and host.heartbeat_at <= since)


def _gpu_rows(session: Session, host_id: str) -> Sequence[GpuRow]:
    return session.exec(select(GpuRow).where(GpuRow.host_id == host_id).order_by(col(GpuRow.gpu))).all()


def _now() -> datetime:
    return datetime.now(UTC)
