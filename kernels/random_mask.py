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
    rows = torch.arange(num_tokens, dtype=torch.int32, device=device)
    seeds, thresholds = (torch.full_like(rows, _signed(bits)) for bits in (seed & _BITS_32, drop_threshold(dropout)))
    return keep_mask_of_rows(seeds, rows, thresholds, layer_index=layer_index, width=width)


def keep_mask_of_rows(
    seeds_T: Tensor, tokens_T: Tensor, thresholds_T: Tensor, *, layer_index: int, width: int
) -> Tensor:
    """`keep_mask` for rows of any segments.

    Args:
        seeds_T: int32, bit pattern of each row's segment seed.
        tokens_T: int32, each row's number within its segment.
        thresholds_T: int32, bit pattern of `drop_threshold`.
        layer_index, width: as in `keep_mask`.

    Returns:
        bool [T, width], true where kept.
    """
    layer_seeds_T = _mix32_(seeds_T ^ _signed(mix32(layer_index + _GOLDEN)))
    token_keys_T = _mix32_(layer_seeds_T.add_(tokens_T))
    feature_keys_I = _mix32_(torch.arange(width, dtype=torch.int32, device=seeds_T.device).mul_(_signed(_GOLDEN)))
    hashes_TI = _mix32_(token_keys_T[:, None] ^ feature_keys_I)
    # Flipping the top bit makes signed order equal to unsigned order.
    top_bit = _signed(1 << 31)
    return hashes_TI.bitwise_xor_(top_bit) >= (thresholds_T ^ top_bit)[:, None]


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
