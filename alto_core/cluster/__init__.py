"""Between the store and the planner: what there is to plan, runs that hold GPUs, and what to do when they die.

Prefect is not known here; flows tell what its runs look like.
"""
