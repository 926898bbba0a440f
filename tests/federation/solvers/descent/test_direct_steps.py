"""Steps by one operation of torch: the same as the optimiser's own, also where it has to take them itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, NAdam

from fedtorch.optimisers import DirectSteps

OPTIMISERS = {
    "SGD": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "weight decay": partial(SGD, lr=0.1, weight_decay=0.5),
    "maximize": partial(SGD, lr=0.1, maximize=True),
    "Adam": partial(Adam, lr=0.1, fused=True),
    "Adam, weight decay": partial(Adam, lr=0.1, weight_decay=0.5, fused=True),
    "AdamW": partial(AdamW, lr=0.1, fused=True),
    "not fused": partial(Adam, lr=0.1),
    "tensor of a rate": partial(Adam, lr=torch.tensor(0.1), fused=True),
    "NAdam": partial(NAdam, lr=0.1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("missing", [False, True], ids=["", "a gradient is missing"])
@pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS)
def test_steps_are_the_optimisers_own(make, missing, dtype):
    start = [torch.linspace(-1, 1, 12, dtype=dtype).reshape(2, 3, 2), torch.ones(2, 5, dtype=dtype)]
    ours, own = ([leaf.clone() for leaf in start] for _ in range(2))
    stepped, plain = make(ours), make(own)
    direct = DirectSteps(stepped)
    for t in range(4):
        for optimizer in (stepped, plain):
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.9  # as schedules do
        for one, other in zip(ours, own):
            other.grad = torch.sin(other + t)
            one.grad = other.grad.clone()
        if missing and t == 2:
            ours[1].grad = own[1].grad = None
        direct.step()
        plain.step()
    for one, other in zip(ours, own):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        states = (stepped.state.get(one, {}), plain.state.get(other, {}))
        torch.testing.assert_close(*({k: v for k, v in s.items() if v is not None} for s in states), rtol=0, atol=0)


def test_hooks_of_an_optimiser_are_called_at_every_step():
    tensor, calls = torch.ones(2), []
    optimizer = SGD([tensor], lr=0.1)
    optimizer.register_step_post_hook(lambda *arguments: calls.append(1))
    direct, tensor.grad = DirectSteps(optimizer), torch.ones(2)
    for _ in range(3):
        direct.step()
    assert len(calls) == 3
