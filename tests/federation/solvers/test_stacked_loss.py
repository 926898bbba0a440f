"""Stacked losses and gradients of one step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.oracles.stacked_losses import COUNTS, block_of, linear, stacked
from torch import nn

from fedtorch import functional, random, tree
from fedtorch.federation.solvers.batches import Batch
from fedtorch.module_randomness.step_draws import StepKeys


def keys() -> StepKeys:
    return StepKeys(random.fold_in(random.key(4), torch.arange(3)))


def step(found, block, sizes, module=None):
    named = functional.parameters(linear() if module is None else module)
    tensors = {n: p.expand(3, *p.shape).clone().requires_grad_() for n, p in named.items()}
    width = max(sizes)
    rows = tree.map(lambda leaf: leaf[:, :width], block.batch)
    batch = Batch(rows, torch.tensor(sizes))
    return found.gradients(tensors, {}, batch, 0, keys())


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("sizes", [(2, 5, 3), (2, 2, 2)])
def test_losses_and_gradients_of_each_client(batched, compile, sizes):
    found, block = stacked(batched=batched, compile=compile), block_of()
    for _ in range(2):  # captured, then replayed
        losses, logs, buffers, gradients, *_ = step(found, block, sizes)
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
    weights = Batch(block.batch, torch.tensor(COUNTS), padded=True).weights
    values = [p.detach().expand(3, *p.shape).clone().requires_grad_() for p in linear().parameters()]

    def losses(*values):
        return found.stacked([*values, *tree.leaves(block.batch), weights], block.batch, 0, "error")[0]

    assert torch.autograd.gradcheck(losses, values)


class LateDropout(nn.Module):
    """Draws from the second step on, which nobody has seen before."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = linear(), 0

    def forward(self, x):
        return F.dropout(self.net(x), 0.5) if self.calls else self.net(x)


def test_a_module_that_draws_later_draws_from_keys_and_leaves_the_generator():
    module = LateDropout()
    found = stacked(module=module, batched=False)
    assert not found.random
    found.objective.module.calls = 1
    before = torch.get_rng_state()
    seldom = step(found, block_of(), COUNTS, module=module)
    assert torch.equal(torch.get_rng_state(), before)
    found.random = True
    torch.testing.assert_close(step(found, block_of(), COUNTS, module=module), seldom, rtol=0, atol=0)


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand_like(gradient)


@pytest.mark.parametrize("random", [True, False])
def test_backward_passes_one_by_one_draw_from_keys(random):
    module = linear()
    found = stacked(lambda output, target: F.cross_entropy(NoisyGradient.apply(output), target), batched=False)
    found.random = random
    before = torch.get_rng_state()
    first, again = (step(found, block_of(), COUNTS, module) for _ in range(2))
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_steps_one_by_one_that_draw_nothing_are_not_intercepted():
    modes = []

    def loss(output, target):
        modes.append(torch._C._len_torch_dispatch_stack())
        return F.cross_entropy(output, target)

    found = stacked(loss, batched=False)
    modes.clear()
    step(found, block_of(), COUNTS)
    assert modes == [0, 0, 0]


def test_recurrent_modules_stacked_equal_those_one_by_one():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(1, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.rnn(x[..., None])[0][:, -1])

    module = Recurrent().double()
    for i, p in enumerate(module.parameters()):
        p.data = random.normal(random.key(i), p.shape, p.dtype)
    answers = [step(stacked(module=module, batched=b), block_of(), COUNTS, module=module) for b in (True, False)]
    torch.testing.assert_close(*answers)


class Clamped(nn.Module):
    """Gives its parameter other memory in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = linear()

    def forward(self, x):
        self.net.weight.data = self.net.weight.data.clamp(-0.1, 0.1)
        return self.net(x)


def test_memory_that_a_module_gives_to_a_parameter_reaches_the_stack():
    found, module = stacked(module=Clamped(), batched=False), Clamped()
    tensors = {name: p.detach().expand(3, *p.shape).clone() for name, p in module.named_parameters()}
    batch = Batch(block_of().batch, torch.tensor(COUNTS))
    for index in range(2):
        found.gradients(tensors, {}, batch, index, keys())
        assert float(tensors["net.weight"].abs().max()) <= 0.1
        tensors["net.weight"].mul_(20)


def test_clients_one_by_one_have_the_same_parameters_in_all_steps_of_a_round_and_none_after_it():
    seen = set()
    found = stacked(batched=False)
    found.objective.module.register_forward_pre_hook(lambda module, inputs: seen.add(module.weight))
    tensors = {name: p.detach().expand(3, *p.shape).clone() for name, p in linear().named_parameters()}
    batch = Batch(block_of().batch, torch.tensor(COUNTS))
    for index in range(4):
        found.gradients(tensors, {}, batch, index, keys())
    assert len(seen) == 3
    found.release()
    assert not found._of
