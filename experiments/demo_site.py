"""What a site of `demo_sites` has and runs: a process with a token and an address, and its own part of a table.

It enrols, takes part in two runs over the patients of its own, and then, as a party, in a vertical one over patients
of whom every site knows other measurements. `fedtorch enrol` and `fedtorch join` do the same with files of a site's
own; here every process reads the table of the demo and takes its own rows and columns of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import fedtorch as ft
from experiments import local_sites
from experiments.local_sites import say
from fedtorch import sites as transport, vfl
from fedtorch.models import hierarchical
from fedtorch.models.hierarchical import generalised
from fedtorch.protocol import Half
from fedtorch.sites import SiteConfiguration, join
from fedtorch.sites.vertical import over_link
from fedtorch.vfl import Holder, Iteration, PartyNode, ServerNode, mlp, party_half, server_half
from fedtorch.vfl.model import likelihoods

SITES = {"north": [0], "south": [1], "west": [2, 3]}  # each site's clients
LACKING = 10  # every site lacks so many of the patients that all are about in the vertical run
_HIDDEN, _CUT = 8, 2


class Table(NamedTuple):
    """The demo's data: clients' rows, and those that are split by columns."""

    name: str
    clients: ft.data.FederatedData  # x `(1 + d,)` with a constant first, y 0 or 1
    x: Tensor  # (n, d), of the first client
    y: Tensor  # (n,)

    @property
    def features(self) -> int:
        """d."""
        return self.x.shape[1]


def table() -> Table:
    """Heart disease in four hospitals where its files are at hand, else breast cancer in four parts."""
    if "heart_disease" in [data_set.name for data_set in ft.data.data_sets(present=True)]:
        found = ft.data.heart_disease(standardise=True, dtype=torch.float64)
        pairs, names, name = [found[k] for k in range(len(found))], found.names, "heart disease, four hospitals"
    else:
        x, y = ft.data.breast_cancer()
        means = x[:, :10].double()  # of ten measurements; the other columns are their errors and extremes
        pairs, name = list(zip(means.chunk(4), y.chunk(4))), "breast cancer, four parts"
        names = tuple(f"part {k}" for k in range(4))
    rows = [(torch.cat([torch.ones(len(x), 1, dtype=x.dtype), x], 1), y.double()) for x, y in pairs]
    return Table(name, ft.data.from_tensors(rows, list(names)), pairs[0][0], pairs[0][1].double())


def fedavg(features: int) -> ft.Algorithm:
    """Federated averaging of a logistic regression from zero: five passes over its rows at each client and round."""
    module = nn.Linear(features, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(module.weight)
    return ft.fedavg(
        ft.gradient_descent(
            module,
            epochs=5,
            loss=lambda output, y: binary_cross_entropy_with_logits(output[:, 0], y),
            optimizer=partial(torch.optim.SGD, lr=0.3),
        )
    )


def ep(features: int) -> ft.Algorithm:
    """Expectation propagation of a logistic regression whose intercept differs among clients."""
    return ft.ep(generalised.logistic(hierarchical.normal(features, random=[0])))


ALGORITHMS = {"fedavg": fedavg, "ep": ep}


def columns(features: int) -> dict[str, list[int]]:
    """Each party's columns."""
    return {name: list(range(features))[j :: len(SITES)] for j, name in enumerate(SITES)}


def parties(data: Table) -> dict[str, vfl.Party]:
    """All parties, the labels at the last: rows in other orders, of which each party lacks some."""
    patients = [f"patient {i}" for i in range(len(data.y))]
    found = {}
    for j, (name, own) in enumerate(columns(data.features).items()):
        rows = torch.arange(len(patients)).roll(7 * j + 3).flip(0)[LACKING:]
        found[name] = vfl.Party(name, [patients[i] for i in rows], data.x[rows][:, own])
    return {**found, "registry": vfl.Party("registry", patients, response=data.y)}


def network(features: int) -> vfl.SplitNetwork:
    """A network at each party, and one at the server of what they send; the same at every node."""
    bottoms = [mlp(len(own), [_HIDDEN], _CUT).double() for own in columns(features).values()]
    return vfl.SplitNetwork(
        bottoms,
        likelihoods.bernoulli(),
        combine=vfl.concatenated,
        top=mlp(_CUT * len(bottoms), [_HIDDEN], 1).double(),
        widths=[_CUT] * len(bottoms),
        names=list(SITES),
    ).double()


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Every node's optimiser."""
    return torch.optim.Adam(parameters, lr=1e-2)


def party(name: str, data: Table, iterations: int) -> Half:
    """A party's side of the vertical run: its rows are aligned with the others', then its network is trained."""
    mine = parties(data)[name]
    rows = yield from Holder(mine.identifiers, name).following("registry")
    own = mine.take(rows)
    assert own.x is not None
    say(name, f"{len(rows)} of {len(mine.identifiers)} patients are those of all parties")
    unknown = torch.full((len(rows),), torch.nan, dtype=torch.float64)
    part = network(data.features).parties[list(SITES).index(name)]
    node = PartyNode(part, vfl.VerticalData((own.x,), unknown), optimizer=adam, per_row=True)
    yield from party_half(node, [Iteration(step=step) for step in range(iterations)])


def registry(data: Table, iterations: int) -> Half:
    """The server's side; returns the network, of which it has trained its own part, its node, and the seconds of it."""
    mine, made = parties(data)["registry"], network(data.features)
    rows = yield from Holder(mine.identifiers, "registry").leading(list(SITES))
    assert mine.response is not None
    node = ServerNode(made.server, vfl.VerticalData((), mine.response[rows]), optimizer=adam, per_row=True)
    begun = time.perf_counter()
    yield from server_half(node, [Iteration(step=step) for step in range(iterations)])
    return made, node, time.perf_counter() - begun


def take_part(name: str, folder: str, address: str, iterations: str) -> None:
    """A site's whole life."""
    me = local_sites.identified(Path(folder) / name)
    say(name, f"enrolled; its key has never left {name}'s folder")
    dial, data = partial(transport.connect, address, me), table()
    configuration = SiteConfiguration(data.clients.select(SITES[name]), ALGORITHMS)
    say(name, f"joins with {', '.join(configuration.data.names)}: {int(configuration.data.counts.sum())} rows")
    for _ in ALGORITHMS:
        join(dial, configuration)
    link = dial()
    moved: Mapping[str, int] = over_link(party(name, data, int(iterations)), link)[1]._asdict()
    link.close()
    say(name, f"done; {moved['up'] / 1e6:.2f} MB up in the vertical run")
