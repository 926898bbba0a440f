"""Minibatches: a client's own, in the order of its own permutations, whatever its company."""

from __future__ import annotations

import pytest
import torch

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.data import FederatedData
from fedtorch.federation.solvers.batches import PERMUTATIONS, Batches

COUNTS = (1, 4, 5, 11)


def block(counts=COUNTS):
    rows = torch.arange(1.0, sum(counts) + 1)  # no row is zero, as padding is
    return FederatedData({"a": rows, "b": rows[:, None].expand(-1, 2)}, torch.tensor(counts)).stack(range(len(counts)))


def keys(count):
    return random.fold_in(random.key(0), torch.arange(count))


def expected(data, k, key, batch_size, epochs):
    n = int(data.count[k])
    own = data.batch["a"][k, :n]
    found = []
    for epoch in range(epochs):
        order = random.permutation(random.fold_in(random.fold_in(key, PERMUTATIONS), epoch), n)
        found.extend(own[order].split(batch_size))
    return found


@pytest.mark.parametrize("batch_size", [1, 3, 4, 5, 20])
@pytest.mark.parametrize("limit", [{"epochs": 2, "steps": None}, {"epochs": None, "steps": 7}], ids=str)
@pytest.mark.parametrize("counts", [COUNTS, (5, 5, 5)], ids=["ragged", "alike"])
def test_each_client_has_its_own_batches(counts, batch_size, limit):
    clients = len(counts)
    data, key = block(counts), keys(clients)
    batches = Batches(data.batch, data.count, batch_size, limit["epochs"], limit["steps"], key, padded=True)
    per_epoch = [-(-n // batch_size) for n in counts]
    assert batches.per_epoch.tolist() == per_epoch
    assert batches.total.tolist() == [2 * n if limit["epochs"] else 7 for n in per_epoch]
    own = [expected(data, k, key[k], batch_size, 7) for k in range(clients)]
    assert batches.longest == int(batches.total.max())
    for t in range(int(batches.total.max())):
        batch = batches[t]
        there = (batches.total > t).nonzero()[:, 0].tolist()
        assert len(batch.size) == len(there)
        for k, client in enumerate(there):
            size = int(batch.size[k])
            assert batch.rows["a"][k, :size].tolist() == own[client][t].tolist()
            assert torch.equal(batch.rows["b"][k, :, 0], batch.rows["a"][k])
            assert set(batch.rows["a"][k].tolist()) <= set(own[client][t].tolist())  # padding repeats rows of the batch
            if batch.weights is None:
                assert size == batch.rows["a"].shape[1]
            else:
                assert batch.weights[k].tolist() == pytest.approx(
                    [1 / size] * size + [0] * (len(batch.weights[k]) - size)
                )


def test_full_batches_keep_the_order_and_copy_nothing_when_all_are_equal():
    data = block((4, 4))
    batches = Batches(data.batch, data.count, None, 3, None, keys(2))
    assert batches.total.tolist() == [3, 3]
    assert batches[0].leaves[0].data_ptr() == data.batch["a"].data_ptr()
    assert batches[0].weights is None
    assert batches[2] is batches[0]


def test_full_batches_of_ragged_clients():
    data = block()
    batch = Batches(data.batch, data.count, None, 1, None, keys(4), padded=True)[0]
    for k, n in enumerate(COUNTS):
        assert torch.equal(batch.rows["a"][k, :n], data.batch["a"][k, :n])
        assert torch.equal(batch.rows["a"][k, n:], data.batch["a"][k, n - 1].expand(11 - n))
    torch.testing.assert_close(batch.weights.sum(1), torch.ones(4, dtype=torch.float64))


def test_full_batches_narrow_a_block_to_its_largest_client():
    data = tree.take(block(), torch.tensor([1, 2]))
    assert Batches(data.batch, data.count, None, 1, None, keys(2))[0].rows["b"].shape == (2, 5, 2)


def test_orders_change_with_epoch_and_client():
    data = block((11, 11))
    batches = Batches(data.batch, data.count, 11, 2, None, keys(2))
    first, second = batches[0].rows["a"], batches[1].rows["a"]
    assert not torch.equal(first, second)
    assert not torch.equal(first[0] - first[0].min(), first[1] - first[1].min())


@pytest.mark.parametrize("counts", [(5, 5), (4, 5)], ids=["alike", "ragged"])
def test_full_batches_of_a_module_that_draws_nothing_need_no_keys(counts):
    data, module, asked = block(counts), torch.nn.Linear(2, 1), []

    def made():
        asked.append(len(asked))
        return keys(len(counts))

    def solved(batch_size):
        local = ft.gradient_descent(
            module,
            steps=2,
            batch_size=batch_size,
            loss=lambda output, y: (output[:, 0] - y).square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        rows = data._replace(batch=(data.batch["b"], data.batch["a"]))
        start = tree.expand(local.parameters, len(counts))
        return local.solve(start, tree.expand(local.init(local.parameters), len(counts)), rows, None, ft.Turn(made, 0))

    solved(None)
    assert asked == []
    solved(2)
    assert asked == [0]  # made once


def test_steps_do_not_see_changes_of_rows():
    data, weight = block((12, 9)), torch.ones(2, requires_grad=True)
    for batch in Batches(data.batch, data.count, 3, 1, None, keys(2)):
        rows = batch.rows["b"]
        assert not rows.requires_grad
        rows += weight
        rows.sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((2,), 21.0))


def test_all_batches_of_a_round_are_chosen_at_once(monkeypatch):
    planned, data = [], block((3, 7, 12))
    plan = Batches._plan
    monkeypatch.setattr(Batches, "_plan", lambda self, step: (planned.append(step), plan(self, step)))
    found = list(Batches(data.batch, data.count, 2, 2, None, keys(3)))
    assert (len(found), planned) == (12, [0])
