"""Packed rows: every token and label once, at its place, whatever the slots hold."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from alto_core.data.packing import PackedBatch, pack_rows
from alto_core.data.rows import TokenRow


def row(token_ids: list[int], labels: list[int]) -> TokenRow:
    mask = tuple(i in labels for i in range(len(token_ids)))
    return TokenRow(row_id=0, origin="a.jsonl:1", token_ids=tuple(token_ids), label_mask=mask)


def test_two_slots_with_an_empty_one_between() -> None:
    pack = pack_rows([[row([5, 6, 7], [1, 2]), row([8, 9], [1])], [], [row([3, 2, 1], [2])]])
    assert pack.token_ids_T.tolist() == [5, 6, 7, 8, 9, 3, 2, 1]
    assert pack.position_ids_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert pack.row_offsets_N1.tolist() == [0, 3, 5, 8]
    assert pack.slot_offsets_S1.tolist() == [0, 5, 5, 8]
    assert pack.label_positions_P.tolist() == [0, 1, 3, 6]
    assert pack.label_ids_P.tolist() == [6, 7, 9, 1]
    assert pack.label_rows_P.tolist() == [0, 0, 1, 2]
    assert (pack.row_slots, pack.row_lengths) == ((0, 0, 2), (3, 2, 3))
    assert (pack.num_rows, pack.num_tokens) == (3, 8)
    assert pack.row_offsets_N1.dtype == pack.slot_offsets_S1.dtype == np.int32
    assert pack.token_ids_T.dtype == pack.position_ids_T.dtype == pack.label_positions_P.dtype == np.int64


def test_no_rows_at_all() -> None:
    pack = pack_rows([[], []])
    assert pack.num_tokens == pack.num_rows == 0
    assert pack.row_offsets_N1.tolist() == [0] and pack.slot_offsets_S1.tolist() == [0, 0, 0]
    assert pack.label_rows_P.tolist() == [] and pack.token_ids_T.dtype == np.int64


rows = st.lists(st.integers(0, 99), min_size=1, max_size=8).flatmap(
    lambda ids: st.sets(st.integers(1, len(ids))).map(lambda labels: row(ids, [i for i in labels if i < len(ids)]))
)


@given(st.lists(st.lists(rows, max_size=3), min_size=1, max_size=4))
def test_unpacking_gives_the_rows_back(slots: list[list[TokenRow]]) -> None:
    pack = pack_rows(slots)
    flat = [item for slot in slots for item in slot]
    offsets = pack.row_offsets_N1.tolist()
    labels = _labels_by_row(pack)
    for i, item in enumerate(flat):
        assert tuple(pack.token_ids_T[offsets[i] : offsets[i + 1]].tolist()) == item.token_ids
        expected = [(j - 1, item.token_ids[j]) for j, trained in enumerate(item.label_mask) if trained]
        assert [(position - offsets[i], index) for position, index in labels.get(i, [])] == expected
    counts = [sum(len(item.token_ids) for item in slot) for slot in slots]
    assert np.diff(pack.slot_offsets_S1).tolist() == counts


def _labels_by_row(pack: PackedBatch) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for position, index, number in zip(pack.label_positions_P, pack.label_ids_P, pack.label_rows_P, strict=True):
        found.setdefault(int(number), []).append((int(position), int(index)))
    return found
