"""The rounds of GTV minimisation by predictions; the package describes the method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import expected, tree
from fedtorch.data import BadClients, ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm, LocalSolver, Reply
from fedtorch.federation.algorithms.regressors.nodes import Fit, Node, NodeRows, Regressor, node
from fedtorch.federation.exchanges.graph import Neighbourhood, graph
from fedtorch.federation.posterior import Posterior
from fedtorch.federation.runs.run import Run
from fedtorch.federation.told import Told
from fedtorch.federation.turn import Turn
from fedtorch.learns import Learns, tells
from fedtorch.networks.network import Network
from fedtorch.tree import Tree

Make = Callable[[], Regressor] | LocalSolver  # a node's model


@tells(Learns("membership of rows, of predictions on the shared inputs", "attacks.membership"))
class _Told(NamedTuple):
    """A node's predictions, or the sum over its neighbours."""

    predictions: Tensor  # (K, m') on the shared inputs, or (K, m', C) probabilities
    weight: Tensor  # (K,) one from its first fit on; in sums, Σ_j A_ij over neighbours that have answered


class _State(NamedTuple):
    """State of a node; leaves `(K, ...)`."""

    told: _Told
    kept: Tensor  # (K, P) numbers from which a node's next fit starts, padded with zeros


class RegressorsServer(NamedTuple):
    """The nodes' received messages, `(n, ...)`; row i is node i's memory."""

    total: Tree = None  # `predictions` (n, m') and `weight` (n,): Σ_j A_ij over neighbours that have answered


class _Outbox(NamedTuple):
    """A node's inputs; row i is in node i's memory, and only the received messages have travelled."""

    heard: _Told
    inputs: Tensor  # (n, m', d) x' in each node's features
    number: Tensor  # (n,) of the node


class _Nodes:
    """The nodes' models.

    Args:
        makes: builds each node's model, or one for all.
        classes: as for `gtv_regressors`, like the next.
        repeats: calls of a local solver a round.
    """

    def __init__(self, makes: tuple[Make, ...], classes: int | None, repeats: int) -> None:
        self.each = [node(make, classes, repeats) for make in makes]
        self.size = max(each.size for each in self.each)

    def __call__(self, number: int) -> Node:
        """Return the model of a node."""
        return self.each[number if len(self.each) > 1 else 0]


def gtv_regressors(
    make: Make | Sequence[Make],
    network: Network,
    alpha: float,
    inputs: Tensor,
    *,
    classes: int | None = None,
    repeats: int = 1,
) -> Algorithm:
    """Build GTV minimisation for models of any kind, which are coupled by their predictions on shared inputs.

    In the first round a node fits its own rows; neighbours that have not answered do not count. A client's tensors are
    its predictions on the shared inputs; `fitted` returns the models themselves.

    Args:
        make: a function that makes a new regressor with `fit(X, y, sample_weight)` and `predict(X)`; a local solver of
            a module, such as `ft.gradient_descent(module, steps=20, loss=...)`; or a list of these, one for each node.
            Fits must not depend on global random state, so pass a `random_state`.
        network: has the clients as nodes, in their order; rows are (x `(d,)`, y `()`).
        alpha: strength α of the coupling.
        inputs: `(m', d)` the shared inputs x', which need no labels; or `(n, m', d)`, the same examples in each node's
            own features.
        classes: C for classifiers of labels 0 … C − 1, by `predict_proba` or by a module's C logits.
        repeats: calls of a local solver in a round, each with the coupling at the present parameters. Solvers of one
            step with `reset="never"` then take that many steps on the whole objective, which suits deep networks.

    Shapes: server state is `RegressorsServer`; client state has the predictions, `(K, m')` or `(K, m', C)`.

    Raises:
        ValueError: α is negative or not finite, inputs of another form or not finite, or not one model per node; at the
            start of a run, a node without rows, rows of another form or a network of another size; in a round, a node's
            predictions are not finite or have another shape, or its model raises an error.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.regressors import fitted
        >>> from sklearn.tree import DecisionTreeRegressor
        >>> data = ft.data.from_tensors([(torch.zeros(4, 1), torch.ones(4)), (torch.zeros(4, 1), -torch.ones(4))])
        >>> line = ft.gradient_descent(  # a tree at one node, a line at the other
        ...     torch.nn.Linear(1, 1), steps=20, loss=lambda output, y: (output[:, 0] - y).square().mean(),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2))
        >>> nodes, inputs = [lambda: DecisionTreeRegressor(random_state=0), line], torch.zeros(3, 1)
        >>> algorithm = ft.gtv_regressors(nodes, ft.Network.from_edges([(0, 1)]), 0.5, inputs)
        >>> run = ft.run(algorithm, ft.InProcess(data), {}, rounds=40)
        >>> tree, module = fitted(run)
        >>> round(float(tree.predict([[0.0]])[0]), 3), round(module(torch.zeros(1)).item(), 3)  # ±1 / (1 + 2α)
        (0.5, -0.5)
    """
    shared = _checked_inputs(alpha, inputs, network.nodes)
    makes = tuple(make) if isinstance(make, Sequence) else (make,)
    if isinstance(make, Sequence) and len(makes) != network.nodes:
        raise ValueError(
            f"Expected a model for each of {network.nodes} nodes, but got {len(makes)}; pass one for all of them, or a "
            "list of as many"
        )
    if repeats < 1:
        raise ValueError(f"Expected repeats of at least 1, but got {repeats}")
    shape = (shared.shape[1],) if classes is None else (shared.shape[1], classes)
    nodes = _Nodes(makes, classes, repeats)

    def init(parameters: Tree, clients: int) -> tuple[RegressorsServer, _State]:
        if clients != network.nodes:
            raise ValueError(
                f"Expected a network of as many nodes as there are clients, {clients}, but got {network.nodes} nodes"
            )
        nothing = torch.zeros(shape, dtype=torch.float64)
        kept = nothing.new_zeros(nodes.size)
        return RegressorsServer(), _State(_Told(nothing, nothing.new_zeros(())), kept)

    def client(inbox: Neighbourhood, state: _State, data: ClientData, turn: Turn) -> Reply:
        rows = _rows(inbox.heard, data, alpha)
        kept = state.kept.clone()
        begun = state.told.weight.tolist() if nodes.size else [0.0] * len(rows)
        predictions, losses = torch.zeros_like(state.told.predictions), torch.zeros_like(state.told.weight)
        for k, number in enumerate(inbox.heard.number.tolist()):
            model = nodes(number)
            before = kept[k, : model.size].cpu() if begun[k] else None
            fit = _checked_fit(_fit(model, before, rows[k], _alone(turn, k, model), k), shape, k)
            kept[k, : model.size], predictions[k], losses[k] = fit.kept, fit.predictions, fit.loss
        told = _Told(predictions, torch.ones_like(state.told.weight))
        return Reply(None, _State(told, kept), {"loss": losses})

    return Algorithm(
        start={},
        init=init,
        outbox=lambda server: _Outbox(server.total, shared, torch.arange(network.nodes)),
        client=client,
        server=lambda server, aggregate, key: server,
        model=lambda inbox, state: {"predictions": state.told.predictions, "kept": state.kept},
        exchange=graph(network),
        prepare=lambda data: _checked(data, inputs.shape[-1], classes),
        told=Told(lambda state: state.told, counts=("weight",)),
        posterior=_Refitted(nodes, alpha),
        settings={
            "algorithm": "gtv_regressors",
            **_settings(makes),
            "nodes": nodes,
            "alpha": alpha,
            "inputs": inputs,
            "classes": classes,
            "repeats": repeats,
            "edges": network.edges,
        },
    )


@dataclass(frozen=True)
class _Refitted(Posterior):
    """Inputs from which `fitted` makes the nodes' models."""

    nodes: _Nodes
    alpha: float


def fitted(run: Run) -> list[Any]:
    """Fit each node's model to its rows and its neighbours' predictions, as its next round would, where its rows are.

    Args:
        run: of `gtv_regressors` on data at hand.

    Returns:
        regressors, and copies of local solvers' modules.

    Raises:
        TypeError: a run of another algorithm, or of a population without its data.

    Example:
        >>> import torch, fedtorch as ft
        >>> from sklearn.linear_model import LinearRegression
        >>> x = torch.randn(4, 10, 2).double()
        >>> data = ft.data.from_tensors([(rows, rows.sum(1)) for rows in x])
        >>> algorithm = ft.gtv_regressors(LinearRegression, ft.Network.ring(4), 0.1, x[0])
        >>> run = ft.run(algorithm, ft.InProcess(data), {}, rounds=2)
        >>> [type(each).__name__ for each in ft.fitted(run)][:1]
        ['LinearRegression']
    """
    posterior = run.algorithm.posterior
    data = getattr(run.population, "data", None)
    if not isinstance(posterior, _Refitted) or not isinstance(data, FederatedData):
        raise TypeError(
            "Expected a run of ft.gtv_regressors on data at hand, but got one of "
            f"{run.algorithm.settings.get('algorithm')} on {run.population!r}"
        )
    fits = run.tensors()["kept"]
    inbox = run.algorithm.exchange.scatter(run.outbox, slice(0, len(data))).heard
    rows = _rows(inbox, data.stack(range(len(data))), posterior.alpha)
    nodes: list[Node] = [posterior.nodes(k) for k in range(len(data))]
    return [each.model(fits[k, : each.size].cpu(), rows[k]) for k, each in enumerate(nodes)]


def _rows(inbox: _Outbox, data: ClientData, alpha: float) -> list[NodeRows]:
    """Return the data of each node's fit in a block, on the CPU."""
    x, y, inputs, predictions = [
        torch.from_numpy(leaf.cpu().numpy().copy()) for leaf in (*data.batch, inbox.inputs, inbox.heard.predictions)
    ]
    rows = zip(x, y, inputs, predictions, inbox.heard.weight.tolist(), data.count.tolist())
    return [
        NodeRows(x[:n], y[:n], shared, neighbours / (weight if weight > 0 else 1.0), alpha * weight)
        for x, y, shared, neighbours, weight, n in rows
    ]


def _alone(turn: Turn, k: int, model: Node) -> Turn | None:
    """Return the turn of one client; regressors draw nothing."""
    return turn.with_key(turn.key[k : k + 1]) if model.size else None


def _fit(model: Node, before: Tensor | None, rows: NodeRows, turn: Turn | None, k: int) -> Fit:
    """Fit the model of a node of the block; errors name the node.

    Raises:
        BadClients: the fit failed.
    """
    try:
        return model.fit(before, rows, turn)
    except BadClients as error:  # raised by a local solver, which has a single client
        raise BadClients(torch.tensor([k]), str(error)) from error
    except Exception as error:
        raise BadClients(torch.tensor([k]), f"its model raised {type(error).__name__}: {error}") from error


def _checked_fit(fit: Fit, shape: tuple[int, ...], k: int) -> Fit:
    """Raise BadClients unless predictions are finite and have the shape of all nodes'."""
    if tuple(fit.predictions.shape) != shape:
        raise BadClients(
            torch.tensor([k]),
            f"expected predictions of shape {shape} on the shared inputs, but got {tuple(fit.predictions.shape)}; give "
            "all nodes models of the same outputs, for C classes with classes=C",
        )
    if not bool(fit.predictions.isfinite().all()):
        raise BadClients(
            torch.tensor([k]),
            "expected finite predictions on the shared inputs, but got NaN or Inf; look for NaN in its rows, or train "
            "with smaller steps",
        )
    return fit


def _settings(makes: tuple[Make, ...]) -> dict[str, Any]:
    """Return settings of the models, and of local solvers."""
    if len(makes) == 1 and not isinstance(makes[0], LocalSolver):
        return {"make": makes[0]}
    settings: dict[str, Any] = {}
    for i, each in enumerate(makes):
        about = each.settings if isinstance(each, LocalSolver) else {"make": each}
        settings.update({f"node {i}.{name}": value for name, value in about.items()})
    return settings


def _checked_inputs(alpha: float, inputs: Tensor, nodes: int) -> Tensor:
    """Return the inputs in each node's features, `(n, m', d)`."""
    expected.not_negative(alpha=alpha)
    shape = tuple(inputs.shape)
    if len(shape) not in (2, 3) or shape[-2] == 0 or (len(shape) == 3 and shape[0] != nodes):
        raise ValueError(
            f"Expected shared inputs (m', d) with at least one row, or ({nodes}, m', d), but got shape {shape}"
        )
    if not bool(inputs.isfinite().all()):
        raise ValueError("Expected finite shared inputs, but got NaN or Inf; leave such rows out, they need no labels")
    return inputs.detach().cpu().expand(nodes, *shape[-2:])


def _checked(data: ClientData, features: int, classes: int | None) -> ClientData:
    shapes = [tuple(leaf.shape[2:]) for leaf in tree.leaves(data.batch)]
    if shapes != [(features,), ()]:
        raise ValueError(f"Expected rows (x, y) of shapes ({features},) and (), but got {shapes}")
    empty = (data.count == 0).cpu().nonzero()[:, 0]
    if len(empty):
        raise BadClients(empty, "expected rows to fit, but got none; leave the node out")
    y = data.batch[1]
    if classes is not None:
        wrong = ((y < 0) | (y >= classes) | (y != y.floor())).any(1).cpu().nonzero()[:, 0]
        if len(wrong):
            raise BadClients(wrong, f"expected labels 0 to {classes - 1}, but got others; count them from 0")
    return data
