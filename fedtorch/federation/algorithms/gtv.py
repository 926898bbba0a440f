r"""GTV minimisation: a model for every node of a network, with a penalty on the differences of neighbours' models.

The nodes' parameters solve

.. math:: \min_{w_1, \dots, w_n} \sum_i L_i(w_i) + \alpha \sum_{\{i,j\} \in E} A_{ij} \|w_i - w_j\|^2.

For node i the others are the `Quadratic` with λ = 2αd_i and h = 2α Σ_j A_ij w_j, d_i = Σ_j A_ij, so that any local
solver gives a method:

- an exact one FedRelax (Algorithm 5.4), block-coordinate minimisation;
- one full-batch gradient step FedGD (Algorithm 5.1), one step on a minibatch FedSGD (Algorithm 5.2);
- several steps of any module, deep ones too, methods in between;
- a cohort of active nodes the asynchronous form of each (Algorithm 8.1); see `unreliable_edges` for delays.

Corrected in print: (5.20) and (5.21) minimise L_i + (α/2) Σ_j A_ij ‖w_i − w_j‖² over w_i. That is block-coordinate
minimisation of GTVMin with α/2, because the sum over nodes counts every edge twice; the factor here is α.

`penalty=` replaces the square of the difference by its norm, or by another function that makes neighbours exactly
equal: nodes then form clusters with one model each (section 6.3). The edges' variables are then at a server.

Node i sends w_i to its neighbours; a node that has not answered yet counts with the common start of all nodes.

Source: Jung, "Federated learning: from theory to practice", chapters 3, 5, 6 (equation 6.5) and 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fedtorch import expected, functional, tree
from fedtorch.federation.algorithm import Algorithm, LocalSolver, Quadratic, Reply, check_solver, solved_by
from fedtorch.federation.algorithms._edge_penalty import edge_rounds
from fedtorch.federation.algorithms.fedavg import averaged_buffers
from fedtorch.federation.exchanges.graph import Neighbourhood, graph
from fedtorch.federation.told import Averages, Told
from fedtorch.federation.turn import Turn
from fedtorch.learns import Learns
from fedtorch.networks.network import Network
from fedtorch.networks.solvers.penalties import Penalty
from fedtorch.tree import Tree

_LEARNS = Learns(
    "attributes of a node's rows, which a neighbour infers, for good", "attacks.learnt_attribute", "privacy.node_level"
)


class _State(NamedTuple):
    """State of a node; leaves `(K, ...)`."""

    parameters: dict[str, Tensor]  # w_i
    solver: Tree


class GTVServer(NamedTuple):
    """The nodes' received messages, a row per node, `(n, ...)`. There is no server: row i is node i's memory."""

    total: Tree = None  # {name: Σ_j A_ij w_j} of the coupled parameters, float64


def gtv(
    local: LocalSolver,
    network: Network,
    alpha: float | Mapping[str, float],
    *,
    penalty: Penalty | None = None,
    rho: float = 1.0,
) -> Algorithm:
    """Build GTV minimisation over a network, by any local solver.

    Args:
        local: solver of a node's own problem; the module's docstring lists the resulting methods.
        network: has the clients as nodes, in their order.
        alpha: strength α of the coupling; or a mapping from shell patterns of parameter names to strengths, as
            `{"body.*": 1.0, "head.bias": 0.1}`, for penalties on parts of the parameters (6.5). Strengths of patterns
            that match one name add up; parameters that match none are personal and never sent.
        penalty: φ of the difference of two nodes' coupled parameters, in place of its square: `networks.solvers.norm2`
            makes neighbours equal or not. A server then keeps the nodes' parameters and the edges, and strengths are
            the same for all coupled parameters.
        rho: ρ, how strictly a round of ADMM makes the two ends of an edge agree, with a penalty; about the curvature
            of the losses. The solution does not depend on it, the number of rounds does.

    Shapes: server state is `GTVServer`, the outbox its total; client state has w_i, `(K, ...)`.

    Raises:
        ValueError: α is negative or not finite, ρ not positive, or strengths differ with a penalty; a pattern matches
            no parameter; buffers are treated as parameters; or, at the start of a run, the numbers of nodes and clients
            differ.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.ones(1)), (torch.ones(1, 1), -torch.ones(1))])
        >>> local = ft.least_squares(torch.nn.Linear(1, 1, bias=False))
        >>> algorithm = ft.gtv(local, ft.Network.from_edges([(0, 1)]), alpha=0.5)
        >>> final = ft.run(algorithm, ft.InProcess(data), rounds=50)
        >>> final.tensors()["weight"].flatten().round(decimals=4)  # ±1 / (1 + 2α)
        tensor([ 0.5000, -0.5000])
        >>> from fedtorch.networks.solvers import norm2
        >>> tied = ft.gtv(local, ft.Network.from_edges([(0, 1)]), alpha=2.5, penalty=norm2)
        >>> weight = ft.run(tied, ft.InProcess(data), rounds=50).tensors()["weight"]
        >>> bool(weight[0] == weight[1]), weight.abs().max().round(decimals=4)
        (True, tensor(0.))
    """
    check_solver(local)
    expected.kind(network, Network, "a network", "make one with ft.Network.from_edges, k_nearest, ring, …")
    strengths = _strengths(alpha, local)
    if penalty is not None:
        return _with_penalty(local, network, strengths, penalty, rho)

    def init(parameters: Tree, clients: int) -> tuple[GTVServer, _State]:
        if clients != network.nodes:
            raise ValueError(
                f"Expected a network of as many nodes as there are clients, {clients}, but got {network.nodes} nodes"
            )
        return GTVServer(), _State(parameters, local.init(parameters))

    def client(inbox: Neighbourhood, state: _State, data: Any, turn: Turn) -> Reply:
        quadratic = _coupling(inbox, state.parameters, strengths)
        solved = local.solve(state.parameters, state.solver, data, quadratic, turn)
        return Reply(None, _State(solved.parameters, solved.state), solved.info)

    return Algorithm(
        init=init,
        outbox=lambda server: server.total,
        client=client,
        server=lambda server, aggregate, key: server,
        model=lambda inbox, state: local.tensors(state.parameters, state.solver),
        exchange=graph(network),
        prepare=local.prepare,
        **solved_by(local, algorithm="gtv", alpha=strengths, edges=network.edges, weights=network.weights),
        told=Told(
            lambda state: {name: state.parameters[name] for name in strengths}, Averages.COORDINATEWISE, learns=_LEARNS
        ),
    )


def _with_penalty(
    local: LocalSolver, network: Network, strengths: Mapping[str, float], penalty: Penalty, rho: float
) -> Algorithm:
    """Return GTV minimisation with another penalty than the square."""
    expected.positive(rho=rho)
    expected.kind(penalty, Penalty, "a penalty", "take networks.solvers.norm2, norm1 or equal")
    if len(set(strengths.values())) != 1:
        raise ValueError(
            f"Expected one strength of all coupled parameters with a penalty, but got {strengths}; their difference is "
            "one vector"
        )
    (alpha,) = set(strengths.values())
    return Algorithm(
        **edge_rounds(local, network, alpha, penalty, rho, list(strengths)),
        prepare=local.prepare,
        **solved_by(
            local,
            algorithm="gtv",
            alpha=strengths,
            edges=network.edges,
            weights=network.weights,
            penalty=penalty,
            rho=rho,
        ),
    )


def _coupling(inbox: Neighbourhood, parameters: Tree, strengths: Mapping[str, float]) -> Quadratic:
    """Return λ = 2αd_i and h = 2α Σ_j A_ij w_j of every parameter, zero for the personal ones."""
    if not hasattr(inbox, "degree"):
        raise TypeError(
            f"Expected messages of neighbours, but got {type(inbox).__name__}; do not replace GTV's exchange, a graph"
        )
    degree = inbox.degree
    shift = tree.zeros_like({name: leaf for name, leaf in parameters.items() if name not in strengths})
    for name, alpha in strengths.items():
        shift[name] = (2 * alpha * inbox.heard[name]).to(parameters[name].dtype)
    ordered = {name: shift[name] for name in parameters}
    if len(strengths) == len(parameters) and len(set(strengths.values())) == 1:
        return Quadratic(2 * next(iter(strengths.values())) * degree, ordered)
    return Quadratic({name: 2 * strengths.get(name, 0.0) * degree for name in parameters}, ordered)


def _strengths(alpha: float | Mapping[str, float], local: LocalSolver) -> dict[str, float]:
    """Return α of every coupled parameter by name."""
    strengths: dict[str, float] = {}
    for pattern, strength in (alpha if isinstance(alpha, Mapping) else {"*": alpha}).items():
        expected.not_negative(alpha=strength)
        for name in functional.split(local.parameters, pattern)[0]:
            strengths[name] = strengths.get(name, 0.0) + float(strength)
    averaged = averaged_buffers(local) & strengths.keys()
    if averaged:
        raise ValueError(
            f"Expected trainable parameters to couple, but got buffers {sorted(averaged)}; use buffers='local'"
        )
    return {name: strengths[name] for name in local.parameters if name in strengths}
