"""Fuses what stands between the linear layers of a model, layer by layer, with `torch.compile`.

Each decoder layer is compiled as it is. The wrapped linear layers and the attention stay out of it, so what is fused
are norms, rotary embeddings, activations and residual additions. All layers of a model share the compiled code. It is
made for one number of tokens first and for any number at the second, with and without gradients: four variants or more,
which is near torch's own limit, above which it leaves a function uncompiled. Torch notes in its cache folder which
sizes of this model vary, so later processes begin with the code for any number, which lies in that cache as well.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from alto_core.engine.decoder_layers import decoder_layers
from kernels.path_choice import has_triton

MAX_VARIANTS = 32
"""Of one function, before it runs uncompiled."""
NOTES = "alto-"
"""Begins the names under which torch keeps notes of sizes; a name that the user has set is left alone."""


def compile_layers(model: Any) -> None:
    """Compile every decoder layer at its next call. Models whose layers are not found run as they are."""
    import torch._dynamo.config

    _note_sizes_of(model)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    for layer in decoder_layers(model):
        layer.compile()


def _note_sizes_of(model: Any) -> None:
    """Have torch read and write down which sizes vary under a name of this model's own.

    Sizes of two models under one name would make their widths look variable too, and the code for that is slower.
    """
    import torch.compiler.config
    from torch._dynamo.pgo import reset_code_state

    shapes = ((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())
    digest = hashlib.sha256(repr((type(model).__name__, *shapes)).encode()).hexdigest()[:16]
    known = torch.compiler.config.job_id
    if known is None or (known.startswith(NOTES) and known != NOTES + digest):
        reset_code_state()  # what is in memory belongs to the name before
        torch.compiler.config.job_id = NOTES + digest


def uncompile_layers(model: Any) -> None:
    """Let every decoder layer run as transformers wrote it."""
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None


@contextmanager
def compile_time() -> Iterator[list[float]]:
    """Yields a list whose one entry, after the block, is the seconds of it that `torch.compile` and Triton took."""
    from torch._dynamo.callback import callback_handler

    seconds, began = [0.0], [0.0]

    def start(*_: object) -> None:
        began[0] = time.perf_counter()

    def end(*_: object) -> None:
        seconds[0] += time.perf_counter() - began[0]

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        with _kernel_compile_time() as of_kernels:
            yield seconds
        seconds[0] += of_kernels[0]
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)


def _kernel_compile_time() -> AbstractContextManager[list[float]]:
    if not has_triton():
        return nullcontext([0.0])
    from kernels.triton_compile_time import kernel_compile_time  # cannot be imported without Triton

    return kernel_compile_time()
