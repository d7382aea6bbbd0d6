"""The stages of a tuning task as Prefect tasks, one per file: open the task by id, call the core, return a value."""
