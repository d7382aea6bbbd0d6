"""A frozen Llama with random weights and many adapters on it, as `bench_backbone` measures it; one step of each method.

Backbone, attention and loss are the same for all methods; nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

LENGTH, LABELS = 192, 132
"""Tokens of a row, and how many of them, at its end, have labels."""


def model_config(name: str) -> Any:
    from transformers import LlamaConfig

    common = {"vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attn_implementation": "causal_rows"}
    if name == "1b":
        return LlamaConfig(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
            num_key_value_heads=8, head_dim=64, tie_word_embeddings=True, **common,
        )  # fmt: skip
    if name == "135m":
        return LlamaConfig(
            hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, tie_word_embeddings=True, **{**common, "vocab_size": 49152},
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
            weight=m.weight,
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
