"""Stacked steps are those of `torch.optim`, a client at a time, whatever is stacked beside it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.programs import launches, reference
from torch import Tensor

from fedtorch.programs import stacked_step
from fedtorch.programs.stacked_step import ClientValues

RULES = {
    "sgd": (partial(torch.optim.SGD, lr=0.1), partial(stacked_step.sgd, lr=0.1)),
    "decay": (
        partial(torch.optim.SGD, lr=0.1, weight_decay=0.3),
        partial(stacked_step.sgd, lr=0.1, weight_decay=0.3),
    ),
    "momentum": (
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1),
        partial(stacked_step.sgd, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1),
    ),
    "nesterov": (
        partial(torch.optim.SGD, lr=0.1, momentum=0.8, nesterov=True),
        partial(stacked_step.sgd, lr=0.1, momentum=0.8, nesterov=True),
    ),
    "adam": (
        partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
        partial(stacked_step.adam, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
    ),
    "adamw": (
        partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        partial(stacked_step.adam, lr=0.01, weight_decay=0.1, decoupled=True),
    ),
}
SHAPES = [(3, 5, 7), (1, 4), (5, 1), (2, 1100), (3,)]
TOTAL = torch.tensor([4, 1, 3, 0, 2])  # steps of each client


def gradient(shape: tuple[int, ...], t: int) -> Tensor:
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * (t + 1)).reshape(shape)


def by_torch(make, start: Tensor, total: Tensor, pull: tuple[Tensor, Tensor] | None, most: float | None) -> Tensor:
    """Each client alone for its own number of steps."""
    rows = []
    for k, steps in enumerate(total[: len(start)].tolist()):
        x = torch.nn.Parameter(start[k].clone())
        optimizer = make([x])
        for t in range(steps):
            x.grad = gradient(start.shape, t)[k].clone()
            if pull is not None:
                x.grad += pull[0][k] * x.detach() - pull[1][k]
            if most is not None:
                torch.nn.utils.clip_grad_norm_([x], most)
            optimizer.step()
        rows.append(x.detach())
    return torch.stack(rows)


def stacked(step, start: Tensor, total: Tensor, pull: tuple[Tensor, Tensor] | None, most: float | None) -> Tensor:
    """All at once, in which those who have finished leave the stack."""
    x, total = start.clone(), total[: len(start)].to(start.device)
    kept = [torch.zeros_like(x), torch.zeros_like(x)]
    kept = kept if step.func is stacked_step.adam else kept[:1] if "momentum" in step.keywords else [None]
    for t in range(int(total.max())):
        left = (t < total).nonzero()[:, 0]
        some = [None if each is None else each[left] for each in (x, *kept)]
        clients = ClientValues(torch.full_like(left, t))
        if pull is not None:
            clients = clients._replace(precision=pull[0][left], shift=pull[1][left])
        g = gradient(start.shape, t).to(x)[left]
        if most is not None:
            clients = clients._replace(share=stacked_step.clipped([some[0]], [g], [clients], most))
        step(some[0], g, *some[1:], clients)
        for whole, part in zip((x, *kept), some):
            if whole is not None:
                whole[left] = part
    return x


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_client_takes_its_own_steps(rule, shape, device, monkeypatch) -> None:
    make, step = RULES[rule]
    total = torch.tensor([4]) if shape[0] == 1 else TOTAL
    start = torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    pull = torch.linspace(0, 2, shape[0], dtype=torch.float64), start.flip(0).contiguous()
    for pulled, most in ((None, None), (pull, 0.7)):
        wanted = by_torch(make, start, total, pulled, most)
        args = (start.to(device), total, None if pulled is None else tuple(p.to(device) for p in pulled), most)
        with reference():
            # Adam divides by a root of moments; a few roundings of each of four steps.
            torch.testing.assert_close(stacked(step, *args).cpu(), wanted, rtol=1e-11, atol=1e-13)
        with launches(monkeypatch, at_least=4 if max(total) == 4 else 3):
            found = stacked(step, *args)
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("rule", RULES)
def test_single_precision(rule, device) -> None:
    make, step = RULES[rule]
    start = torch.linspace(-1, 1, 5 * 33, dtype=torch.float64).reshape(5, 33)
    wanted = by_torch(make, start, TOTAL, None, None)
    found = stacked(step, start.float().to(device), TOTAL, None, None)
    assert found.dtype == torch.float32
    # A few units of rounding of numbers up to 2 in each of four steps; Adam's first moves are of the size of lr.
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=4 * 4 * 2.0**-23)


def test_no_clients_and_no_elements(device) -> None:
    for shape in ((0, 3), (2, 0)):
        x = torch.zeros(shape, device=device)
        stacked_step.sgd(x, x.clone(), None, ClientValues(0), lr=0.1)
        stacked_step.adam(x, x.clone(), x.clone(), x.clone(), ClientValues(0), lr=0.1)
        assert x.shape == shape


def test_nan_stays_with_its_client(device) -> None:
    x, g = torch.ones(3, 4, device=device), torch.ones(3, 4, device=device)
    g[1, 2] = torch.nan
    share = stacked_step.clipped([x], [g], [ClientValues(0)], 1.0)
    stacked_step.sgd(x, g, None, ClientValues(0, share=share), lr=0.1)
    assert x.isnan().any(1).tolist() == [False, True, False]


def test_gradients_of_any_strides_and_rates_on_the_device(device) -> None:
    start = torch.linspace(-1, 1, 12, device=device).reshape(3, 4)
    g = torch.arange(12.0, device=device).reshape(4, 3).mT
    wanted, found = start.clone(), start.clone()
    stacked_step.sgd(wanted, g.contiguous(), None, ClientValues(0), lr=0.5)
    stacked_step.sgd(found, g, None, ClientValues(0), lr=torch.tensor(0.5, device=device))
    assert torch.equal(found, wanted)
    assert torch.equal(wanted, start - 0.5 * g)


def test_the_count_may_be_a_number(device) -> None:
    x = torch.linspace(-1, 1, 6, device=device).reshape(2, 3)
    results = []
    for taken in (3, torch.full((2,), 3, device=device)):
        state = [x.clone(), x.sin(), x.abs() / 2, x.square()]
        stacked_step.adam(*state, ClientValues(taken), lr=0.1)
        results.append(state[0])
    assert torch.equal(*results)


def test_other_dtypes_go_to_the_reference(device) -> None:
    x = torch.ones(2, 3, device=device, dtype=torch.bfloat16)
    assert not stacked_step.fits(x)
    assert not stacked_step.fits(torch.ones(3, 2, device=device).mT)
    assert stacked_step.fits(torch.ones(3, 2, device=device))
    stacked_step.sgd(x, x.clone(), None, ClientValues(0), lr=0.5)
    assert x.tolist() == [[0.5] * 3] * 2
