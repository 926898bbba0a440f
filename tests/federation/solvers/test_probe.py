"""What the probe finds out about a module."""

from __future__ import annotations

import random as python_random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.oracles.stacked_losses import block_of, linear, stacked
from torch import nn

from fedtorch import functional
from fedtorch.data import ClientData
from fedtorch.federation.solvers._probe import probe
from fedtorch.federation.solvers._probed_rows import spread_rows
from fedtorch.federation.solvers.batches import is_ragged


def weighted(output, target):
    return F.cross_entropy(output, target, weight=torch.tensor([1.0, 1.0, 4.0], dtype=torch.float64))


def total(output, target):
    return F.cross_entropy(output, target, reduction="sum")


def ignoring(output, target):
    return F.cross_entropy(output, target, ignore_index=0)


def rooted(output, target):
    return F.cross_entropy(output, target).sqrt()


def smoothed(output, target):
    return F.cross_entropy(output, target, label_smoothing=0.1)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    ("loss", "separable"),
    [(F.cross_entropy, True), (smoothed, True), (weighted, False), (total, False), (ignoring, False), (rooted, False)],
)
def test_whether_a_loss_is_the_mean_of_its_examples(loss, separable, zero):
    assert stacked(loss, linear(zero)).separable is separable


def test_equal_clients_do_not_ask_and_later_blocks_may_still_tell():
    found = stacked(weighted, block=block_of((4, 4)))
    assert found.separable is None
    values = functional.parameters(linear())
    alike = block_of()._replace(batch=(block_of().batch[0], torch.zeros_like(block_of().batch[1])))
    probe(found, alike, values)
    assert found.separable is True
    probe(found, block_of(), values)
    assert found.separable is False


def test_a_rare_class_is_among_the_rows_of_the_probe():
    block = block_of((3, 400))
    y = torch.zeros_like(block.batch[1])
    y[1, 123] = 2
    assert stacked(weighted, block=block._replace(batch=(block.batch[0], y))).separable is False


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
    assert stacked(module=Branching(), batched=False).probed
    caplog.set_level("INFO", logger="fedtorch")
    assert not stacked(module=Branching(), batched="auto").batched
    assert stacked(batched="auto").batched
    why, together = caplog.messages
    assert why.startswith(
        "batched='auto' evaluates the clients of Branching one by one: Branching cannot run on stacked clients"
    )
    assert together == "batched='auto' evaluates the clients of Linear together"


def test_whether_a_module_branches_on_values():
    branching = lambda output, target: F.cross_entropy(output if output.sum() > 0 else -output, target)
    assert stacked(branching).reads
    assert not stacked().reads
    assert stacked(branching, compile=True).eager == "the module branches on values"
    assert stacked(branching, batched="auto").batched


def test_a_loss_that_differs_under_vmap_is_refused():
    def loss(output, target):
        return output.mean() * (1 + torch._C._functorch.is_batchedtensor(output))

    with pytest.raises(RuntimeError, match=r"gives the losses .* on two stacked copies .*batched=False"):
        stacked(loss)


@pytest.mark.parametrize("batched", [True, False, "auto"])
def test_a_module_that_counts_its_steps_is_refused(batched):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.count = linear(), 0

        def forward(self, x):
            self.count += 1
            return self.count * self.net(x)

    with pytest.raises(TypeError, match=r"Counting gave .* keeps something from step to step.*ft.lightning_fit"):
        stacked(module=Counting(), batched=batched)


def test_a_module_that_draws_from_numpy_or_fills_lists_is_the_same_again():
    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.outputs = linear(), []

        def forward(self, x):
            self.outputs.append(len(x))
            return self.net(x) * np.random.rand() * python_random.random()  # noqa: NPY002

    assert stacked(module=Drawing(), batched=False).probed


def test_a_module_without_a_loss_is_named():
    with pytest.raises(TypeError, match=r"Linear to return a scalar loss, but got a tensor of shape \(10,\)"):
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
