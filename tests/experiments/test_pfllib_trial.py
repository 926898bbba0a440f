"""The trial of PFLlib: users are as said, and the rounds that are written for it are plain loops'."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fedtorch as ft
from experiments.trials import pfllib


def a_few(count: int = 3) -> pfllib.Users:
    draws = torch.Generator().manual_seed(0)
    rows = [(torch.rand(8, 784, generator=draws), torch.randint(10, (8,), generator=draws)) for _ in range(count)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return pfllib.Users(rows, rows, pfllib.Network())


def step(module: torch.nn.Module, parameters: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> list:
    gradients = torch.autograd.grad(F.cross_entropy(module(x), y), parameters)
    with torch.no_grad():
        for leaf, gradient in zip(parameters, gradients):
            leaf -= pfllib.LR * gradient
    return gradients


@pytest.mark.slow
def test_fedrep_trains_the_head_then_the_body() -> None:
    of = a_few()
    run = pfllib.run(pfllib.fedrep(of.network), of.train, 1)
    bodies = []
    for k, (x, y) in enumerate(of.train):
        module = copy.deepcopy(of.network)
        for part in (module.head, module.base):
            for _ in range(pfllib.EPOCHS):
                step(module, list(part.parameters()), x, y)
        torch.testing.assert_close(run.tensors()["head.weight"][k], module.head.weight.detach(), atol=1e-6, rtol=0)
        bodies.append(module.base[1].weight.detach())
    torch.testing.assert_close(run.server["base.1.weight"], torch.stack(bodies).mean(0), atol=1e-6, rtol=0)


def test_apfl_mixes_by_its_own_alpha() -> None:
    of = a_few(1)
    run = pfllib.run(pfllib.apfl(pfllib.descent(of.network, 1), pfllib.LR), of.train, 1)
    shared, personal, alpha = copy.deepcopy(of.network), copy.deepcopy(of.network), pfllib.ALPHA
    ((x, y),) = of.train
    for _ in range(pfllib.EPOCHS):
        of_shared = step(shared, list(shared.parameters()), x, y)
        of_personal = step(personal, list(personal.parameters()), x, y)
        slope = 0.02 * alpha
        for a, b, g, h in zip(personal.parameters(), shared.parameters(), of_personal, of_shared, strict=True):
            slope += float(((a - b).detach() * (alpha * g + (1 - alpha) * h)).sum())
        alpha = min(max(alpha - pfllib.LR * slope, 0.0), 1.0)
    for name, leaf in run.tensors().items():
        mixed = (1 - alpha) * shared.get_parameter(name) + alpha * personal.get_parameter(name)
        torch.testing.assert_close(leaf[0], mixed.detach(), atol=1e-6, rtol=0)


def test_apfl_of_quadratic_losses_is_its_closed_form() -> None:
    """Of losses whose gradient is H (w - b), s steps take w to b + M^s (w - b), M = I - lr H, and α to a line in α."""
    lr, steps, draws = 0.05, 3, torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(*shape, generator=draws, dtype=torch.float64)
    rows = [(draw(size, 2), draw(size)) for size in (4, 9, 6)]
    local = ft.gradient_descent(
        torch.nn.Linear(2, 1, bias=False, dtype=torch.float64),
        steps=1,
        loss=lambda found, y: (found[:, 0] - y).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
    )
    start = {"weight": draw(1, 2)}
    hessians = [2 * x.T @ x / len(y) for x, y in rows]
    best = [torch.linalg.lstsq(x, y[:, None]).solution[:, 0] for x, y in rows]
    power = lambda k, s: torch.linalg.matrix_power(torch.eye(2).double() - lr * hessians[k], s)
    shared, own, alphas = start["weight"][0], [start["weight"][0]] * 3, [pfllib.ALPHA] * 3
    for done in ft.Run(pfllib.apfl(local, lr, steps), ft.InProcess(ft.data.from_tensors(rows)), start).rounds(6):
        after = []
        for k in range(3):
            apart = own[k] - shared
            for s in range(steps):
                pull = apart @ power(k, s + 1) @ hessians[k] @ power(k, s)
                moved = alphas[k] * (1 - 0.02 * lr - lr * pull @ apart) - lr * pull @ (shared - best[k])
                alphas[k] = float(moved.clamp(0, 1))
            after.append(best[k] + power(k, steps) @ (shared - best[k]))
            own[k] = after[k] + alphas[k] * power(k, steps) @ apart
        shared = sum(len(y) * w for (_, y), w in zip(rows, after)) / 19
        torch.testing.assert_close(done.server["weight"][0], shared, rtol=0, atol=1e-12)
        states = done.clients.table.read(slice(0, 3))
        torch.testing.assert_close(states.personal["weight"][:, 0], torch.stack(own), rtol=0, atol=1e-12)
        torch.testing.assert_close(states.alpha.double(), torch.tensor(alphas, dtype=torch.float64), rtol=0, atol=1e-12)
    assert max(alphas) - min(alphas) > 1e-3  # each has moved by its own rows


@pytest.mark.slow
def test_the_trial_runs(tmp_path: Path) -> None:
    try:
        ft.data.mnist(train=False)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    pfllib.main(["--smoke", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["setting"] for row in rows} == set(pfllib.OURS) == set(pfllib.CLIENTS)
