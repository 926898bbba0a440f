"""Chapter 6's flavours on the weather of the day after: parties that share examples, and few-shot detectors.

Three parties know the place, five days' maxima and five days' minima of the same station-days (6.5); detectors of
regions learn from a single example or none where like regions have more (6.7). Parts of `experiments.gtv.flavours`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import roc_auc_score
from torch import Tensor

import fedtorch as ft
from fedtorch.federation.algorithms.regressors import fitted
from fedtorch.networks import clustering, solvers

REGIONS, RARE = 12, {0: 0, 1: 0, 2: 1, 3: 1, 4: 2}  # examples of the rare regions, by number
PARTIES = {"place": (0, 1), "maxima": range(2, 7), "minima": range(7, 12)}
ERROR = "mean squared error (°C²)"


class Outcome(NamedTuple):
    """What a flavour found."""

    rows: dict[tuple[str, str], float]  # by setting and metric
    shares: Tensor  # (n, n) of what i predicts, what comes from j
    places: Tensor  # (n, 2)
    names: Sequence[str] = ()


def helpers(setting: str, share: Tensor) -> dict[tuple[str, str], float]:
    """How much of a prediction comes from the node's own rows, and from how many nodes' as if in equal parts."""
    return {
        (setting, "own share"): float(share.diagonal().mean()),
        (setting, "helpers"): float((1 / share.square().sum(1)).mean()),
    }


def station_days(seed: int, stations: int | None) -> list[tuple[Tensor, Tensor]]:
    """Inputs and next day's maximum at half of the stations, to learn from, and at the others."""
    every = list(ft.data.fmi_forecast(torch.float64))[:stations]
    order = ft.random.permutation(ft.random.key(seed), len(every)).tolist()
    parts = [[every[i] for i in half] for half in (order[: len(every) // 2], order[len(every) // 2 :])]
    return [(torch.cat([x for x, _ in part]), torch.cat([y[:, 0] for _, y in part])) for part in parts]


def vertical(seed: int, stations: int | None) -> Outcome:
    """Three parties with features of their own of the same station-days (6.5), coupled by what they predict."""
    (x, y), (x_new, y_new) = station_days(seed, stations)
    columns = torch.zeros(len(PARTIES), x.shape[1], dtype=torch.bool)
    for i, at in enumerate(PARTIES.values()):
        columns[i, list(at)] = True
    network = ft.Network.complete(len(PARTIES))

    inputs = torch.where(columns[:, None], x, 0.0)  # what a party does not know is zero to it

    def predicted(alpha: float, moved: int | None = None) -> Tensor:
        labels = y.repeat(len(PARTIES), 1)
        if moved is not None:
            labels[moved] += 1.0
        data = ft.data.FederatedData((inputs.flatten(0, 1), labels.flatten()), torch.full((len(PARTIES),), len(y)))
        algorithm = ft.gtv_regressors(LinearRegression, network, alpha, inputs)
        models = fitted(ft.run(algorithm, ft.InProcess(data), {}, rounds=60))
        return torch.stack(
            [torch.from_numpy(each.predict((x_new * own).numpy())) for each, own in zip(models, columns)]
        )

    error = lambda prediction: float((prediction - y_new).square().mean())
    all_in_one = LinearRegression().fit(x.numpy(), y.numpy()).predict(x_new.numpy())
    rows = {("6.5 vertical, all features in one place", ERROR): error(torch.from_numpy(all_in_one))}
    for way, alpha in (("alone", 0.0), ("α = 0.1", 0.1), ("α = 1", 1.0)):
        found = predicted(alpha)
        for name, prediction in zip((*PARTIES, "mean of the three"), (*found, found.mean(0))):
            rows[f"6.5 vertical, {name}, {way}", ERROR] = error(prediction)
    share = torch.stack([(predicted(1.0, j) - found).mean(1) for j in range(len(PARTIES))], 1)
    circle = torch.tensor([[0.0, 1.0], [-0.87, -0.5], [0.87, -0.5]])
    return Outcome({**rows, **helpers("6.5 vertical, α = 1", share)}, share, circle, list(PARTIES))


def detectors(x: Tensor, y: Tensor, network: ft.Network, alpha: float) -> solvers.LinearProblem:
    """Detectors w_c'x near one at examples of c and near zero at others, both as heavy; without any, L_c = 0."""
    nodes = []
    for c in range(network.nodes):
        of = (y == c).to(torch.float64)
        weight = of / (2 * of.sum()) + (1 - of) / (2 * (1 - of).sum())
        root = (weight * len(y)).sqrt()[: len(y) if bool(of.any()) else 0]
        nodes.append((root[:, None] * x[: len(root)], root * of[: len(root)]))
    rows, counts = tuple(torch.cat(part) for part in zip(*nodes)), torch.tensor([len(node[1]) for node in nodes])
    data = ft.data.FederatedData(rows, counts, allow_empty=True)
    return solvers.linear_problem(data, network, alpha, unlabelled=True)


def few_shot(seed: int, stations: int | None) -> Outcome:
    """Which region five days' maxima and minima are from (6.7), where like regions are those next to each other."""
    every = list(ft.data.fmi_forecast(torch.float64))[:stations]
    places = torch.stack([x[0, :2] for x, _ in every])
    key, count = ft.random.key(seed), REGIONS if stations is None else 6
    region = clustering.k_means(places, count, seed=seed)
    centres = torch.stack([places[region == r].mean(0) for r in range(count)])
    network = ft.Network.k_nearest(centres, 2, great_circle=True)
    known, new = [], []
    for r in range(count):
        inside = [every[i][0][:, 2:] for i in (region == r).nonzero()[:, 0].tolist()]
        rows = torch.cat(inside)[ft.random.permutation(ft.random.fold_in(key, r), sum(map(len, inside)))]
        learnt = RARE.get(r, len(rows) // 2)
        known.append(rows[:learnt])
        new.append(rows[len(rows) // 2 :])
    centre, spread = torch.cat(known).mean(0), torch.cat(known).std(0)
    scaled = lambda rows: torch.cat([torch.ones(len(rows), 1).double(), (rows - centre) / spread], 1)
    x, y = scaled(torch.cat(known)), torch.arange(count).repeat_interleave(torch.tensor([len(rows) for rows in known]))
    at, truth = scaled(torch.cat(new)), torch.arange(count).repeat_interleave(torch.tensor([len(r) for r in new]))

    def areas(alpha: float, of: Sequence[int]) -> float:
        w = solvers.direct(detectors(x, y, network, alpha)).parameters
        return float(np.mean([roc_auc_score((truth == r).numpy(), (at @ w[r]).numpy()) for r in of]))

    frequent = [r for r in range(count) if r not in RARE]
    rare = [r for r in RARE if r < count]
    name, metric = "6.7 detectors of regions", "area under ROC, {} regions"
    areas_of: dict[tuple[str, str], float] = {}
    for way, alpha in ((", alone", 1e-6), (", α = 0.1", 0.1), (", α = 1", 1.0)):
        for which, of in (("rare", rare), ("other", frequent)):
            areas_of[f"{name}{way}", metric.format(which)] = areas(alpha, of)
    problem = detectors(x, y, network, 1.0)
    matrix = torch.block_diag(*problem.gram) + torch.kron(network.laplacian().to_dense(), torch.eye(x.shape[1]))
    moved = torch.linalg.pinv(matrix, hermitian=True) @ torch.block_diag(*problem.cross[:, :, None])
    mine = torch.stack([scaled(rows).mean(0) for rows in new])
    share = torch.einsum("id,idj->ij", mine, moved.reshape(count, -1, count))
    share = share / share.abs().sum(1, keepdim=True)
    names = [str(len(rows)) for rows in known]
    return Outcome(areas_of, share, centres.flip(1), names)
