"""Variants of single kernels that are not in use, timed against those that are, in CUDA graphs.

    python benchmarks/kernel_variants.py          # on a GPU; prints microseconds and bytes per second

`expand` with tiles of 128 ranks: no loop over ranks up to there, so that output and B are loaded ahead.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WIDTHS = (512, 2048, 4096, 8192, 14336)
RANKS = {"8..128": (8, 16, 24, 48, 64, 96, 128), "128": (128,)}


def main() -> None:
    import torch

    from benchmarks import lora_methods as lm
    from kernels.triton_expand import expand_
    from kernels.triton_shrink import shrink
    from kernels.triton_tuning import choose_tiles

    for (mix, ranks), total, width, count in itertools.product(RANKS.items(), (4096, 32768), WIDTHS, (1, 3)):
        tokens, ranks = lm.zipf_tokens(16, total), tuple(itertools.islice(itertools.cycle(ranks), 16))
        segments = [lm.adapter_segments(tokens, ranks, (2.0,) * 16)] * count
        w = [(torch.randn(sum(ranks), width, device="cuda") * 0.02).to(lm.BF16) for _ in range(count)]
        sets = max(2, min(8, round(240e6 / (2 * total * width))))
        outs = [torch.randn(total, width, device="cuda").to(lm.BF16) for _ in range(sets)]
        layers = list(range(count))
        s = shrink(outs[0], w, segments, layers)
        tiles = choose_tiles("expand", total, width, count)
        variants = {
            "64": tiles,
            "128": dataclasses.replace(tiles, block_rank=128),
            "128, 2 stages": dataclasses.replace(tiles, block_rank=128, num_stages=2),
            "128, half as wide": dataclasses.replace(tiles, block_rank=128, block_width=tiles.block_width // 2),
            "128, 8 warps": dataclasses.replace(tiles, block_rank=128, num_warps=8),
        }
        graphs, results = {}, {}
        for name, variant in variants.items():
            results[name] = outs[0].clone()
            expand_(results[name], s, w, segments, layers, tiles=variant)
            difference = (results[name].float() - results["64"].float()).norm() / results["64"].float().norm()
            assert difference < 4e-3, f"{name}: {difference.item():.1e}"

            def add(variant=variant, outs=outs, s=s, w=w, segments=segments, layers=layers) -> None:  # type: ignore[no-untyped-def]
                for out in outs:
                    expand_(out, s, w, segments, layers, tiles=variant)

            graphs[name] = lm.capture(add)
        shrunk = sum(t * r for t, r in zip(tokens, ranks, strict=True))
        moved = 4 * total * width + 2 * count * (sum(ranks) * width + shrunk)
        times = lm.time_graphs(graphs, repeats=5, seconds=0.01)
        cells = {name: sorted(values)[2] / sets for name, values in times.items()}
        print(
            mix,
            total,
            width,
            f"{count} projections",
            *(f"| {n}: {1000 * ms:.1f} us {moved / ms / 1e9:.2f} TB/s" for n, ms in cells.items()),
        )


if __name__ == "__main__":
    main()
