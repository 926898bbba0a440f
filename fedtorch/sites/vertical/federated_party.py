r"""A vertical party that is itself a federation: its rows are at several sites, and their features are never joined.

Party j's part of the bound is a sum over rows and terms of its parameters alone,

.. math:: \log p(\theta_j) - \log q(\theta_j) + \sum_k \sum_{i \in k}
    \Big[\log\frac{p(z_{ij} \mid \theta_j)}{q(z_{ij} \mid \theta_j)} + \langle g_{ij}, z_{ij}\rangle\Big] ,

with g the gradient of the others' terms, which the server sends. So each site k computes the values of its own rows and
the gradient of its own sum. The party puts the values in the places of their rows and adds up the gradients, by an
ordinary `Algorithm`. To the server it is a `PartyNode` like any other, with the same steps as a party with all rows.

A site receives the party's parameters, and only for its own rows noise, gradients, weights and (if parties know it) the
response. It sends the values of its rows and its gradient, which the party sees.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import expected, tree
from fedtorch._representation import without_rows
from fedtorch.data import FederatedData
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.exchanges.exchange import RowsOf, Sum
from fedtorch.federation.exchanges.rows import private_rows
from fedtorch.federation.populations.population import Population
from fedtorch.federation.runs.faults import Faults
from fedtorch.federation.runs.run import Run
from fedtorch.federation.turn import Turn
from fedtorch.learns import Learns, tells
from fedtorch.tree import Tree
from fedtorch.vfl.fit.adam import RestartingAdam
from fedtorch.vfl.fit.bound import climb, party_bound
from fedtorch.vfl.fit.guide import Noise, draw_own
from fedtorch.vfl.fit.part import Part
from fedtorch.vfl.model.checks import check_rows
from fedtorch.vfl.nodes.iteration import VALUES_AND_GRADIENTS, protocol_of
from fedtorch.vfl.nodes.node import Drawn, Iteration, Optimizers, PartyNode, Proposal
from fedtorch.vfl.rows.data import VerticalData


@without_rows
class _Inbox(NamedTuple):
    """Inboxes of sites, `(K, ...)`; values of their rows `(K, N, ...)`."""

    parameters: dict[str, Tensor]
    theta: Tensor  # noise of θ
    climbing: Tensor  # (K,) whether a gradient is requested
    scale: Tensor  # (K, B) scale of the terms of its rows
    z: Tensor  # noise of z
    gradient: Tensor
    response: Tensor
    weight: Tensor


@tells(
    Learns(
        "to its party, values of the site's rows in each step and the sum of their gradients, of few rows the rows",
        "attacks.linear_inputs",
    )
)
@without_rows
class _Message(NamedTuple):
    """Messages of sites."""

    values: Sum  # (K, N, ...) values of their rows
    gradients: Sum  # {name: (K, ...)} gradients of their terms, summed over draws


@without_rows
class _Server(NamedTuple):
    """The last inboxes of the sites, and their answers."""

    asked: _Inbox
    answered: Tensor  # (M,) sites that have answered
    values: Tensor
    gradients: dict[str, Tensor]


class FederatedParty(PartyNode):
    """A party whose rows are at the clients of a population.

    Args:
        part: the party's part of a model, which is trained in place.
        data: the party's common data of the aligned rows: weights, and the response if parties see it; no features.
        population: the sites, with rows (features `(d,)`, number of the aligned row `()`); each row is at one site.
        optimizer: parameters -> optimiser.
        per_row: whether the bound is divided by the weights' sum, as at the server.
        faults: faults of the sites, for simulations.

    Raises:
        ValueError: a row at no site or at several; a family with parameters for every row; a model whose likelihood the
            parties evaluate.
        RuntimeError: in an iteration, if a site does not answer; the message names it, and no parameter has changed.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.sites.vertical import FederatedParty
        >>> data = ft.vfl.VerticalData((torch.ones(4, 1), torch.ones(4, 2)), torch.tensor([0.0, 1.0, 1.0, 1.0]))
        >>> bottoms = [torch.nn.Linear(1, 1), torch.nn.Linear(2, 1)]
        >>> server, (one, other) = ft.vfl.SplitNetwork(bottoms, ft.vfl.likelihoods.bernoulli()).nodes(data)
        >>> rows = [(torch.ones(3, 2), torch.tensor([2, 0, 3])), (torch.ones(1, 2), torch.tensor([1]))]
        >>> sites = ft.InProcess(ft.data.from_tensors(rows, ["north", "south"]))
        >>> known = other.data._replace(features=())
        >>> party = FederatedParty(other.part, known, sites, per_row=other.per_row)
        >>> fit = ft.vfl.NodesRun(server, [one, party])
        >>> for _ in fit.rounds(50):
        ...     pass
        >>> losses = fit.history["train_loss"]
        >>> bool(losses.iloc[-1] < losses.iloc[0])
        True
    """

    def __init__(
        self,
        part: Part,
        data: VerticalData,
        population: Population,
        *,
        optimizer: Optimizers = RestartingAdam,
        per_row: bool = False,
        faults: Faults | None = None,
    ) -> None:
        self.population = population
        sites: Any = getattr(population, "data", None)
        expected.kind(sites, FederatedData, "a population with its data at hand", "such as ft.InProcess(data)")
        self.sites: FederatedData = sites
        super().__init__(part, data, optimizer=optimizer, per_row=per_row)
        if protocol_of(self) is not VALUES_AND_GRADIENTS:
            raise ValueError("Expected a model whose likelihood the server evaluates, but got one of the parties")
        if any(leaf.shape[-1] == self.rows and leaf.ndim > 2 for leaf in self.q.get("z", {}).values()):
            raise ValueError(
                "Expected an amortised family of z, but got one with parameters for every row; use vfl.amortised, "
                "vfl.sums or vfl.noiseless"
            )
        self.place = _places(self.sites, self.rows)
        self._run: Run | None = None
        self._faults = faults

    @property
    def rows(self) -> int:
        """Return the number of aligned rows."""
        return self.data.response.shape[-1]

    def check(self, data: VerticalData) -> None:
        """Raise `ValueError` unless the sites' rows suit this party."""
        if data.features or data.present is not None:
            raise ValueError("Expected no features at the party itself, but got some; they are at its sites")
        data.check_known()
        for k, (x, rows) in enumerate(self.sites):
            name = f"{self.part.name}, site {self.sites.names[k]!r}"
            check_rows(self.model.predictors[self.index - 1], x, len(rows), name)
        if self.guide.auxiliary.sees_response and bool(data.response.isnan().all()):
            raise ValueError("Expected the response at the party, which its encoder needs, but got NaN")

    def propose(self, iteration: Iteration) -> Proposal:
        """Draw θ_j, and request the sites' values."""
        if iteration.rows is not None:
            raise ValueError("Expected all rows in every iteration of a federated party, but got a minibatch")
        drawn = self.draw(iteration)
        values = self._ask(drawn, None).values
        terms = values.new_zeros(values.shape[:2])
        return Proposal(drawn, values, values, terms, values)

    def climb(
        self,
        proposal: Proposal,
        *,
        gradient: Tensor | None = None,
        likelihood: Callable[[Proposal], Tensor] | None = None,
        rate: float | None = None,
        local_steps: int = 1,
    ) -> None:
        """Take gradient steps by the sum of the sites' gradients; arguments as of `PartyNode.climb`."""
        assert likelihood is None
        drawn = proposal.drawn
        for _ in range(local_steps):
            down = torch.zeros_like(proposal.sent) if gradient is None else gradient
            of_sites = self._ask(drawn, down).gradients
            theta = self.draw_theta(drawn.noise)
            predictor = self.model.predictors[self.index - 1]
            mine = self.model.masked(predictor.log_prior(theta), 0.0) + self.minus_log_q(theta)
            named = dict(self.part.named_parameters())
            objective, leaves = self.scaled(mine).sum(), list(named.values())
            known = objective.requires_grad  # False for a point with a flat prior
            grads = torch.autograd.grad(objective, leaves, allow_unused=True) if known else [None] * len(leaves)
            for (name, leaf), each in zip(named.items(), grads):
                total = of_sites[name].to(leaf) if each is None else of_sites[name].to(leaf) + each
                leaf.grad = (total / -mine.shape[1]).contiguous()
            climb(self.optimizer, rate)

    def _ask(self, drawn: Drawn, gradient: Tensor | None) -> _Server:
        """Return the sites' values in the places of their rows, and the sum of their gradients."""
        asked = self._site_inboxes(drawn, gradient)
        run = self._site_run(asked)
        run.server = run.server._replace(asked=asked)
        run.step()
        answers: _Server = run.server
        missing = sorted(set(range(len(self.sites))) - set(run.last.ids.tolist() if run.last else []))
        if missing:
            names = ", ".join(repr(self.sites.names[k]) for k in missing)
            raise RuntimeError(
                f"Expected an answer of every site of party {self.part.name!r} in step {run.number}, but got none of "
                f"{names}; its rows would be missing from the sum. No parameter has changed: repeat the step when the "
                "site is back, or leave its rows out at all parties"
            )
        real = self.place >= 0
        order = self.place[real].argsort()
        values = answers.values[real][order].movedim(0, -1)
        return answers._replace(values=values)

    def _site_inboxes(self, drawn: Drawn, gradient: Tensor | None) -> _Inbox:
        """Return the sites' inboxes."""
        sites, count = len(self.sites), drawn.theta.shape[0]
        draws, outputs = drawn.theta.shape[1], self.model.outputs[self.index]
        index, like = self.place.clamp(min=0), drawn.theta
        of_rows = lambda value: value.detach().movedim(-1, 0)[index]
        down = like.new_zeros(count, draws, outputs, self.rows) if gradient is None else gradient
        weight = torch.ones(self.rows).to(like) if self.data.weight is None else self.data.weight
        held = (self.place >= 0).to(like).reshape(*self.place.shape, *[1] * (weight.ndim - 1))
        scale = (1 / self._total.to(like)).reshape(-1).expand(count) if self.per_row else like.new_ones(count)
        noise = drawn.noise.z[self.index]
        z = noise if noise.shape[-1] == self.rows else noise.new_zeros(*noise.shape[:-1], self.rows)
        return _Inbox(
            {name: leaf.detach().expand(sites, *leaf.shape) for name, leaf in self.part.named_parameters()},
            drawn.noise.theta[self.index].expand(sites, *drawn.noise.theta[self.index].shape),
            torch.full((sites,), gradient is not None),
            scale.expand(sites, count),
            of_rows(z),
            of_rows(down),
            of_rows(self.data.response),
            of_rows(weight) * held,
        )

    def _site_run(self, asked: _Inbox) -> Run:
        """Return the run over the sites, whose state is not part of the party's."""
        if self._run is None:
            algorithm = _algorithm(copy.deepcopy(self.part), asked)
            self._run = Run(algorithm, self.population, {}, faults=self._faults)
        return self._run


def _places(sites: FederatedData, rows: int) -> Tensor:
    """Return the aligned row of each of a site's rows, `(K, N)`, −1 beyond its last.

    Raises:
        ValueError: a row at no site or at several.
    """
    place = torch.full((len(sites), int(sites.counts.max())), -1)
    owners: dict[int, str] = {}
    for k, (_, numbers) in enumerate(sites):
        for row in numbers.tolist():
            if row in owners or not 0 <= row < rows:
                where = f"also at {owners[row]!r}" if row in owners else f"not among rows 0 to {rows - 1}"
                raise ValueError(
                    f"Expected each aligned row at one site, but row {row} of {sites.names[k]!r} is {where}"
                )
            owners[row] = sites.names[k]
        place[k, : len(numbers)] = numbers
    missing = sorted(set(range(rows)) - owners.keys())
    if missing:
        raise ValueError(f"Expected each of {rows} aligned rows at a site, but none has row {missing[0]}")
    return place


def _algorithm(part: Part, asked: _Inbox) -> Algorithm:
    """Return the algorithm of a party's sites, which computes values and, if requested, gradients."""
    zeros = {name: leaf[0].new_zeros(leaf.shape[1:]) for name, leaf in asked.parameters.items()}
    start = _Server(asked, torch.zeros(0, dtype=torch.int64), torch.zeros_like(asked.gradient), zeros)

    def client(inbox: _Inbox, state: Tree, data: Any, turn: Turn) -> Reply:
        x = tree.leaves(data.batch)[0]
        values, gradients = torch.zeros_like(inbox.gradient), tree.zeros_like(inbox.parameters)
        for k, count in enumerate(data.count.tolist()):
            mine = tree.map(lambda leaf, k=k: leaf[k], inbox)
            value, each = _of_a_site(part, mine, x[k, :count])
            values[k, :count] = value.movedim(-1, 0)
            for name, leaf in each.items():
                gradients[name][k] = leaf
        return Reply(_Message(Sum(values), Sum(gradients)), state, {})

    def server(state: _Server, aggregate: RowsOf, key: Tensor) -> _Server:
        message = aggregate.message
        values = torch.zeros_like(state.asked.gradient).index_copy(0, aggregate.ids, message.values.value)
        gradients = tree.map(lambda leaf: leaf.sum(0), message.gradients.value)
        return state._replace(answered=aggregate.ids, values=values, gradients=gradients)

    return Algorithm(
        init=lambda parameters, clients: (start, torch.zeros(())),
        outbox=lambda state: state.asked,
        client=client,
        server=server,
        model=lambda inbox, state: inbox.parameters,
        exchange=private_rows(),
        settings={"algorithm": "sites of a vertical party", "party": part.name},
        start={},
    )


def _of_a_site(part: Part, asked: _Inbox, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a site's values `(B, M, C, n)`, and the gradient of its rows' terms if requested."""
    named = dict(part.named_parameters())
    with torch.no_grad():
        for name, leaf in named.items():
            leaf.copy_(asked.parameters[name])
    index, model, rows = part.index, part.model, len(x)
    last = lambda leaf: leaf[:rows].movedim(0, -1)
    places = index + 1
    noise = Noise((asked.theta,) * places, (last(asked.z),) * places)
    data = VerticalData((x,), last(asked.response), None, last(asked.weight))
    with torch.enable_grad():
        theta = draw_own(model, part.guide, index, part.q["theta"], noise.theta[index])
        value, _, terms = party_bound(model, part.guide, index, part.q, theta, data, noise)
        if not bool(asked.climbing):
            return value.detach(), {}
        row_terms = terms - model.masked(model.predictors[index - 1].log_prior(theta), 0.0)
        objective = row_terms * asked.scale[:, None] + (value * last(asked.gradient)).sum((-2, -1))
        gradients = torch.autograd.grad(objective.sum(), list(named.values()), allow_unused=True)
    return value.detach(), {name: each for (name, _), each in zip(named.items(), gradients) if each is not None}
