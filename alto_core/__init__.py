"""The method: task files, data, engine, early exit, scheduling, tracking, store, report. Prefect stands above it."""
