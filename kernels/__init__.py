"""The grouped LoRA operation: many adapters of mixed ranks on one packed batch.

`segments` says which tokens belong to which adapter, `reference` is the specification in plain torch, `grouped_lora`
the one public operation with autograd. Nothing here knows jobs, models or training.

transformers looks for a hub package of this name; the version below tells it that this is not the one.
"""

__version__ = "0.0.0"
