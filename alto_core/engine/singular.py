"""The leading singular vectors of a matrix, by subspace iteration from a fixed start.

Halko, Martinsson and Tropp, arXiv 0909.4061, algorithm 4.4. Products with the matrix are all that it takes, so a wide
layer costs little more than its forward pass. Where more vectors are wanted than the narrower side has room for beside
the spare ones, the result is that of a whole decomposition.

Shape suffixes: O rows of the matrix, I columns, r wanted vectors, k tried ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SPARE = 32
"""Vectors tried beside the wanted ones."""
ITERATIONS = 4

Product = Callable[[Tensor], Tensor]


def leading_singular(matrix_OI: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """U [O, r], S [r] and V^T [r, I] of the largest singular values, in float32; equal on every call.

    Args:
        matrix_OI: any float dtype and strides.
        count: r, at most the narrower side.
    """
    matrix_OI = matrix_OI.float()
    return leading_singular_of(lambda x: matrix_OI @ x, lambda y: matrix_OI.T @ y, matrix_OI, count)


def leading_singular_of(
    times: Product, transposed_times: Product, like_OI: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of a matrix that is known by its products.

    Args:
        times: M x of columns [I, k].
        transposed_times: M^T y of columns [O, k].
        like_OI: any tensor of the matrix's shape, on its device.
        count: r, at most the narrower side.
    """
    narrower = min(like_OI.shape)
    assert 0 < count <= narrower
    tried = min(count + SPARE, narrower)
    # Drawn on the CPU: every device starts from the same.
    start_Ik = torch.randn(like_OI.shape[1], tried, generator=torch.Generator().manual_seed(0))
    q_Ok = torch.linalg.qr(times(start_Ik.to(like_OI.device)))[0]
    for _ in range(ITERATIONS):
        q_Ik = torch.linalg.qr(transposed_times(q_Ok))[0]
        q_Ok = torch.linalg.qr(times(q_Ik))[0]
    u_kk, s_k, vt_kI = torch.linalg.svd(transposed_times(q_Ok).T, full_matrices=False)
    return (q_Ok @ u_kk)[:, :count], s_k[:count], vt_kI[:count]
