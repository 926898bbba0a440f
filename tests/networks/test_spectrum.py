"""Both ways to the extreme eigenvalues of sparse matrices agree with the whole matrix."""

import math

import networkx
import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

import fedtorch as ft
from fedtorch.networks.spectrum import largest_eigenvalue, smallest_positive_eigenvalue

NODES = 600
PATH = ft.Network([(i, i + 1) for i in range(NODES - 1)])  # λ₂ is 1e-5 of λ_n
EXPANDER = networkx.random_regular_graph(6, NODES, seed=0)  # many eigenvalues beside λ₂
REGULAR = ft.Network.from_networkx(EXPANDER)


@pytest.mark.parametrize("small", [0.0, 1.0])  # Lanczos on the matrix, Lanczos on its inverse
@pytest.mark.parametrize("network", [REGULAR, ft.Network.erdos_renyi(NODES, 0.03, seed=1)])
def test_the_smallest_positive_eigenvalue_by_either_way(network, small):
    values = np.linalg.eigvalsh(network.laplacian().to_dense().numpy())
    found = smallest_positive_eigenvalue(network.scipy_laplacian, lambda x: x - x.mean(), 1.25 * values[-1], small)
    assert found == pytest.approx(values[1], rel=1e-8)


def test_small_eigenvalues_of_a_path_in_closed_form():
    found = smallest_positive_eigenvalue(PATH.scipy_laplacian, lambda x: x - x.mean(), 4.0)
    assert found == pytest.approx(2 - 2 * math.cos(math.pi / NODES), rel=1e-7)  # 1e-16 / λ₂ and the shift
    assert largest_eigenvalue(PATH.scipy_laplacian) == pytest.approx(2 + 2 * math.cos(math.pi / NODES), rel=1e-9)


def test_a_null_space_of_any_dimension_is_left_out():
    network = ft.Network([(i, i + 1) for i in range(0, NODES, 3)] + [(i, i + 2) for i in range(0, NODES, 3)])
    labels, number = network.components
    assert number == NODES // 3
    inverse = 1 / labels.bincount().double()

    def project(x: np.ndarray) -> np.ndarray:
        found = torch.from_numpy(x)
        return (found - (inverse * labels.bincount(found))[labels]).numpy()

    assert smallest_positive_eigenvalue(network.scipy_laplacian, project, 3.0) == pytest.approx(1.0, rel=1e-8)


def test_two_rows():
    assert largest_eigenvalue(csr_matrix(np.array([[1.0, -1.0], [-1.0, 1.0]]))) == pytest.approx(2.0)
