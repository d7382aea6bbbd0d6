"""Training many LoRA jobs at once over one frozen backbone: load, wrap, step, evaluate, generate, save, export.

`engine.Engine` is what the executor uses; the other modules each hold one concept of it. Which job trains when, and
when it ends, is decided elsewhere (`executor`, `early_exit`).
"""
