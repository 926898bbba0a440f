"""What a company of `demo_vertical` has and runs: a process with a token, an address, and columns of its own.

It enrols, trains its half of three networks and keeps them in its folder. A later process of the same name reads them
and answers for new patients. `fedtorch enrol` and `fedtorch join --half` do the same with files of a company's own;
here every process reads the table of the demo and takes its own rows and columns of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fedtorch as ft
from experiments import local_sites
from experiments.local_sites import TIMEOUT, say
from fedtorch import sites, vfl
from fedtorch.protocol import Half
from fedtorch.sites.vertical import over_link
from fedtorch.trust import attacks
from fedtorch.vfl import Holder, Iteration, PartyNode, VerticalData, mlp, party_half

# Of the cells' nuclei: radius, perimeter and area; texture, smoothness, symmetry and fractal dimension.
COLUMNS = {"clinic": [0, 2, 3], "laboratory": [1, 4, 8, 9]}
WAYS = {"plain": math.inf, "private labels, ε = 10": 10.0, "private labels, ε = 1": 1.0}
LACKING, NEW = 0.05, 0.2  # shares: of patients whom a company lacks, and of new ones


class Table(NamedTuple):
    """What all know together, and what each of them has of it."""

    x: Tensor  # (n, 30)
    y: Tensor  # (n,) 1 for benign
    new: Tensor  # (n,) whether the registry knows nothing of a patient yet
    has: dict[str, Tensor]  # by company, rows in an order of its own

    def identifiers(self, rows: Tensor) -> list[str]:
        """Names of patients, by which all know them."""
        return [f"patient {row}" for row in rows.tolist()]

    def features(self, name: str) -> Tensor:
        """A company's own columns of its own rows, by its own means and standard deviations."""
        x = self.x[self.has[name]][:, COLUMNS[name]]
        return (x - x.mean(0)) / x.std(0)

    def at_registry(self, new: bool) -> Tensor:
        """The registry's rows: of patients whose label it has, or of new ones."""
        return (self.new == new).nonzero()[:, 0]


def table(seed: int) -> Table:
    """The patients, of whom each company lacks some."""
    x, y = ft.data.breast_cancer(standardise=False)
    drawn = {name: ft.random.permutation(ft.random.fold_in(ft.random.key(seed), j), len(y))
             for j, name in enumerate(["registry", *COLUMNS])}  # fmt: skip
    new = torch.zeros(len(y), dtype=torch.bool)
    new[drawn["registry"][: int(NEW * len(y))]] = True
    return Table(x.double(), y.double(), new, {name: drawn[name][int(LACKING * len(y)) :] for name in COLUMNS})


def network(seed: int, names: Sequence[str] = tuple(COLUMNS)) -> vfl.SplitNetwork:
    """A network at each company, whose outputs the registry adds up; the same at every process before it is trained."""
    bottoms = [mlp(len(COLUMNS[name]), (8,), 1, activation=nn.Tanh).double() for name in names]
    return vfl.SplitNetwork(bottoms, vfl.likelihoods.bernoulli(), seed=seed, names=list(names)).double()


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Every process's optimiser."""
    return torch.optim.Adam(parameters, lr=0.02)


def iterations(steps: int) -> list[Iteration]:
    """What all have agreed on."""
    return [Iteration(step=step) for step in range(steps)]


def file_of(folder: Path, way: str) -> Path:
    """Where a process keeps its half."""
    name = f"epsilon_{WAYS[way]:g}" if math.isfinite(WAYS[way]) else way
    return folder / f"{name}.safetensors"


def trains(name: str, data: Table, steps: int, seed: int, folder: Path) -> Half:
    """A company's side: its rows are aligned, its half is trained and kept, and the labels are guessed meanwhile."""
    identifiers, j = data.identifiers(data.has[name]), list(COLUMNS).index(name)
    rows = yield from Holder(identifiers, name).following("registry")
    say(name, f"has {len(identifiers)} patients; {len(rows)} of them all three have")
    own = VerticalData((data.features(name)[rows],), torch.full((len(rows),), torch.nan, dtype=torch.float64))
    guesses = {}
    for way in WAYS:
        part, heard = network(seed).parties[j], list[Tensor]()
        overhear = lambda node, message, sent, heard=heard: None if sent else heard.append(message[0])
        half = party_half(PartyNode(part, own, optimizer=adam, per_row=True), iterations(steps))
        yield from attacks.tapped(half, overhear)
        part.save(file_of(folder, way))
        say(name, f"{way}: keeps its half in {file_of(folder, way).name}, {file_of(folder, way).stat().st_size} bytes")
        guess = attacks.guessed_labels(torch.stack(heard))[0, 0]
        guesses[way] = {identifiers[row]: label for row, label in zip(rows.tolist(), guess.tolist())}
    (folder / "guesses.json").write_text(json.dumps(guesses))


def answers(name: str, data: Table, seed: int, folder: Path) -> Half:
    """A company's side of predictions, from the halves that it has kept."""
    rows = yield from Holder(data.identifiers(data.has[name]), name).following("registry")
    say(name, f"has {len(rows)} of the new patients; sends a number of each, from the halves in its folder")
    for way in WAYS:
        model = network(seed)
        model.parties[list(COLUMNS).index(name)].load(file_of(folder, way))
        yield from model.party_prediction(name, data.features(name)[rows])


def take_part(name: str, folder: str, address: str, act: str, steps: str, seed: str) -> None:
    """A company's whole process."""
    me, own = local_sites.identified(Path(folder) / name), Path(folder) / name
    data = table(int(seed))
    trained = act == "train"
    half = trains(name, data, int(steps), int(seed), own) if trained else answers(name, data, int(seed), own)
    link = sites.connect(address, me)
    traffic = over_link(half, link, seconds=TIMEOUT)[1]
    link.close()
    say(name, f"ends; it has sent {traffic.up / 1e6:.2f} MB, of numbers a row and blinded identifiers, and no feature")
