"""GTV minimisation of linear models written out densely, and data for it, that several tests share."""

from __future__ import annotations

import torch
from torch import Tensor

import fedtorch as ft


def bare_linear_clients(sizes: list[int], features: int = 3, seed: int = 0) -> ft.data.FederatedData:
    """Rows (x, y) of different linear models without intercept."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    clients = []
    for size in sizes:
        x = draw(size, features)
        clients.append((x, x @ draw(features) + 0.3 * draw(size)))
    return ft.data.from_tensors(clients)


def weighted_network(nodes: int, seed: int = 0, p: float = 0.4) -> ft.Network:
    """A connected network: a path and random edges, with random weights."""
    generator = torch.Generator().manual_seed(seed)
    path = torch.stack((torch.arange(nodes - 1), torch.arange(1, nodes)), 1)
    pairs = torch.combinations(torch.arange(nodes))
    more = pairs[(torch.rand(len(pairs), generator=generator) < p) & (pairs[:, 1] - pairs[:, 0] > 1)]
    edges = torch.cat((path, more))
    return ft.Network(edges, 0.5 + torch.rand(len(edges), generator=generator, dtype=torch.float64), nodes=nodes)


def dense_system(data: ft.data.FederatedData, network: ft.Network, alpha: float) -> tuple[Tensor, Tensor]:
    """Q `(nd, nd)` and b `(nd,)` of equation (3.26), node by node and edge by edge."""
    n, d = len(data), data.rows[0].shape[1]
    q, b = torch.zeros(n, d, n, d, dtype=torch.float64), torch.zeros(n, d, dtype=torch.float64)
    for i, (x, y) in enumerate(data):
        if len(x):
            q[i, :, i] += x.T @ x / len(x)
            b[i] += x.T @ y / len(x)
    eye = torch.eye(d, dtype=torch.float64)
    for (i, j), weight in zip(network.edges.tolist(), network.weights.tolist()):
        for one, two in ((i, j), (j, i)):
            q[one, :, one] += alpha * weight * eye
            q[one, :, two] -= alpha * weight * eye
    return q.reshape(n * d, n * d), b.flatten()


def dense_solution(data: ft.data.FederatedData, network: ft.Network, alpha: float) -> Tensor:
    """The minimiser of GTVMin with the squared norm, of least norm, `(n, d)`."""
    q, b = dense_system(data, network, alpha)
    return (torch.linalg.pinv(q, rtol=1e-12, hermitian=True) @ b).reshape(len(data), -1)
