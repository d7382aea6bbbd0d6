"""The fused AdamW over all adapters of a model against its byte floor.

    python benchmarks/bench_adamw.py --out FOLDER                  # on a GPU: writes FOLDER/adamw.json
    python benchmarks/bench_adamw.py --record FOLDER               # anywhere: takes the bar into results/

32 adapters of ranks 16/32/64 of the Llama-3.2-1B shape, 842 million parameters. The floor reads parameters, gradients
and both moments and writes all but the gradients, once each, at the speed of a copy; the update also reads the
gradients for the norms and writes the compute-dtype copy of the parameters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RANKS, JOBS = (16, 32, 64), 32
WIDTH = 16 * (2 * 2048 + 2 * (2048 + 512) + 2 * 2048 + 3 * (2048 + 8192))
FLOOR_BYTES = 28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.record:
        from benchmarks.kernel_bars import merge

        merge(options.record, "adamw")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    measure(options.out)


def measure(out: Path) -> None:
    import torch

    from benchmarks import lora_methods as lm
    from benchmarks.bench_lora_linear import environment
    from kernels.triton_adamw import AdamWState, adamw_update_

    bandwidth = lm.copy_bandwidth()
    ranks = list(itertools.islice(itertools.cycle(RANKS), JOBS))
    rows = sum(ranks)
    params, grads, exp_avg, exp_avg_sq = (torch.randn(rows, WIDTH, device="cuda") * 1e-2 for _ in range(4))
    exp_avg_sq.square_()
    shadow = params.to(lm.BF16)

    def column(value: float) -> torch.Tensor:
        return torch.full((JOBS,), value, device="cuda")

    state = AdamWState(
        job_of_row_R=torch.arange(JOBS, dtype=torch.int32).repeat_interleave(torch.tensor(ranks)).to("cuda"),
        is_updated_J=torch.ones(JOBS, dtype=torch.int32, device="cuda"),
        learning_rate_J=column(1e-4),
        weight_decay_J=column(0.01),
        beta1_J=column(0.9),
        beta2_J=column(0.999),
        epsilon_J=column(1e-8),
        correction1_J=column(0.1),
        correction2_sqrt_J=column(0.03),
        max_grad_norm_J=column(1.0),
        a_ratio_J=column(1.0),
        b_ratio_J=column(1.0),
        is_b_W=torch.zeros(WIDTH, dtype=torch.int8, device="cuda"),
    )
    graph = lm.capture(lambda: adamw_update_(params, grads, exp_avg, exp_avg_sq, state, shadow_RW=shadow))
    ms = statistics.median(lm.time_graphs({"": graph}, repeats=5, seconds=0.1)[""])
    share = params.numel() * FLOOR_BYTES / bandwidth * 1000 / ms
    print(f"{params.numel() / 1e6:.0f} M parameters: {ms:.2f} ms, copy {bandwidth / 1e12:.2f} TB/s, share {share:.3f}")
    summary = {**environment(), "ms": ms, "bars": {"kernels.adamw_bandwidth_share": share}}
    (out / "adamw.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
