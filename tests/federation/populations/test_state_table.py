"""The state table against a plain dict, its memory, and its round trip through a flat dict."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from support.oracles.closed_forms import same_bits
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.populations.state_table import StateTable
from fedtorch.tree import Tree


class State(NamedTuple):
    w: Any
    more: Any


def initial() -> State:
    return State(
        torch.arange(6.0, dtype=torch.float64).reshape(2, 3),
        {"steps": torch.tensor(7), "flag": torch.tensor([True, False]), "nothing": None},
    )


def fresh(count: int, generator: torch.Generator) -> State:
    return State(
        torch.randn(count, 2, 3, generator=generator, dtype=torch.float64),
        {
            "steps": torch.randint(100, (count,), generator=generator),
            "flag": torch.rand(count, 2, generator=generator) < 0.5,
            "nothing": None,
        },
    )


def row(states: Tree, k: int) -> Tree:
    return tree.map(lambda leaf: leaf[k].clone(), states)


def some_ids(clients: int, generator: torch.Generator) -> Any:
    """A slice, ascending ids, or ids in any order; also none."""
    kind = int(torch.randint(3, (1,), generator=generator))
    count = int(torch.randint(clients + 1, (1,), generator=generator))
    if kind == 0:
        start = int(torch.randint(clients - count + 1, (1,), generator=generator))
        return slice(start, start + count)
    ids = torch.randperm(clients, generator=generator)[: count if kind == 1 else min(count, 3)]
    return ids.sort().values if kind == 1 else ids


def as_list(ids: Any) -> list[int]:
    return list(range(ids.start, ids.stop)) if isinstance(ids, slice) else ids.tolist()


def check(table: StateTable, model: dict[int, Tree], ids: Any) -> None:
    expected = [model.get(k, initial()) for k in as_list(ids)]
    found = table.read(ids)
    assert all(len(leaf) == len(expected) for leaf in tree.leaves(found))
    assert all(same_bits(row(found, i), state) for i, state in enumerate(expected))


@pytest.mark.parametrize("seed", range(8))
def test_reads_and_writes_like_a_dict(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    clients = 9
    table, model = StateTable(initial(), clients), {}
    for _ in range(40):
        ids = some_ids(clients, generator)
        states = fresh(len(as_list(ids)), generator)
        if seed % 2:
            table.reserve(ids)
        table.write(ids, states)
        model.update({k: row(states, i) for i, k in enumerate(as_list(ids))})
        check(table, model, some_ids(clients, generator))
        for known in (slice(0, 0), slice(0, 3), slice(2, 7), slice(0, clients)):  # read before, and others since
            check(table, model, known)
        assert table.touched().tolist() == sorted(model)
        if len(model) > 5:  # begin again, half of the time through a round trip
            flat = table.state_dict()
            keep = torch.rand(clients, generator=generator) < 0.5
            table = StateTable(initial(), clients)
            table.load_state_dict(flat, keep)
            model = {k: state for k, state in model.items() if keep[k]}
            check(table, model, slice(0, clients))
    check(table, model, slice(0, clients))


def test_rows_that_grew_over_several_pages() -> None:
    generator = torch.Generator().manual_seed(1)
    table, model = StateTable(initial(), 200), {}
    for start in range(0, 200, 7):
        ids = torch.arange(start, min(start + 7, 200))
        states = fresh(len(ids), generator)
        table.write(ids, states)
        model.update({int(k): row(states, i) for i, k in enumerate(ids)})
    check(table, model, slice(0, 200))
    check(table, model, torch.randperm(200, generator=generator))


def test_slices_of_clients_that_have_nothing_yet_are_read_again_when_they_have() -> None:
    generator, model = torch.Generator().manual_seed(2), {}
    table = StateTable(initial(), 6)
    for ids in (slice(0, 2), slice(1, 4), torch.tensor([5]), slice(0, 6)):
        for known in (slice(0, 2), slice(0, 4), slice(4, 6), slice(0, 6)):
            check(table, model, known)
        states = fresh(len(as_list(ids)), generator)
        table.write(ids, states)
        model.update({k: row(states, i) for i, k in enumerate(as_list(ids))})
        for known in (slice(0, 2), slice(0, 4), slice(4, 6), slice(0, 6)):
            check(table, model, known)
    table.load_state_dict({k: leaf[:2] for k, leaf in table.state_dict().items()})
    check(table, {k: model[k] for k in range(2)}, slice(0, 6))


def test_of_many_slices_some_are_looked_up_anew() -> None:
    generator = torch.Generator().manual_seed(3)
    table, states = StateTable(initial(), 400), fresh(400, generator)
    table.write(slice(0, 400), states)
    for start in (*range(399), 0):
        assert same_bits(table.read(slice(start, start + 1)), tree.take(states, slice(start, start + 1)))
    assert len(table._places) <= 256


def test_before_the_first_commit_everybody_shares_the_initial_state() -> None:
    start = initial()
    table = StateTable(start, 10**6)
    states = table.read(slice(0, 10**6))
    assert states.w.shape == (10**6, 2, 3)
    assert states.w.data_ptr() == start.w.data_ptr()


def storages(table: StateTable) -> int:
    """Bytes of the pages."""
    return sum(leaf.untyped_storage().nbytes() for page in table._pages for leaf in tree.leaves(page))


def test_memory_is_that_of_the_touched() -> None:
    each = tree.nbytes(initial())
    table = StateTable(initial(), 10**6)
    generator = torch.Generator().manual_seed(0)
    for touched in range(50, 1000, 50):
        ids = torch.arange(touched - 50, touched) * 997
        table.write(ids, fresh(50, generator))
        assert storages(table) <= 4 * touched * each  # pages double, so that there are few
    assert len(table._pages) < 10
    everybody = StateTable(initial(), 300)
    everybody.write(slice(0, 300), fresh(300, generator))
    everybody.write(slice(0, 300), fresh(300, generator))
    assert storages(everybody) == 300 * each


def test_what_lies_side_by_side_is_read_as_a_view() -> None:
    generator = torch.Generator().manual_seed(0)
    table = StateTable(initial(), 10)
    table.reserve(torch.tensor([8, 2, 5, 3, 4]))
    table.write(torch.tensor([8, 2, 5, 3, 4]), fresh(5, generator))
    for ids, views in [
        (torch.tensor([8, 2, 5]), True),
        (slice(3, 5), True),
        (torch.tensor([2, 8]), False),
        (torch.tensor([8, 8]), False),
    ]:
        inside = table.read(ids).w.untyped_storage().data_ptr() == table._pages[0].w.untyped_storage().data_ptr()
        assert inside == views


def test_tables_own_their_memory() -> None:
    table, states = StateTable(initial(), 4), fresh(2, torch.Generator().manual_seed(0))
    table.write(slice(1, 3), states)
    before = tree.map(torch.clone, table.read(slice(1, 3)))
    flat = table.state_dict()
    states.w.zero_()
    assert same_bits(table.read(slice(1, 3)), before)
    table.write(slice(1, 3), states)
    assert torch.equal(flat["state.w"], before.w)
    table.write(slice(1, 3), table.read(slice(1, 3)))  # a client may return its state as it was read
    assert same_bits(table.read(slice(1, 3)), states)


def test_states_of_another_shape_or_dtype_are_refused() -> None:
    table = StateTable({"w": torch.zeros(3)}, 4)
    for ids in (slice(0, 2), torch.tensor([3, 0])):
        with pytest.raises(ValueError, match=r"Expected states like the initial one, torch.float32 of shape \(3,\)"):
            table.write(ids, {"w": torch.zeros(2, 1)})
        with pytest.raises(ValueError, match=r"but got torch\.float64"):
            table.write(ids, {"w": torch.zeros(2, 3, dtype=torch.float64)})


@pytest.mark.parametrize("empty", [None, {}, ({}, {"a": None})], ids=str)
def test_without_states(empty: Tree) -> None:
    table = StateTable(empty, 5)
    assert table.read(slice(0, 5)) == empty
    table.write(torch.tensor([3, 1]), empty)
    assert table.touched().tolist() == [1, 3]
    assert table.read(torch.tensor([1])) == empty
    flat = table.state_dict()
    assert list(flat) == ["ids"]
    other = StateTable(empty, 5)
    other.load_state_dict(flat, torch.tensor([True, True, False, False, True]))
    assert other.touched().tolist() == [1]


def test_round_trip_through_a_flat_dict() -> None:
    generator = torch.Generator().manual_seed(2)
    table = StateTable(initial(), 6)
    nobody = table.state_dict()
    assert nobody["ids"].shape == (0,)
    assert nobody["state.w"].shape == (0, 2, 3)
    table.write(torch.tensor([4, 0]), fresh(2, generator))
    flat: dict[str, Tensor] = table.state_dict()
    assert set(flat) == {"ids", "state.w", "state.more.steps", "state.more.flag"}
    assert flat["ids"].tolist() == [0, 4]
    other = StateTable(initial(), 6)
    other.write(slice(0, 6), fresh(6, generator))
    other.load_state_dict(flat)
    assert same_bits(other.read(slice(0, 6)), table.read(slice(0, 6)))
    assert other.touched().tolist() == [0, 4]
    other.load_state_dict(nobody)
    assert other.touched().tolist() == []
    bare = StateTable(torch.zeros(2), 3)
    bare.write(slice(1, 2), torch.ones(1, 2))
    again = StateTable(torch.zeros(2), 3)
    again.load_state_dict(bare.state_dict())
    assert torch.equal(again.read(slice(0, 3)), bare.read(slice(0, 3)))
