r"""The main flavours of federated learning as GTV minimisation: which losses, which network, which coupling.

Source: Jung, "Federated learning: from theory to practice", chapter 6. Each recipe combines a problem, an algorithm or
a solution of the package with the arguments of that flavour; nothing here is new.

- single model (6.2): `single_model`; for other models `ft.gtv` with a large α, or `ft.fedavg`;
- clustered (6.3): `clustering.k_means` of `discrepancy.maximum_likelihood` or `clustering.spectral`, then `clustered`;
  `clustered_by_gtv`;
- horizontal, unlabelled nodes (6.4): `horizontal`;
- vertical (6.5): `vertical`;
- personalised (6.6): `personalised`; by a hypermodel `hypermodel` and `trained_from`;
- few-shot (6.7): `few_shot`.

Rows are (x `(d,)`, y `()`) unless stated otherwise, and linear models have no intercept: give x a column of ones.

>>> import torch, fedtorch as ft
>>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.full((2,), y)) for y in (1.0, 1.1, -1.0)])
>>> labels = ft.networks.clustering.k_means(ft.networks.discrepancy.maximum_likelihood(data), 2)
>>> labels.tolist()
[0, 0, 1]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch._lazy import only
from fedtorch.data import FederatedData
from fedtorch.federation.algorithm import Algorithm, LocalSolver
from fedtorch.federation.algorithms.gtv import gtv
from fedtorch.federation.algorithms.regressors.algorithm import gtv_regressors
from fedtorch.federation.algorithms.regressors.nodes import Regressor
from fedtorch.federation.turn import Turn
from fedtorch.models.linear import SufficientStatistics
from fedtorch.networks.network import Network
from fedtorch.networks.solvers import LinearProblem, Solution, linear_problem
from fedtorch.networks.solvers.admm import admm
from fedtorch.networks.solvers.penalties import equal, norm2
from fedtorch.networks.solvers.primal_dual import primal_dual
from fedtorch.random.named import numbers
from fedtorch.tree import Tree

__all__ = ["clustered", "clustered_by_gtv"]
__dir__ = only(__all__)


def single_model(problem: LinearProblem) -> Solution:
    """Return one linear model for all nodes (section 6.2): GTV minimisation in the limit α → ∞, by consensus ADMM.

    The minimiser of Σ_i L_i(w) over one w, with equal weights of the nodes' mean squared errors, for any α. The network
    only carries the messages, so a sparse one suffices, such as a star or a ring; each connected component has its own
    model. For other models use `ft.gtv(local, network, alpha)` with a large α: (3.31) bounds the remaining differences
    between nodes, which `ft.networks.diagnose(…).deviation_bound` returns.

    Args:
        problem: losses and network.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.federation.runs import recipes
    >>> from fedtorch.networks import solvers
    >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.tensor([1.0])), (torch.ones(3, 1), -torch.ones(3))])
    >>> one = recipes.single_model(solvers.linear_problem(data, ft.Network.star(2), alpha=1.0))
    >>> bool((one.parameters.abs() < 1e-8).all())  # each node counts once, however many rows it has
    True
    """
    return admm(problem, equal)


def cluster_network(labels: Tensor) -> Network:
    """Build a star within each cluster and no edges between clusters: the fewest edges that connect each cluster.

    Args:
        labels: `(n,)` integers, the cluster of each node; its first node becomes the middle.

    >>> import torch
    >>> cluster_network(torch.tensor([0, 1, 0, 1, 1])).edges.tolist()
    [[0, 2], [1, 3], [1, 4]]
    """
    edges = []
    for label in labels.unique().tolist():
        first, *others = (labels == label).nonzero()[:, 0].tolist()
        edges += [(first, other) for other in others]
    return Network.from_edges(edges, nodes=len(labels))


def clustered(data: FederatedData, labels: Tensor) -> Solution:
    """Return one linear model per cluster (section 6.3), for given clusters.

    `single_model` on a network that has the clusters as components.

    Args:
        data: a client per node.
        labels: `(n,)` integers, from `ft.networks.clustering.k_means` of the nodes' own fits
            (`ft.networks.discrepancy.maximum_likelihood`), which needs enough rows at every node,
            `clustering.spectral`, or from elsewhere.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.federation.runs import recipes
    >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.full((2,), y)) for y in (1.0, 2.0, -1.0)])
    >>> recipes.clustered(data, torch.tensor([0, 0, 1])).parameters[:, 0].round(decimals=6).tolist()
    [1.5, 1.5, -1.0]
    """
    return single_model(linear_problem(data, cluster_network(labels), 1.0))


def clustered_by_gtv(problem: LinearProblem, rounds: int = 20_000) -> Solution:
    """Clusters and their linear models at once (section 6.3): GTV minimisation with ‖w_i − w_j‖ instead of its square.

    The norm makes neighbours exactly equal or lets them differ, so that `Solution.clusters` can be read off; with the
    squared norm nodes of a cluster only approach each other, as far as (6.4) allows. The number of clusters follows
    from α. The price is a bias: each cluster is pulled to its neighbours by a force αA_ij per edge;
    `clustered(data, labels)` with these clusters has no such bias.

    Args:
        problem: losses, a network with more edges within clusters than between them, and α.
        rounds: most rounds.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.federation.runs import recipes
    >>> from fedtorch.networks import solvers
    >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.full((2,), y)) for y in (1.0, 2.0, -1.0, -2.0)])
    >>> network = ft.Network.from_edges([(0, 1, 1.0), (1, 2, 0.05), (2, 3, 1.0)])
    >>> found = recipes.clustered_by_gtv(solvers.linear_problem(data, network, alpha=2.0))
    >>> found.clusters.tolist()
    [0, 0, 1, 1]
    >>> found.parameters[:, 0].round(decimals=4).tolist()  # ±1.5, less by 0.05 α / 4
    [1.475, 1.475, -1.475, -1.475]
    """
    return primal_dual(problem, norm2, rounds=rounds)


def horizontal(
    data: FederatedData, network: Network, alpha: float, unlabelled: Sequence[int] | Tensor
) -> LinearProblem:
    """Return the problem of nodes with the same features, some without labels (section 6.4), whose loss is L_i = 0.

    This is semi-supervised learning: a node without labels takes the weighted mean of its neighbours' parameters. Its
    features still help to make the network, such as `ft.Network.k_nearest` of the nodes' mean features. For
    other models leave the rows of these nodes out and take `ft.gtv(unlabelled(local), network, alpha)`, by
    `fedtorch.federation.solvers.unlabelled`.

    Args:
        data: a client per node; labels of the nodes in `unlabelled` are not used.
        network: of all nodes.
        alpha: strength α of the coupling.
        unlabelled: the numbers of these nodes, `(U,)`.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.federation.runs import recipes
    >>> from fedtorch.networks import solvers
    >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.full((2,), y)) for y in (1.0, 9.0, 3.0)])
    >>> path = ft.Network.from_edges([(0, 1), (1, 2)])
    >>> found = solvers.direct(recipes.horizontal(data, path, 0.5, [1])).parameters[:, 0]
    >>> bool((found[1] - (found[0] + found[2]) / 2).abs() < 1e-9)
    True
    """
    problem = linear_problem(data, network, alpha, unlabelled=True)
    without = torch.as_tensor(unlabelled, device=problem.cross.device)
    return replace(problem, statistics=tree.map(lambda leaf: leaf.index_fill(0, without, 0.0), problem.statistics))


def vertical(
    make: Callable[[], Regressor], x: Tensor, y: Tensor, columns: Tensor, network: Network, alpha: float
) -> tuple[FederatedData, Algorithm, Tensor]:
    """Return the problem of nodes with the same examples and their own features (section 6.5), coupled by predictions.

    Parameters of models with different features cannot be compared, but predictions for the shared examples can; the
    variation of two nodes is their mean squared difference there. Other nodes' features are zeros for a node:
    regression trees never split at them, and least squares gives them no weight. Run it with
    `run = ft.run(algorithm, ft.InProcess(data), {})`, and make the regressors by `regressors.fitted(run)`. If one party
    only has the labels, or predictions must not be compared, see `fedtorch.vfl`.

    Args:
        make: a new regressor, such as a scikit-learn tree.
        x: `(m, d')` the features of all examples.
        y: `(m,)` their labels, known to every node.
        columns: `(n, d')` bool, which features each node has.
        network: of the n nodes.
        alpha: strength α of the coupling.

    Returns:
        data with a client per node, the algorithm, and its inputs `(n, m, d')`, x in each node's features.

    >>> import torch, fedtorch as ft
    >>> from sklearn.linear_model import LinearRegression
    >>> from fedtorch.federation.runs import recipes
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> network, columns = ft.Network.from_edges([(0, 1)]), torch.eye(2, dtype=torch.bool)
    >>> data, algorithm, inputs = recipes.vertical(LinearRegression, x, torch.tensor([1.0, 3.0]), columns, network, 1.0)
    >>> inputs[0].tolist(), inputs[1].tolist()
    ([[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]])
    >>> round = ft.Run(algorithm, ft.InProcess(data), {}).step()
    """
    nodes, examples = len(columns), len(x)
    if columns.dtype != torch.bool or columns.shape[1:] != x.shape[1:] or nodes != network.nodes:
        raise ValueError(
            f"Expected columns ({network.nodes}, {x.shape[1]}) of type bool, but got {columns.dtype} of shape "
            f"{tuple(columns.shape)}"
        )
    inputs = torch.where(columns[:, None, :], x, 0.0)
    data = FederatedData((inputs.flatten(0, 1), y.repeat(nodes)), torch.full((nodes,), examples))
    return data, gtv_regressors(make, network, alpha, inputs), inputs


def personalised(local: LocalSolver, network: Network, alpha: float, shared: str | Sequence[str]) -> Algorithm:
    """Networks whose first layers are coupled and whose last are personal (section 6.6): (6.5) with parts by name.

    `ft.gtv` with a mapping of patterns to strengths; use several entries for parts with different coupling strengths.
    Parameters that no pattern matches never leave their node. The same on a star is `ft.personal_layers`.

    Args:
        local: solver of a node's own problem.
        network: of the nodes.
        alpha: strength α of the coupling.
        shared: shell patterns of the names of coupled parameters, such as `"body.*"`.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.federation.runs import recipes
    >>> algorithm = recipes.personalised(ft.least_squares(torch.nn.Linear(2, 1)), ft.Network.ring(4), 1.0, "weight")
    >>> list(algorithm.told.of(algorithm.init(algorithm.start, 4)[1]))
    ['weight']
    """
    patterns = [shared] if isinstance(shared, str) else shared
    return gtv(local, network, dict.fromkeys(patterns, alpha))


def hypermodel(data: FederatedData, vectors: Tensor) -> Tensor:
    r"""Return a linear hypermodel H, from which each node's training starts: w_i = H z_i (section 6.6).

    H minimises Σ_i L_i(H z_i), which is learning a single model: :math:`x'Hz = \langle H, x z' \rangle`, so that it is
    `single_model` with the products of features and z as features. Then every node trains from there by `trained_from`,
    and a new node with only its z starts at H z too.

    Source: Shamsian et al. (2021), "Personalized federated learning using hypernetworks", with a linear hypernetwork of
    given node vectors.

    Args:
        data: a client per node.
        vectors: `(n, q)` z_i: coordinates, say, with a column of ones.

    Returns:
        H, `(d, q)`; the starts are `vectors @ H.T`.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.federation.runs import recipes
    >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.tensor([y])) for y in (1.0, 2.0, 3.0)])
    >>> z = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    >>> recipes.hypermodel(data, z).round(decimals=4).tolist()
    [[1.0, 1.0]]
    """
    if vectors.ndim != 2 or len(vectors) != len(data):
        raise ValueError(f"Expected a vector per node, ({len(data)}, q), but got shape {tuple(vectors.shape)}")
    x, y = data.rows
    of_row = vectors.to(x).repeat_interleave(data.counts.to(x.device), 0)
    products = (x[:, :, None] * of_row[:, None, :]).flatten(1)
    problem = linear_problem(FederatedData((products, y), data.counts), Network.star(len(data)), 1.0)
    return single_model(problem).parameters[0].reshape(x.shape[1], vectors.shape[1])


def trained_from(local: LocalSolver, starts: Tree, data: FederatedData, key: Tensor) -> Tree:
    """Return every node's parameters after one call of its local solver from its own start (section 6.6).

    With a few gradient steps this is the second half of learning with a hypermodel; more steps move a node further from
    the common model.

    Args:
        local: solver of a node's own problem.
        starts: `(n, ...)` parameters by name.
        data: a client per node.
        key: random key of the training.

    Returns:
        parameters by name, `(n, ...)`.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.federation.runs import recipes
    >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.zeros(1)), (torch.ones(1, 1), torch.zeros(1))])
    >>> local = ft.least_squares(torch.nn.Linear(1, 1, bias=False), steps=1, lr=0.25)
    >>> starts = {"weight": torch.tensor([[[1.0]], [[2.0]]])}
    >>> recipes.trained_from(local, starts, data, ft.random.key(0))["weight"].flatten().tolist()
    [0.5, 1.0]
    """
    nodes = torch.arange(len(data))
    state = tree.expand(local.init(local.parameters), len(data))
    return local.solve(
        starts, state, local.prepare(data.stack(nodes)), None, Turn(random.fold_in(key, numbers(tuple(data.names))), 0)
    ).parameters


def few_shot(x: Tensor, y: Tensor, network: Network, alpha: float) -> LinearProblem:
    r"""Return detectors of many categories, some with few examples or none, over a network of categories (section 6.7).

    Node c is a category, edges join similar categories, and w_c scores the similarity of x to it:

    .. math:: L_c(w) = \frac{1}{2 m_c} \sum_{y_r = c} (1 - w'x_r)^2 + \frac{1}{2 (m - m_c)} \sum_{y_r \ne c} (w'x_r)^2,

    in which the few examples count as much as the many others. A category without examples has L_c = 0 and is detected
    as its neighbours are.

    Args:
        x: `(m, d)` features.
        y: `(m,)` int64 categories, from 0 to n − 1.
        network: of the n categories.
        alpha: strength α of the coupling.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.federation.runs import recipes
    >>> from fedtorch.networks import solvers
    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    >>> problem = recipes.few_shot(x, y, ft.Network.from_edges([(0, 2)], nodes=3), alpha=1.0)
    >>> (solvers.direct(problem).parameters @ x.double().T).round(decimals=4).tolist()  # category 2 looks like 0
    [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    """
    nodes = network.nodes
    if y.dtype != torch.int64 or y.shape != (len(x),) or not 0 <= int(y.min()) <= int(y.max()) < nodes:
        raise ValueError(f"Expected int64 categories ({len(x)},) from 0 to {nodes - 1}, but got {y.dtype}, {y.shape}")
    rows = x.to(torch.float64)
    counts = torch.bincount(y, minlength=nodes).to(torch.float64)
    labelled = counts > 0
    scale = torch.where(labelled, 0.5 / counts.clamp(min=1), 0.0)
    rest = torch.where(labelled, 0.5 / (len(x) - counts).clamp(min=1), 0.0)
    total = rows.new_zeros(nodes, x.shape[1]).index_add_(0, y, rows)
    gram = torch.stack([rows[y == c].T @ rows[y == c] for c in range(nodes)])
    others = gram.sum(0) - gram
    gram = tree.along(scale, gram) * gram + tree.along(rest, gram) * others
    return LinearProblem(
        network, alpha, SufficientStatistics(gram, scale[:, None] * total, 0.5 * labelled.to(torch.float64), counts)
    )
