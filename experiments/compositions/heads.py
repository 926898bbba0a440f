"""A shared body with Bayesian linear heads, beside FedAvg, personal heads and heads on a body found before."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.models import hierarchical

COMPOSED = "shared body, HM1 heads, alternating"
PARTS = "FedAvg", "personal heads", "shared body, heads on their own", "personal heads' body, then HM1"
NOISE = 0.1  # sd of a row's response
INPUTS, FEATURES = 5, 8


class Federation(NamedTuple):
    """Clients whose features are the same and whose heads are related."""

    rows: ft.data.FederatedData
    held_out: ft.data.FederatedData  # responses without noise


def federation(seed: int, clients: int = 40, rows: int = 20) -> Federation:
    """Features tanh(Wx) for all; heads are combinations of two, and a little of their own."""
    draw = lambda at, *shape: ft.random.normal(ft.random.fold_in(ft.random.key(seed), at), shape, torch.float64)
    weight, level = 1.2 * draw(0, INPUTS, 6), draw(1, 6)
    heads = draw(2, clients, 2) @ draw(3, 2, 6) / 2 + 0.1 * draw(4, clients, 6)

    def of(at: int, count: int, noise: float) -> ft.data.FederatedData:
        x = draw(at, clients, count, INPUTS)
        y = ((x @ weight + level).tanh() @ heads[..., None])[..., 0] + noise * draw(at + 1, clients, count)
        return ft.data.from_tensors(list(zip(x, y)))

    return Federation(of(5, rows, NOISE), of(7, 200, 0.0))


def body(seed: int) -> nn.Module:
    """The module that clients share: eight features."""
    linear = nn.Linear(INPUTS, FEATURES, dtype=torch.float64)
    with torch.no_grad():
        for at, parameter in enumerate(linear.parameters()):
            parameter.copy_(0.5 * ft.random.normal(ft.random.key(1000 + 2 * seed + at), parameter.shape, torch.float64))
    return nn.Sequential(linear, nn.Tanh())


def descent(head: nn.Module, steps: int, buffers: str = "refuse") -> ft.LocalSolver:
    """Adam on the mean squared error."""
    return ft.gradient_descent(
        head,
        steps=steps,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        buffers="local" if buffers == "local" else "refuse",
    )


def errors(seed: int, rounds: int, steps: int = 5) -> dict[str, float]:
    """Mean squared error of what is predicted of held-out rows, by every way."""
    rows, held_out = federation(seed)
    head = ft.LinearHead(FEATURES, body(seed), dtype=torch.float64)
    given = descent(ft.LinearHead(FEATURES, body(seed), given=True, dtype=torch.float64), steps, "local")
    linear = ft.least_squares(ft.LinearHead(FEATURES + 1, intercept=False, dtype=torch.float64))
    model = hierarchical.linear(hierarchical.normal(FEATURES + 1))
    ways = {
        "FedAvg": ft.fedavg(descent(head, steps)),
        "personal heads": ft.personal_layers(descent(head, steps), "coefficients"),
        "shared body, heads on their own": ft.shared_body(given, ft.separate(linear)),
        COMPOSED: ft.shared_body(given, ft.matrix_normal(linear)),
        "shared body, EP heads, alternating": ft.shared_body(given, ft.ep(model)),
    }
    runs = {name: ft.run(algorithm, ft.InProcess(rows), rounds=rounds, seed=seed) for name, algorithm in ways.items()}
    found = {name: error(run.tensors(), held_out) for name, run in runs.items()}
    trained = runs["personal heads"].tensors()
    fixed = rows.map(lambda pair: (features(trained, pair[0]), pair[1]))
    hm1 = ft.run(ft.matrix_normal(linear), ft.InProcess(fixed), rounds=60, seed=seed)
    found["personal heads' body, then HM1"] = error({**trained, **hm1.tensors()}, held_out)
    return found


def features(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """The design rows of the body that all clients share."""
    phi = (x @ tensors["feature_map.0.weight"][0].T + tensors["feature_map.0.bias"][0]).tanh()
    return torch.cat([phi, torch.ones_like(phi[:, :1])], 1)


def error(tensors: dict[str, Tensor], data: ft.data.FederatedData) -> float:
    """The mean squared error over all clients."""
    x, y = data.stack(range(len(data))).batch
    phi = torch.stack([features(tensors, rows) for rows in x])
    return float(((phi @ tensors["coefficients"][..., None])[..., 0] - y).square().mean())
