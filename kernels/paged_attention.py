"""Attention of one query per row over keys and values that lie in pages of a pool: a step of generation.

*Semantics*, for row n that looks at `counts_N[n]` places, the latest last, head h of key head k, and a window of w:

    place p of the row lies at      f(p)      = pages_NM[n, p // L] L + p % L
    out[n, h] = sum of weight(p) values[f(p), k] over the places p in max(0, count - w) .. count - 1
    weight    = softmax over these of bend(scale query[n, h] . keys[f(p), k]),    bend(s) = s or cap tanh(s / cap)

Nothing but these places enters, whatever the rest of the pool holds. Scores, weights and sums are float32.

Shape suffixes: N rows, M pages of a row, L places of a page (`PAGE_PLACES`), F places of the pool, C places that the
twin looks at, H heads, K key/value heads, G = H / K, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.pages import PAGE_PLACES
from kernels.path_choice import Implementation, choose_path

MIN_TRITON_WIDTH = 16
"""Of a head, which is what the tensor cores multiply at least."""


def paged_attention(
    query_NHD: Tensor,
    keys_FKD: Tensor,
    values_FKD: Tensor,
    pages_NM: Tensor,
    counts_N: Tensor,
    *,
    most_places: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See above. On CUDA it waits for nothing and may be captured.

    Args:
        query_NHD: any strides.
        keys_FKD, values_FKD: contiguous, whole pages, dtype of the query.
        pages_NM: int32, numbers of pages.
        counts_N: int32, places that each row looks at, 1 at least.
        most_places: no count is larger. The Triton kernel reads each row's count instead.
        scale: factor on the scores.
        window: the latest so many places alone are seen; None: all.
        softcap: bound of the scores, as Gemma 2 has it; None: they are not bent.

    Returns:
        out [N, H, D], contiguous, in the query's dtype.
    """
    choice = choose_path(query_NHD.device, query_NHD.dtype).implementation
    if choice is Implementation.TRITON and query_NHD.shape[-1] >= MIN_TRITON_WIDTH:
        from kernels.triton_paged_attention import attend  # cannot be imported without Triton

        return attend(query_NHD, keys_FKD, values_FKD, pages_NM, counts_N, scale=scale, window=window, softcap=softcap)
    return paged_attention_twin(
        query_NHD,
        keys_FKD,
        values_FKD,
        pages_NM,
        counts_N,
        most_places=most_places,
        scale=scale,
        window=window,
        softcap=softcap,
    )


def paged_attention_twin(
    query_NHD: Tensor,
    keys_FKD: Tensor,
    values_FKD: Tensor,
    pages_NM: Tensor,
    counts_N: Tensor,
    *,
    most_places: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`paged_attention` in plain torch: each row's places are copied out of the pool, then attended to at once."""
    (num_rows, _, width), key_heads = query_NHD.shape, keys_FKD.shape[1]
    num_pages = -(-most_places // PAGE_PLACES)
    place_C = torch.arange(num_pages * PAGE_PLACES, device=query_NHD.device)
    seen_NC = place_C < counts_N[:, None]
    if window is not None:
        seen_NC &= place_C >= counts_N[:, None] - window
    # all rows see what lies before; where the host would wait for the device to know it, nothing is taken to
    seen_by_all = int(counts_N.min()) if window is None and query_NHD.device.type == "cpu" else 0

    def copied(pool_FKD: Tensor) -> Tensor:
        pages = pool_FKD.view(-1, PAGE_PLACES * key_heads * width).index_select(0, pages_NM[:, :num_pages].flatten())
        copy_NCKD = pages.view(num_rows, len(place_C), key_heads, width)
        # what is not seen may be anything that another row left there, and 0 times not-a-number is not 0
        copy_NCKD[:, seen_by_all:].masked_fill_(~seen_NC[:, seen_by_all:, None, None], 0.0)
        return copy_NCKD.transpose(1, 2)

    keys_NKCD, values_NKCD = copied(keys_FKD), copied(values_FKD)
    seen_N11C = seen_NC[:, None, None]
    # heads that share keys become queries of one head, so that shared keys are read once
    query_NKGD = query_NHD.reshape(num_rows, key_heads, -1, width)
    if softcap is None:
        out_NKGD = functional.scaled_dot_product_attention(
            query_NKGD, keys_NKCD, values_NKCD, attn_mask=seen_N11C, scale=scale
        )
    else:
        scores_NKGC = torch.tanh(query_NKGD @ keys_NKCD.transpose(-1, -2) * scale / softcap) * softcap
        scores_NKGC = scores_NKGC.masked_fill(~seen_N11C, float("-inf"))
        weights_NKGC = functional.softmax(
            scores_NKGC, dim=-1, dtype=torch.promote_types(query_NHD.dtype, torch.float32)
        )
        out_NKGD = weights_NKGC.to(query_NHD.dtype) @ values_NKCD
    return out_NKGD.reshape(num_rows, -1, width)
