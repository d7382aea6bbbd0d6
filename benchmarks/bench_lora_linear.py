"""One frozen linear layer with many adapters, forward and backward, every method in one process, all in CUDA graphs.

    python benchmarks/bench_lora_linear.py --out FOLDER            # on a GPU: writes FOLDER/lora_linear.csv
    python benchmarks/bench_lora_linear.py --tune --out FOLDER     # on a GPU: writes FOLDER/triton_tuning.json
    python benchmarks/bench_lora_linear.py --record FOLDER         # anywhere: takes the rows and bars into results/

Rows are relative to the frozen layer alone. Inputs are random and rotate through more memory than the L2 holds; each
method is first checked against a float32 loop.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SHAPES_1B = ((2048, 2048), (2048, 512), (2048, 8192), (8192, 2048))
SHAPES_8B = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096))
RANKS = {"16/32/64": (16, 32, 64), "8..128": (8, 16, 24, 48, 64, 96, 128)}
BARS = {"4x192": 1.40, "32x192": 1.20, "4x768": 1.22, "32x768": 1.15}
TUNED_WIDTHS = (512, 2048, 4096, 8192, 14336)
FAST_METHODS = ("base", "bmm", "grouped_mm", "ours")
L2_BYTES = 120e6
COLUMNS = (
    "rows", "d_in", "d_out", "jobs", "tokens", "distribution", "ranks", "method", "ms_p20", "ms", "ms_p80", "over_base",
    "floor_share",
)  # fmt: skip


def cases(quick: bool) -> Iterator[tuple[str, str, str, Any]]:
    """(group, distribution, rank mix, case): the four bars' cells on all shapes, then ragged and mixed rows."""
    from benchmarks.lora_methods import Case, zipf_tokens

    shapes = (*SHAPES_1B, *SHAPES_8B)
    for jobs, tokens in ((4, 192), (32, 192), (4, 768), (32, 768)):
        for d_in, d_out in shapes[::3] if quick else shapes:
            ranks = tuple(itertools.islice(itertools.cycle(RANKS["16/32/64"]), jobs))
            yield (
                f"{jobs}x{tokens}",
                "equal",
                "16/32/64",
                Case(d_in=d_in, d_out=d_out, tokens=(tokens,) * jobs, ranks=ranks),
            )
    mixes = (("zipf", "16/32/64"), ("zipf", "8..128"), ("equal", "8..128"))
    for jobs, total in itertools.product((4, 16, 32, 64), (256, 4096, 32768)):
        for i, (distribution, mix) in enumerate(mixes):
            # The shapes rotate, so that every kind of row meets a narrow and a wide layer of both models.
            d_in, d_out = shapes[(jobs // 4 + 3 * i + round(math.log2(total))) % 8]
            counts = zipf_tokens(jobs, total) if distribution == "zipf" else (total // jobs,) * jobs
            ranks = tuple(itertools.islice(itertools.cycle(RANKS[mix]), jobs))
            if not quick or total != 32768:
                yield "mixed", distribution, mix, Case(d_in=d_in, d_out=d_out, tokens=counts, ranks=ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--widths", type=int, nargs="+", default=TUNED_WIDTHS, help="to tune; others stay as they are")
    parser.add_argument("--quick", action="store_true", help="a third of the rows")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.record:
        record(options.record)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.tune:
        tune(options.out / "triton_tuning.json", options.widths)
    else:
        measure(options.out, quick=options.quick)


def measure(out: Path, *, quick: bool) -> None:
    from benchmarks.lora_methods import copy_bandwidth

    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s")
    rows: list[dict[str, Any]] = []
    for group, distribution, mix, case in cases(quick):
        times = _measure_case(case, FAST_METHODS if group == "mixed" else (*FAST_METHODS, "loop", "unsloth"))
        base = statistics.median(times["base"])
        for method, values in times.items():
            ms = statistics.median(values)
            share = ""
            if method.startswith("ours"):
                share = f"{case.floor_bytes() / bandwidth * 1000 / max(1e-9, ms - base):.3f}"
            rows.append(
                dict(
                    zip(
                        COLUMNS,
                        (
                            group, case.d_in, case.d_out, len(case.tokens), case.num_tokens, distribution, mix, method,
                            f"{min(values):.5f}", f"{ms:.5f}", f"{max(values):.5f}", f"{ms / base:.3f}", share,
                        ),
                        strict=True,
                    )
                )
            )  # fmt: skip
    with (out / "lora_linear.csv").open("w", newline="", encoding="utf-8") as target:
        writer = csv.DictWriter(target, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    summary = {"bandwidth": bandwidth, **environment(), "bars": bars_of(rows)}
    (out / "lora_linear.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    print_table(rows)
    print(json.dumps(summary["bars"]))


def _measure_case(case: Any, methods: Sequence[str]) -> dict[str, list[float]]:
    """Milliseconds per forward and backward of each method."""
    import torch

    from benchmarks import lora_methods as lm

    torch.cuda.empty_cache()
    weights = lm.Weights(case)
    bytes_per_set = 4 * case.num_tokens * (case.d_in + case.d_out)
    count = min(8, max(2, math.ceil(L2_BYTES / bytes_per_set)))
    xs = [torch.randn(case.num_tokens, case.d_in, device="cuda").to(lm.BF16).requires_grad_() for _ in range(count)]
    dys = [torch.randn(case.num_tokens, case.d_out, device="cuda").to(lm.BF16) for _ in range(count)]
    graphs, steps = {}, []
    for name in methods:
        step = lm.METHODS[name](weights)
        steps.append(step)  # a graph reads the memory that its step holds
        if name != "base":
            lm.check(step, weights, xs[0], dys[0])

        def rotate(step: Callable[..., Any] = step) -> None:
            for x, dy in zip(xs, dys, strict=True):
                step(x, dy)

        graphs[name] = lm.capture(rotate)
    times = lm.time_graphs(graphs, repeats=5, seconds=0.006)
    return {name: [value / count for value in values] for name, values in times.items()}


def bars_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures of issue rows: geometric means, the worst ratio to the best other method, the worst floor share."""
    bars = {}
    for group in BARS:
        ratios = [float(r["over_base"]) for r in rows if r["rows"] == group and r["method"] == "ours"]
        bars[f"kernels.linear_{group}"] = statistics.geometric_mean(ratios)
    worst, shares = 0.0, []
    for _, same in itertools.groupby(rows, key=lambda r: [r[c] for c in COLUMNS[:7]]):
        by_method = {r["method"]: r for r in same}
        others = [float(r["ms"]) for m, r in by_method.items() if m not in ("base", "ours", "ours_serial")]
        worst = max(worst, float(by_method["ours"]["ms"]) / min(others))
        if int(by_method["ours"]["tokens"]) >= 4096:
            shares.append(float(by_method["ours"]["floor_share"]))
    return {**bars, "kernels.worst_over_best_other": worst, "kernels.byte_floor_share_4k": min(shares, default=0.0)}


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    for key, same in itertools.groupby(rows, key=lambda r: [r[c] for c in COLUMNS[:7]]):
        by_method = {r["method"]: r for r in same}
        cells = " ".join(
            f"{m[:6]}{m[-6:] if m == 'ours_serial' else ''} {r['over_base']}" for m, r in by_method.items()
        )
        share = by_method["ours"]["floor_share"]
        print(*key, "| base us", f"{1000 * float(by_method['base']['ms']):.0f} |", cells, "| floor", share)


def environment() -> dict[str, str]:
    """What the figures were measured with."""
    import platform

    import torch
    import triton

    versions = f"python {platform.python_version()}; torch {torch.__version__}; triton {triton.__version__}"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "versions": versions}


CANDIDATES: dict[str, list[dict[str, int]]] = {
    "shrink": [
        {"block_tokens": t, "block_width": w, "num_warps": 4, "num_stages": s, "splits": k}
        for t, w, s, k in (
            (64, 64, 4, 1), (64, 128, 3, 1), (64, 128, 4, 1), (32, 128, 3, 1), (32, 128, 4, 1), (32, 256, 3, 1),
            (128, 64, 3, 1), (32, 128, 4, 2), (32, 128, 3, 4), (64, 128, 3, 2), (64, 128, 3, 4), (16, 256, 3, 1),
            (16, 256, 3, 2),
        )
    ],
    "expand": [
        {"block_tokens": t, "block_width": w, "num_warps": n, "num_stages": s, "width_tiles": k}
        for t, w, n, s, k in (
            (64, 128, 4, 1, 1), (64, 128, 4, 2, 2), (64, 128, 4, 2, 4), (64, 128, 4, 3, 4), (64, 128, 4, 3, 8),
            (64, 64, 4, 3, 4), (64, 64, 4, 3, 8), (64, 64, 4, 4, 8), (64, 64, 4, 3, 16), (128, 64, 4, 3, 4),
            (128, 64, 8, 3, 8), (128, 128, 8, 2, 4), (128, 128, 8, 3, 4), (32, 128, 4, 3, 4), (64, 64, 4, 2, 2),
        )
    ],
    "outer": [
        {"block_tokens": t, "block_width": w, "num_warps": n, "num_stages": s}
        for t, w, n, s in (
            (64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 4), (32, 128, 4, 3), (32, 128, 4, 4),
            (64, 256, 8, 3), (128, 64, 4, 3), (64, 32, 4, 4),
        )
    ],
}  # fmt: skip


def tune(file: Path, widths: Sequence[int]) -> None:
    """Time every candidate of each kernel at some widths, for one projection; write the table with the fastest."""
    import torch

    from benchmarks import lora_methods as lm
    from kernels.triton_expand import expand_
    from kernels.triton_outer import outer_
    from kernels.triton_shrink import shrink
    from kernels.triton_tuning import TABLE, Tiles

    table: dict[str, list[dict[str, Any]]] = {
        kernel: [row for row in rows if row.get("projections", 1) > 1 or row["width"] not in widths]
        for kernel, rows in json.loads(TABLE.read_text(encoding="utf-8")).items()
    }
    for (jobs, each), width in itertools.product(((4, 192), (32, 192), (32, 768)), widths):
        tokens = jobs * each
        ranks = tuple(itertools.islice(itertools.cycle(RANKS["16/32/64"]), jobs))
        segments = lm.adapter_segments((each,) * jobs, ranks, (2.0,) * jobs)
        w = (torch.randn(sum(ranks), width, device="cuda") * 0.02).to(lm.BF16)
        grad = torch.zeros_like(w, dtype=torch.float32)
        count = min(8, max(2, math.ceil(L2_BYTES / (2 * tokens * width))))
        xs = [torch.randn(tokens, width, device="cuda").to(lm.BF16) for _ in range(count)]
        s = shrink(xs[0], [w], [segments], [0], tiles=Tiles(block_tokens=64, block_width=64))
        calls: dict[str, Callable[[Any, Tiles], Any]] = {
            "shrink": lambda x, t, w=w, segments=segments: shrink(x, [w], [segments], [0], tiles=t),
            "expand": lambda x, t, w=w, s=s, segments=segments: expand_(x, s, [w], [segments], [0], tiles=t),
            "outer": lambda x, t, g=grad, s=s, segments=segments: outer_(
                g, x, s[0], segments, 0, accumulate=False, tiles=t
            ),
        }
        for kernel, call in calls.items():
            timed = []
            for values in CANDIDATES[kernel]:
                tiles = Tiles(**values)
                graph = lm.capture(lambda call=call, tiles=tiles, xs=xs: [call(x, tiles) for x in xs])
                ms = min(lm.time_graphs({"": graph}, repeats=3, seconds=0.004)[""]) / count
                timed.append((ms, values))
            timed.sort(key=lambda pair: pair[0])
            moved = 2 * tokens * width * (2 if kernel == "expand" else 1) + sum(ranks) * width * (
                4 if kernel == "outer" else 2
            )
            print(
                kernel, tokens, width, f"{1000 * timed[0][0]:.1f} us {moved / timed[0][0] / 1e9:.2f} TB/s",
                *(f"{1000 * ms:.1f}:{'/'.join(map(str, v.values()))}" for ms, v in timed[:4]),
                f"worst {1000 * timed[-1][0]:.1f}", flush=True,
            )  # fmt: skip
            table[kernel].append({"tokens": tokens, "width": width, "tiles": timed[0][1]})
    text = ",\n".join(
        f' "{kernel}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        for kernel, rows in table.items()
    )
    file.write_text("{\n" + text + "\n}\n", encoding="utf-8")


def record(folder: Path) -> None:
    """Take fetched rows and bars into results/."""
    from benchmarks.kernel_bars import merge

    merge(folder, "lora_linear")


if __name__ == "__main__":
    main()
