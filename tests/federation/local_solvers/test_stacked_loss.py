"""What the probe finds out about a module, and stacked losses and gradients of one step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedtorch import functional, random, tree
from fedtorch.data import FederatedData
from fedtorch.federation.local_solvers.batches import Batch
from fedtorch.federation.local_solvers.objective import Objective, training_copy
from fedtorch.federation.local_solvers.stacked_loss import StackedLoss, is_ragged

COUNTS = (2, 5, 3)


def data(counts=COUNTS):
    total = sum(counts)
    x = random.normal(random.key(1), (total, 3), torch.float64)
    y = random.randint(random.key(2), 3, (total,))
    return FederatedData((x, y), torch.tensor(counts)).stack(range(len(counts)))


def linear(zero=False):
    net = nn.Linear(3, 3).double()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(torch.zeros_like(p) if zero else random.normal(random.key(i), p.shape, p.dtype))
    return net


def stacked(loss=F.cross_entropy, module=None, batched=True, compile=False, block=None):
    module = linear() if module is None else module
    names = list(functional.parameters(module))
    found = StackedLoss(Objective(training_copy(module), loss), names, [], batched, compile)
    found.probe(data() if block is None else block, functional.parameters(module))
    return found


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
    found = stacked(weighted, block=data((4, 4)))
    assert found.separable is None
    values = functional.parameters(linear())
    alike = data()._replace(batch=(data().batch[0], torch.zeros_like(data().batch[1])))
    found.probe(alike, values)
    assert found.separable is True
    found.probe(data(), values)
    assert found.separable is False


def test_a_rare_class_is_among_the_rows_of_the_probe():
    block = data((3, 400))
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
    assert not stacked(compile=True, module=Dropping(p=0.5)).traced


def test_modules_that_look_at_the_whole_stack_or_fail_under_vmap():
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = linear()

        def forward(self, x):
            return self.net(x) if x.sum() > 0 else -self.net(x)

    with pytest.raises(
        RuntimeError, match=r"Branching cannot run on stacked clients under torch.vmap.*\n.*batched=False"
    ):
        stacked(module=Branching())
    assert stacked(module=Branching(), batched=False).probed


def test_a_loss_that_differs_under_vmap_is_refused():
    def loss(output, target):
        return output.mean() * (1 + torch._C._functorch.is_batchedtensor(output))

    with pytest.raises(RuntimeError, match=r"gives the losses .* on two stacked copies .*batched=False"):
        stacked(loss)


def test_a_module_without_a_loss_is_named():
    with pytest.raises(TypeError, match=r"Linear to return a scalar loss, but got a tensor of shape \(10,\)"):
        stacked(lambda output, target: F.cross_entropy(output, target, reduction="none"))


def step(found, block, sizes, key=None):
    module = linear()
    tensors = tree.map(lambda p: p.expand(3, *p.shape).clone().requires_grad_(), functional.parameters(module))
    width = max(sizes)
    rows = tree.map(lambda leaf: leaf[:, :width], block.batch)
    batch = Batch(rows, torch.tensor(sizes), torch.ones(3, dtype=torch.bool))
    return found.gradients(tensors, {}, batch, 0, random.fold_in(random.key(4), torch.arange(3)))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("sizes", [(2, 5, 3), (2, 2, 2)])
def test_losses_and_gradients_of_each_client(batched, compile, sizes):
    found, block = stacked(batched=batched, compile=compile), data()
    for _ in range(2):  # traced, then replayed
        losses, logs, buffers, gradients = step(found, block, sizes)
        assert (logs, buffers) == ({}, {})
        for k, size in enumerate(sizes):
            net = linear()
            loss = F.cross_entropy(net(block.batch[0][k, :size]), block.batch[1][k, :size])
            loss.backward()
            torch.testing.assert_close(losses[k].detach(), loss.detach())
            for p, gradient in zip(net.parameters(), gradients):
                torch.testing.assert_close(gradient[k], p.grad)


def test_stacked_gradients_pass_gradcheck():
    found, block = stacked(), data()
    weights = Batch(block.batch, torch.tensor(COUNTS), torch.ones(3, dtype=torch.bool)).weights
    values = [p.detach().expand(3, *p.shape).clone().requires_grad_() for p in linear().parameters()]

    def losses(*values):
        return found.stacked([*values, *tree.leaves(block.batch), weights], block.batch, 0, "error")[0]

    assert torch.autograd.gradcheck(losses, values)


def test_only_clients_that_still_train_are_evaluated_one_by_one():
    calls = []

    def loss(output, target):
        calls.append(len(output))
        return F.cross_entropy(output, target)

    found = stacked(loss, batched=False)
    calls.clear()
    tensors = tree.map(lambda p: p.expand(3, *p.shape).clone(), functional.parameters(linear()))
    batch = Batch(data().batch, torch.tensor(COUNTS), torch.tensor([True, False, True]))
    losses, _, _, gradients = found.gradients(tensors, {}, batch, 0, random.fold_in(random.key(4), torch.arange(3)))
    assert calls == [2, 3]
    assert losses[1] == 0
    assert all(gradient[1].abs().max() == 0 for gradient in gradients)


def test_traces_are_bounded(monkeypatch):
    monkeypatch.setattr("fedtorch.federation.local_solvers.stacked_loss._MOST_TRACES", 2)
    found, block = stacked(compile=True), data((5, 5, 5))
    for size in (1, 2, 3, 1):
        step(found, block, (size,) * 3)
        assert len(found._traces) <= 2


def test_is_ragged():
    assert is_ragged(torch.tensor([3, 4]))
    assert not is_ragged(torch.tensor([3, 3]))
    assert not is_ragged(torch.tensor([3]))
    assert not is_ragged(torch.tensor([], dtype=torch.int64))
