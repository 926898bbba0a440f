"""A vertical federation of a clinic and laboratories whose measurements lie at three sites, beside its parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import fedtorch as ft
from fedtorch import vfl
from fedtorch.sites.vertical import FederatedParty

COMPOSED = "clinic, and laboratories at three sites"
PARTS = "clinic alone", "laboratories alone, in one place", "clinic, and laboratories at the largest site alone"
TEST = 318  # patients


def divided(seed: int) -> tuple[vfl.VerticalData, vfl.VerticalData, Sequence[Tensor]]:
    """Training and test rows of heart patients by clinic and laboratories, and which of the former each site has."""
    table = ft.data.heart_failure(torch.float64)
    x, kept = table.x.clone(), list(table.continuous)
    x[:, kept] = (x[:, kept] - x[:, kept].mean(0)) / x[:, kept].std(0)
    order = ft.random.permutation(ft.random.key(seed), len(x))
    x, y = x[order], table.y[order].double()
    parties = [x[:, list(columns)] for columns in table.parties]
    train, test = (
        vfl.VerticalData(tuple(features[rows] for features in parties), y[rows])
        for rows in (slice(TEST, None), slice(TEST))
    )
    places = ft.random.permutation(ft.random.fold_in(ft.random.key(seed), 1), len(train.response))
    return train, test, places.split([250, 200, len(places) - 450])


def selected(data: vfl.VerticalData, rows: Tensor | slice, parties: Sequence[int]) -> vfl.VerticalData:
    """Some rows of some parties."""
    return vfl.VerticalData(tuple(data.features[j][rows] for j in parties), data.response[rows])


def loss(train: vfl.VerticalData, test: vfl.VerticalData, rounds: int, places: Sequence[Tensor] = ()) -> float:
    """Minus the mean log score of a logistic regression, the last party's rows at sites if places are given."""
    bottoms: list[torch.nn.Module] = [torch.nn.Linear(part.shape[1], 1, dtype=torch.float64) for part in train.features]
    with torch.no_grad():
        for bottom in bottoms:
            for parameter in bottom.parameters():
                parameter.zero_()
    network = vfl.SplitNetwork(bottoms, vfl.likelihoods.bernoulli())
    adam = lambda weights: torch.optim.Adam(weights, lr=0.05)
    server, parties = network.nodes(train, optimizer=adam)
    if places:
        sites = ft.data.from_tensors([(train.features[-1][rows], rows) for rows in places], ["north", "south", "west"])
        known = parties[-1].data._replace(features=())
        parties[-1] = FederatedParty(parties[-1].part, known, ft.InProcess(sites), optimizer=adam, per_row=True)
    fit = vfl.NodesRun(server, parties)
    for _ in fit.rounds(rounds):
        pass
    return -float(network.log_score(test).double().mean())


def errors(seed: int, rounds: int) -> dict[str, float]:
    """Minus the mean log score on test patients, by every way."""
    train, test, places = divided(seed)
    everybody = slice(None)
    one = lambda j: (selected(train, everybody, [j]), selected(test, everybody, [j]))
    return {
        "clinic alone": loss(*one(0), rounds),
        "laboratories alone, in one place": loss(*one(1), rounds),
        "clinic, and laboratories at the largest site alone": loss(selected(train, places[0], [0, 1]), test, rounds),
        "clinic, and laboratories in one place": loss(train, test, rounds),
        COMPOSED: loss(train, test, rounds, places),
    }
