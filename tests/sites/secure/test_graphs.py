"""Sums over neighbourhoods under masks, and networks in which listeners could subtract them."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.oracles.closed_forms import linear, linear_clients

import fedtorch as ft
from fedtorch.federation.exchanges.exchange import Mean, Sum
from fedtorch.federation.exchanges.graph import graph
from fedtorch.sites.secure import Grid
from fedtorch.sites.secure.graphs import check_neighbourhoods
from fedtorch.sites.secure.messages import Aborted
from fedtorch.trust import privacy, secure

NODES = 7
COMPLETE = ft.Network.from_edges(list(itertools.combinations(range(NODES), 2)))
WHEEL = ft.Network.from_edges([(i, (i + step) % NODES, 0.5 * step) for i in range(NODES) for step in (1, 2)])
GRID = Grid(30, 2.0**20)


def masked(network: ft.Network, **settings):
    return secure.masked_graph(network, GRID, entropy=privacy.from_seed(0), **settings)


@pytest.mark.parametrize("network", [COMPLETE, WHEEL], ids=["complete", "wheel"])
def test_nodes_hear_what_they_would_without_masks(network: ft.Network) -> None:
    """Six roundings of 2⁻³¹ each, of the values and of the weights."""
    generator = torch.Generator().manual_seed(0)
    value = {"a": torch.randn(NODES, 3, generator=generator), "b": torch.randn(NODES, generator=generator).double()}
    message = (Sum(value), Mean(value, torch.rand(NODES, generator=generator) + 0.5))
    under = masked(network).carried(ft.gtv(ft.least_squares(linear()), network, 0.2)).exchange
    one, two = (e.finish(e.merge([e.gather(message, slice(0, NODES))])) for e in (graph(network), under))
    for plain, under in zip(one, two):
        for name in value:
            assert plain.value[name].shape == under.value[name].shape
            assert float((plain.value[name] - under.value[name]).abs().max()) < 20 * 2.0**-31
    assert float((one[1].weight - two[1].weight).abs().max()) < 20 * 2.0**-31


def test_gtv_under_masks_is_gtv_up_to_the_grid_in_any_blocks() -> None:
    data = linear_clients([5, 3, 8, 4, 6, 7, 9])
    plain = ft.gtv(ft.least_squares(linear()), WHEEL, 0.2)
    usual = ft.run(plain, ft.InProcess(data), rounds=4).tensors()
    for chunk in (None, 3):
        found = ft.run(plain, ft.InProcess(data, chunk, carry=masked(WHEEL)), rounds=4).tensors()
        assert all(float((usual[name] - found[name]).abs().max()) < 100 * 2.0**-31 for name in usual)


def test_a_round_in_which_nodes_are_silent_is_no_sum() -> None:
    data = linear_clients([5, 3, 8, 4, 6, 7, 9])
    plain, under = ft.gtv(ft.least_squares(linear()), WHEEL, 0.2), ft.InProcess(data, carry=masked(WHEEL))
    with pytest.raises(Aborted, match="all 7 nodes, but got 3"):
        ft.run(plain, under, rounds=1, cohort=3)
    silent = ft.Faults(after=lambda keys, ids: ids == 2)
    with pytest.raises(Aborted, match="all 7 nodes, but got 6"):
        ft.run(plain, under, rounds=1, faults=silent)


def exposed(network: ft.Network, listeners: tuple[int, ...], few: int) -> bool:
    """By linear algebra: whether some combination of the listeners' sums is of 1 to `few` values that they lack."""
    others = [node for node in range(network.nodes) if node not in listeners]
    rows = network.adjacency(torch.float64).to_dense()[list(listeners)][:, others]
    for size in range(1, few + 1):
        for some in itertools.combinations(range(len(others)), size):
            rest = [j for j in range(len(others)) if j not in some]
            whole = torch.linalg.matrix_rank(rows)
            if int(torch.linalg.matrix_rank(rows[:, rest]) if rest else 0) < int(whole):
                return True
    return False


@pytest.mark.parametrize("collusion", [1, 2])
@pytest.mark.parametrize("minimum", [2, 3])
def test_networks_are_refused_just_where_listeners_could_subtract(collusion: int, minimum: int) -> None:
    """Random networks with weights of few values, against ranks of what listeners hear."""
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(60):
        nodes = int(torch.randint(4, 8, (), generator=generator))
        pairs = [p for p in itertools.combinations(range(nodes), 2) if torch.rand((), generator=generator) < 0.75]
        if not pairs:
            continue
        weights = (1 + torch.randint(0, 2, (len(pairs),), generator=generator)).double()
        network = ft.Network(pairs, weights, nodes)
        unsafe = any(
            exposed(network, listeners, minimum - 1)
            for size in range(1, collusion + 1)
            for listeners in itertools.combinations(range(nodes), size)
        )
        seen.add(unsafe)
        if unsafe:
            with pytest.raises(ValueError, match=r"neighbours of every node|by subtracting sums"):
                check_neighbourhoods(network, minimum, collusion)
        else:
            check_neighbourhoods(network, minimum, collusion)
    assert len(seen) == 2 or (minimum, collusion) == (3, 2)


def test_settings_and_networks_that_say_too_much_are_refused() -> None:
    for wrong in ({"minimum": 1}, {"collusion": 0}, {"collusion": 3}):
        with pytest.raises(ValueError, match="minimum of at least 2 and a collusion of 1 or 2"):
            masked(COMPLETE, **wrong)
    with pytest.raises(ValueError, match="node 0 has 2"):
        masked(ft.Network.ring(5))
    alike = ft.Network(WHEEL.edges, nodes=NODES)
    with pytest.raises(ValueError, match="nodes 0 and 1 can work out those of 2"):
        masked(alike, collusion=2)
    masked(COMPLETE, collusion=2)
    masked(WHEEL, collusion=2)  # whose weights do not cancel
    with pytest.raises(ValueError, match="below 2⁶³"):
        secure.masked_graph(COMPLETE, Grid(52, 2.0**12))
