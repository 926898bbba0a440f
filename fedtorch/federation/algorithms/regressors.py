r"""GTV minimisation for any regressor: neighbours' predictions on shared inputs are drawn towards each other.

The nodes' hypotheses h_i, trees or whatever has `fit` and `predict`, minimise

.. math:: \sum_i \frac1{m_i} \sum_r (y_{ir} - h_i(x_{ir}))^2 +
    \alpha \sum_{\{i,j\} \in E} A_{ij} \frac1{m'} \sum_{r'} (h_i(x'_{r'}) - h_j(x'_{r'}))^2

one node at a time given the others (Algorithm 5.4 with the update 5.21). To node i that is a fit on its own rows with
weights 1/m_i and on the shared inputs x', labelled by its neighbours' mean prediction, with weights αd_i/m'. Models are
never sent, only predictions on the shared inputs. The inputs may look different to every node, who knows features of
its own: then they are shared examples, and this is vertical federation (section 6.5).

Corrected in print: (5.21) has α/2 where the minimiser over one node of GTVMin with α needs α; see `ft.gtv`.

Source: Jung, "Federated learning: from theory to practice", section 5.6 and equation (5.21).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtorch import expected, tree
from fedtorch.data import BadClients, ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.exchanges.graph import Neighbourhood, graph
from fedtorch.federation.told import Told
from fedtorch.federation.turn import Turn
from fedtorch.networks.network import Network
from fedtorch.tree import Tree


class Regressor(Protocol):
    """Fit and predict, as scikit-learn's regressors do."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Fit to rows with weights."""
        ...

    def predict(self, X: Any) -> Any:
        """Return predictions, `(rows,)`."""
        ...


class _Told(NamedTuple):
    """Hold what a node tells, or the sum of what its neighbours have told."""

    predictions: Tensor  # (K, m') on the shared inputs
    weight: Tensor  # (K,) one from its first fit on; summed, Σ_j A_ij of the neighbours that have been heard


class _State(NamedTuple):
    """Hold a node's own state; leaves `(K, ...)`."""

    told: _Told


class RegressorsServer(NamedTuple):
    """Hold what the nodes have heard, `(n, ...)`; row i is node i's memory."""

    total: Tree = None  # `predictions` (n, m') and `weight` (n,): Σ_j A_ij of the neighbours' own, and of those heard


class _Outbox(NamedTuple):
    """Hold what a node works with; row i is in node i's memory, and only the heard part of it has travelled."""

    heard: _Told
    inputs: Tensor  # (n, m', d) x' as each node sees it


def gtv_regressors(make: Callable[[], Regressor], network: Network, alpha: float, inputs: Tensor) -> Algorithm:
    """Build GTV minimisation for regressors with `fit(X, y, sample_weight)` and `predict(X)`.

    In the first round a node fits its own rows, and neighbours that have not been heard do not count. The tensors that
    a client predicts with are its predictions on the shared inputs; `fitted` makes the regressors themselves.

    Args:
        make: a new regressor; fits must not depend on global random state, so pass a `random_state`.
        network: whose nodes are the clients, in their order; rows are (x `(d,)`, y `()`).
        alpha: strength α of the coupling.
        inputs: `(m', d)` the shared inputs x', which need no labels; or `(n, m', d)`, as every node sees the same
            examples.

    Shapes: server state is `RegressorsServer`; client state has the predictions, `(K, m')`.

    Raises:
        ValueError: α is negative or not finite, inputs of another form; or, when a run begins, rows of another form or
            a network of another size.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.regressors import fitted
        >>> from sklearn.tree import DecisionTreeRegressor
        >>> data = ft.data.from_tensors([(torch.zeros(4, 1), torch.ones(4)), (torch.zeros(4, 1), -torch.ones(4))])
        >>> make, inputs = lambda: DecisionTreeRegressor(random_state=0), torch.zeros(3, 1)
        >>> algorithm = ft.gtv_regressors(make, ft.Network.from_edges([(0, 1)]), 0.5, inputs)
        >>> final = ft.run(algorithm, ft.InProcess(data), {}, rounds=40)
        >>> one, other = fitted(make, data, final.server, 0.5, inputs)
        >>> round(float(one.predict([[0.0]])[0]), 4)  # 1 / (1 + 2α)
        0.5
    """
    shared = _checked_inputs(alpha, inputs, network.nodes)

    def init(parameters: Tree, clients: int) -> tuple[RegressorsServer, _State]:
        if clients != network.nodes:
            raise ValueError(
                f"Expected a network of as many nodes as there are clients, {clients}, but got {network.nodes} nodes"
            )
        return RegressorsServer(), _State(
            _Told(torch.zeros(shared.shape[1], dtype=torch.float64), torch.zeros(()).double())
        )

    def client(inbox: Neighbourhood, state: _State, data: ClientData, turn: Turn) -> Reply:
        received: _Told = inbox.heard.heard
        seen = inbox.heard.inputs.numpy()
        rows, labels = [leaf.cpu().numpy() for leaf in data.batch]
        targets, weight = received.predictions.cpu().numpy(), received.weight.tolist()
        predictions, losses = np.zeros(targets.shape), np.zeros(len(targets))
        for k, count in enumerate(data.count.tolist()):
            x, y = rows[k, :count], labels[k, :count]
            model = _fit(make, x, y, targets[k], weight[k], alpha, seen[k])
            predictions[k], losses[k] = model.predict(seen[k]), np.square(y - model.predict(x)).mean()
        message = _Told(torch.as_tensor(predictions).to(state.told.predictions), torch.ones_like(state.told.weight))
        return Reply(None, _State(message), {"loss": torch.as_tensor(losses).to(message.weight)})

    return Algorithm(
        init=init,
        outbox=lambda server: _Outbox(server.total, shared),
        client=client,
        server=lambda server, aggregate, key: server,
        model=lambda inbox, state: {"predictions": state.told.predictions},
        exchange=graph(network),
        prepare=lambda data: _checked(data, inputs.shape[-1]),
        told=Told(lambda state: state.told, counts=("weight",)),
        settings={
            "algorithm": "gtv_regressors",
            "make": make,
            "alpha": alpha,
            "inputs": inputs,
            "edges": network.edges,
        },
    )


def fitted(
    make: Callable[[], Regressor], data: FederatedData, server: RegressorsServer, alpha: float, inputs: Tensor
) -> list[Regressor]:
    """Fit a regressor per node to its rows and its neighbours' predictions; arguments as of `gtv_regressors`."""
    seen, received = _checked_inputs(alpha, inputs, len(data)).numpy(), server.total
    targets, weight = received.predictions.cpu().numpy(), received.weight.tolist()
    return [
        _fit(make, x.cpu().numpy(), y.cpu().numpy(), targets[k], weight[k], alpha, seen[k])
        for k, (x, y) in enumerate(data)
    ]


def _fit(
    make: Callable[[], Regressor],
    x: NDArray[Any],
    y: NDArray[Any],
    heard: NDArray[Any],
    weight: float,
    alpha: float,
    shared: NDArray[Any],
) -> Regressor:
    """Fit one node's regressor: Σ_j A_ij (h − h_j)² is Σ_j A_ij times (h − their mean)², up to a constant."""
    model, weights = make(), np.full(len(y), 1 / max(len(y), 1))
    if weight * alpha == 0:
        model.fit(x, y, sample_weight=weights)
        return model
    labels = heard / weight
    theirs = np.full(len(shared), alpha * weight / len(shared))
    rows, targets = np.concatenate((x, shared)), np.concatenate((y, labels))
    model.fit(rows, targets, sample_weight=np.concatenate((weights, theirs)))
    return model


def _checked_inputs(alpha: float, inputs: Tensor, nodes: int) -> Tensor:
    """Return the inputs as each node sees them, `(n, m', d)`."""
    expected.not_negative(alpha=alpha)
    shape = tuple(inputs.shape)
    if len(shape) not in (2, 3) or shape[-2] == 0 or (len(shape) == 3 and shape[0] != nodes):
        raise ValueError(
            f"Expected shared inputs (m', d) with at least one row, or ({nodes}, m', d), but got shape {shape}"
        )
    return inputs.detach().cpu().expand(nodes, *shape[-2:])


def _checked(data: ClientData, features: int) -> ClientData:
    shapes = [tuple(leaf.shape[2:]) for leaf in tree.leaves(data.batch)]
    if shapes != [(features,), ()]:
        raise ValueError(f"Expected rows (x, y) of shapes ({features},) and (), but got {shapes}")
    empty = (data.count == 0).cpu().nonzero()[:, 0]
    if len(empty):
        raise BadClients(empty, "expected rows to fit, but got none; leave the node out")
    return data
