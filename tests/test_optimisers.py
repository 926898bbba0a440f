"""Any optimiser as a function of trees is the optimiser itself; nothing is shared and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from fedtorch import random, tree
from fedtorch.optimisers import TreeOptimizer, rebind

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "adam": lambda p: Adam(p, lr=0.05),
    "amsgrad": lambda p: Adam(p, lr=0.05, amsgrad=True, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}
SHAPES = {"matrix": (3, 2), "vector": (4,), "scalar": ()}


def draw(number: int) -> dict[str, Tensor]:
    key = random.fold_in(random.key(1), number)
    return {
        name: random.normal(random.fold_in(key, i), shape, torch.float64)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_an_optimiser_that_lives_on(name: str) -> None:
    parameters = draw(0)
    own = {n: nn.Parameter(leaf.clone()) for n, leaf in parameters.items()}
    plain = OPTIMIZERS[name](own.values())
    optimiser = TreeOptimizer.made(OPTIMIZERS[name], parameters)
    state = optimiser.init(parameters)
    assert all(not leaf.any() for leaf in tree.leaves(state))
    for number in range(1, 6):
        gradients: dict[str, Tensor | None] = {**draw(number)}
        if number < 3:
            gradients["scalar"] = None  # it awakes later
        if number == 4:  # made anew, as in a resumed run
            optimiser = TreeOptimizer.made(OPTIMIZERS[name], parameters)
        before = tree.map(torch.clone, (parameters, state))
        moved, kept = optimiser.step(parameters, gradients, state)
        torch.testing.assert_close((parameters, state), before, rtol=0, atol=0)
        tree.map(lambda a, b: None, kept, state)  # of one structure
        for n, p in own.items():
            p.grad = gradients[n]
        plain.step()
        torch.testing.assert_close(moved, {n: p.detach() for n, p in own.items()}, rtol=1e-12, atol=1e-12)
        parameters, state = moved, kept


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacked_steps_are_those_of_each_client(name: str) -> None:
    start = draw(0)
    own = {n: nn.Parameter(leaf) for n, leaf in start.items()}
    stacked = TreeOptimizer(OPTIMIZERS[name](own.values()), own, stacked=True)
    alone = TreeOptimizer.made(OPTIMIZERS[name], start)
    parameters = tree.stack([draw(0), draw(10)])
    state = stacked.init(parameters)
    clients = [(tree.map(lambda leaf, k=k: leaf[k], parameters), alone.init(start)) for k in range(2)]
    for number in range(1, 4):
        gradients = [draw(number), draw(10 * number)]
        parameters, state = stacked.step(parameters, tree.stack(gradients), state)
        clients = [alone.step(own, gradient, kept) for (own, kept), gradient in zip(clients, gradients)]
        assert all(len(leaf) == 2 for leaf in tree.leaves(state))
        torch.testing.assert_close(parameters, tree.stack([own for own, _ in clients]), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state, tree.stack([kept for _, kept in clients]), rtol=1e-12, atol=1e-12)


class Summing(SGD):
    """Keeps sums over rows."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["total"] = parameter.grad.sum(0)
        return super().step(closure)


def test_what_is_no_optimiser_or_has_a_state_that_is_no_tree_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Expected a torch\.optim\.Optimizer, but got NoneType"):
        TreeOptimizer.made(lambda p: None, draw(0))  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="Expected an optimiser that needs no closure, but got LBFGS"):
        TreeOptimizer.made(lambda p: torch.optim.LBFGS(list(p)), draw(0)).init(draw(0))
    own = {"matrix": nn.Parameter(torch.ones(2, 3))}
    with pytest.raises(TypeError, match=r"hold the module's parameters, but got others of shapes \[\(2, 3\)\]"):
        TreeOptimizer(SGD(own.values(), lr=0.1), {"other": torch.ones(2, 3)})
    summing = TreeOptimizer(Summing(own.values(), lr=0.1), own, stacked=True, advice="use another one")
    with pytest.raises(TypeError, match=r"Summing's state 'total' to have a row per client.* \(3,\) .*another one"):
        summing.init({"matrix": torch.ones(5, 3)})


def test_rebinding_keeps_options_and_shares_nothing():
    net = nn.Linear(3, 2)
    rate = torch.tensor(0.3)
    optimizer = Adam([{"params": [net.bias], "lr": rate}, {"params": [net.weight]}], lr=0.1, foreach=False)
    StepLR(optimizer, 1)
    tensors = [torch.zeros(5, 2), torch.ones(5, 2, 3)]
    clone = rebind(optimizer, [[tensors[0]], [tensors[1]]])
    assert clone.param_groups[0]["params"][0] is tensors[0]
    assert [float(group["lr"]) for group in clone.param_groups] == [pytest.approx(0.3), 0.1]
    clone.param_groups[0]["lr"].fill_(9.0)
    assert float(rate) == pytest.approx(0.3)
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    clone.step()
    assert len(clone.state) == 2
    assert len(optimizer.state) == 0


def test_states_of_the_constructor_that_differ_between_elements_are_refused():
    net = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.Adagrad(net.parameters())
    optimizer.state[net.weight]["sum"][0] = 5.0
    with pytest.raises(TypeError, match="Adagrad starts with a state 'sum' that differs between elements"):
        rebind(optimizer, [[torch.zeros(4, 2, 3)]])
