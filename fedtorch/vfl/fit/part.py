"""A node's part of a model, its parameters of q and its networks, which it saves and loads separately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fedtorch import checkpoint, random
from fedtorch.vfl.fit.guide import Guide, Noise, Parameters, draw_own
from fedtorch.vfl.model.vertical import VerticalModel
from fedtorch.vfl.rows.data import VerticalData

_DRAWS, _DROPOUT, _PREDICT = 0, 1, 3  # purposes of a node's key
_BLOCK = 64  # steps whose noise a node draws at a time


class NodeNoise:
    """The noise of one node: a pure function of its key and the step, drawn for a block of steps at a time.

    Args:
        key: of the node.
        theta: how many numbers a step takes for the node's parameters.
        z: how many numbers a step takes for each row.
    """

    def __init__(self, key: Tensor, theta: int, z: int) -> None:
        self.key, self.theta, self.z = key, theta, z
        self._blocks: dict[tuple[int, torch.dtype, torch.device], tuple[int, Tensor]] = {}

    def at(self, step: int, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return a step's noise of the parameters, `(1, 1, theta)`, and of z, `(1, 1, z, rows)`."""
        count, block = self.theta + self.z * rows, step // _BLOCK
        place = rows, like.dtype, like.device
        if not count:
            return like.new_zeros(1, 1, 0), like.new_zeros(1, 1, 0, rows)
        if place not in self._blocks or self._blocks[place][0] != block:
            steps = torch.arange(block * _BLOCK, (block + 1) * _BLOCK, device=like.device)
            keys = random.fold_in(random.fold_in(self.key.to(like.device), _DRAWS), steps)
            self._blocks[place] = block, random.normal(keys, (count,), like.dtype)
        of_theta, rest = self._blocks[place][1][step % _BLOCK].split([self.theta, self.z * rows])
        return of_theta.reshape(1, 1, -1), rest.reshape(1, 1, self.z, rows)

    def keys(self, step: int, like: Tensor) -> Callable[[], Tensor]:
        """Return a function that makes the keys of a step's dropout, one for each element of `like` `(B, ...)`."""
        return partial(self._keys, step, len(like), like.device)

    def _keys(self, step: int, size: int, device: torch.device) -> Tensor:
        of_step = random.fold_in(random.fold_in(self.key.to(device), _DROPOUT), step)
        return random.fold_in(of_step, torch.arange(size, device=device))


class Part(nn.Module):
    """A node's part of a model and its guide, which can run alone in another organisation.

    Args:
        model: the model, of whose predictors the part uses its own only.
        guide: the family.
        index: 0 for the server, 1 to J for the parties.
        q: the node's parameters, as in `Parameters`.
        name: of the node.
        key: of its noise; None if the noise comes with each iteration.

    Raises:
        ValueError: a key and a guide with parameters for every row, which a part cannot draw for minibatches.

    >>> import fedtorch as ft
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.bernoulli(), [ft.vfl.linear(2)], rho=1.0)
    >>> guide = Guide(ft.vfl.noiseless(), ft.vfl.fit.guide.point())
    >>> q = {"theta": {"mean": torch.tensor([[1.0, 2.0]])}}
    >>> clinic = Part(model, guide, 1, q, name="clinic", key=random.key(0))
    >>> clinic.propose(torch.ones(3, 2), random.key(1))  # of three new rows
    tensor([[[[3., 3., 3.]]]])
    """

    rho: Tensor  # (1 or B,)
    noise: NodeNoise
    active: Tensor | None  # (B,) whether an element has noise and priors; None for all

    def __init__(
        self,
        model: VerticalModel,
        guide: Guide,
        index: int,
        q: dict[str, dict[str, Tensor]],
        *,
        name: str,
        key: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.guide, self.index, self.name, self.key, self._model = guide, index, name, key, model
        self.outputs = model.outputs[index]
        predictor = model.predictors[index - 1] if index else model.top
        self.network = predictor if isinstance(predictor, nn.Module) else None
        self.groups = nn.ModuleDict({
            group: nn.ParameterDict({name: value.detach().clone() for name, value in values.items()})
            for group, values in q.items()
        })  # fmt: skip
        if key is not None and any(value.numel() == 0 for value in q.get("z", {}).values()):
            raise ValueError("Expected an amortised family of z, but got one with parameters for every row")
        self.register_buffer("rho", model.rho.clone(), persistent=False)
        self.register_buffer("active", None if model.active is None else model.active.clone(), persistent=False)
        if key is not None:
            draws_z = (index > 0) == (guide.auxiliary.party is not None)
            z = guide.auxiliary.noises(model) * self.outputs if draws_z else 0
            self.noise = NodeNoise(key, guide.family(index).noises(model.sizes[index]), z)

    @property
    def q(self) -> dict[str, dict[str, Tensor]]:
        """Return the node's parameters of q, `(B, ...)` each, by group: "theta", "z", "weights"."""
        return {name: dict(group._parameters) for name, group in self.groups.items()}  # type: ignore[arg-type]

    @property
    def model(self) -> VerticalModel:
        """Return the model, with ρ on this part's device."""
        return replace(self._model, rho=self.rho, active=self.active)

    def draw_noise(self, step: int, rows: int) -> Noise:
        """Return the noise of an iteration, with this node's part at its index."""
        theta, z = self.noise.at(step, rows, self.rho)
        keys = (self.noise.keys(step, self.rho),) if self.training else ()
        places = self.index + 1
        return Noise((theta,) * places, (z,) * places, keys * places)

    @torch.no_grad()
    def propose(self, x: Tensor, key: Tensor, draws: int = 1, noise: bool = True) -> Tensor:
        """Draw z_j of new rows from the model, `(B, draws, C_j, n)`, for a party to send to the server.

        A network with dropout has to be in evaluation mode (`eval()`).

        Args:
            x: features of the new rows.
            key: of the draws; the party folds its index in.
            draws: M; plain networks need only one.
            noise: whether to add the model's noise ρε.
        """
        model, predictor, auxiliary = self.model, self.model.predictors[self.index - 1], self.guide.auxiliary
        etas = predictor.forward(self.draw_theta(key, draws).expand(-1, draws, -1), x)
        if not noise or (auxiliary.party is None and auxiliary.server is None):
            return etas
        shape = self.outputs, x.shape[-1 - predictor.row_dims]
        of_rows = random.normal(random.fold_in(self._keys(key, draws), 1), shape, self.rho.dtype)
        return torch.addcmul(etas, model.masked(model.noise_sd, 0.0), of_rows.to(self.rho.device))

    @torch.no_grad()
    def draw_theta(self, key: Tensor, draws: int = 1) -> Tensor:
        """Draw θ_j, or γ, from q, `(B, draws or 1, d)`; the node folds its index into the key."""
        noise = random.normal(random.fold_in(self._keys(key, draws), 0), (1, 1, self.noise.theta), self.rho.dtype)
        reshaped = noise.to(self.rho.device).reshape(1, draws, -1)
        return draw_own(self.model, self.guide, self.index, self.q["theta"], reshaped)

    def _keys(self, key: Tensor, draws: int) -> Tensor:
        """Return the keys of draws for predictions."""
        of_key = random.fold_in(random.fold_in(self.noise.key.to(key.device), key), _PREDICT)
        return random.fold_in(of_key, torch.arange(draws, device=key.device))

    def save(self, file: str | Path) -> None:
        """Write this node's parameters to a safetensors file, atomically and readable by its owner only."""
        checkpoint.write(file, self.state_dict(), {"party": self.name}, private=True)

    def load(self, file: str | Path) -> None:
        """Read the parameters from a file that `save` wrote.

        Raises:
            ValueError: the file is another node's, of a part of another shape, or damaged.
        """
        with checkpoint.opened(file) as content:
            name, flat = content.about.get("party"), {each: content.tensor(each).clone() for each in content.names}
        try:
            if name != self.name:
                raise ValueError(f"Expected parameters of party {self.name!r}, but got those of {name!r}")
            checkpoint.check_structure(flat, self.state_dict())
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        self.load_state_dict(flat)


def parts(
    model: VerticalModel,
    guide: Guide,
    parameters: Parameters,
    *,
    names: Sequence[str] | None = None,
    key: Tensor | None = None,
) -> list[Part]:
    """Return the server's and the parties' parts, each with its own parameters.

    Args:
        model: the model.
        guide: the family.
        parameters: of all nodes, for example of `sfvi` or `initial`.
        names: of the parties.
        key: of the noise, for parts that draw their own; each node folds its index in.

    Raises:
        ValueError: a joint q(γ, θ), which is fitted in one graph.

    >>> import tempfile, fedtorch as ft
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.bernoulli(), [ft.vfl.linear(2), ft.vfl.linear(3)], rho=1.0)
    >>> guide, key = Guide(), random.key(0)
    >>> start = ft.vfl.fit.guide.initial(model, guide, 5, 1, key)
    >>> server, clinic, laboratory = parts(model, guide, start, names=["clinic", "laboratory"], key=key)
    >>> [tuple(part.shape) for part in draw_noises([server, clinic, laboratory], step=0, rows=5).theta]
    [(1, 1, 1), (1, 1, 2), (1, 1, 3)]
    >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
    ...     clinic.save(f"{folder}/own.safetensors")
    ...     laboratory.load(f"{folder}/own.safetensors")
    Traceback (most recent call last):
    ValueError: ...: Expected parameters of party 'laboratory', but got those of 'clinic'
    """
    if parameters.joint is not None:
        raise ValueError(
            "Expected independent q(γ) and q(θ_j), of which each node holds its own, but got a joint one; fit it in "
            "one graph by fedtorch.vfl.sfvi"
        )
    node_names = ["server", *(names or (f"party {j}" for j in range(len(model.predictors))))]
    keys = [None if key is None else random.fold_in(key, index) for index in range(len(node_names))]
    groups = (parameters.server, *parameters.parties)
    return [
        Part(model, guide, j, q, name=name, key=noise_key)
        for j, (q, name, noise_key) in enumerate(zip(groups, node_names, keys))
    ]


@torch.no_grad()
def predicted(
    server: Part,
    parties: Sequence[Part],
    features: Sequence[Tensor],
    draws: int,
    key: Tensor,
    noise: bool = True,
    data: VerticalData | None = None,
) -> tuple[Tensor, Tensor]:
    """Return draws of the likelihood's predictor of new rows, `(B, M, C, n)`, and its own parameters, `(B, M, S)`.

    Args:
        server: the server's part.
        parties: all parties' parts.
        features: `(n, ...)` or `(B, n, ...)`, one per party.
        draws: M.
        key: of the draws.
        noise: whether to add the model's noise to z.
        data: has the rows' offset, and which parties have each row.

    Raises:
        ValueError: another number of parties, parties with other numbers of rows, or parts that draw no noise of their
            own.
    """
    model = server.model
    if len(features) != len(parties):
        raise ValueError(f"Expected features of {len(parties)} parties, but got {len(features)}")
    rows = [x.shape[-1 - dims] for x, dims in zip(features, model.row_dims)]
    if len(set(rows)) > 1:
        raise ValueError(f"Expected the same rows of all parties, but got {rows} of them; align the rows")
    if any(part.key is None for part in (server, *parties)):
        raise ValueError("Expected parts that draw their own noise, but got others; give vfl.parts(..., key=)")
    with evaluating(server, *parties):
        values = [party.propose(x, key, draws, noise) for party, x in zip(parties, features)]
        return combined(server, values, draws, key, data)


@torch.no_grad()
def combined(
    server: Part, values: Sequence[Tensor], draws: int, key: Tensor, data: VerticalData | None = None
) -> tuple[Tensor, Tensor]:
    """Return the result of `predicted` from the parties' values, `(B, M, C_j, n)` each; the server's computation."""
    if data is not None and data.present is not None:
        values = [value * data.present[:, j].to(value.dtype) for j, value in enumerate(values)]
    offset = None if data is None or data.offset is None else data.offset.to(values[0].dtype)
    return server.model.centre(server.draw_theta(key, draws), server.model.cut(values), offset)


@contextmanager
def evaluating(*parts: Part) -> Iterator[None]:
    """Put parts in evaluation mode, without dropout, for the duration of the context."""
    trained = [part for part in parts if part.training]
    try:
        for part in trained:
            part.eval()
        yield
    finally:
        for part in trained:
            part.train()


def draw_noises(nodes: Sequence[Part], step: int, rows: int) -> Noise:
    """Return the noise of an iteration of all nodes, the server first."""
    theta, z, keys = zip(*(node.draw_noise(step, rows) for node in nodes))
    return Noise(*(tuple(steps[-1] for steps in each if steps) for each in (theta, z, keys)))
