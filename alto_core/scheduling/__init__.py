"""Who runs where and when, and what that takes and lasts: tasks on GPUs, jobs in slots. Pure functions and values.

Times of plans are whole seconds from the moment of planning. Nothing here knows the store, Prefect or a wall clock.
"""
