"""Parts that run on a device beside the algorithms of the conformance test: `(device) -> tensors on the CPU`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from test_conformance import ROBUST_RULES
from torch import nn

import fedtorch as ft
from fedtorch import random, tree, vfl
from fedtorch.models import hierarchical
from fedtorch.models.gibbs import logistic, sparse
from fedtorch.tree import Tree
from fedtorch.trust import privacy, robust
from fedtorch.vfl.fit import encoder
from fedtorch.vfl.model import likelihoods
from support import splits, verticals
from support.oracles.closed_forms import linear_clients, sgd
from support.small_federations import Classifier, classes

Case = Callable[[str], Tree]


def ran(
    make: Callable[[], ft.Algorithm], data: Callable[[], Any], device: str, rounds: int = 2, **options: Any
) -> Tree:
    """What a run's clients predict with."""
    run = ft.run(make(), ft.InProcess(data(), device=device), rounds=2, seed=1, progress=False, **options)
    return tree.to(run.tensors(), "cpu")


def trained(device: str, solver: Any = ft.gradient_descent, **options: Any) -> Tree:
    """A Lightning module with dropout, a metric, logs and a schedule."""
    make = lambda: ft.fedavg(solver(Classifier().double(), epochs=1, batch_size=4, **options))
    return ran(make, lambda: classes(dtype=torch.float64), device)


def perceptron() -> nn.Module:
    """A network with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()


def loaders() -> Any:
    """Clients' own loaders."""
    sets = [torch.utils.data.TensorDataset(*rows) for rows in classes(dtype=torch.float64)]
    return ft.data.from_loaders(
        {str(k): torch.utils.data.DataLoader(one, batch_size=4, shuffle=True) for k, one in enumerate(sets)}
    )


def counts(family: str) -> ft.data.FederatedData:
    """Responses of a family, for three columns."""
    made = []
    for k, (x, _) in enumerate(linear_clients([12, 20, 15])):
        uniform = random.uniform(random.key(k), (len(x),), torch.float64)
        y = {"logistic": (uniform < 0.5), "poisson": (uniform * 4).floor(), "cumulative": (uniform * 3).floor()}[family]
        made.append((x, y.double()))
    return ft.data.from_tensors(made)


def fitted(family: str, device: str) -> Tree:
    """Expectation propagation of a generalised model, and its summary."""
    made = {"logistic": hierarchical.generalised.logistic, "poisson": hierarchical.generalised.poisson}[family]
    model = made(hierarchical.normal(3, random=[0]))
    run = ft.run(ft.ep(model), ft.InProcess(counts(family), device=device), rounds=4, progress=False)
    return tree.to(run.tensors(), "cpu"), torch.tensor(run.summary().select_dtypes("number").to_numpy(dtype=float))


def split(name: str, device: str) -> Tree:
    """The parameters of a split network after three steps."""
    model, rows = splits.CASES[name]().to(device), tree.to(splits.data(), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        model.train().losses(rows, step).sum().backward()
        optimizer.step()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def vertical(device: str) -> Tree:
    """A variational posterior of a vertical model after a few steps."""
    data = tree.to(verticals.gaussian_data([3], 30), device)
    model = vfl.augmented(likelihoods.gaussian(verticals.SD), verticals.predictors([3]), torch.tensor((0.5, 1.0)))
    guide = vfl.Guide(vfl.sums(encoder.affine(), skewed=False), joint=True)
    # Adam takes whole steps along gradients that are zero but for rounding, so that parameters themselves differ.
    fit = vfl.sfvi(model, guide, data, key=random.key(0), steps=2, draws=2, size=2)
    return tree.to((fit.bounds, fit.moments()), "cpu")


def wrapped(wrapper: Callable[[], Any], device: str) -> Tree:
    """Averaging in a wrapper."""
    return ran(lambda: ft.fedavg(sgd(0.1, steps=2)) | wrapper(), lambda: linear_clients([5, 9, 4, 7, 6, 8]), device)


SEEDED = {"entropy": privacy.from_seed(0)}
CASES: dict[str, Case] = {
    "a Lightning module": trained,
    "a Lightning module, one by one": partial(trained, batched=False),
    "a Lightning module, stacked": partial(trained, batched=True),
    "a Lightning module, chunks of one": lambda device: tree.to(
        ft.run(
            ft.fedavg(ft.gradient_descent(Classifier().double(), epochs=1, batch_size=4)),
            ft.InProcess(classes(dtype=torch.float64), chunk=1, device=device),
            rounds=2,
            seed=1,
        ).tensors(),
        "cpu",
    ),
    "kept moments": partial(trained, reset="never"),
    "compiled": lambda device: ran(
        lambda: ft.fedavg(sgd(0.1, perceptron(), steps=2, compile=True)), lambda: linear_clients([5, 9, 4, 7]), device
    ),
    "from loaders": lambda device: ran(
        lambda: ft.fedavg(ft.gradient_descent(Classifier().double(), epochs=1)), lambda: loaders(), device
    ),
    "by Trainers": lambda device: ran(
        lambda: ft.fedavg(ft.lightning_fit(Classifier().double(), max_epochs=1, batch_size=4)),
        lambda: classes(dtype=torch.float64),
        device,
    ),
    "logistic expectation propagation": partial(fitted, "logistic"),
    "Poisson expectation propagation": partial(fitted, "poisson"),
    "logistic Gibbs": lambda device: ran(
        lambda: ft.gibbs(logistic.logistic_regression(), sparse.hierarchy(), sweeps=2, chains=2),
        lambda: counts("logistic"),
        device,
        parameters=torch.full((3,), 0.5, dtype=torch.float64),
    ),
    **{f"robust {name}": partial(wrapped, lambda rule=rule: robust.rule(rule)) for name, rule in ROBUST_RULES.items()},
    "noise at clients": partial(wrapped, lambda: privacy.local_level(clip=1.0, noise=2.0, delta=1e-3, **SEEDED)),
    "noise of clients": partial(wrapped, lambda: privacy.client_level(clip=1.0, noise=2.0, delta=1e-3, **SEEDED)),
    "noise of examples": lambda device: ran(
        lambda: ft.fedavg(
            privacy.example_level(
                perceptron(),
                clip=1.0,
                noise=2.0,
                sampling_rate=0.3,
                steps=2,
                delta=1e-3,
                loss=nn.functional.mse_loss,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                **SEEDED,
            )
        ),
        lambda: linear_clients([5, 9, 4, 7]).map(lambda rows: (rows[0], rows[1].reshape(-1, 1))),
        device,
    ),
    **{f"split network, {name}": partial(split, name) for name in splits.CASES},
    "a vertical model": vertical,
    "a perceptron by SGD": lambda device: ran(
        lambda: ft.fedavg(sgd(0.1, perceptron(), epochs=1, batch_size=3)), lambda: linear_clients([5, 9, 4, 7]), device
    ),
}
