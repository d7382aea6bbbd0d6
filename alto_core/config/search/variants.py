"""What search spaces share of LoRA's variants: types of their fields, and the refusal of DoRA. See docs/variants.md."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _refuse_dora(value: bool) -> bool:
    if value:
        raise ValueError(
            "false: DoRA scales every output by a norm of W + BA, so each job would run the frozen weights by itself, "
            "and nothing could be shared. `init: pissa` and `use_rslora: true` are the variants for high ranks"
        )
    return value


UseDora = Annotated[bool, AfterValidator(_refuse_dora)]
"""Taken only as `false`, as PEFT's configurations have it."""
