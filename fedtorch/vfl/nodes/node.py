"""Server and parties: each has its own part of the model, data and optimiser, and nothing of the others'.

Messages are `NamedTuple`s of tensors; `iteration` defines when they are sent, and between which nodes. The draws and
the results of a node in an iteration are values (`Drawn`, `Proposal`). The node itself holds its parameters, its
optimiser's state and the messages that outlive an iteration; together these are its `state_dict`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedtorch import checkpoint, tree, wire
from fedtorch._representation import without_rows
from fedtorch.checkpoint import below
from fedtorch.learns import Learns, tells
from fedtorch.tree import Tree
from fedtorch.vfl.fit.adam import RestartingAdam
from fedtorch.vfl.fit.bound import ascend, party_bound
from fedtorch.vfl.fit.guide import Noise, draw_own, fixed
from fedtorch.vfl.fit.part import Part
from fedtorch.vfl.model.checks import check_response, check_rows
from fedtorch.vfl.model.vertical import summed
from fedtorch.vfl.rows.data import VerticalData

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_PART = Learns(
    "the party's part of each row's predictor in each step, from which an inversion recovers features; the noise ρ of "
    "a model averages out over steps",
    "attacks.split.split_inversion",
    "masked_party, where the server needs the sum alone",
)
_LABELS = Learns(
    "the labels, with two classes all of them from the first step on, whatever the noise ρ; and with them the sum of "
    "the others' parts of each row's predictor, with two parties the other's part, under masks or not",
    "attacks.guessed_labels",
    "privacy.noised_gradients at ε of 1 or less",
)
_OTHERS = Learns(
    "to a party that has the response, the sum of the others' parts of each row's predictor, with two parties the "
    "other's part; back to the server, the gradients with respect to it"
)


@without_rows
class Iteration(NamedTuple):
    """An iteration, as every node knows it before it begins."""

    noise: Noise | None = None  # by default each node draws its own for the step, from the key of its part
    rate: float | None = None  # learning rate; the optimisers' own by default
    rows: Tensor | None = None  # (m,) of a minibatch; all by default
    active: Sequence[bool] | None = None  # which parties take part; all by default
    step: int = 0

    def taking_part(self, has_sent: Sequence[bool]) -> list[bool]:
        """Return which parties take part, given which of them have sent a value before.

        Raises:
            ValueError: an idle party that has sent no value yet, or idle parties with minibatches, whose rows would
                differ.
        """
        active = [True] * len(has_sent) if self.active is None else list(self.active)
        if not all(active) and (self.rows is not None or not all(a or known for a, known in zip(active, has_sent))):
            raise ValueError("Expected all parties in the first iteration and with minibatches, but got idle ones")
        return active


@tells(_PART)
@without_rows
class Value(NamedTuple):
    """Up: a party's contribution to the predictor."""

    value: Tensor  # (B, M, C, n) z_j, or η_j in plain networks


@tells(_PART)
@without_rows
class Summand(NamedTuple):
    """Up: a party's contribution to a predictor, of which the server needs the sum alone."""

    value: Tensor  # (B, M, C, n) z_j, or η_j with `sums` and in plain networks


@tells(_LABELS)
@without_rows
class Gradient(NamedTuple):
    """Down: the gradient of the others' terms of the bound with respect to the party's value."""

    gradient: Tensor  # (B, M, C, n)


@tells(_OTHERS)
@without_rows
class Share(NamedTuple):
    """Down: the predictor, for a party that evaluates the likelihood; and up: the gradients with respect to it."""

    predictor: Tensor  # (B, M, C, n) intercept + offset + Σ z, in the power model of the others
    shared: Tensor  # (B, M, S)
    weight: Tensor | None  # (B,) of the party's likelihood, where weights are learnt


@without_rows
class Drawn(NamedTuple):
    """A node's rows, noise and draw of its parameters in an iteration."""

    rows: VerticalData
    noise: Noise
    theta: Tensor  # (B, M, d) θ_j, or γ at the server


@without_rows
class Proposal(NamedTuple):
    """A party's values in an iteration, before the server's answer, with a graph to its parameters."""

    drawn: Drawn
    value: Tensor  # (B, M, C, n) its contribution to the predictor
    eta: Tensor  # (B, M, C, n) η_j
    terms: Tensor  # (B, M) its terms of the bound, without log q(θ_j)
    sent: Tensor  # (B, M, C, n) the value that the server has received, without a graph


def value_of(part: Part) -> type[Value] | type[Summand]:
    """Return the type of a party's first message: `Summand` if the server needs the sum alone, otherwise `Value`."""
    apart = part.model.power and part.guide.auxiliary.party is not None
    return Summand if part.model.combine is summed and not apart else Value


class _Node:
    """A part with data and an optimiser of its own: the server is node 0, the parties 1 to J."""

    def __init__(
        self,
        part: Part,
        data: VerticalData,
        *,
        response_shared: bool = False,
        optimizer: Optimizers = RestartingAdam,
        per_row: bool = False,
    ) -> None:
        self.part, self.index, self.model, self.guide, self.q = part, part.index, part.model, part.guide, part.q
        self.response_shared, self.per_row = response_shared, per_row
        self.check(data)
        self.data = data.to_dtype(tree.leaves(self.q)[0].dtype)
        self.optimizer = optimizer(part.parameters())
        self._total = self.data.total

    @property
    def value(self) -> type[Value] | type[Summand]:
        """Return the type of a party's first message."""
        return value_of(self.part)

    def draw(self, iteration: Iteration) -> Drawn:
        """Return an iteration's rows, noise and draw of θ (or γ)."""
        dims = self.model.row_dims[self.index - 1 : self.index] if self.index else []
        rows = self.data if iteration.rows is None else self.data.take(iteration.rows, dims)
        noise = iteration.noise or self.part.draw_noise(iteration.step, rows.response.shape[-1])
        return Drawn(rows, noise, self.draw_theta(noise))

    def draw_theta(self, noise: Noise) -> Tensor:
        """Return θ (or γ) for this noise and the present parameters."""
        return draw_own(self.model, self.guide, self.index, self.q["theta"], noise.theta[self.index])

    def minus_log_q(self, theta: Tensor) -> Tensor:
        """Return −log q(θ), `(B, M)`."""
        family = self.guide.family(self.index)
        return self.model.masked(-family.log_density(fixed(self.guide, self.q["theta"]), theta), 0.0)

    def check(self, data: VerticalData) -> None:
        """Raise `ValueError` unless the data suit this node."""
        raise NotImplementedError

    def scaled(self, objective: Tensor) -> Tensor:
        """Return the objective, divided by the sum of the rows' weights if the node maximises it per row."""
        return objective / self._total.to(objective).reshape(-1, 1) if self.per_row else objective

    def messages(self) -> dict[str, Tensor]:
        """Return the tensors of the messages that outlive an iteration, by name."""
        raise NotImplementedError

    def load_messages(self, flat: Mapping[str, Tensor]) -> None:
        """Replace the messages that outlive an iteration by those that `messages` returned."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that training changes, flat, in tensors that share no memory with the node."""
        flat = {f"part.{name}": leaf for name, leaf in self.part.state_dict().items()}
        flat |= {f"optimizer.{name}": leaf for name, leaf in checkpoint.pack(self.optimizer.state_dict()).items()}
        flat |= {f"messages.{name}": leaf for name, leaf in self.messages().items()}
        return {name: leaf.detach().clone() for name, leaf in flat.items()}

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Restore, bit by bit, the state that `state_dict` of a node like this one returned."""
        device = next(self.part.buffers()).device
        self.part.load_state_dict(below("part.", flat))
        self.optimizer.load_state_dict(checkpoint.unpack(below("optimizer.", flat)))
        self.load_messages({name: leaf.to(device) for name, leaf in below("messages.", flat).items()})


class PartyNode(_Node):
    """A party: its features and its part of the model.

    Args:
        part: its part of a model, which it trains in place.
        data: the party's features only, the rows' weights, one column of `present` with the rows that it has, and the
            response, NaN unless the party has to know it.
        response_shared: whether the parties compute the likelihood's gradient themselves; as at the server.
        optimizer: from parameters to an optimiser.
        per_row: whether the bound is divided by the weights' sum; as at the server.

    Attributes:
        has_sent: whether this party has sent a value to the server.
        history: a digest of all messages that `party_half` has received for this party, in their order. It is part of
            the party's state: restoring an earlier state restores the history of then.

    Raises:
        ValueError: features that do not fit the model or its weights, or a response that is needed and not given.

    >>> import torch, fedtorch as ft
    >>> flat = ft.vfl.model.predictors.flat_prior()
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.gaussian(1.0), [ft.vfl.linear(1, flat)], rho=1.0)
    >>> guide, key = ft.vfl.Guide(ft.vfl.noiseless(), ft.vfl.fit.guide.point()), ft.random.key(0)
    >>> from fedtorch.vfl.fit.part import parts
    >>> part = parts(model, guide, ft.vfl.fit.guide.initial(model, guide, 3, 1, key), key=key)[1]
    >>> data = VerticalData((torch.tensor([[1.0], [0.0], [1.0]]),), torch.full((3,), torch.nan))
    >>> party = PartyNode(part, data, optimizer=lambda leaves: torch.optim.SGD(leaves, lr=0.1))
    >>> proposal = party.propose(Iteration())
    >>> proposal.sent  # x θ, at θ = 0
    tensor([[[[0., 0., 0.]]]])
    >>> party.climb(proposal, gradient=torch.tensor([[[[1.0, 2.0, 3.0]]]]))
    >>> part.q["theta"]["mean"].data  # 0.1 times 1 + 3
    tensor([[0.4000]])
    """

    has_sent = False
    history = bytes(32)

    def check(self, data: VerticalData) -> None:
        """Raise `ValueError` unless the data suit this party."""
        data.check_known()
        check_rows(self.model.predictors[self.index - 1], data.features[0], data.response.shape[-1], self.part.name)
        evaluates = self.response_shared or (self.model.power and self.guide.auxiliary.party is not None)
        if (evaluates or self.guide.auxiliary.sees_response) and bool(data.response.isnan().all()):
            raise ValueError("Expected the response at the party, which its likelihood or encoder needs, but got NaN")

    def takes_part(self, iteration: Iteration) -> bool:
        """Return whether this party takes part; raises like `Iteration.taking_part`."""
        return iteration.taking_part([self.has_sent] * len(self.model.predictors))[self.index - 1]

    def propose(self, iteration: Iteration) -> Proposal:
        """Draw θ_j and z_j, and compute this party's contribution to the predictor."""
        drawn = self.draw(iteration)
        return self._proposed(drawn._replace(rows=drawn.rows.of_party(0)))

    def _proposed(self, drawn: Drawn, sent: Tensor | None = None) -> Proposal:
        value, eta, terms = party_bound(
            self.model, self.guide, self.index, self.q, drawn.theta, drawn.rows, drawn.noise
        )
        return Proposal(drawn, value, eta, terms, value.detach() if sent is None else sent)

    def climb(
        self,
        proposal: Proposal,
        *,
        gradient: Tensor | None = None,
        likelihood: Callable[[Proposal], Tensor] | None = None,
        rate: float | None = None,
        local_steps: int = 1,
    ) -> None:
        """Take one or several steps up the bound, with this iteration's draws.

        Args:
            proposal: of the iteration.
            gradient: of the others' terms with respect to this party's value, already divided by the weights' sum.
            likelihood: this party's copy of the likelihood, `(B, M)`.
            rate: learning rate; the optimiser's own by default.
            local_steps: number of steps.
        """
        for step in range(local_steps):
            if step:
                again = proposal.drawn._replace(theta=self.draw_theta(proposal.drawn.noise))
                proposal = self._proposed(again, proposal.sent)
            objective = proposal.terms + self.minus_log_q(proposal.drawn.theta)
            objective = self.scaled(objective if likelihood is None else objective + likelihood(proposal))
            if gradient is not None:
                objective = objective + (proposal.value * gradient).sum((-2, -1))
            ascend(self.optimizer, objective, rate)

    def note(self, message: Tree) -> None:
        """Add a message to the history: its type, and names, shapes, dtypes and bytes of its tensors."""
        kind = type(message).__name__.encode()
        self.history = hashlib.sha256(self.history + kind + b"\0" + wire.encode(message)).digest()

    def start(self) -> bytes:
        """Return a digest of the present parameters, without those of single rows, keys and received messages."""
        trained = {name: leaf for name, leaf in self.part.named_parameters() if not name.startswith("groups.z.")}
        plain = {name: leaf.detach().cpu() + 0.0 for name, leaf in trained.items()}  # -0 is 0
        return hashlib.sha256(wire.encode(plain)).digest()

    def messages(self) -> dict[str, Tensor]:
        """Return whether this party has sent a value, and the history of the messages that it has received."""
        return {"has_sent": torch.tensor(self.has_sent), "history": torch.tensor(list(self.history), dtype=torch.uint8)}

    def load_messages(self, flat: Mapping[str, Tensor]) -> None:
        """Restore the state that `messages` returned."""
        self.has_sent, self.history = bool(flat["has_sent"]), bytes(flat["history"].tolist())


class ServerNode(_Node):
    """The server: the response, the offset and the shared parameters.

    Args:
        part: its part of a model, which it trains in place.
        data: response, offset and weights; features are not used.
        response_shared: whether the parties know y and compute the likelihood's gradient themselves.
        optimizer: from parameters to an optimiser.
        per_row: whether the bound is divided by the weights' sum.

    Attributes:
        batch: the rows of the last iteration, `(m,)`; None for all.
        values: the last value of each party, None before.
        answers: the last gradients of each party's likelihood, in the power model's protocol.
        terms: its terms of the bound in the last iteration, `(B, M)`; None where the parties evaluate the likelihood.

    Raises:
        ValueError: a response that the likelihood does not accept.

    >>> import torch, fedtorch as ft
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.gaussian(1.0), [ft.vfl.linear(1)], rho=1.0)
    >>> guide, key = ft.vfl.Guide(ft.vfl.noiseless(), ft.vfl.fit.guide.point()), ft.random.key(0)
    >>> from fedtorch.vfl.fit.part import parts
    >>> part = parts(model, guide, ft.vfl.fit.guide.initial(model, guide, 3, 1, key), key=key)[0]
    >>> server = ServerNode(part, VerticalData((), torch.tensor([1.0, 2.0, 3.0])))
    >>> server.expected(0, server.draw(Iteration())).value.shape  # of the value that the party has to send
    torch.Size([1, 1, 1, 3])
    """

    def __init__(
        self,
        part: Part,
        data: VerticalData,
        *,
        response_shared: bool = False,
        optimizer: Optimizers = RestartingAdam,
        per_row: bool = False,
    ) -> None:
        super().__init__(part, data, response_shared=response_shared, optimizer=optimizer, per_row=per_row)
        parties = len(self.model.predictors)
        self.values: list[Value | Summand | None] = [None] * parties
        self.answers: list[Share | None] = [None] * parties
        self.terms: Tensor | None = None
        self.batch: Tensor | None = None

    def draw(self, iteration: Iteration) -> Drawn:
        """Return an iteration's rows, noise and draw of γ, and record its rows in `batch`."""
        self.batch = iteration.rows
        return super().draw(iteration)

    def check(self, data: VerticalData) -> None:
        """Raise `ValueError` unless the likelihood accepts the response."""
        check_response(self.model.likelihood, data)

    def expected(self, party: int, drawn: Drawn) -> Value | Summand:
        """Return a value of the shapes that a party, from 0 on, has to send."""
        outputs, rows = self.model.outputs[party + 1], drawn.rows.response.shape[-1]
        return self.value(drawn.theta.new_zeros(*drawn.theta.shape[:2], outputs, rows))

    def last_values(self) -> list[Tensor]:
        """Return the last values of all parties."""
        return [value.value for value in self.values if value is not None]

    def messages(self) -> dict[str, Tensor]:
        """Return the last messages of all parties, which an iteration without some of the parties uses."""
        flat: dict[str, Tensor] = {}
        for name, messages in (("values", self.values), ("answers", self.answers)):
            for j, message in enumerate(messages):
                fields = {} if message is None else message._asdict()
                flat |= {f"{name}.{j}.{field}": leaf for field, leaf in fields.items() if leaf is not None}
        return flat

    def load_messages(self, flat: Mapping[str, Tensor]) -> None:
        """Restore the state that `messages` returned."""
        for j in range(len(self.values)):
            value, answer = below(f"values.{j}.", flat), below(f"answers.{j}.", flat)
            self.values[j] = self.value(**value) if value else None
            self.answers[j] = Share(answer["predictor"], answer["shared"], answer.get("weight")) if answer else None
