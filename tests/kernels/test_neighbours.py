"""The sum over neighbours is a sparse product, whatever the degrees."""

from __future__ import annotations

import pytest
import torch
from support.programs import launches, reference
from torch import Tensor

import fedtorch as ft
from fedtorch import random
from fedtorch.kernels import neighbours as kernel
from fedtorch.kernels.neighbours import neighbours, plan

NETWORKS = {
    "hub": lambda: ft.Network.star(150),  # three segments and many nodes with one edge
    "ring": lambda: ft.Network.ring(7),
    "random": lambda: ft.Network.erdos_renyi(40, 0.2, random.key(1)),
    "isolated": lambda: ft.Network(torch.tensor([[0, 3]]), torch.tensor([0.5]), nodes=5),
}


def rows_of(network: ft.Network, width: int) -> Tensor:
    return random.normal(random.key(2), (network.nodes, width), torch.float64)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("width", [1, 3, 16])
def test_sums_of_all_degrees(name, width, device, monkeypatch) -> None:
    network = NETWORKS[name]()
    rows = rows_of(network, width)
    wanted = network.adjacency().to_dense() @ rows
    matrix = network.adjacency(device=device)
    for given in (rows.to(device), rows.mT.contiguous().mT.to(device)):
        with launches(monkeypatch):
            found = neighbours(matrix, given)
        # A sum of up to 150 terms of a few units, in another order.
        torch.testing.assert_close(found.cpu(), wanted, rtol=150 * 2.0**-52, atol=150 * 2.0**-50)
        assert torch.equal(neighbours(matrix, given), found)
    with reference():
        torch.testing.assert_close(neighbours(matrix, rows.to(device)).cpu(), wanted, rtol=1e-13, atol=1e-13)


def test_single_precision_and_mixed(device) -> None:
    network = NETWORKS["hub"]()
    rows = rows_of(network, 5)
    wanted = network.adjacency().to_dense() @ rows
    single = neighbours(network.adjacency(torch.float32, device), rows.float().to(device))
    torch.testing.assert_close(single.cpu().double(), wanted, rtol=1e-4, atol=150 * 2.0**-21)
    mixed = neighbours(network.adjacency(device=device), rows.float().to(device))
    assert mixed.dtype == torch.float64
    torch.testing.assert_close(
        mixed.cpu(), network.adjacency().to_dense() @ rows.float().double(), rtol=1e-12, atol=1e-12
    )


def test_derivatives(device, monkeypatch) -> None:
    matrix = NETWORKS["random"]().adjacency(device=device)
    rows = random.normal(random.key(3), (40, 2), torch.float64).to(device).requires_grad_()
    with launches(monkeypatch):
        assert torch.autograd.gradcheck(lambda rows: neighbours(matrix, rows), rows, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda rows: neighbours(matrix, rows), rows, fast_mode=True)


def test_nan_reaches_neighbours_only(device) -> None:
    rows = torch.zeros(7, 2, device=device, dtype=torch.float64)
    rows[2] = torch.nan
    heard = neighbours(NETWORKS["ring"]().adjacency(device=device), rows)
    assert heard.isnan().any(1).nonzero()[:, 0].tolist() == [1, 3]


def test_wide_rows_and_no_rows_go_to_the_reference(device, monkeypatch) -> None:
    matrix = NETWORKS["ring"]().adjacency(device=device)
    with launches(monkeypatch, at_least=0) as seen:
        for width in (0, kernel.MOST + 1):
            assert neighbours(matrix, torch.ones(7, width, device=device, dtype=torch.float64)).shape == (7, width)
    assert seen == []


def test_a_plan_has_every_edge_once() -> None:
    matrix = NETWORKS["hub"]().adjacency()
    found = plan(matrix)
    edges = torch.cat([torch.arange(s, s + n) for s, n in zip(found.starts.tolist(), found.lengths.tolist())])
    assert edges.sort().values.tolist() == list(range(len(matrix.values())))
    assert found.split.tolist() == [0]
    assert found.pieces.tolist() == [3]
    assert sorted(found.targets.tolist()) == [*range(1, 150), 150, 151, 152]
