"""Clusters of nodes: by their parameters, by the network, or by equal parameters in a GTV solution.

Every function returns labels `(n,)`, numbered by their first nodes, so that equal partitions are equal tensors.

>>> import torch, fedtorch as ft
>>> network = ft.Network([(0, 1), (1, 2), (2, 3)])
>>> ft.networks.clustering.tied(network, torch.tensor([[1.0], [1.0], [4.0], [4.0]]))
tensor([0, 0, 1, 1])
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedtorch import random
from fedtorch._lazy import only
from fedtorch.networks.network import Network

__all__ = ["gaussian_mixture", "k_means", "spectral"]
__dir__ = only(__all__)

_DENSE = 400  # most nodes for a dense eigendecomposition


def k_means(parameters: Tensor, clusters: int, *, seed: int = 0, starts: int = 10) -> Tensor:
    """Cluster the nodes' parameters, or any vectors that represent them, by k-means.

    Args:
        parameters: `(n, ...)`, flattened per node.
        clusters: their number, at most n.
        seed: of the starts.
        starts: number of starts; the best result is returned.

    Raises:
        ValueError: a number of clusters out of range, or parameters that are not finite.
    """
    from sklearn.cluster import KMeans

    points = _points(parameters, clusters)
    labels = KMeans(clusters, n_init=starts, random_state=_state(seed)).fit_predict(points)
    return _by_first_node(torch.from_numpy(labels).to(torch.int64))


def gaussian_mixture(
    parameters: Tensor, clusters: int, *, seed: int = 0, starts: int = 10, covariance: str = "diag"
) -> Tensor:
    """Cluster the nodes' parameters, or any vectors that represent them, by the likeliest part of a Gaussian mixture.

    Unlike k-means it allows clusters of different sizes and different spreads in each direction. Fitted by expectation
    maximisation; a cluster that is most likely for no node has no label.

    Source: Jung, "Federated learning: from theory to practice", section 6.3.

    Args:
        parameters: `(n, ...)`, flattened per node.
        clusters: their number, at most n.
        seed: of the starts.
        starts: number of starts; the best result is returned.
        covariance: as in scikit-learn's `GaussianMixture`: "full", "tied", "diag" or "spherical"; a full one has (d +
            1)d/2 numbers and needs many nodes in each cluster.

    Raises:
        ValueError: a number of clusters out of range, or parameters that are not finite.

    >>> import fedtorch as ft
    >>> gaussian_mixture(torch.tensor([[0.0], [0.1], [9.0], [0.2], [12.0]]), 2)
    tensor([0, 0, 1, 0, 1])
    """
    from sklearn.mixture import GaussianMixture

    points = _points(parameters, clusters)
    mixture = GaussianMixture(clusters, covariance_type=covariance, n_init=starts, random_state=_state(seed))
    return _by_first_node(torch.from_numpy(mixture.fit_predict(points)).to(torch.int64))


def spectral(network: Network, clusters: int, *, seed: int = 0) -> Tensor:
    r"""Cluster nodes by k-means of the rows of the first eigenvectors of the normalised adjacency.

    The eigenvectors belong to the largest eigenvalues of :math:`D^{-1/2} A D^{-1/2}`, with rows scaled to length one;
    an isolated node counts as its own neighbour.

    Source: Ng, Jordan and Weiss (2002), "On spectral clustering: analysis and an algorithm".

    Args:
        network: of n nodes.
        clusters: their number, at most n.
        seed: of the starts.

    >>> import fedtorch as ft
    >>> triangles = ft.Network([(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5), (2, 3)])  # and an edge between them
    >>> spectral(triangles, 2)
    tensor([0, 0, 0, 1, 1, 1])
    """
    _check_clusters(clusters, network.nodes)
    vectors = _leading_vectors(network, clusters)
    return k_means(vectors / vectors.norm(dim=1, keepdim=True).clamp_min(1e-300), clusters, seed=seed)


def tied(network: Network, parameters: Tensor, tolerance: float = 1e-6) -> Tensor:
    """Read clusters off a GTV solution: components of the edges over which parameters are equal.

    Penalties without a square, |w_i − w_j|, make many of them exactly equal; squared ones only nearly so.

    Args:
        network: of n nodes.
        parameters: w, `(n, ...)`.
        tolerance: the Euclidean distance up to which parameters are equal, times the largest norm of any node's.
    """
    w = torch.as_tensor(parameters).detach().cpu()
    if len(w) != network.nodes:
        raise ValueError(f"Expected parameters of {network.nodes} nodes, but got shape {tuple(w.shape)}")
    flat = w.reshape(network.nodes, -1).to(torch.float64)
    apart = (flat[network.edges[:, 0]] - flat[network.edges[:, 1]]).norm(dim=1)
    equal = apart <= tolerance * flat.norm(dim=1).max()
    return Network(network.edges[equal], nodes=network.nodes).components.labels


def _leading_vectors(network: Network, count: int) -> Tensor:
    from scipy.sparse import diags
    from scipy.sparse.linalg import eigsh

    alone = network.neighbour_counts == 0
    scale = diags(torch.where(alone, 1.0, network.degrees).rsqrt().numpy())
    matrix = scale @ network.scipy_adjacency @ scale + diags(alone.to(torch.float64).numpy())
    if network.nodes <= _DENSE or count >= network.nodes - 1:
        return torch.linalg.eigh(torch.from_numpy(matrix.toarray())).eigenvectors[:, -count:]
    start = random.normal(random.key(network.nodes), (network.nodes,), torch.float64).numpy()
    # Shifted by one, the relevant eigenvalues are also the largest in absolute value.
    _, vectors = eigsh(matrix + diags([1.0], shape=matrix.shape), count, which="LA", v0=start, tol=1e-8)
    return torch.from_numpy(vectors)


def _points(parameters: Tensor, clusters: int) -> np.ndarray:
    """Return one row of numbers per node, checked."""
    points = torch.as_tensor(parameters).detach().cpu().to(torch.float64)
    points = points.flatten(1) if points.ndim > 1 else points[:, None]
    if not bool(points.isfinite().all()):
        raise ValueError("Expected finite parameters, but got NaN or infinity")
    _check_clusters(clusters, len(points))
    return points.numpy()


def _state(seed: int) -> int:
    """Return a seed that scikit-learn takes."""
    return int(random.randint(random.key(seed), 2**31))


def _check_clusters(clusters: int, nodes: int) -> None:
    if not 1 <= clusters <= nodes:
        raise ValueError(f"Expected from 1 to {nodes} clusters, as many as there are nodes, but got {clusters}")


def _by_first_node(labels: Tensor) -> Tensor:
    known, codes = labels.unique(return_inverse=True)
    first = torch.full((len(known),), len(labels)).scatter_reduce_(0, codes, torch.arange(len(labels)), "amin")
    return first.argsort().argsort()[codes]
