"""Every flavour of chapter 6 on Finnish weather: what it gains, and who helps whom.

Single-model, clustered, horizontal (a third of the stations have no labels) and personalised federation of linear
models of the temperature at 207 stations, eight hours of each to learn from; a vertical one of three parties that know
the place, the maxima and the minima of the same station-days; and few-shot detectors of regions, some with a single
example or none. α is chosen on rows that are neither learnt from nor reported. Who helps whom is exact: the share of
what i predicts that comes from j is how far i's predictions move when all labels of j move by one degree, and the
shares of a node are one together; of personalised models, whose level is their own, it is the share in the slope over
days. Source: Jung, "Federated learning: from theory to practice", chapter 6. Reads the folder `fmi_weather` of
FEDTORCH_DATA_DIR, or downloads the course's files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedtorch as ft
from experiments import common, result_pages
from experiments.gtv import fmi as gtv_fmi
from experiments.gtv.forecasts import ERROR, Outcome, few_shot, helpers, vertical
from fedtorch.federation.runs import recipes
from fedtorch.networks import clustering, discrepancy, solvers

ROWS, NEIGHBOURS, CLUSTERS, UNLABELLED = 8, 4, 6, 1 / 3
ALPHAS = (0.001, 0.01, 0.1, 1.0, 10.0)
SHOWN = 0.02  # shares from which on a line is drawn
READING = result_pages.Reading(smaller="error", larger="area")


class Study(NamedTuple):
    """Stations with rows to learn from, to choose α by, and to report."""

    training: ft.data.FederatedData
    selection: ft.data.FederatedData
    validation: ft.data.FederatedData
    network: ft.Network  # of great-circle neighbours
    places: Tensor  # (n, 2) longitude and latitude
    seed: int
    rounds: int = 300  # of networks


def design(x: Tensor) -> Tensor:
    """One, latitude, longitude, days since the first, cosine and sine of the hour; of the book's features."""
    day = (x[:, 4] * 32 - 28) % 31 + x[:, 5] * 25 / 24  # from the 28th of December on
    angle = 2 * torch.pi * x[:, 5] * 25 / 24
    return torch.stack(
        (torch.ones_like(day), x[:, 0] * 10 - 6.5, x[:, 1] * 10 - 2.5, day / 4, angle.cos(), angle.sin()), 1
    )


def load(seed: int, stations: int | None) -> Study:
    """Eight rows of every station to learn from, a fifth of them to report, the rest to choose α by."""
    split = gtv_fmi.load(seed, stations)
    training = [(design(x)[:ROWS], y[:ROWS]) for x, y in split.training]
    selection = [(design(x)[ROWS:], y[ROWS:]) for x, y in split.training]
    validation = [(design(x), y) for x, y in split.validation]
    network = ft.Network.k_nearest(split.coordinates, NEIGHBOURS, great_circle=True)
    learnt, chosen, reported = (ft.data.from_tensors(part) for part in (training, selection, validation))
    return Study(learnt, chosen, reported, network, split.coordinates.flip(1), seed, 300 if stations is None else 40)


def shares(
    study: Study,
    network: ft.Network,
    alpha: float,
    *,
    silent: Sequence[int] = (),
    personal: int | None = None,
    slope: int | None = None,
) -> Tensor:
    """The shares of stations in what every station predicts, `(n, n)`, of the minimiser M⁺c, M = blockdiag Q + α L ⊗ C.

    Labels of j that move by one move w_i by the block M⁺_ij x̄_j; those that move by feature k move it by M⁺_ij Q_j e_k.

    Args:
        study: rows.
        network: of the coupling.
        alpha: α.
        silent: stations without labels.
        personal: a coefficient that is not coupled.
        slope: the coefficient whose shares are meant; default: those of the mean prediction.
    """
    gram = torch.stack([x.T @ x / len(x) for x, _ in study.training])
    mean = torch.stack([x.mean(0) for x, _ in study.training])
    gram[list(silent)], mean[list(silent)] = 0.0, 0.0
    mask = torch.ones(gram.shape[1], dtype=torch.float64)
    if personal is not None:
        mask[personal] = 0.0
    matrix = torch.block_diag(*gram) + alpha * torch.kron(network.laplacian().to_dense(), mask.diag())
    right = mean if slope is None else gram[:, :, slope]
    moved = torch.linalg.pinv(matrix, hermitian=True, rtol=1e-12) @ torch.block_diag(*right[:, :, None])
    moved = moved.reshape(len(gram), -1, len(gram))
    at = torch.stack([x.mean(0) for x, _ in study.validation])
    return torch.einsum("id,idj->ij", at, moved) if slope is None else moved[:, slope]


def best_alpha(fit: Callable[[float], Tensor], study: Study, ids: Sequence[int] | None = None) -> tuple[float, Tensor]:
    """The α whose models err least on rows kept for that, and the models."""
    rows = study.selection
    kept = list(range(len(rows))) if ids is None else list(ids)
    models = {alpha: fit(alpha) for alpha in ALPHAS}
    alpha = min(models, key=lambda each: gtv_fmi.mean_error(rows.select(kept), models[each][kept]))
    return alpha, models[alpha]


def coupled(study: Study) -> Outcome:
    """GTV minimisation as it is (chapter 3), beside every station alone and the mean of its own labels."""
    alone = discrepancy.maximum_likelihood(study.training)
    means = torch.zeros_like(alone)
    means[:, 0] = discrepancy.mean_label(study.training)[:, 0]
    alpha, w = best_alpha(lambda a: solve(study, study.network, a), study)
    share = shares(study, study.network, alpha)
    found = {"each alone": alone, "each its own mean": means, "GTV": w}
    rows = {(name, ERROR): gtv_fmi.mean_error(study.validation, each) for name, each in found.items()}
    return Outcome({**rows, ("GTV", "α"): alpha, **helpers("GTV", share)}, share, study.places)


def solve(study: Study, network: ft.Network, alpha: float) -> Tensor:
    """The minimiser of least norm."""
    return solvers.direct(solvers.linear_problem(study.training, network, alpha)).parameters


def one_model(data: ft.data.FederatedData) -> Tensor:
    """The parameters `(d,)` that all nodes agree on by messages."""
    return recipes.clustered(data, torch.zeros(len(data), dtype=torch.int64)).parameters[0]


def single(study: Study) -> Outcome:
    """One model (6.2) by messages over the network, beside FedAvg and the normal equations of all rows."""
    n, setting = len(study.training), "6.2 single model"
    w = one_model(study.training).expand(n, 6)
    local = common.linear_descent(6, steps=5, lr=0.1)
    averaged = ft.run(ft.fedavg(local), ft.InProcess(study.training), rounds=400).server["weight"].expand(n, 6)
    gram, cross = (sum(part) for part in zip(*((x.T @ x / len(x), x.T @ y / len(x)) for x, y in study.training)))
    exact = torch.linalg.solve(gram, cross)
    share = shares(study, ft.Network.star(n), 1e6)
    return Outcome(
        {
            (setting, ERROR): gtv_fmi.mean_error(study.validation, w),
            (f"{setting}, FedAvg of 400 rounds", ERROR): gtv_fmi.mean_error(study.validation, averaged),
            (setting, "distance from the normal equations"): float((w - exact).norm(dim=1).max() / exact.norm()),
            **helpers(setting, share),
        },
        share,
        study.places,
    )


def clustered(study: Study) -> Outcome:
    """A model for each cluster (6.3), which k-means, a Gaussian mixture or GTV with ‖w_i − w_j‖ finds."""
    count = min(CLUSTERS, len(study.training) // 3)
    vectors = torch.cat((study.places, discrepancy.mean_label(study.training)), 1)
    vectors = (vectors - vectors.mean(0)) / vectors.std(0)
    labels = {
        "k-means": clustering.k_means(vectors, count, seed=study.seed),
        "Gaussian mixture": clustering.gaussian_mixture(vectors, count, seed=study.seed),
        "Gaussian mixture of own fits": clustering.gaussian_mixture(
            discrepancy.maximum_likelihood(study.training), count, seed=study.seed
        ),
    }

    def tied(alpha: float) -> Tensor:
        problem = solvers.linear_problem(study.training, study.network, alpha)
        found = recipes.clustered_by_gtv(problem, rounds=2000).clusters
        return torch.arange(len(study.training)) if found is None else found

    ties = {alpha: tied(alpha) for alpha in ALPHAS}
    alpha, _ = best_alpha(lambda a: recipes.clustered(study.training, ties[a]).parameters, study)
    labels["ties of GTV"] = ties[alpha]
    rows = {}
    for name, each in labels.items():
        w = recipes.clustered(study.training, each).parameters
        rows[f"6.3 clusters by {name}", ERROR] = gtv_fmi.mean_error(study.validation, w)
        rows[f"6.3 clusters by {name}", "clusters"] = float(len(each.unique()))
    alike = labels["Gaussian mixture"][:, None] == labels["Gaussian mixture"]
    network = ft.Network.from_matrix(alike.double().fill_diagonal_(0.0))
    share = shares(study, network, 1e6)
    return Outcome({**rows, **helpers("6.3 clusters by Gaussian mixture", share)}, share, study.places)


def horizontal(study: Study) -> Outcome:
    """Stations without labels (6.4) take their neighbours' models: errors at these stations alone."""
    n = len(study.training)
    order = ft.random.permutation(ft.random.key(study.seed), n)
    silent = order[: round(UNLABELLED * n)].sort().values
    labelled = order[len(silent) :].sort().values

    data = study.training.select(labelled.tolist())
    counts = torch.zeros(n, dtype=torch.int64).index_copy_(0, labelled, data.counts)
    there = ft.data.FederatedData(data.rows, counts, allow_empty=True)

    def fit(alpha: float) -> Tensor:
        return solvers.direct(solvers.linear_problem(there, study.network, alpha, unlabelled=True)).parameters

    alpha, w = best_alpha(fit, study, labelled.tolist())
    on_earth = discrepancy.distances(unit_vectors(study.places))
    nearest = labelled[on_earth[silent][:, labelled].argmin(1)]
    theirs = discrepancy.maximum_likelihood(study.training)[nearest]
    at = study.validation.select(silent.tolist())
    models = {
        "": w[silent],
        ", one model of the others": one_model(data).expand(len(silent), -1),
        ", the nearest one's": theirs,
    }
    name = "6.4 a third without labels"
    rows = {(f"{name}{way}", ERROR): gtv_fmi.mean_error(at, each) for way, each in models.items()}
    share = shares(study, study.network, alpha, silent=silent.tolist())
    return Outcome({**rows, (name, "α"): alpha, **helpers(name, share)}, share, study.places)


def unit_vectors(places: Tensor) -> Tensor:
    """Longitudes and latitudes in degrees as points of a sphere, whose chords order as great circles."""
    east, north = places.deg2rad().unbind(1)
    return torch.stack((north.cos() * east.cos(), north.cos() * east.sin(), north.sin()), 1)


def personalised(study: Study) -> Outcome:
    """Slopes in common and an intercept of one's own, networks that share their first layer, a hypermodel (6.6)."""
    name, n = "6.6 slopes coupled, intercepts personal", len(study.training)

    def fit(alpha: float) -> Tensor:
        problem = solvers.linear_problem(study.training, study.network, alpha)
        mask = torch.tensor([0, 1, 1, 1, 1, 1], dtype=torch.float64).diag()
        matrix = torch.block_diag(*problem.gram) + alpha * torch.kron(study.network.laplacian().to_dense(), mask)
        return (torch.linalg.pinv(matrix, hermitian=True, rtol=1e-12) @ problem.cross.flatten()).reshape(n, 6)

    alpha, w = best_alpha(fit, study)
    share = shares(study, study.network, alpha, personal=0, slope=3)
    rows = {(name, ERROR): gtv_fmi.mean_error(study.validation, w), (name, "α"): alpha, **helpers(name, share)}
    vectors = torch.cat((torch.ones(n, 1, dtype=torch.float64), unit_vectors(study.places)), 1)
    products = [((x[:, :, None] * z).flatten(1), y) for (x, y), z in zip(study.training, vectors)]  # x'Hz = ⟨H, xz'⟩
    hypermodel = one_model(ft.data.from_tensors(products)).reshape(6, 4)
    rows["6.6 hypermodel of the place", ERROR] = gtv_fmi.mean_error(study.validation, vectors @ hypermodel.T)
    for way, shared in (("first layer coupled", ["0.*"]), ("both layers coupled", ["*"]), ("each alone", [])):
        rows[f"6.6 networks, {way}", ERROR] = network_error(study, shared)
    return Outcome(rows, share, study.places)


def network_error(study: Study, shared: Sequence[str]) -> float:
    """Of networks with a hidden layer of eight units, α = 1, all from one start."""
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(ft.random.normal(ft.random.key(i), parameter.shape, torch.float64) / 6**0.5)
    scale = 10.0  # of the labels
    local = ft.gradient_descent(
        module,
        steps=5,
        loss=lambda output, y: (output[:, 0] - y / scale).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    )
    algorithm = ft.gtv(local, study.network, dict.fromkeys(shared, 1.0)) if shared else ft.separate(local)
    run = ft.run(algorithm, ft.InProcess(study.training), rounds=study.rounds)
    squared = {"error": lambda output, y: (scale * output[..., 0] - y).square()}
    return float(run.evaluate(study.validation, squared)["error"].clients.mean())


FLAVOURS: dict[str, Callable[[Study], Outcome]] = {
    "GTV": coupled,
    "single model (6.2)": single,
    "clusters (6.3)": clustered,
    "a third without labels (6.4)": horizontal,
    "personal intercepts (6.6)": personalised,
}


def everything(seed: int, stations: int | None) -> dict[str, Outcome]:
    """All flavours of one split."""
    study = load(seed, stations)
    outcomes = {name: flavour(study) for name, flavour in FLAVOURS.items()}
    outcomes["three parties (6.5)"] = vertical(seed, stations)
    outcomes["regions by number of examples (6.7)"] = few_shot(seed, stations)
    return outcomes


def draw(outcomes: dict[str, Outcome]) -> Figure:
    """Who helps whom: nodes coloured by the share of their own rows, lines as wide as the larger share of two nodes."""
    figure, panels = common.subplots(2, 4, figsize=(13, 10))
    for axes, (name, outcome) in zip(panels.flat, outcomes.items()):
        points = draw_shares(axes, name, outcome)
    for axes in panels.flat:
        axes.set_axis_off()
    figure.colorbar(points, ax=panels.flat[-1], location="left", label="share of its own rows", shrink=0.6)
    return figure


def draw_shares(axes: Any, name: str, outcome: Outcome) -> Any:
    """One flavour."""
    share, places = outcome.shares.abs(), outcome.places
    both = torch.maximum(share, share.T).fill_diagonal_(0.0)
    for i, j in both.triu().gt(SHOWN).nonzero().tolist():
        width = 0.4 + 6 * float(both[i, j])
        axes.plot(*places[[i, j]].T, color="0.35", linewidth=width, alpha=0.6, zorder=1)
    size = 120 if len(places) < 30 else 18
    points = axes.scatter(*places.T, c=share.diagonal(), vmin=0, vmax=1, s=size, cmap="viridis", zorder=2)
    for label, place in zip(outcome.names, places):
        axes.annotate(label, place, xytext=(6, 6), textcoords="offset points", fontsize="small")
    axes.set_title(name, fontsize="medium")
    axes.margins(0.18 if outcome.names else 0.05)
    if len(places) > 3:
        axes.set_aspect(2.37)  # a degree of latitude beside one of longitude at 65° north
    return points


def main(argv: Sequence[str] | None = None) -> None:
    """Run every flavour, print errors and shares, and draw who helps whom."""
    warnings.filterwarnings("ignore", message="Expected columns of rank")  # eight hours of one place
    options = common.arguments(__doc__).parse_args(argv)
    runs = [everything(1 + seed, 24 if options.smoke else None) for seed in range(options.seeds)]
    tables = [{key: value for outcome in run.values() for key, value in outcome.rows.items()} for run in runs]
    rows = [common.row(*key, [table[key] for table in tables]) for key in tables[0]]
    common.show_rows(f"Flavours of chapter 6, {ROWS} rows a station", rows)
    common.finish("gtv.flavours", rows, options, lambda: {"gtv_flavours": draw(runs[0])})


if __name__ == "__main__":
    main()
