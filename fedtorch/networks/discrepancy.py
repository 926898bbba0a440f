r"""Discrepancies between nodes' data sets (Jung, "Federated learning: from theory to practice", section 7.3).

Most methods have two steps: a vector z_i that represents the data set of node i, and the distance
:math:`D(i, j) = |z_i - z_j|` of two of them. Functions that return vectors `(n, m)` can be passed to
`Network.k_nearest`, which never forms all pairs; `distances` forms them, for `learning.regular` and
`learning.edge_budget`.

Vectors leave the nodes, and disclose information about their data: at least a mean or a gradient.

>>> import torch, fedtorch as ft
>>> from fedtorch.networks import discrepancy
>>> rows = torch.zeros(4, 1), torch.tensor([0.0, 2.0, 5.0, 1.0])
>>> data = ft.data.FederatedData(rows, counts=torch.tensor([2, 1, 1]))
>>> discrepancy.mean_label(data).tolist()
[[1.0], [5.0], [1.0]]
>>> ft.Network.k_nearest(discrepancy.mean_label(data), 1).edges.tolist()
[[0, 1], [0, 2]]
>>> discrepancy.distances(discrepancy.mean_label(data))  # all pairs
tensor([[0., 4., 0.],
        [4., 0., 4.],
        [0., 4., 0.]], dtype=torch.float64)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch._lazy import only
from fedtorch.data import FederatedData
from fedtorch.progress import Progress, tracked
from fedtorch.tree import Tree

__all__ = ["autoencoder_code", "distances", "gaussian_mixture", "maximum_likelihood", "mean_label", "pooled_gradient"]
__dir__ = only(__all__)

_TITLE = "Representing the nodes"


def distances(vectors: Tensor) -> Tensor:
    """Return Euclidean distances `(n, n)` of vectors `(n, m)`, symmetric with a zero diagonal."""
    given = torch.as_tensor(vectors).detach()
    points = (tree.as_real(given).flatten(1) if given.is_complex() else given).to(torch.float64)
    if points.ndim != 2 or not bool(points.isfinite().all()):
        raise ValueError(f"Expected finite vectors (n, m), but got shape {tuple(points.shape)} or NaN or inf")
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")


def mean_label(data: FederatedData, label: int | str = 1) -> Tensor:
    """Return the mean label of each node, `(n, p)`: the maximum-likelihood estimate of a constant with Gaussian noise.

    Args:
        data: the nodes' rows.
        label: the field of the labels, `(total,)` or `(total, p)`.
    """
    target = _field(data, label)
    return _means(data, target.flatten(1) if target.ndim > 1 else target[:, None])


def maximum_likelihood(data: FederatedData, fit: Callable[[Tree], Tensor] | None = None) -> Tensor:
    """Return the maximum-likelihood parameters of each node's own model, `(n, m)`.

    Args:
        data: the nodes' rows.
        fit: takes one node's rows and returns its parameters; default: `linear_regression`.

    >>> x, y = torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([2.0, 4.0, 5.0])
    >>> data = FederatedData((x, y), counts=torch.tensor([2, 1]))
    >>> maximum_likelihood(data).round(decimals=6).flatten()  # the slopes
    tensor([2., 5.], dtype=torch.float64)
    >>> maximum_likelihood(data, fit=lambda rows: rows[1].mean()).flatten()
    tensor([3., 5.], dtype=torch.float64)
    """
    nodes = tracked(data, _TITLE, unit="node")
    return torch.stack([tree.wide((fit or linear_regression)(rows).detach().flatten()) for rows in nodes])


def linear_regression(rows: Tree) -> Tensor:
    """Fit rows (x `(m, d)`, y `(m,)` or `(m, p)`) by least squares without intercept, of minimum norm.

    >>> linear_regression((torch.tensor([[1.0, 1.0]]), torch.tensor([4.0]))).round(decimals=6)
    tensor([2., 2.], dtype=torch.float64)
    """
    x, y = rows
    coefficients = torch.linalg.pinv(x.to(torch.float64)) @ (y[:, None] if y.ndim == 1 else y).to(torch.float64)
    return coefficients.flatten()


def pooled_gradient(data: FederatedData) -> Tensor:
    r"""Return the gradient of each node's mean squared error at the linear model that fits all rows best, `(n, d)`.

    .. math:: z_i = \frac{2}{m_i} X_i'(X_i \hat w - y_i), \quad \hat w = \arg\min_w |Xw - y|^2

    Source: construction III of the assignment of section 7.6.

    Args:
        data: rows (x `(total, d)`, y `(total,)`).

    >>> data = FederatedData((torch.ones(4, 1), torch.tensor([0.0, 0.0, 4.0, 4.0])), counts=torch.tensor([2, 2]))
    >>> pooled_gradient(data).round(decimals=6).flatten()  # 2 (ŵ − y) at ŵ = 2
    tensor([ 4., -4.], dtype=torch.float64)
    """
    x, y = (leaf.to(torch.float64) for leaf in (_field(data, 0), _field(data, 1)))
    residual = x @ linear_regression((x, y)) - y
    return 2 * _means(data, x * residual[:, None])


def gradients(loss: Callable[[Tree, Tree], Tensor], parameters: Tree, data: FederatedData) -> Tensor:
    """Return the gradient of each node's loss at common parameters, `(n, m)`, leaves flattened one after the other.

    Args:
        loss: takes parameters and one node's rows, and returns a scalar.
        parameters: a tree, such as a module's after training on all nodes.
        data: the nodes' rows.

    >>> data = FederatedData((torch.ones(4, 1), torch.tensor([0.0, 0.0, 4.0, 4.0])), counts=torch.tensor([2, 2]))
    >>> gradients(lambda w, rows: (rows[0] @ w["slope"] - rows[1]).square().mean(), {"slope": torch.ones(1)}, data)
    tensor([[ 2.],
            [-6.]])
    """
    rows_of = []
    for rows in tracked(data, _TITLE, unit="node"):
        at = tree.map(lambda leaf: leaf.detach().requires_grad_(), parameters)
        leaves = list(tree.leaves(at))
        parts = torch.autograd.grad(loss(at, rows), leaves)
        rows_of.append(torch.cat([part.detach().flatten() for part in parts]))
    return torch.stack(rows_of)


def gaussian_mixture(data: FederatedData, components: int = 1, field: int | str = 0, seed: int = 0) -> Tensor:
    """Return weights, means and covariances of a Gaussian mixture of each node's features, `(n, m)`.

    The components are ordered by their means, and the covariance's upper triangle is used once.

    Source: construction II of the assignment of section 7.6.

    Args:
        data: the nodes' rows.
        components: of the mixture, at most a node's rows.
        field: of the features `(total, d)`.
        seed: of scikit-learn's start.

    Raises:
        ValueError: a node with fewer rows than components.

    >>> data = FederatedData((torch.tensor([[0.0], [2.0], [4.0], [8.0]]),), counts=torch.tensor([2, 2]))
    >>> gaussian_mixture(data).round(decimals=3)  # weight, mean and variance
    tensor([[1., 1., 1.],
            [1., 6., 4.]], dtype=torch.float64)
    """
    from sklearn.mixture import GaussianMixture

    if int(data.counts.min()) < max(2, components):
        raise ValueError(f"Expected {max(2, components)} rows or more at every node, but got {int(data.counts.min())}")
    features = _field(data, field).to(torch.float64)
    upper = torch.triu_indices(features.shape[1], features.shape[1])
    vectors = []
    for rows in tracked(features.split(data.counts.tolist()), _TITLE, unit="node"):
        mixture = GaussianMixture(components, random_state=seed).fit(rows.cpu().numpy())
        means, weights = torch.from_numpy(mixture.means_), torch.from_numpy(mixture.weights_)
        order = torch.tensor(sorted(range(components), key=lambda c: tuple(means[c].tolist())))
        triangles = torch.from_numpy(mixture.covariances_)[order][:, upper[0], upper[1]]
        vectors.append(torch.cat((weights[order], means[order].flatten(), triangles.flatten())))
    return torch.stack(vectors)


def autoencoder_code(
    data: FederatedData, *, seed: int = 0, code: int = 2, hidden: int = 16, iterations: int = 200
) -> Tensor:
    """Return the mean code of each node's rows in an autoencoder trained on all rows, `(n, code)`.

    Rows are all fields side by side, standardised; encoder and decoder have one layer of `hidden` tanh units each, or
    none with `hidden=0`, which gives principal components. Trained by L-BFGS on the mean squared error.

    Args:
        data: the nodes' rows.
        seed: of the start.
        code: the width of the code.
        hidden: the width of the hidden layers.
        iterations: of L-BFGS.

    >>> import fedtorch as ft
    >>> data = FederatedData((torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]]),), counts=torch.tensor([1, 1, 1]))
    >>> apart = distances(autoencoder_code(data, code=1, hidden=0))
    >>> round(float(apart[1, 2] / apart[0, 1]), 3)  # along the first principal component, 2 → 4 and 1 → 2
    2.0
    """
    rows = torch.cat([leaf.flatten(1) if leaf.ndim > 1 else leaf[:, None] for leaf in tree.leaves(data.rows)], 1)
    rows = rows.detach().to(torch.float64)
    spread = rows.std(0, correction=0)
    rows = (rows - rows.mean(0)) / torch.where(spread > 0, spread, 1.0)
    widths = [rows.shape[1], hidden, code, hidden, rows.shape[1]] if hidden else [rows.shape[1], code, rows.shape[1]]
    keys = [random.fold_in(random.key(seed).to(rows.device), i) for i in range(len(widths) - 1)]
    layers = [_layer(*each) for each in zip(keys, widths, widths[1:])]
    half = len(layers) // 2
    optimizer = torch.optim.LBFGS(
        [leaf for layer in layers for leaf in layer], max_iter=iterations, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        error = (_run(layers[half:], _run(layers[:half], rows)) - rows).square().mean()
        error.backward()
        shown.update()
        return error

    with Progress(_TITLE, unit="evaluation") as shown:
        optimizer.step(closure)
    return _means(data, _run(layers[:half], rows).detach())


def _field(data: FederatedData, name: int | str) -> Tensor:
    fields: dict[str, Any] = dict(tree.items(data.rows))
    if str(name) not in fields:
        raise ValueError(f"Expected one of the fields {sorted(fields)}, but got {name!r}")
    if int(data.counts.min()) == 0:
        raise ValueError("Expected rows at every node, but got a node without; leave it out with select()")
    return fields[str(name)].detach()


def _means(data: FederatedData, values: Tensor) -> Tensor:
    """Return means of rows `(total, m)` by node, `(n, m)` float64."""
    node = torch.arange(len(data)).repeat_interleave(data.counts).to(values.device)
    total = torch.zeros(len(data), values.shape[1], dtype=torch.float64, device=values.device)
    return total.index_add_(0, node, values.to(torch.float64)) / data.counts[:, None].to(values.device)


def _layer(key: Tensor, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    weight = random.normal(key, (inputs, outputs), torch.float64) / math.sqrt(inputs)
    return weight.requires_grad_(), torch.zeros(outputs, dtype=weight.dtype, device=key.device, requires_grad=True)


def _run(layers: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    for weight, bias in layers[:-1]:
        x = torch.tanh(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias
