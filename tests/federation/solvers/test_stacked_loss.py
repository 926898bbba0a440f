"""Stacked losses and gradients of one step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.oracles.stacked_losses import COUNTS, block_of, linear, stacked

from fedtorch import functional, random, tree
from fedtorch.federation.solvers.batches import Batch


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
    found, block = stacked(batched=batched, compile=compile), block_of()
    for _ in range(2):  # captured, then replayed
        losses, logs, buffers, gradients, _ = step(found, block, sizes)
        assert (logs, buffers) == ({}, {})
        for k, size in enumerate(sizes):
            net = linear()
            loss = F.cross_entropy(net(block.batch[0][k, :size]), block.batch[1][k, :size])
            loss.backward()
            torch.testing.assert_close(losses[k].detach(), loss.detach())
            for p, gradient in zip(net.parameters(), gradients):
                torch.testing.assert_close(gradient[k], p.grad)


def test_stacked_gradients_pass_gradcheck():
    found, block = stacked(), block_of()
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
    batch = Batch(block_of().batch, torch.tensor(COUNTS), torch.tensor([True, False, True]))
    losses, _, _, gradients, _ = found.gradients(tensors, {}, batch, 0, random.fold_in(random.key(4), torch.arange(3)))
    assert calls == [2, 3]
    assert losses[1] == 0
    assert all(gradient[1].abs().max() == 0 for gradient in gradients)
