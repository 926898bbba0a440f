"""Steps of generalised linear models are those of the losses of `torch.nn.functional`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.programs import launches, reference
from torch import Tensor

from fedtorch import random
from fedtorch.programs import glm_steps as glm
from fedtorch.programs.glm_steps import glm_steps

LOSSES = {
    "gaussian": (glm.GAUSSIAN, F.mse_loss),
    "bernoulli": (glm.BERNOULLI, F.binary_cross_entropy_with_logits),
    "poisson": (glm.POISSON, F.poisson_nll_loss),
    "categorical": (glm.CATEGORICAL, F.cross_entropy),
}
SIZES = [(3, 9, 4), (1, 1, 1), (2, 0, 2)]


def problem(name: str, clients: int, rows: int, features: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = random.normal(random.key(1), (clients, rows, features), torch.float64) / 2
    classes = 5 if name == "categorical" else 2
    y = random.randint(random.key(2), classes, (clients, rows))
    count = random.randint(random.key(3), rows + 1, (clients,)) if rows else torch.zeros(clients, dtype=torch.int64)
    count[:1] = rows
    x[torch.arange(rows) >= count[:, None]] = torch.nan  # padding that nobody may look at
    shape = (clients, features, 5) if name == "categorical" else (clients, features)
    return x, y if name == "categorical" else y.double(), count, random.normal(random.key(4), shape, torch.float64)


def by_hand(name, x, y, count, start, steps, lr, batches=None, precision=None, shift=None, total=None):
    """Each client alone, by autograd: (parameters, mean losses)."""
    done, told = [], []
    x = torch.cat([x, torch.ones_like(x[..., :1])], -1) if start.shape[1] > x.shape[2] else x
    for k in range(len(x)):
        theta, losses = start[k].clone(), [start.new_zeros(())]
        for t in range(steps if total is None else int(total[k])):
            rows = torch.arange(int(count[k])) if batches is None else batches[k, t][batches[k, t] >= 0]
            theta.requires_grad_()
            loss = LOSSES[name][1](x[k, rows] @ theta, y[k, rows]) if len(rows) else 0 * theta.sum()
            losses.append(loss.detach())
            if precision is not None:
                loss = loss + precision[k] / 2 * theta.square().sum() - (shift[k] * theta).sum()
            (gradient,) = torch.autograd.grad(loss, theta)
            theta = (theta - lr * gradient).detach()
        done.append(theta)
        told.append(torch.stack(losses).sum() / max(1, len(losses) - 1))
    return torch.stack(done), torch.stack(told)


def assert_close(found, wanted, close) -> None:
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one.cpu().double(), other, rtol=close, atol=close, equal_nan=True)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", SIZES)
def test_against_autograd(name, size, device, monkeypatch) -> None:
    x, y, count, start = problem(name, *size)
    pull = torch.linspace(0, 1, len(x), dtype=torch.float64), start.flip(0)
    batches = torch.stack([random.permutation(random.fold_in(random.key(9), t), size[1])[:3] for t in range(2)])
    batches = batches.expand(len(x), -1, -1).clone()
    batches[batches >= count[:, None, None]] = -1
    total = torch.arange(len(x)) % 3
    for options in ({}, {"precision": pull[0], "shift": pull[1], "total": total}, {"batches": batches}):
        wanted = by_hand(name, x, y, count, start, 2, 0.2, **options)
        moved = {key: value.to(device) for key, value in options.items()}
        args = (LOSSES[name][0], *(part.to(device) for part in (x, y, count, start)))
        with reference():
            assert_close(glm_steps(*args, steps=2, lr=0.2, **moved), wanted, 1e-12)
        single = name == "categorical"
        if single:
            args = (args[0], args[1].float(), *args[2:4], args[4].float())
        with launches(monkeypatch):
            found = glm_steps(*args, steps=2, lr=0.2, **moved)
        # Sums of a dozen terms of a few units: a hundred units of rounding over the steps.
        assert_close(found, wanted, 100 * 2.0 ** (-23 if single else -52))


@pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
def test_rows_that_do_not_stay(name, device, monkeypatch) -> None:
    monkeypatch.setattr(glm, "_RESIDENT", 32)
    monkeypatch.setattr(glm, "_TILE", 128)
    x, y, count, start = problem(name, 2, 13, 3)
    wanted = by_hand(name, x, y, count, start, 2, 0.1)
    found = glm_steps(LOSSES[name][0], *(part.to(device) for part in (x, y, count, start)), steps=2, lr=0.1)
    assert_close(found, wanted, 1e-13)


@pytest.mark.parametrize("name", LOSSES)
def test_an_intercept_needs_no_column_of_ones(name, device, monkeypatch) -> None:
    x, y, count, start = problem(name, 2, 7, 3)
    batches = torch.tensor([[[0, 4, 5, -1]], [[1, -1, -1, -1]]])
    wider = torch.cat([start, start[:, :1]], 1)
    args = (y.to(device), count.to(device))
    kind = torch.float32 if name == "categorical" else torch.float64
    for options in ({}, {"batches": batches}):
        wanted = by_hand(name, x, y, count, wider, 1, 0.3, **options)
        moved = {key: value.to(device) for key, value in options.items()}
        for form in (reference(), launches(monkeypatch)):
            with form:
                found = glm_steps(
                    LOSSES[name][0], x.to(device, kind), *args, wider.to(device, kind), steps=1, lr=0.3, **moved
                )
            assert_close(found, wanted, 100 * torch.finfo(kind).eps)


def test_labels_that_cross_entropy_leaves_out(device, monkeypatch) -> None:
    x, y, count, start = problem("categorical", 2, 5, 3)
    count[:] = 5
    x = random.normal(random.key(5), x.shape, torch.float64)
    y[0, :3], y[1] = -100, -100
    wanted = by_hand("categorical", x, y, count, start, 2, 0.3)
    assert wanted[1].isnan().tolist() == [False, True]  # the mean over no rows, whose gradient is zero
    args = (x.float().to(device), y.to(device), count.to(device), start.float().to(device))
    for form in (reference(), launches(monkeypatch)):
        with form:
            assert_close(glm_steps(glm.CATEGORICAL, *args, steps=2, lr=0.3), wanted, 100 * 2.0**-23)


def test_single_precision_and_strides(device) -> None:
    x, y, count, start = problem("poisson", 3, 8, 4)
    wanted = by_hand("poisson", x, y, count, start, 3, 0.1)
    strided = x.float().mT.contiguous().mT.to(device)
    found = glm_steps(glm.POISSON, strided, y.to(device), count.to(device), start.float().to(device), steps=3, lr=0.1)
    assert {part.dtype for part in found} == {torch.float32}
    assert_close(found, wanted, 100 * 2.0**-23)


def test_no_clients_and_too_many_features(device, monkeypatch) -> None:
    empty = [part[:0].to(device) for part in problem("gaussian", 2, 3, 2)]
    assert [part.shape for part in glm_steps(glm.GAUSSIAN, *empty, steps=2, lr=0.1)] == [(0, 2), (0,)]
    wide = [part.to(device) for part in problem("gaussian", 1, 2, 129)]
    with launches(monkeypatch, at_least=0) as seen:
        glm_steps(glm.GAUSSIAN, *wide, steps=1, lr=0.1)
    assert seen == []


def test_gradients_of_the_start_come_from_the_reference(device) -> None:
    x, y, count, start = (part.to(device) for part in problem("bernoulli", 2, 4, 2))
    x = x.nan_to_num()
    run = lambda start: glm_steps(glm.BERNOULLI, x, y, count, start, steps=2, lr=0.3)[0]
    assert torch.autograd.gradcheck(run, start.requires_grad_())


def test_shapes_that_do_not_fit() -> None:
    x, y, count, start = problem("gaussian", 2, 3, 2)
    with pytest.raises(ValueError, match="Expected x"):
        glm_steps(glm.GAUSSIAN, x, y[:1], count, start, steps=1, lr=0.1)
    with pytest.raises(ValueError, match=r"Expected batches of shape \(2, 1, B\)"):
        glm_steps(glm.GAUSSIAN, x, y, count, start, steps=1, lr=0.1, batches=torch.zeros(2, 2, 1, dtype=torch.int64))
