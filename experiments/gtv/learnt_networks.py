"""Networks that weather stations learn by talking (7.4), and what their pictures look like (7.6).

Stations look for the four most like them, by the level and the daily course of their temperatures, over a network of
great-circle neighbours: choosing among neighbours, passing on what they have heard of the nearest, passing on all of
it, and by another search over what was chosen with some random edges besides. Beside them what a place that has all
vectors finds. Then stations settle the weights of their edges by prices that they tell each other (`ft.edge_weights`),
for one degree of all (7.6) and for a budget of edges (7.7), beside the programs of one place with all discrepancies:
"cost against one place" is Σ A_ij D(i, j) of both, less one. At last the networks: errors of GTV minimisation over
each, and maps. Source: Jung, "Federated learning:
from theory to practice", sections 7.4 and 7.6. Reads the folder `fmi_weather` of FEDTORCH_DATA_DIR, or downloads the
course's file.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages
from experiments.gtv import fmi as gtv_fmi
from fedtorch.networks import clustering, discrepancy, learning, solvers

CHOSEN, TALKING, RANDOM = 4, 6, 3  # neighbours to find, to talk to, and of them at random in repeated searches
ROUNDS, PHASES, ALPHA, CLUSTERS = 8, 4, 0.5, 5
SETTLING, CANDIDATES = 2000, 12  # rounds of prices, and neighbours that a station may be joined to
READING = result_pages.Reading(smaller="error|lack|cost", larger="share found")


class Search(NamedTuple):
    """What a search has found, by round."""

    found: list[float]  # share of the true neighbours
    known: list[float]  # vectors that a station has seen, mean
    network: ft.Network


def vectors_of(split: gtv_fmi.Split) -> Tensor:
    """Mean temperature and its mean by quarter of the day, `(n, 5)`; of training rows."""
    return torch.stack([vector_of(x, y) for x, y in split.training])


def vector_of(x: Tensor, y: Tensor) -> Tensor:
    """Of one station; of a quarter without rows, the mean of all."""
    quarter = (x[:, 5] * 25 / 6).long().clamp(max=3)
    quarters = [y[quarter == q] for q in range(4)]
    return torch.stack([y.mean(), *(part.mean() if len(part) else y.mean() for part in quarters)])


def lists(vectors: Tensor) -> Tensor:
    """The nearest of all, as a place that has all vectors finds them."""
    return discrepancy.distances(vectors).fill_diagonal_(math.inf).topk(CHOSEN, largest=False).indices


def share(neighbours: Tensor, wanted: Tensor) -> float:
    """Of the wanted neighbours, how many are there."""
    return float((neighbours[:, :, None] == wanted[:, None, :]).any(1).double().mean())


def search(network: ft.Network, vectors: Tensor, relay: int | None) -> Search:
    """Eight rounds over one network."""
    data = ft.data.FederatedData((vectors,), torch.ones(len(vectors), dtype=torch.int64))
    algorithm = ft.neighbour_search(network, CHOSEN, vectors.shape[1], relay=relay)
    run, found, known, wanted = ft.Run(algorithm, ft.InProcess(data)), [], [], lists(vectors)
    for round in run.rounds(ROUNDS):
        found.append(share(run.tensors()["neighbours"], wanted))
        known.append(float(round.info["known"].mean()))
    return Search(found, known, ft.Network.from_neighbours(run.tensors()["neighbours"], positions=network.positions))


def repeated(network: ft.Network, vectors: Tensor, key: Tensor) -> Search:
    """Searches of two rounds, each over what the one before chose, and random edges."""
    found, known = [], []
    seen = torch.eye(len(vectors), dtype=torch.bool)
    for phase in range(PHASES):
        last = search_once(network, vectors)
        seen |= within_two(network)
        found += [share(last, lists(vectors))] * 2
        known += [float(seen.sum(1).double().mean()) - 1] * 2
        some = ft.random.randint(ft.random.fold_in(key, phase), len(vectors), (len(vectors), RANDOM))
        some = torch.where(some == torch.arange(len(vectors))[:, None], -1, some)
        chosen = torch.cat((last, some), 1)
        network = ft.Network.from_neighbours(chosen, positions=network.positions)
    return Search(found, known, ft.Network.from_neighbours(last, positions=network.positions))


def search_once(network: ft.Network, vectors: Tensor) -> Tensor:
    """What nodes know after two rounds in which everything is passed on: neighbours and theirs."""
    data = ft.data.FederatedData((vectors,), torch.ones(len(vectors), dtype=torch.int64))
    algorithm = ft.neighbour_search(network, CHOSEN, vectors.shape[1], relay=None)
    return ft.run(algorithm, ft.InProcess(data), rounds=2).tensors()["neighbours"]


def within_two(network: ft.Network) -> Tensor:
    """Whether two nodes are at most two edges apart, `(n, n)`."""
    near = network.adjacency().to_dense()
    return (near + near @ near) > 0


class Settled(NamedTuple):
    """How stations settled their edges, by round."""

    cost: list[float]  # against one place, less one
    lack: list[float]  # of any station, largest
    network: ft.Network


def settle(algorithm: ft.Algorithm, vectors: Tensor, wanted: ft.Network, rounds: int) -> Settled:
    """Rounds of prices, beside the network that a place with all discrepancies finds."""
    data = ft.data.FederatedData((vectors,), torch.ones(len(vectors), dtype=torch.int64))
    run, costs, lacks, apart = ft.Run(algorithm, ft.InProcess(data)), [], [], discrepancy.distances(vectors)
    best = float((wanted.adjacency().to_dense() * apart).sum())
    for round in run.rounds(rounds):
        weights = run.tensors()["weights"]
        costs.append(float((weights * apart).sum()) / best - 1)
        lacks.append(float(round.info["lack"].max()))
    rounded = torch.where(weights < 1e-6, 0.0, (weights + weights.mT) / 2)
    return Settled(costs, lacks, ft.Network.from_matrix(torch.where(rounded.mT > 0, rounded, 0.0)))


def settled(vectors: Tensor, talking: ft.Network, rounds: int) -> dict[str, Settled]:
    """For a degree and for a budget, among candidates; over these and the edges of `talking`."""
    apart, near = discrepancy.distances(vectors), ft.Network.k_nearest(vectors, min(CANDIDATES, len(vectors) - 1))
    pairs = torch.cat((near.edges, talking.edges)).unique(dim=0)
    network, budget = ft.Network(pairs, nodes=len(vectors)), CHOSEN * len(vectors) // 2
    width = vectors.shape[1]
    cheapest = pairs[apart[pairs[:, 0], pairs[:, 1]].argsort(stable=True)[:budget]]
    return {
        "(7.6)": settle(
            ft.edge_weights(network, width, degree=CHOSEN),
            vectors,
            learning.regular(apart, CHOSEN, candidates=pairs),
            rounds,
        ),
        "(7.7)": settle(
            ft.edge_weights(network, width, edges=budget), vectors, ft.Network(cheapest, nodes=len(vectors)), rounds
        ),
    }


def error(split: gtv_fmi.Split, network: ft.Network) -> float:
    """The validation error of GTV minimisation."""
    w = solvers.direct(solvers.linear_problem(split.training, network, ALPHA)).parameters
    return gtv_fmi.mean_error(split.validation, w)


def stations(seed: int, number: int | None, rounds: int) -> tuple[dict[tuple[str, str], float], dict[str, Any]]:
    """Searches and networks of one split: figures by setting and metric, and what is drawn."""
    split = gtv_fmi.load(seed, number)
    vectors = vectors_of(split)
    talking = ft.Network.k_nearest(split.coordinates, TALKING, great_circle=True)
    key = ft.random.key(seed)
    searches = {
        "neighbours only": search(talking, vectors, 0),
        f"{CHOSEN} nearest passed on": search(talking, vectors, CHOSEN),
        "all passed on": search(talking, vectors, None),
        "repeated, over what was chosen": repeated(talking, vectors, key),
    }
    rows = {}
    for name, each in searches.items():
        rows[f"7.4 {name}", "share found"] = each.found[-1]
        rows[f"7.4 {name}", "vectors seen by a station"] = each.known[-1]
        rows[f"7.4 {name}", "validation error (°C²)"] = error(split, each.network)
    by_prices = settled(vectors, talking, rounds)
    for name, made in by_prices.items():
        setting = f"{name} by messages, {rounds} rounds"
        rows[setting, "cost against one place"] = made.cost[-1]
        rows[setting, "largest lack of a station"] = made.lack[-1]
        rows[setting, "validation error (°C²)"] = error(split, made.network)
    apart = discrepancy.distances(vectors)
    candidates = ft.Network.k_nearest(vectors, min(CANDIDATES, len(vectors) - 1)).edges
    networks = {
        "great circles": ft.Network.k_nearest(split.coordinates, CHOSEN, great_circle=True),
        "raw degrees": ft.Network.k_nearest(split.coordinates, CHOSEN),
        "alike, all in one place": ft.Network.k_nearest(vectors, CHOSEN),
        "alike, (7.6) among candidates": learning.regular(apart, CHOSEN, candidates=candidates),
        "alike, (7.7)": learning.edge_budget(apart, CHOSEN * len(vectors) // 2),
    }
    for name, network in networks.items():
        rows[f"7.6 {name}", "validation error (°C²)"] = error(split, network)
        rows[f"7.6 {name}", "edges"] = float(len(network.edges))
    first, second = networks["great circles"].edges, networks["raw degrees"].edges
    common_edges = len({*map(tuple, first.tolist())} & {*map(tuple, second.tolist())})
    rows["7.6 great circles", "of them in raw degrees too"] = float(common_edges)
    scaled = (vectors - vectors.mean(0)) / vectors.std(0)
    labels = clustering.gaussian_mixture(scaled, CLUSTERS, seed=seed)
    places = split.coordinates.flip(1)
    drawn = {"searches": searches, "settled": by_prices, "networks": networks, "labels": labels, "places": places}
    return rows, drawn


def draw(drawn: dict[str, Any]) -> dict[str, Figure]:
    """Searches by round, and maps of the networks."""
    figure, (left, middle, right) = common.subplots(1, 3, figsize=(13, 3.8))
    for name, each in drawn["searches"].items():
        left.plot(range(1, len(each.found) + 1), each.found, "o-", label=name)
        middle.plot(range(1, len(each.known) + 1), each.known, "o-", label=name)
    left.set_ylabel(f"share of the {CHOSEN} nearest that is found")
    middle.set_ylabel("vectors that a station has seen")
    left.set_ylim(0, 1.05)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    for i, (name, each) in enumerate(drawn["settled"].items()):
        rounds = range(1, len(each.cost) + 1)
        right.plot(rounds, [abs(value) + 1e-16 for value in each.cost], f"C{4 + i}-", label=f"cost, {name}")
        right.plot(rounds, [value + 1e-16 for value in each.lack], f"C{4 + i}:", label=f"lack, {name}")
    right.set(ylabel="|cost against one place|, largest lack", yscale="log", ylim=(1e-10, None))
    right.legend(frameon=False)
    for axes in (left, middle, right):
        axes.set_xlabel("round")
    return {"gtv_learnt_networks": figure, "gtv_learnt_maps": draw_maps(drawn)}


def draw_maps(drawn: dict[str, Any]) -> Figure:
    """The networks on the map, stations coloured by clusters of a Gaussian mixture of their vectors."""
    networks = {**drawn["networks"], "alike, by messages": drawn["searches"]["repeated, over what was chosen"].network}
    figure, panels = common.subplots(1, len(networks), figsize=(14, 4.6))
    places, labels = drawn["places"], drawn["labels"]
    for axes, (name, network) in zip(panels, networks.items()):
        for i, j in network.edges.tolist():
            axes.plot(*places[[i, j]].T, color="0.5", linewidth=0.5, alpha=0.6, zorder=1)
        for label in labels.unique().tolist():
            axes.plot(*places[labels == label].T, "o", color=f"C{label}", markersize=3, zorder=2)
        axes.set_title(name, fontsize="medium")
        axes.set_aspect(1 / math.cos(math.radians(gtv_fmi.LATITUDE)))
        axes.set_axis_off()
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Search, compare the networks, and draw."""
    warnings.filterwarnings("ignore", message="Expected columns of rank")  # the year of a station is constant
    options = common.arguments(__doc__).parse_args(argv)
    number, rounds = (30, 50) if options.smoke else (None, SETTLING)
    runs = [stations(1 + seed, number, rounds) for seed in range(options.seeds)]
    rows = [common.row(*key, [table[key] for table, _ in runs]) for key in runs[0][0]]
    common.show_rows("Networks learnt by messages", rows)
    common.finish("gtv.learnt_networks", rows, options, lambda: draw(runs[0][1]))


if __name__ == "__main__":
    main()
