"""Modules that branch on values, as transformers do on their masks: stacked steps equal each client's own."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from support.oracles.plain_training import CLOSE, check, keys, net, seeded, solve, stacked_data
from torch import nn

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.data import FederatedData
from fedtorch.federation.solvers.gradient_descent import gradient_descent
from fedtorch.federation.solvers.stacked_loss import StackedLoss

COUNTS = (5, 8, 8, 3, 6, 8)


class Masked(L.LightningModule):
    """Skips the mask where nothing is masked, as attention does, and logs; one parameter is of that branch only."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = net(), nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x, mask):
        if mask.all():
            return self.net(x * self.scale)
        return self.net(x * mask) / mask.sum().clamp(min=1)

    def training_step(self, batch):
        loss = F.cross_entropy(self(batch["x"], batch["mask"]), batch["y"])
        self.log("per_row", loss / max(int(batch["mask"].sum()), 1))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def masked_rows(counts=COUNTS):
    total = sum(counts)
    x = random.normal(random.key(1), (total, 3), torch.float64)
    mask = random.bernoulli(random.key(4), 0.9, (total, 3)).bool()
    mask[:5] = mask[-8:] = True  # nothing is masked at two of the clients
    rows = {"x": x, "mask": mask, "y": random.randint(random.key(2), 2, (total,))}
    return FederatedData(rows, torch.tensor(counts))


@pytest.mark.parametrize("batch_size", [4, None])
def test_clients_whose_branches_differ_train_as_alone(batch_size):
    module = Masked()
    check(module, masked_rows().stack(range(6)), epochs=2, batch_size=batch_size)


def test_dropout_is_drawn_from_each_client_s_key_in_either_branch():
    class Random(Masked):
        def forward(self, x, mask):
            return F.dropout(super().forward(x, mask), 0.4)

    data, module = masked_rows().stack(range(6)), Random()
    together, alone = (
        solve(gradient_descent(module, epochs=1, batch_size=4, batched=batched), data, keys(6))
        for batched in (True, False)
    )
    for first, second in zip(tree.leaves(together.parameters), tree.leaves(alone.parameters)):
        torch.testing.assert_close(first, second, **CLOSE)


def test_buffers_and_steps_go_on_in_groups():
    class Normed(Masked):
        def __init__(self):
            super().__init__()
            self.net = seeded(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))

    check(Normed(), masked_rows().stack(range(6)), buffers="local", epochs=3)


class Skips(Masked):
    def forward(self, x, mask):
        return self.net(x if mask.all() else x * mask)


def test_predictions_branch_too():
    data = masked_rows()
    local = gradient_descent(Skips(), epochs=1, batch_size=4)
    run = ft.run(ft.fedavg(local), ft.InProcess(data), rounds=1)
    parted = lambda rows: ({"x": rows["x"], "mask": rows["mask"]}, rows["y"])
    scores = run.evaluate(data, {"loss": F.cross_entropy}, split=parted)
    model = run.global_module()
    alone = [F.cross_entropy(model(rows["x"], rows["mask"]), rows["y"]) for rows in data]
    torch.testing.assert_close(scores["loss"].clients, torch.stack(alone).detach(), **CLOSE)


def test_steps_that_branch_are_not_captured():
    data = masked_rows().stack(range(6))
    captured, plain = (gradient_descent(Masked(), epochs=2, batch_size=4, compile=c) for c in (True, False))
    first, second = (solve(local, data, keys(6)).parameters for local in (captured, plain))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(first), tree.leaves(second)))


def test_branches_on_sizes_of_the_others_are_not_taken():
    """What is read is a client's own: two clients that agree by chance share a step, never a value."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            return self.inner(x) * (1 + int((x[:, 0] > 0).sum()))

    check(Counting(), stacked_data((5, 5, 5, 4)), F.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.01), epochs=2)


class Scaled(nn.Module):
    """Reads a whole number of its batch: of `kinds` many, so that all clients differ where there are enough."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.inner, self.kinds = net(), kinds

    def forward(self, x):
        number = int((1e6 * x).long().sum() % self.kinds)
        return self.inner(x) * (1 + number / self.kinds)


@pytest.mark.parametrize(("kinds", "shared"), [(10**6, 1), (2, 5)])
def test_clients_go_one_by_one_for_the_rest_of_a_round_where_grouping_them_gains_nothing(monkeypatch, kinds, shared):
    tried = set()
    mapped = StackedLoss._mapped

    def noted(self, rows, draws, index, flat):
        if len(flat[0]) > 2:  # not one that the check makes of two
            tried.add(index)
        return mapped(self, rows, draws, index, flat)

    monkeypatch.setattr(StackedLoss, "_mapped", noted)
    data, sgd = stacked_data((10,) * 12), lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    check(Scaled(kinds), data, F.cross_entropy, sgd, epochs=1, batch_size=2)
    assert len(tried) == shared


def test_a_few_clients_of_a_branch_are_evaluated_alone_and_their_hooks_are_called_once():
    module = Scaled(10**6)
    module.inner[0].weight.register_hook(lambda gradient: 2 * gradient)
    data, sgd = stacked_data((10,) * 5), lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    says = {"epochs": 1, "batch_size": 5, "loss": F.cross_entropy, "optimizer": sgd}
    first, second = (solve(gradient_descent(module, batched=b, **says), data, keys(5)) for b in (True, False))
    for one, other in zip(tree.leaves(first.parameters), tree.leaves(second.parameters)):
        torch.testing.assert_close(one, other, **CLOSE)
