"""What the probe finds out about a module."""

from __future__ import annotations

import random as python_random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.oracles.stacked_losses import linear, stacked
from torch import nn

from fedtorch.data import ClientData
from fedtorch.federation.solvers._probe import spread_rows
from fedtorch.federation.solvers.batches import is_ragged


class Dropping(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.net, self.options = linear(), options

    def forward(self, x):
        return F.dropout(self.net(x), **self.options)


def test_whether_a_module_draws():
    assert not stacked().random
    assert stacked(module=Dropping(p=0.5)).random
    assert not stacked(module=Dropping(p=0.5, training=False)).random
    assert stacked(compile=True, module=Dropping(p=0.5)).eager == "the module draws random numbers"


def test_modules_that_look_at_the_whole_stack_or_fail_under_vmap(caplog):
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = linear()

        def forward(self, x):
            return self.net(x[x[:, 0] > -99])

    with pytest.raises(
        RuntimeError, match=r"Branching cannot run on stacked clients under torch.vmap.*\n.*batched=False"
    ):
        stacked(module=Branching())
    assert stacked(module=Branching(), batched=False).observed
    caplog.set_level("INFO", logger="fedtorch.federation.solvers._probe")
    assert not stacked(module=Branching(), batched="auto").batched
    assert stacked(batched="auto").batched
    (why,) = (message for message in caplog.messages if "one by one" in message)
    assert why.startswith("batched='auto' evaluates the clients of Branching one by one: vmap: ")


@pytest.mark.parametrize("batched", [True, False, "auto"])
def test_a_module_that_counts_its_steps_is_refused(batched):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.count = linear(), 0

        def forward(self, x):
            self.count += 1
            return self.count * self.net(x)

    with pytest.raises(TypeError, match=r"Counting keeps count from step to step and reads it.*ft.lightning_fit"):
        stacked(module=Counting(), batched=batched)


def test_a_module_that_draws_from_numpy_or_fills_lists_is_the_same_again():
    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.outputs = linear(), []

        def forward(self, x):
            self.outputs.append(len(x))
            return self.net(x) * np.random.rand() * python_random.random()  # noqa: NPY002

    assert stacked(module=Drawing(), batched=False).observed


def test_a_module_without_a_loss_is_named():
    with pytest.raises(TypeError, match=r"Linear to return a scalar loss, but got a tensor of shape \(5,\)"):
        stacked(lambda output, target: F.cross_entropy(output, target, reduction="none"))


def test_is_ragged():
    assert is_ragged(torch.tensor([3, 4]))
    assert not is_ragged(torch.tensor([3, 3]))
    assert not is_ragged(torch.tensor([3]))
    assert not is_ragged(torch.tensor([], dtype=torch.int64))


def test_rows_are_found_in_very_large_blocks() -> None:
    clients, rows = 2**20, 17  # more than single precision counts
    block = ClientData(torch.zeros(1, 1, 2).expand(clients, rows, 2), torch.full((clients,), rows))
    client, row = spread_rows(block)
    assert (int(client.max()), int(row.max())) == (clients - 1, rows - 1)
