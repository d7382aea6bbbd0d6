"""A whole model with many adapters, forward and backward in a CUDA graph, against the frozen model alone.

    python benchmarks/bench_backbone.py --out FOLDER               # on a GPU: writes FOLDER/backbone.csv
    python benchmarks/bench_backbone.py --record FOLDER            # anywhere: takes the rows and bars into results/

Random weights of the Llama-3.2-1B and Llama-3.1-8B shapes, LoRA on all seven projections, labels on the last 132 of 192
tokens, logits only there. Backbone, attention and capture are the same for all methods; nothing is compiled.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LENGTH, LABELS = 192, 132
RANKS = {"16/32/64": (16, 32, 64), "8..128": (8, 16, 24, 48, 64, 96, 128)}
BARS = {
    "1b_b1": "kernels.model_1b_b1",
    "1b_b2": "kernels.model_1b_b2",
    "1b_b4": "kernels.model_1b_b4",
    "1b_zipf": "kernels.model_1b_zipf",
    "8b_16": "kernels.model_8b_16",
}
COLUMNS = ("row", "model", "jobs", "tokens", "distribution", "ranks", "method", "ms_min", "ms", "ms_max", "over_base")


def model_config(name: str) -> Any:
    from transformers import LlamaConfig

    common = {"vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attn_implementation": "causal_rows"}
    if name == "1b":
        return LlamaConfig(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
            num_key_value_heads=8, head_dim=64, tie_word_embeddings=True, **common,
        )  # fmt: skip
    return LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        **common,
    )  # fmt: skip


def build_model(name: str) -> Any:
    """A frozen bfloat16 model with random weights; every row attends causally to itself."""
    import torch
    from transformers import AttentionInterface, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    def causal_rows(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **_: Any) -> Any:
        # Under capture transformers' own sdpa builds a mask and loses the flash kernel.
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    AttentionInterface.register("causal_rows", causal_rows)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"), no_init_weights():
        model = LlamaForCausalLM(model_config(name))
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in key else parameter.normal_(std=0.02)
    model.tie_weights()
    return model.eval().requires_grad_(False)


class Adapters:
    """All adapters of a model in one flat set of rank rows, as the engine lays them out, in the compute dtype."""

    def __init__(self, model: Any, tokens: Sequence[int], ranks: Sequence[int]):
        import torch

        from benchmarks.lora_methods import adapter_segments

        self.tokens, self.ranks, self.scales = tuple(tokens), tuple(ranks), (2.0,) * len(ranks)
        self.segments = adapter_segments(self.tokens, self.ranks, self.scales)
        self.linears = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and "lm_head" not in name
        }
        width = sum(m.in_features + m.out_features for m in self.linears.values())
        generator = torch.Generator("cuda").manual_seed(1)
        self.params_RW = torch.empty(sum(ranks), width, device="cuda", dtype=torch.bfloat16)
        self.params_RW.normal_(std=0.02, generator=generator)
        self.columns, start = {}, 0
        for name, m in self.linears.items():
            self.columns[name] = (
                slice(start, start + m.in_features),
                slice(start + m.in_features, start + m.in_features + m.out_features),
            )
            start += m.in_features + m.out_features


def attach_ours(model: Any, adapters: Adapters) -> None:
    """q, k, v and gate, up share a call; the first projection's forward makes all outputs of its group."""
    import torch

    from kernels.grouped_lora import grouped_lora_linears
    from kernels.projections import Projection

    grads_RW = torch.zeros_like(adapters.params_RW, dtype=torch.float32)
    projections = {}
    for index, (name, m) in enumerate(adapters.linears.items()):
        a, b = adapters.columns[name]
        projections[name] = Projection(
            weight_OI=m.weight,
            bias_O=None,
            a_RI=adapters.params_RW[:, a].detach().requires_grad_(),
            b_RO=adapters.params_RW[:, b].detach(),
            layer_index=index,
            gradient_sinks=(grads_RW[:, a], grads_RW[:, b]),
        )

    def wire(parent: str, members: Sequence[str]) -> None:
        group = [projections[f"{parent}.{member}"] for member in members]
        ready: dict[str, Any] = {}

        def forward(x: Any, member: str) -> Any:
            if member == members[0]:
                outputs = grouped_lora_linears(x.view(-1, x.shape[-1]), group, adapters.segments, accumulate=False)
                ready.update(zip(members, (y.view(*x.shape[:-1], -1) for y in outputs), strict=True))
            return ready.pop(member)

        for member in members:
            module = model.get_submodule(f"{parent}.{member}")
            module.forward = lambda x, member=member: forward(x, member)

    for i in range(model.config.num_hidden_layers):
        wire(f"model.layers.{i}.self_attn", ("q_proj", "k_proj", "v_proj"))
        wire(f"model.layers.{i}.self_attn", ("o_proj",))
        wire(f"model.layers.{i}.mlp", ("gate_proj", "up_proj"))
        wire(f"model.layers.{i}.mlp", ("down_proj",))


def attach_stacked(model: Any, adapters: Adapters, method: str) -> list[Any]:
    """Padded `bmm` or `grouped_mm` behind every linear layer, stacked rank-padded adapters, gradients in bfloat16."""
    from benchmarks.lora_methods import Case, Weights, stacked_forward

    leaves: list[Any] = []
    for name, m in adapters.linears.items():
        case = Case(d_in=m.in_features, d_out=m.out_features, tokens=adapters.tokens, ranks=adapters.ranks)
        weights = Weights.__new__(Weights)
        a, b = adapters.columns[name]
        weights.case, weights.device, weights.weight_OI = case, "cuda", m.weight
        weights.a = list(adapters.params_RW[:, a].split(adapters.ranks))
        weights.b = list(adapters.params_RW[:, b].split(adapters.ranks))
        function, own = stacked_forward(weights, method)
        leaves += own
        m.forward = lambda x, f=function: f(x.view(-1, x.shape[-1])).view(*x.shape[:-1], -1)
    return leaves


def make_step(model: Any, rows: int, leaves: Sequence[Any]) -> Callable[[], Any]:
    """Forward and backward over `rows` random rows; the loss is the sum over labels."""
    import torch

    ids = torch.randint(0, model.config.vocab_size, (rows, LENGTH), device="cuda")
    labels = ids[:, -LABELS:].reshape(-1)
    embedded = model.model.embed_tokens(ids).detach().requires_grad_()

    def step() -> Any:
        hidden = model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, -LABELS - 1 : -1].reshape(-1, hidden.shape[-1]))
        loss = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum") / labels.numel()
        return loss.detach(), *torch.autograd.grad(loss, [embedded, *leaves])

    return step


def measure_row(
    row: str, model_name: str, tokens: Sequence[int], mix: str, methods: Sequence[str], profile: bool = False
) -> dict[str, Any]:
    """Milliseconds of each method's replays, five interleaved rounds; losses and dx are compared first."""
    import torch

    from benchmarks import lora_methods as lm

    ranks = tuple(itertools.islice(itertools.cycle(RANKS[mix]), len(tokens)))
    model = build_model(model_name)
    adapters = Adapters(model, tokens, ranks)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    plain = {name: module.forward for name, module in linears.items()}
    forwards, steps, losses = {}, {}, {}

    def use(method_forwards: dict[str, Any]) -> None:
        for name, forward in method_forwards.items():
            linears[name].forward = forward

    # All eager work comes before the first capture: both need much of the memory.
    for method in methods:
        torch.manual_seed(0)
        use(plain)
        leaves: Sequence[Any] = ()
        if method == "ours":
            attach_ours(model, adapters)
        elif method != "base":
            leaves = attach_stacked(model, adapters, method)
        forwards[method] = {name: module.forward for name, module in linears.items()}
        steps[method] = make_step(model, sum(tokens) // LENGTH, leaves)
        loss, dx, *_ = steps[method]()
        if method != "base":
            losses[method] = (loss.item(), dx.float())
        del loss, dx, _
        torch.cuda.empty_cache()
    (reference, reference_dx), *others = losses.values()
    for loss, dx in others:
        difference = ((dx - reference_dx).norm() / reference_dx.norm()).item()
        if abs(loss - reference) > 2e-3 * abs(reference) or not difference < 0.15:
            raise ValueError(f"{row}: methods disagree: losses {loss} and {reference}, dx by {difference:.2e}")
    graphs, pool = {}, torch.cuda.graph_pool_handle()
    for method in methods:
        use(forwards[method])
        graphs[method] = lm.capture(steps[method], pool, warm_up=sum(tokens) < 20_000)
        if profile:
            lm.print_profile(method, graphs[method])
    times = lm.time_graphs(graphs, repeats=5, seconds=0.1)
    for graph in graphs.values():
        graph.reset()
    return times


def plans(selected: Sequence[str]) -> list[tuple[str, str, tuple[int, ...], str, tuple[str, ...]]]:
    from benchmarks.lora_methods import zipf_tokens

    methods = ("base", "ours", "bmm", "grouped_mm")
    zipf = zipf_tokens(32, 64)  # whole rows of 192 tokens
    every = [(f"1b_b{batch}", "1b", (batch * LENGTH,) * 32, "16/32/64", methods) for batch in (1, 2, 4)]
    every += [
        ("1b_zipf", "1b", tuple(rows * LENGTH for rows in zipf), "8..128", methods),
        ("8b_16", "8b", (LENGTH,) * 16, "16/32/64", methods),
    ]
    return [plan for plan in every if not selected or plan[0] in selected]


def _earlier(out: Path) -> tuple[list[Any], dict[str, float]]:
    """Rows and bars that processes before this one wrote."""
    if not (out / "backbone.json").exists():
        return [], {}
    with (out / "backbone.csv").open(newline="", encoding="utf-8") as source:
        table = [tuple(row) for row in csv.reader(source)][1:]
    return table, json.loads((out / "backbone.json").read_text(encoding="utf-8"))["bars"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", nargs="*", default=[], help=f"of {', '.join(BARS)}; all when none is named")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one replay of each method")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.record:
        from benchmarks.kernel_bars import merge

        merge(options.record, "backbone")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows = options.rows or list(BARS)
    if len(rows) == 1:
        measure(options.out, rows, options.profile)
        return
    for row in rows:  # a process each: captured graphs hold their memory
        command = [sys.executable, __file__, "--out", str(options.out), "--rows", row]
        subprocess.run(command + ["--profile"] * options.profile, check=False)


def measure(out: Path, selected: Sequence[str], profile: bool) -> None:
    import gc

    import torch

    from benchmarks.bench_lora_linear import environment

    table, bars = _earlier(out)
    for row, model_name, tokens, mix, methods in plans(selected):
        times = measure_row(row, model_name, tokens, mix, methods, profile)
        gc.collect()
        torch.cuda.empty_cache()
        base = statistics.median(times["base"])
        distribution = "equal" if len(set(tokens)) == 1 else "zipf"
        for method, values in times.items():
            ms = statistics.median(values)
            head = (row, model_name, len(tokens), sum(tokens), distribution, mix, method)
            table.append((*head, f"{min(values):.3f}", f"{ms:.3f}", f"{max(values):.3f}", f"{ms / base:.3f}"))
        bars[BARS[row]] = statistics.median(times["ours"]) / base
        print(
            row,
            *(f"{m} {statistics.median(v):.2f} ({statistics.median(v) / base:.3f})" for m, v in times.items()),
            flush=True,
        )
        with (out / "backbone.csv").open("w", newline="", encoding="utf-8") as target:
            csv.writer(target, lineterminator="\n").writerows([COLUMNS, *table])
        (out / "backbone.json").write_text(json.dumps({**environment(), "bars": bars}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
