"""LoRA dropout masks from a counter: every element's bit is a hash of where it is; nothing is stored or drawn in order.

*Semantics*, all arithmetic modulo 2^32, t counted within the job:

    layer seed = mix(seed ^ mix(layer + G))     keep[t, i] = mix(mix(layer seed + t) ^ mix(i * G)) >= dropout * 2^32

A job's mask therefore does not depend on which other jobs share the step, and backward makes the same mask again.
mix is lowbias32 (a 32-bit mixer by Chris Wellons, public domain) in wrapping arithmetic, which a kernel repeats bit for
bit; G is 0x9E3779B9.

Shape suffixes: see `segments`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B
_GOLDEN = 0x9E3779B9
_BITS_32 = 0xFFFFFFFF


def mix32(value: int) -> int:
    """lowbias32 of an unsigned 32-bit integer."""
    value &= _BITS_32
    value = ((value ^ (value >> 16)) * _MULTIPLIER_1) & _BITS_32
    value = ((value ^ (value >> 15)) * _MULTIPLIER_2) & _BITS_32
    return value ^ (value >> 16)


def segment_seed(*, job_seed: int, update: int, micro_step: int) -> int:
    """The 32 bits that a job's masks start from in one micro step. `job_seed` may have any size and sign."""
    seed = mix32(job_seed ^ _GOLDEN)
    for part in (job_seed >> 32, update, micro_step):
        seed = mix32((seed + _GOLDEN) ^ mix32(part))
    return seed


def drop_threshold(dropout: float) -> int:
    """Elements whose hash, an unsigned 32-bit number, is below this are dropped."""
    return min(round(dropout * (1 << 32)), _BITS_32)


def keep_mask(
    *, seed: int, layer_index: int, num_tokens: int, width: int, dropout: float, device: torch.device
) -> Tensor:
    """Which elements of a segment's input stay.

    Args:
        seed: from `segment_seed`.
        layer_index: which layer asks.
        num_tokens, width: shape of the segment's input.
        dropout: probability of dropping, in [0, 1).

    Returns:
        bool [num_tokens, width], true where kept.
    """
    layer_seed = mix32(seed ^ mix32(layer_index + _GOLDEN))
    token_keys_t = _mix32_(torch.arange(num_tokens, dtype=torch.int32, device=device).add_(_signed(layer_seed)))
    feature_keys_I = _mix32_(torch.arange(width, dtype=torch.int32, device=device).mul_(_signed(_GOLDEN)))
    hashes_tI = _mix32_(token_keys_t[:, None] ^ feature_keys_I)
    # Flipping the top bit makes signed order equal to unsigned order.
    return hashes_tI.bitwise_xor_(_signed(1 << 31)) >= drop_threshold(dropout) - (1 << 31)


def _mix32_(values: Tensor) -> Tensor:
    """`mix32` of each int32 element, in place. Shifts of int32 carry the sign, so the upper bits are masked off."""
    values ^= (values >> 16) & 0xFFFF
    values *= _signed(_MULTIPLIER_1)
    values ^= (values >> 15) & 0x1FFFF
    values *= _signed(_MULTIPLIER_2)
    values ^= (values >> 16) & 0xFFFF
    return values


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >= 1 << 31 else bits
