"""Which task runs when and on which GPUs: instances, plans, and the ways to make and check one.

Times are whole seconds from the moment of planning. Nothing here knows the store, Prefect or a wall clock.
"""
