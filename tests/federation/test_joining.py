"""Clients join a run that goes on: it is the run that has had them from the beginning and has never asked them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, distance, linear, linear_clients, same_bits, sgd
from test_conformance import ALGORITHMS, population, start

import fedtorch as ft
from fedtorch.trust import privacy

NETWORKS = {
    "edge_weights",
    "gtv",
    "gtv_regressors",
    "neighbour_search",
    "without_server",
    "fedmgp_average",
}  # of as many nodes as there are clients
COVARIANCE = {"matrix_normal", "shared_body"}  # of clients with each other
ONE = {"pooled"}
JOINED = sorted(ALGORITHMS.keys() - NETWORKS - COVARIANCE - ONE)


def begun(name: str, clients: int, **arguments: Any) -> ft.Run:
    """A run of the first clients, one after another, so that shapes are the same however many there are."""
    data = population(name).data
    kept = data if clients == len(data) else data.select(range(clients))
    algorithm = ALGORITHMS[name]()
    return ft.Run(algorithm, ft.InProcess(kept, chunk=1), start(name, algorithm), seed=3, **arguments)


@pytest.mark.parametrize("name", JOINED)
def test_a_client_that_joins_counts_as_one_that_was_never_asked(name: str, tmp_path: Path) -> None:
    """Same bits; of totals up to rounding where the initial states tell something, which are added in another order.

    Where the server's state says how many clients there are, the run of all is told of one fewer until the last joins.
    """
    clients = len(population(name).data)
    few, all_but_one = begun(name, clients - 1), begun(name, clients, cohort=list(range(clients - 1)))
    counts = hasattr(few.server, "population")
    if counts:
        all_but_one.server = all_but_one.server._replace(population=few.server.population)
    for run in (few, all_but_one):
        list(run.rounds(2))
    if counts:
        all_but_one.server = all_but_one.server._replace(population=torch.tensor(clients))
    few.save(tmp_path / "few")
    joined = begun(name, clients).load(tmp_path / "few", joined="new")
    wanted = begun(name, clients)
    wanted.load_state_dict(all_but_one.state_dict(), anyway=True)
    for run in (joined, wanted):
        list(run.rounds(3))
    assert joined.number == 3
    assert joined.last is not None
    assert len(joined.last.ids) == clients
    if name == "ep":
        assert distance(joined.server, wanted.server) < ROUNDING
        assert distance(joined.tensors(), wanted.tensors()) < ROUNDING
    else:
        assert same_bits(joined.server, wanted.server)
        assert same_bits(joined.tensors(), wanted.tensors())
    if joined.algorithm.told is not None:
        assert distance(joined.server.total, joined.clients.total()) < ROUNDING


@pytest.mark.parametrize("name", sorted(COVARIANCE))
def test_joining_is_refused_with_covariances_of_clients(name: str, tmp_path: Path) -> None:
    few = begun(name, 5)
    few.step()
    few.save(tmp_path / "few")
    with pytest.raises(ValueError, match=r"covariance\.vectors' is \(5, 5\) with 5 clients and \(6, 6\)"):
        begun(name, 6).load(tmp_path / "few", joined="new")


def relaxed(nodes: int) -> ft.Run:
    data = linear_clients([5, 2, 9, 4])
    algorithm = ft.gtv(ft.least_squares(linear()), ft.Network.ring(nodes), 0.5)
    return ft.Run(algorithm, ft.InProcess(data.select(range(nodes))))


def test_nodes_join_by_a_larger_network(tmp_path: Path) -> None:
    """Another network is another setting; what its nodes hear is then what they tell along its edges."""
    few = relaxed(3)
    list(few.rounds(5))
    few.save(tmp_path / "few")
    with pytest.raises(ValueError, match=r"a run with edges tensor .*, but got one with tensor .*; pass anyway=True"):
        relaxed(4).load(tmp_path / "few", joined="new")
    joined = relaxed(4).load(tmp_path / "few", joined="new", anyway=True)
    weight = joined.tensors()["weight"]
    assert same_bits(weight[:3], few.tensors()["weight"])
    assert same_bits(weight[3], linear().weight.detach())
    ring = torch.tensor([[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]], dtype=torch.float64)
    assert distance(joined.server.total["weight"].flatten(1), ring @ weight.flatten(1)) < ROUNDING
    list(joined.rounds(205))
    whole = relaxed(4)
    list(whole.rounds(200))
    assert distance(joined.tensors(), whole.tensors()) < 1e-9  # both have settled, at a rate of 1/2 and less


def averaged(sizes: list[int], **arguments: Any) -> ft.Run:
    return ft.Run(ft.fedavg(sgd(0.05)), ft.InProcess(linear_clients(sizes)), **arguments)


def test_clients_join_only_by_request(tmp_path: Path) -> None:
    few = averaged([4, 5, 6], cohort=2)
    few.step()
    few.save(tmp_path / "few")
    more = averaged([4, 5, 6, 7], cohort=2)
    for anyway in (False, True):
        with pytest.raises(ValueError, match="a run with 4 clients, but got one with 3; pass joined='new'"):
            more.load(tmp_path / "few", anyway=anyway)
    with pytest.raises(ValueError, match="joined='new', or None where no clients have joined, but got 'all'"):
        more.load(tmp_path / "few", joined="all")  # type: ignore[arg-type]
    assert more.number == 0
    assert more.load(tmp_path / "few", joined="new").number == 1
    more.save(tmp_path / "more")
    with pytest.raises(ValueError, match="3 clients or fewer, but got one of 4"):
        averaged([4, 5, 6], cohort=2).load(tmp_path / "more", anyway=True)
    assert averaged([4, 5, 6, 7], cohort=2).load(tmp_path / "more", joined="new").number == 1


def test_the_clients_that_were_there_come_first_and_have_their_rows(tmp_path: Path) -> None:
    data = linear_clients([4, 5, 6, 7])
    few = ft.Run(ft.fedavg(sgd(0.05)), ft.InProcess(data.select([0, 1, 2])))
    few.step()
    few.save(tmp_path / "few")
    other = lambda ids: ft.Run(ft.fedavg(sgd(0.05)), ft.InProcess(data.select(ids)))
    assert other([0, 1, 2, 3]).load(tmp_path / "few", joined="new").number == 1
    with pytest.raises(ValueError, match=r"a run with clients 3 names of digest .*, but got one with 3 names"):
        other([3, 0, 1, 2]).load(tmp_path / "few", joined="new")
    moved = data.map(lambda rows: (rows[0], rows[1] + 1))
    with pytest.raises(ValueError, match="rows that are here, but client 'client 0' has other rows"):
        ft.Run(ft.fedavg(sgd(0.05)), ft.InProcess(moved)).load(tmp_path / "few", joined="new")


def test_joining_needs_a_ledger_in_a_file(tmp_path: Path) -> None:
    """It counts all rounds at one rate, and the rate is that of the cohort among all clients."""

    def accounted(sizes: list[int]) -> ft.Run:
        settings = {"clip": 1.0, "noise": 2.0, "delta": 1e-3, "sampling_rate": 0.5, "entropy": privacy.from_seed(1)}
        algorithm = ft.fedavg(sgd(0.1)) | privacy.client_level(**settings)
        return ft.Run(algorithm, ft.InProcess(linear_clients(sizes)))

    few = accounted([4, 5, 6])
    few.step()
    few.save(tmp_path / "few")
    with pytest.raises(ValueError, match="pass ledger=path"):
        accounted([4, 5, 6, 7]).load(tmp_path / "few", joined="new")
