r"""Markov random fields of several sites by neighbourhood selection: each variable regressed on the others.

For variables :math:`Y_{ki} \sim N(0, \Omega_k^{-1})`, `(p,)`, the conditional distribution of one given the others is

.. math:: Y_{kij} = Y_{ki,-j}' \theta_{kj} + \epsilon_{kij},\quad \theta_{kj} = -\Omega_{k,-j,j} / \omega_{kjj},\quad
    \epsilon_{kij} \sim N(0, \omega_{kjj}^{-1}),

so that j and h are not neighbours in the network if θ_kjh = 0. The p regressions of all sites, each with the hierarchy
of `sparse`, run side by side: the response is a batch axis after the chains, variables are `(K, C, p, ...)` and global
ones `(C, p, ...)`. A site's rows are used once, for one Gram matrix and one triangular factor; each regression reads
its part of them.

The result is a matrix of inclusion probabilities, row j of which is the regression of j. It is not symmetric: `edges`,
at a given false discovery rate, uses the larger or the smaller of an edge's two probabilities.

Source: Kidd, Wang, Xu and Ni (2023), "Federated learning for sparse Bayesian models", section 2.3; Meinshausen and
Bühlmann, "High-dimensional graphs and variable selection with the lasso", Annals of Statistics 34, 2006.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch._lazy import only
from fedtorch.models.device_posterior import discoveries
from fedtorch.models.gibbs import sparse
from fedtorch.models.gibbs._gaussian_conditional import Design, least_norm
from fedtorch.models.gibbs.deviations import Deviation
from fedtorch.models.gibbs.kernels import GlobalKernel, LocalKernel, check_start
from fedtorch.models.linear import SufficientStatistics
from fedtorch.models.rows import client_by_client, refuse, variable_rows
from fedtorch.tree import Tree

__all__ = ["edges", "every_response", "neighbourhoods", "square", "start"]
__dir__ = only(__all__)


class _Fields(NamedTuple):
    """The statistics of each client's rows for the regressions of all variables; float64."""

    gram: Tensor  # (K, p, p) Y'Y
    estimate: Tensor  # (K, p, p − 1) the least squares estimates of least norm
    rss: Tensor  # (K, p) their residual sums of squares
    degrees: Tensor  # (K,) rows that count for the noise: n, or n − 1 with an intercept
    count: Tensor  # type: ignore[assignment]  # (K,) rows


def start(variables: int) -> Tensor:
    """Return a start of the global parameter, which is every coefficient zero, `(p · (p − 1),)`.

    Raises:
        ValueError: fewer than two variables.
    """
    if variables < 2:
        raise ValueError(f"Expected at least 2 variables, but got {variables}")
    return torch.zeros(variables * (variables - 1), dtype=torch.float64)


def neighbourhoods(
    *,
    deviation: Deviation | None = None,
    noise_shape: float = 1.0,
    intercept: bool = False,
    names: Sequence[str] | None = None,
    interweave: int = 16,
) -> LocalKernel:
    """Return the clients' half, regressions of all variables. Rows are y `(p,)`; `every_response` is the server's half.

    Args:
        deviation: the prior of the coefficients' deviations from the global ones; default `horseshoe()`.
        noise_shape: a_σ.
        intercept: whether every site has its own means under a flat prior, which are integrated out.
        names: the variables' names, for messages.
        interweave: most coefficients for which each regression interweaves, see `sparse.regression`; for p variables it
            costs p (p − 1) (p + 2) / 2 numbers more.

    Raises:
        ValueError: `noise_shape` is not positive; or, when a population is bound, rows of another form, fewer than two
            variables, NaN, or a variable that is constant in a client's rows.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.gibbs import graphical, sparse
        >>> z = ft.random.normal(ft.random.key(0), (5, 40, 3), torch.float64)
        >>> z[..., 1] += z[..., 0]
        >>> data = ft.data.from_tensors(list(z))
        >>> kernels = graphical.neighbourhoods(), graphical.every_response(sparse.hierarchy())
        >>> algorithm = ft.gibbs(*kernels, sweeps=5, chains=2)
        >>> sampler = ft.Sampler(burn_in=5)
        >>> run = ft.run(algorithm, ft.InProcess(data), graphical.start(3), rounds=20, record=sampler)
        >>> inclusion = graphical.square(sampler.mean()["prior.included"])
        >>> graphical.edges(inclusion, 0.1, torch.maximum).nonzero().tolist()
        [[0, 1], [1, 0]]
    """
    regression = sparse.regression(deviation=deviation, noise_shape=noise_shape, interweave=interweave)

    def sweep(
        received: sparse.GlobalVariables, site: sparse.RegressionSite, data: _Fields, keys: Tensor, sweeps: int
    ) -> sparse.RegressionSite:
        p = data.gram.shape[-1]
        if received.theta.ndim != 4:
            raise ValueError(
                "Expected a hierarchy for each variable, but got a single one; use every_response(hierarchy)"
            )
        check_start(site.theta.shape[-2:].numel(), p * (p - 1))
        each = random.fold_in(keys[..., None], torch.arange(p, device=keys.device))
        after = regression.sweep(_to_clients(received), _to_clients(site), designs(data), _to_clients(each), sweeps)
        return _from_clients(after, p)

    return LocalKernel(
        init=lambda start: _split(regression.init(_responses(start)), len(start)),
        prepare=lambda data: _fields(data, intercept, names),
        sweep=sweep,
        report=regression.report,
    )


def every_response(shared: GlobalKernel) -> GlobalKernel:
    """Build the server's half: a separate hierarchy for the regression of each variable, all in one batch.

    Args:
        shared: of one regression, such as `fedtorch.models.gibbs.sparse.hierarchy()`.
    """

    def update(state: Tree, sums: dict[str, Tensor], keys: Tensor) -> Tree:
        p = sums["clients"].shape[1]
        each = random.fold_in(keys[:, None], torch.arange(p, device=keys.device)).flatten()
        return _split(shared.update(_join(state), _join(sums), each), len(keys))

    def send(state: Tree) -> Tree:
        return _split(shared.send(_join(state)), len(tree.leaves(state)[0]))

    return GlobalKernel(lambda start: _split(shared.init(_responses(start)), len(start)), send, update)


def square(values: Tensor) -> Tensor:
    """Return coefficients `(..., p, p − 1)` or `(..., p · (p − 1))` as `(..., p, p)`, the diagonal zero.

    A batch of the second form may have a shape of the first, as seven draws of six coefficients do, and is then
    misread: convert batches to the first form by `by_response`.
    """
    if values.ndim < 2 or values.shape[-1] != values.shape[-2] - 1:
        values = by_response(values)
    p = values.shape[-2]
    index = other_variables(p).to(values.device).expand(values.shape)
    return values.new_zeros((*values.shape[:-1], p)).scatter(-1, index, values)


def by_response(values: Tensor) -> Tensor:
    """Return coefficients `(..., p · (p − 1))` as `(..., p, p − 1)`: a row for each variable's regression.

    Raises:
        ValueError: no p fits the shape.

    >>> import torch
    >>> by_response(torch.arange(6))
    tensor([[0, 1], [2, 3], [4, 5]])
    """
    return values.unflatten(-1, (variables(values.shape[-1]), -1))


def edges(inclusion: Tensor, fdr: float = 0.05, rule: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    """Return the edges to report, with an expected share of false ones of at most `fdr`
    (`device_posterior.discoveries`).

    Args:
        inclusion: probabilities `(p, p)`; the diagonal is not read.
        fdr: the false discovery rate, between 0 and 1.
        rule: combines the two probabilities of an undirected edge: `torch.maximum`, the "or" rule, by which it is an
            edge if either regression includes it, or `torch.minimum`, "and"; None for the arrows of a directed graph,
            or the covariates of each regression.

    Returns:
        bool, `(p, p)`; symmetric with a rule.

    Raises:
        ValueError: a rate out of range.

    >>> import torch
    >>> inclusion = torch.tensor([[0.0, 0.2], [0.97, 0.0]])
    >>> edges(inclusion, fdr=0.05)  # 0 acts on 1
    tensor([[False, False], [ True, False]])
    >>> edges(inclusion, 0.05, torch.maximum).any(), edges(inclusion, 0.05, torch.minimum).any()
    (tensor(True), tensor(False))
    """
    read = ~torch.eye(len(inclusion), dtype=torch.bool, device=inclusion.device)
    if rule is not None:
        read, inclusion = read.triu(), rule(inclusion, inclusion.mT)
    reported = torch.zeros_like(read)
    reported[read] = discoveries(1 - inclusion[read], fdr)
    return reported if rule is None else reported | reported.mT


def _fields(data: Any, intercept: bool = False, names: Sequence[str] | None = None) -> _Fields:
    """Return the clients' rows as the regressions need them, each computed from the client's own rows only.

    Args:
        data: `ClientData` of rows y `(p,)`.
        intercept: whether the variables are centred.
        names: the variables' names, for messages.

    Raises:
        BadClients: NaN or Inf, or a constant variable; `ValueError`: rows of another form.
    """
    statistics_of_one = partial(_one_site, intercept=intercept)
    gram, estimate, rss, count = client_by_client(statistics_of_one, data.count, rows(data, names))
    return _Fields(gram, estimate, rss, count - int(intercept), count)


def designs(data: _Fields) -> Design:
    """Return the regressions of K clients on p − 1 of their variables as those of K · p clients.

    Args:
        data: as `neighbourhoods(...)` prepares it.
    """
    p = data.gram.shape[-1]
    others = other_variables(p).to(data.gram.device)
    each = lambda leaf: leaf.repeat_interleave(p, 0)
    statistics = SufficientStatistics(
        data.gram[:, others[:, :, None], others[:, None]].flatten(0, 1),
        data.gram.gather(2, others.expand(len(data.gram), -1, -1)).flatten(0, 1),
        data.gram.diagonal(dim1=1, dim2=2).flatten(),
        each(data.count),
    )
    return Design(statistics, data.estimate.flatten(0, 1), data.rss.flatten(), each(data.degrees), None, None)


def rows(data: Any, names: Sequence[str] | None = None) -> Tensor:
    """Return y `(K, N, p)` of a block by `variable_rows`; clients with a constant variable are `BadClients` too."""
    y = variable_rows(data)
    inside = data.mask[..., None]
    constant = (torch.where(inside, y, y[:, :1]) == y[:, :1]).all(1) & (data.count > 1)[:, None]
    which = constant.any(0).nonzero()[:, 0].tolist()
    called = [names[j] if names is not None else f"number {j}" for j in which]
    refuse(constant.any(1), f"Expected variables that vary, but got constant {', '.join(called)}; leave them out")
    return y


def other_variables(p: int) -> Tensor:
    """Return the variables but j in row j, `(p, p − 1)`."""
    column = torch.arange(p - 1).expand(p, p - 1)
    return column + (column >= torch.arange(p)[:, None])


def variables(coefficients: int) -> int:
    """Return p of p · (p − 1) coefficients.

    Raises:
        ValueError: no p fits the shape.
    """
    p = (1 + math.isqrt(1 + 4 * coefficients)) // 2
    if p < 2 or p * (p - 1) != coefficients:
        raise ValueError(
            f"Expected p · (p − 1) coefficients of p variables, but got {coefficients}; use graphical.start(p)"
        )
    return p


def _one_site(y: Tensor, intercept: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (Y'Y, the p least squares estimates, their residual sums of squares, n), from one triangular factor."""
    if intercept:
        y = y - y.mean(0)
    factor = torch.linalg.qr(y, mode="r").R
    x = factor[:, other_variables(y.shape[1]).to(y.device)].movedim(1, 0)  # (p, m, p − 1)
    target = factor.mT[..., None]
    estimate = least_norm(x, target)
    return y.mT @ y, estimate[..., 0], (target - x @ estimate).square().sum((1, 2)), y.new_tensor(float(len(y)))


def _responses(start: Tensor) -> Tensor:
    """Return `(C, p · (p − 1))` as `(C · p, p − 1)`."""
    return start.reshape(-1, variables(start.shape[-1]) - 1)


def _join(values: Tree) -> Tree:
    """Return `(C, p, ...)` as `(C · p, ...)`."""
    return tree.map(lambda leaf: leaf.flatten(0, 1), values)


def _split(values: Tree, chains: int) -> Tree:
    """Return `(C · p, ...)` as `(C, p, ...)`."""
    return tree.map(lambda leaf: leaf.unflatten(0, (chains, -1)), values)


def _to_clients(values: Tree) -> Tree:
    """Reshape `(K, C, p, ...)` to `(K · p, C, ...)`: the regressions' program sees clients."""
    return tree.map(lambda leaf: leaf.transpose(1, 2).flatten(0, 1), values)


def _from_clients(values: Tree, p: int) -> Tree:
    """Return `(K · p, C, ...)` as `(K, C, p, ...)`."""
    return tree.map(lambda leaf: leaf.unflatten(0, (len(leaf) // p, p)).transpose(1, 2), values)
