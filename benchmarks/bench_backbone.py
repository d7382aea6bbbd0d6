"""A whole model with many adapters, forward and backward in a CUDA graph, against the frozen model alone.

    python benchmarks/bench_backbone.py --out FOLDER               # on a GPU: writes FOLDER/backbone.csv
    python benchmarks/bench_backbone.py --record FOLDER            # anywhere: takes the rows and bars into results/

Each case runs in a process of its own and is saved when it ends; a method that does not fit into the GPU's memory gets
a row that says so. --cases chooses, --minutes bounds the whole run. Cases measured again replace their rows.

Random weights of the Llama-3.2-1B and Llama-3.1-8B shapes, LoRA on all seven projections, labels on the last 132 of 192
tokens, logits only there. Backbone, attention and capture are the same for all methods.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RANKS = {"16/32/64": (16, 32, 64), "8..128": (8, 16, 24, 48, 64, 96, 128)}
METHODS = ("base", "ours", "bmm", "grouped_mm")
BARS = {case: f"kernels.model_{case}" for case in ("1b_zipf", "8b_16", "1b_b1", "1b_b2", "1b_b4")}
"""Cases in the order of a run: those that take longest to set right first."""
OUT_OF_MEMORY = "out of memory"
TRY_AGAIN = 75
"""Exit status after an exhausted memory during a capture, which this process cannot go on from."""
COLUMNS = ("row", "model", "jobs", "tokens", "distribution", "ranks", "method", "ms_min", "ms", "ms_max", "over_base")


def attempt(call: Callable[[], Any]) -> Any:
    """What the call returns, or None where the GPU's memory does not hold it."""
    import torch

    try:
        return call()
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
    # Not before here: the traceback keeps tensors alive.
    gc.collect()
    torch.cuda.empty_cache()
    return None


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether that is the error or led to it: the end of a broken capture raises one of its own."""
    import torch

    if error is None:
        return False
    is_own = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
    return is_own or ran_out_of_memory(error.__context__)


def measure_case(
    name: str, model_name: str, tokens: Sequence[int], mix: str, methods: Sequence[str], *, profile: bool
) -> tuple[dict[str, list[float]], str | None]:
    """Milliseconds of each method's replays, five interleaved rounds, none where it ran out of memory.

    Losses and dx of the methods are compared first. When the memory ends during a capture, there are no times, and the
    second value names the method.
    """
    import torch

    from benchmarks import lora_methods as lm
    from benchmarks.backbone_steps import LENGTH, Adapters, attach_ours, attach_stacked, build_model, make_step

    ranks = tuple(itertools.islice(itertools.cycle(RANKS[mix]), len(tokens)))
    model = build_model(model_name)
    adapters = Adapters(model, tokens, ranks)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    plain = {name: module.forward for name, module in linears.items()}
    forwards, steps, losses = {}, {}, {}

    def use(method_forwards: dict[str, Any]) -> None:
        for name, forward in method_forwards.items():
            linears[name].forward = forward

    def prepare(method: str) -> tuple[Any, float, Any]:
        leaves: Sequence[Any] = ()
        if method == "ours":
            attach_ours(model, adapters)
        elif method != "base":
            leaves = attach_stacked(model, adapters, method)
        step = make_step(model, sum(tokens) // LENGTH, leaves)
        loss, dx, *_ = step()
        return step, loss.item(), dx.float()

    # All eager work comes before the first capture: both need much of the memory.
    for method in methods:
        torch.manual_seed(0)
        use(plain)
        prepared = attempt(lambda method=method: prepare(method))
        if prepared is not None:
            steps[method], loss, dx = prepared
            forwards[method] = {name: module.forward for name, module in linears.items()}
            if method != "base":
                losses[method] = (loss, dx)
        prepared = dx = None
        torch.cuda.empty_cache()
    if losses:
        check_agreement(name, losses)
    graphs, pool = {}, torch.cuda.graph_pool_handle()
    for method in steps:
        use(forwards[method])
        try:
            graphs[method] = lm.capture(steps[method], pool, warm_up=sum(tokens) < 20_000)
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            return {}, method
        if profile:
            lm.print_profile(method, graphs[method])
    times = lm.time_graphs(graphs, repeats=5, seconds=0.1)
    for graph in graphs.values():
        graph.reset()
    return {method: times.get(method, []) for method in methods}, None


def check_agreement(name: str, losses: dict[str, tuple[float, Any]]) -> None:
    """Compare each method's loss and dx with the first's.

    Raises:
        ValueError: they differ by more than rounding to bfloat16 explains.
    """
    reference, reference_dx = next(iter(losses.values()))
    for loss, dx in losses.values():
        difference = ((dx - reference_dx).norm() / reference_dx.norm()).item()
        if abs(loss - reference) > 2e-3 * abs(reference) or not difference < 0.15:
            raise ValueError(f"{name}: methods disagree: losses {loss} and {reference}, dx by {difference:.2e}")


def plan(case: str) -> tuple[str, tuple[int, ...], str]:
    """Model, tokens of each job, mix of ranks."""
    from benchmarks.backbone_steps import LENGTH
    from benchmarks.lora_methods import zipf_tokens

    if case == "1b_zipf":
        return "1b", tuple(rows * LENGTH for rows in zipf_tokens(32, 64)), "8..128"  # whole rows
    if case == "8b_16":
        return "8b", (LENGTH,) * 16, "16/32/64"
    return "1b", (int(case.removeprefix("1b_b")) * LENGTH,) * 32, "16/32/64"


def read_rows(out: Path) -> list[list[str]]:
    if not (out / "backbone.csv").exists():
        return []
    with (out / "backbone.csv").open(newline="", encoding="utf-8") as source:
        return list(csv.reader(source))[1:]


def write_rows(out: Path, rows: Sequence[Sequence[Any]]) -> None:
    with (out / "backbone.csv").open("w", newline="", encoding="utf-8") as target:
        csv.writer(target, lineterminator="\n").writerows([COLUMNS, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", choices=list(BARS), default=list(BARS), help="all when none is named")
    parser.add_argument("--minutes", type=float, default=30.0, help="no case goes on after this time")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one replay of each method")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        from benchmarks.kernel_bars import merge

        merge(options.record, "backbone")
    elif options.in_this_process:
        sys.exit(measure(options.out, options.cases[0], profile=options.profile))
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        write_rows(options.out, [row for row in read_rows(options.out) if row[0] not in options.cases])
        run_cases(options.out, options.cases, minutes=options.minutes, profile=options.profile)


def run_cases(out: Path, cases: Sequence[str], *, minutes: float, profile: bool) -> None:
    """A process for each case, since captured graphs hold their memory; a fresh one after an exhausted memory."""
    deadline = time.monotonic() + 60 * minutes
    for case in cases:
        command = [sys.executable, __file__, "--out", str(out), "--cases", case, "--in-this-process"]
        status = TRY_AGAIN
        while status == TRY_AGAIN:
            left = deadline - time.monotonic()
            try:
                # Without time this ends at once, and so do the cases that follow.
                status = subprocess.run(command + ["--profile"] * profile, check=False, timeout=max(0, left)).returncode
            except subprocess.TimeoutExpired:
                print(f"{case}: not measured, {minutes:g} minutes are over", flush=True)
                break


def measure(out: Path, case: str, *, profile: bool) -> int:
    """Measure a case and save its rows. Methods that ran out of memory in an earlier process are left out."""
    from benchmarks.bench_lora_linear import environment

    earlier = read_rows(out)
    exhausted = {row[6] for row in earlier if row[0] == case}
    model_name, tokens, mix = plan(case)
    methods = [method for method in METHODS if method not in exhausted]
    times, exhausted_now = measure_case(case, model_name, tokens, mix, methods, profile=profile)
    distribution = "equal" if len(set(tokens)) == 1 else "zipf"
    base = statistics.median(times["base"]) if times.get("base") else None

    def row(method: str) -> list[Any]:
        head = [case, model_name, len(tokens), sum(tokens), distribution, mix, method]
        values = times.get(method)
        if not values or base is None:
            return [*head, "", OUT_OF_MEMORY, "", ""]
        ms = statistics.median(values)
        return [*head, f"{min(values):.3f}", f"{ms:.3f}", f"{max(values):.3f}", f"{ms / base:.3f}"]

    rows = [row(method) for method in ([exhausted_now] if exhausted_now else methods)]
    write_rows(out, [*earlier, *rows])
    print(case, *(f"{cells[6]} {cells[8]} {cells[10]}".rstrip() + "," for cells in rows), flush=True)
    if exhausted_now:
        return 0 if exhausted_now in ("base", "ours") else TRY_AGAIN
    if base is not None and times["ours"]:
        file = out / "backbone.json"
        bars = json.loads(file.read_text(encoding="utf-8"))["bars"] if file.exists() else {}
        bars[BARS[case]] = statistics.median(times["ours"]) / base
        file.write_text(json.dumps({**environment(), "bars": bars}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    main()
