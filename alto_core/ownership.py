"""Who may change what, where MLflow asks for a login. Without logins nobody is known, and everybody may change all.

The check is made by the command or the stage that changes something, before it does; docs/security.md says what that
protects and what it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from alto_core.config import TuningTask
from alto_core.errors import OwnerError, TaskFileError

UNNAMED = "me"
"""Owner of a task whose file names none."""


@dataclass(frozen=True, kw_only=True)
class Person:
    """Who asks."""

    name: str | None = None
    """As logged in to MLflow; None: it asks nobody for a login."""
    is_admin: bool = False

    def require_owner(self, owner: str | None, what: str, action: str) -> None:
        """Refuse to change what belongs to someone else.

        Args:
            owner: whose it is; None: it was made before there were logins, and MLflow's own permissions decide.
            what: for the message, as `task demo-1`.
            action: for the message, as `cancel`.

        Raises:
            OwnerError: it is another one's, and who asks is no admin.
        """
        if self.name is None or self.is_admin or owner in (None, self.name):
            return
        raise OwnerError(
            f"{what}: got {self.name}, who asks to {action} it, expected its owner {owner} or an admin of MLflow. "
            f"Ask {owner}."
        )

    def as_owner(self, task: TuningTask) -> TuningTask:
        """The task with its owner: who asks, unless an admin makes it for someone.

        Raises:
            TaskFileError: its file names someone else.
        """
        if self.name is None or (self.is_admin and task.owner != UNNAMED):
            return task
        if task.owner not in (UNNAMED, self.name):
            raise TaskFileError(
                "owner",
                got=task.owner,
                expected=f"{self.name}, as you are logged in to MLflow",
                hint="Leave the field out, or log in as that user.",
            )
        return task.model_copy(update={"owner": self.name})
