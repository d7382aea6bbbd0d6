"""Packed rows do not see each other, whatever the model family; what packing cannot do is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alto_core.data.packing import PackedBatch, pack_rows
from alto_core.engine.backbone import packed_logits
from alto_core.engine.packed_attention import PackedRows, packed_attention
from alto_core.errors import ModelError

FAMILIES = ("llama", "smollm", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2")


def all_logits(model: Any, batch: PackedBatch) -> torch.Tensor:
    """Logits of every token of a packed batch."""
    ids_T, positions_T = torch.from_numpy(batch.token_ids_T), torch.from_numpy(batch.position_ids_T)
    return packed_logits(model, ids_T, positions_T, PackedRows(batch.row_lengths, "cpu"), torch.arange(len(ids_T)))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_packed_rows_equal_each_row_alone(tiny: Any, family: str) -> None:
    model = tiny.backbone(family).model
    rows = tiny.rows(5, longest=12)
    batch = pack_rows([rows[:2], [], rows[2:]])
    with torch.inference_mode():
        packed = all_logits(model, batch).split(batch.row_lengths)
    plain = tiny.plain_model(family)
    for row, got in zip(rows, packed, strict=True):
        with torch.inference_mode():
            alone = plain(input_ids=torch.tensor([row.token_ids]), use_cache=False).logits[0]
        assert (got - alone).abs().max() < 1e-5


def test_changing_a_row_leaves_its_neighbours_bit_for_bit(tiny: Any) -> None:
    model = tiny.backbone().model
    layout = PackedRows((4, 6, 3), "cpu")
    positions = torch.cat([torch.arange(n) for n in layout.lengths])
    ids = torch.arange(3, 16)
    with torch.inference_mode():
        before = packed_logits(model, ids, positions, layout, torch.arange(13))
        after = packed_logits(
            model, ids.clone().index_fill_(0, torch.arange(4, 10), 50), positions, layout, torch.arange(13)
        )
    assert torch.equal(before[:4], after[:4])
    assert torch.equal(before[10:], after[10:])
    assert not torch.equal(before[4:10], after[4:10])


@pytest.mark.parametrize("lengths", [(5,), (3, 3), (1, 7, 2)])
def test_scatter_and_gather_are_inverse_and_pass_gradients_back(lengths: tuple[int, ...]) -> None:
    rows = PackedRows(lengths, "cpu")
    x = torch.randn(2, sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    padded = rows.scatter(x)
    assert padded.shape == (len(lengths), 2, max(lengths), 3)
    assert torch.equal(rows.gather(padded), x.transpose(0, 1))
    for number, length in enumerate(lengths):
        assert not padded[number, :, length:].any()
    assert torch.autograd.gradcheck(lambda t: rows.gather(rows.scatter(t) ** 2), [x])


def _call(**changes: Any) -> None:
    heads = torch.zeros(1, 2, 3, 4)
    values: dict[str, Any] = {"attention_mask": None, "packed_rows": PackedRows((3,), "cpu"), **changes}
    module = values.pop("module", SimpleNamespace(is_causal=True))
    packed_attention(module, heads, heads, heads, **values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packed_rows": None}, "does not hand the row layout on"),
        ({"s_aux": torch.zeros(2)}, "'s_aux'"),
        ({"position_bias": torch.zeros(2)}, "'position_bias'"),
        ({"attention_mask": torch.ones(1, 3)}, "causally"),
        ({"is_causal": False}, "causally"),
        ({"module": SimpleNamespace(is_causal=False)}, "causally"),
    ],
)
def test_what_packing_cannot_do_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _call(**changes)


def test_gradients_of_packed_rows_equal_each_row_alone(tiny: Any) -> None:
    # Sliding window, softcap and grouped heads at once.
    model, plain = tiny.backbone("gemma2").model, tiny.plain_model("gemma2")
    rows = tiny.rows(3, longest=12)
    batch = pack_rows([rows])
    grads = []
    for own in (True, False):
        chosen = model if own else plain
        weight = chosen.get_submodule("model.layers.0.self_attn.q_proj").weight.requires_grad_()
        if own:
            all_logits(chosen, batch).square().sum().backward()
        else:
            for row in rows:
                chosen(input_ids=torch.tensor([row.token_ids]), use_cache=False).logits.square().sum().backward()
        grads.append(weight.grad)
        weight.requires_grad_(False)
        weight.grad = None
    assert (grads[0] - grads[1]).abs().max() < 1e-4 * grads[1].abs().max()
