r"""Federated Gibbs sampling: several local sweeps per global step, and only sums leave the clients.

For a hierarchical model

.. math:: D_k \sim p(D_k | \theta_k),\quad \theta_k \sim p(\theta_k | \theta),\quad \theta \sim p(\theta)

the clients are independent given the global variables. Client k makes L sweeps over its own variables with the global
ones held fixed, and then the server samples the global ones given sums over the clients. Any number of sweeps leaves
the posterior invariant.

The server receives only sums; with secure summation it never sees a single client's numbers. A client's part of the
sums persists: a silent client stays in the model with its last variables, as in a Gibbs sampler that leaves out a
block, and a client that has never answered is not in the model. The sums are made in the fixed point of
`fedtorch.exact`: they have the same bits for every population, chunking and order of the clients, after any number of
rounds, for up to 2¹⁸ clients if a sum has four terms each, as those of the regressions do: limbs of that many changes
are below 2⁵³.

Source: Kidd, Wang, Xu and Ni (2023), "Federated learning for sparse Bayesian models with applications to electronic
health records and genomics", Pac Symp Biocomput 28, Algorithm 1 and section 2.2.3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import exact, expected, random, tree
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.runs.drawn import Sampled
from fedtorch.federation.told import Told
from fedtorch.federation.turn import Turn
from fedtorch.learns import Learns
from fedtorch.models.gibbs.kernels import GlobalKernel, LocalKernel, Sums
from fedtorch.tree import Tree

_LEARNS = Learns(
    "exact sums over a client's rows, beside its latent variables: of fewer rows than features, the rows",
    helps="sums under masks",
)


class _State(NamedTuple):
    """State of a client; leaves `(K, C, ...)`."""

    variables: Tree
    told: dict[str, Tensor]  # the client's part of the sums, in limbs; zeros before its first sweep


class GibbsServer(NamedTuple):
    """State of the server; leaves `(C, ...)`."""

    variables: Tree
    total: Tree = None  # {name: tensor}, sum of all `told`, in limbs


def gibbs(local: LocalKernel, shared: GlobalKernel, *, sweeps: int = 100, chains: int = 4) -> Algorithm:
    """Build federated Gibbs sampling. Its parameters are the global variables' start, `(p,)`, or `(C, p)` per chain.

    Args:
        local: the clients' half of the sampler, such as `fedtorch.models.gibbs.sparse.regression()`.
        shared: the server's half, such as `fedtorch.models.gibbs.sparse.hierarchy()`.
        sweeps: L, local sweeps per round.
        chains: C, independent chains, which differ by their keys.

    Shapes: server state is `GibbsServer`; client state has the client's variables, `(K, C, ...)`, which
    `Algorithm.model` returns; the outbox is the value of `shared.send`.

    Raises:
        ValueError: `sweeps` or `chains` is less than one, or the start is neither `(p,)` nor `(C, p)`.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.gibbs import sparse
        >>> x = ft.random.normal(ft.random.key(0), (6, 50, 3))
        >>> data = ft.data.from_tensors([(x[k], x[k, :, 0]) for k in range(6)])
        >>> algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=10, chains=2)
        >>> final = ft.run(algorithm, ft.InProcess(data), torch.zeros(3), rounds=20)
        >>> final.server.variables.theta.shape
        torch.Size([2, 3])
        >>> bool(((final.server.variables.theta[:, 0] - 1).abs() < 0.1).all())
        True
    """
    expected.kind(local, LocalKernel, "the clients' half of a sampler", "such as gibbs.sparse.regression()")
    expected.kind(shared, GlobalKernel, "the server's half of a sampler", "such as gibbs.sparse.hierarchy()")
    for name, count in (("sweeps", sweeps), ("chains", chains)):
        if count < 1:
            raise ValueError(f"Expected {name} of at least 1, but got {count}")
    numbers = torch.arange(chains)

    def init(parameters: Tensor, clients: int) -> tuple[GibbsServer, _State]:
        start = _check_start(parameters, chains)
        variables = local.init(start)
        nothing = tree.zeros_like(_in_limbs(local.report(variables)))
        return GibbsServer(shared.init(start)), _State(variables, nothing)

    def client(inbox: Tree, state: _State, data: Any, turn: Turn) -> Reply:
        keys = random.fold_in(turn.key[:, None], numbers.to(turn.key.device))
        variables = local.sweep(inbox, state.variables, data, keys, sweeps)
        return Reply(None, _State(variables, _in_limbs(local.report(variables))), {})

    def server(state: GibbsServer, aggregate: None, key: Tensor) -> GibbsServer:
        device = next(iter(tree.leaves(state)), key).device
        keys = random.fold_in(key, numbers.to(key.device)).to(device)
        return state._replace(variables=shared.update(state.variables, state.total, keys))

    return Algorithm(
        init=init,
        outbox=lambda server: shared.send(server.variables),
        client=client,
        server=server,
        model=lambda inbox, state: state.variables,
        prepare=local.prepare,
        told=Told(lambda state: state.told, learns=_LEARNS),
        settings={"algorithm": "gibbs", "local": local, "shared": shared, "sweeps": sweeps, "chains": chains},
        posterior=Sampled(local),
    )


def _in_limbs(sums: Sums) -> dict[str, Tensor]:
    """Return each name's number in limbs, `(..., LIMBS)`."""
    return dict(zip(sums, exact.totals(*sums.values())))


def _check_start(parameters: Any, chains: int) -> Tensor:
    if not isinstance(parameters, Tensor) or parameters.ndim not in (1, 2):
        got = tuple(parameters.shape) if isinstance(parameters, Tensor) else type(parameters).__name__
        raise ValueError(f"Expected the start of the global parameter, a tensor (p,) or (chains, p), but got {got}")
    if parameters.ndim == 2 and len(parameters) != chains:
        raise ValueError(f"Expected a start for each of {chains} chains, but got {len(parameters)}")
    return parameters.to(torch.float64).expand(chains, parameters.shape[-1]).contiguous()
