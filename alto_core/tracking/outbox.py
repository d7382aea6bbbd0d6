"""The writing side of one task's tracking: into the spool at once, to MLflow by the side thread."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

from alto_core.domain import Evaluation, StepRecord
from alto_core.errors import TrackingError
from alto_core.tracking import connection
from alto_core.tracking.connection import Connection, UnreachableError
from alto_core.tracking.history import HistoryReader
from alto_core.tracking.logbook import Logbook
from alto_core.tracking.messages import VAL_LOSS, Message, Status, Upload
from alto_core.tracking.sender import Sender
from alto_core.tracking.spool import Spool
from alto_core.tracking.sums import read_progress
from alto_core.tracking.task_curves import TaskCurves


class Outbox:
    """Safe to use from several threads.

    Args:
        connection: the way to MLflow.
        spool: the task's spool.
        task_folder: files in it are named relative to it, so that it may move.
        curves: are told what is logged, and what MLflow has got.
        ema_alpha: weight of the newest loss in the smoothed train loss.
    """

    def __init__(
        self,
        connection: Connection,
        spool: Spool,
        task_folder: Path,
        *,
        curves: TaskCurves,
        ema_alpha: float,
    ):
        self._spool, self._task_folder, self._curves = spool, task_folder.resolve(), curves
        self._lock = threading.RLock()
        reader = HistoryReader(connection)
        self._logbook = Logbook(spool, ema_alpha, lambda steps: read_progress(reader, steps, ema_alpha))
        self._sender = Sender(connection, spool, self._task_folder, curves.read_back)

    @property
    def is_away(self) -> bool:
        """Whether MLflow was away when it was last tried."""
        return self._sender.is_away

    def now(self) -> int:
        """Milliseconds since 1970, later than everything logged before."""
        with self._lock:
            return self._logbook.now()

    def put(self, messages: Sequence[Message]) -> None:
        """Send messages as they are."""
        with self._lock:
            self._curves.add(messages)
            num_bytes = self._spool.append(messages)
        if num_bytes:
            self._sender.wake(num_bytes)

    def put_steps(self, records: Mapping[str, Sequence[StepRecord]]) -> None:
        """Send optimizer steps, by run id, those of a run one after the other."""
        with self._lock:
            messages = self._logbook.steps(records)
            measures: list[Message] = []
            for run_id, of_run in records.items():
                self._curves.note_steps(run_id, of_run[-1].step)
                for record in (record for record in of_run if record.measures):
                    measures += self._logbook.values(run_id, record.step, record.measures)
            self.put([*messages, *measures])

    def put_values(self, run_id: str, step: int, values: Mapping[str, float]) -> None:
        """Send metrics of a run at a step."""
        with self._lock:
            self.put(self._logbook.values(run_id, step, values))

    def put_evaluations(self, evaluations: Sequence[tuple[str, Evaluation]]) -> None:
        """Send validation losses, each with its run id, and with them what sums up the steps so far."""
        with self._lock:
            messages: list[Message] = []
            for run_id, evaluation in evaluations:
                sums = self._logbook.sums(run_id, evaluation.step)
                values = {VAL_LOSS: evaluation.val_loss, **evaluation.measures, **sums}
                messages += self._logbook.values(run_id, evaluation.step, values)
            self.put(messages)

    def put_end(self, run_id: str, status: str) -> None:
        """End a run in this state."""
        self.put([Status(run_id=run_id, status=status, end_time=self.now())])

    def put_file(self, run_id: str, file: Path, folder: str | None) -> None:
        """Send a file or a folder that stays as it is."""
        file = file.resolve()
        is_inside = file.is_relative_to(self._task_folder)
        path = file.relative_to(self._task_folder).as_posix() if is_inside else str(file)
        self.put([Upload(run_id=run_id, path=path, folder=folder)])

    def put_copy(self, run_id: str, file: Path, folder: str | None) -> None:
        """Send a file as it is now.

        Raises:
            TrackingError: `folder` leads out of the run's artifacts.
        """
        kept = self._kept_file(f"{folder}/{file.name}" if folder else file.name)
        shutil.copyfile(file, kept)
        self.put_file(run_id, kept, folder)

    def put_text(self, run_id: str, text: str, name: str) -> None:
        """Send a text; `name` is its path among the run's artifacts.

        Raises:
            TrackingError: it leads out of them.
        """
        kept, folder = self._kept_file(name), PurePosixPath(name).parent
        kept.write_text(text, encoding="utf-8")
        self.put_file(run_id, kept, None if folder == PurePosixPath() else str(folder))

    def hurry(self, run_ids: Collection[str], seconds: float) -> None:
        """Send what waits for these runs first, and wait for it as long as that may help."""
        self._sender.hurry(run_ids, seconds)

    def flush(self, seconds: float | None) -> None:
        """Wait until MLflow has everything.

        Args:
            seconds: how long an MLflow is waited for that takes nothing; None: as long as any call.

        Raises:
            TrackingError: MLflow refused something, which is passed over and told once.
            UnreachableError: MLflow stayed away; what waits is in the spool, and the next flush tries again.
        """
        self.put([])  # what a full disk did not take
        self._sender.flush(connection.PATIENCE_SECONDS if seconds is None else seconds)

    def release(self, seconds: float | None) -> str:
        """Wait as `flush` does, then leave the spool to others; tells why something still waits, else empty.

        Raises:
            TrackingError: MLflow refused something.
        """
        try:
            self.flush(seconds)
        except UnreachableError as error:
            return str(error)
        finally:
            self._sender.stop()
        return ""

    def _kept_file(self, name: str) -> Path:
        root = (self._spool.folder / "files").resolve()
        file = (root / name).resolve()
        if not file.is_relative_to(root):
            raise TrackingError(f"artifact {name!r}: got a path out of the artifacts' folder, expected one inside")
        file.parent.mkdir(parents=True, exist_ok=True)
        return file
