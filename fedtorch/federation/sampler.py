"""Running a sampling algorithm: burn-in, thinning, summaries on the way, draws on disk, diagnostics.

A `Sampler` steps an algorithm whose server keeps draws of several chains (`ft.gibbs`), and watches some of them. Means
and variances are kept up as draws arrive (Welford, "Note on a method for calculating corrected sums of squares and
products", Technometrics 4, 1962), so a long run need not keep its draws; those that are kept lie in memory or as
safetensors files in a folder. A run may stop anywhere and go on later, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree, wire
from fedtorch.federation import coordinator
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.coordinator import Round
from fedtorch.federation.faults import Faults
from fedtorch.federation.population import Population
from fedtorch.tree import Tree

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["Moments", "Sampler", "global_variables"]

Draws = dict[str, Tensor]


class Moments(NamedTuple):
    """Running moments of one quantity; chains in front, `(C, ...)`."""

    count: Tensor  # type: ignore[assignment]  # () draws per chain
    mean: Tensor
    squares: Tensor  # Σ (x − mean)²

    def sd(self) -> Tensor:
        """The standard deviation within each chain, `(C, ...)`."""
        return (self.squares / (self.count - 1).clamp(min=1)).sqrt()


def global_variables(round: Round) -> Draws:
    """The server's variables by name, `(C, ...)` each."""
    return tree.flatten(round.server.variables)


class Sampler:
    """A run of a sampling algorithm.

    Args:
        algorithm: such as `ft.gibbs(...)`.
        population: the clients.
        parameters: where the algorithm starts.
        burn_in: rounds that are not watched.
        thin: of the rounds after that, every so many are.
        seed: of all randomness.
        watch: a round -> what to watch by name, `(C, ...)` each; default: all global variables. It may read clients'
            own variables from `round.clients` in research; in a federation they stay where they are.
        keep: whether draws are kept, not only their moments.
        folder: where draws are kept as files of `block` draws each, instead of in memory.
        block: draws per file.
        faults: what goes wrong; see `ft.dropouts`.

    Raises:
        ValueError: a count out of range.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.gibbs import sparse
        >>> x = ft.random.normal(ft.random.key(0), (2, 50, 3))
        >>> data = ft.data.from_tensors([(x[k], x[k, :, 0]) for k in range(2)])
        >>> algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=5, chains=2)
        >>> sampler = ft.Sampler(algorithm, ft.InProcess(data), torch.zeros(3), burn_in=20).run(70)
        >>> sampler.draws()["theta"].shape
        torch.Size([2, 50, 3])
        >>> sampler.mean()["prior.included"].round()
        tensor([1., 0., 0.], dtype=torch.float64)
    """

    def __init__(
        self,
        algorithm: Algorithm,
        population: Population,
        parameters: Tree = None,
        *,
        burn_in: int = 0,
        thin: int = 1,
        seed: int = 0,
        watch: Callable[[Round], Draws] = global_variables,
        keep: bool = True,
        folder: Path | str | None = None,
        block: int = 1000,
        faults: Faults | None = None,
    ) -> None:
        for name, count, least in (("burn_in", burn_in, 0), ("thin", thin, 1), ("block", block, 1)):
            if count < least:
                raise ValueError(f"Expected {name} of at least {least}, but got {count}")
        self.algorithm, self.population = algorithm, population
        self.burn_in, self.thin, self.seed = burn_in, thin, seed
        self.moments: dict[str, Moments] = {}
        self.bytes_up = self.bytes_down = 0
        self._watch, self._keep, self._faults, self._block = watch, keep, faults, block
        self._folder = None if folder is None else Path(folder)
        self._progress = coordinator.begin(algorithm, population, parameters)
        self._recent: list[Draws] = []  # those that are not in a file
        self._files = 0

    @property
    def rounds(self) -> int:
        """Rounds done, burn-in included."""
        return self._progress.number

    @property
    def server(self) -> Tree:
        """The server's state."""
        return self._progress.server

    def run(self, rounds: int) -> Sampler:
        """Goes on until `rounds` rounds are done in all, burn-in included; returns itself."""
        steps = coordinator.run(
            self.algorithm,
            self.population,
            rounds=rounds,
            seed=self.seed,
            faults=self._faults,
            start=self._progress,
        )
        for done in steps:
            self._progress = coordinator.Progress(done.number, done.server, done.clients)
            self.bytes_up += done.bytes_up
            self.bytes_down += done.bytes_down
            after = done.number - self.burn_in
            if after > 0 and after % self.thin == 0:
                self._take(self._watch(done))
        return self

    def _take(self, draws: Draws) -> None:
        draws = {name: leaf.detach().to("cpu", torch.float64, copy=True) for name, leaf in draws.items()}
        self.moments = {
            name: _add_draw(self.moments.get(name, _no_moments(leaf)), leaf) for name, leaf in draws.items()
        }
        if not self._keep:
            return
        self._recent.append(draws)
        if self._folder is not None and len(self._recent) == self._block:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path(self._files).write_bytes(wire.encode(tree.stack(self._recent)))
            self._files, self._recent = self._files + 1, []

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"draws-{number:06d}.safetensors"

    # -- what came out ---------------------------------------------------------------------------------------------

    def mean(self) -> Draws:
        """The posterior means over all chains, without the chains' dimension."""
        return {name: moments.mean.mean(0) for name, moments in self._watched().items()}

    def sd(self) -> Draws:
        """The posterior standard deviations over all chains, without the chains' dimension."""
        found = {}
        for name, moments in self._watched().items():
            between = (moments.mean - moments.mean.mean(0)).square() * moments.count
            total = (moments.squares + between).sum(0)
            found[name] = (total / (moments.count * len(moments.mean) - 1).clamp(min=1)).sqrt()
        return found

    def draws(self) -> Draws:
        """The draws that were kept, `(C, T, ...)` by name."""
        self._watched()
        if not self._keep:
            raise ValueError("Expected draws that were kept, but got keep=False; pass keep=True, or use the moments")
        parts = []
        if self._recent:
            parts.append(tree.stack(self._recent))
        if self._files:
            sample = {name: moments.mean for name, moments in self.moments.items()}
            like = tree.map(lambda leaf: leaf.expand(self._block, *leaf.shape), sample)
            files = [wire.decode(self._path(i).read_bytes(), like) for i in range(self._files)]
            parts = [*files, *parts]
        return {name: leaf.transpose(0, 1) for name, leaf in tree.concatenate(parts).items()}

    def inference_data(self) -> Any:
        """The draws as ArviZ's `InferenceData`, group `posterior`, variables named as they are watched."""
        return _arviz().from_dict(posterior={name: leaf.numpy() for name, leaf in self.draws().items()})

    def summary(self) -> pd.DataFrame:
        """ArviZ's table: mean, sd, 95 % interval, Monte Carlo errors, effective sizes and R-hat by component."""
        az = _arviz()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # what never moves, such as γ = 1, has no R-hat
            return az.summary(self.inference_data(), hdi_prob=0.95, round_to="none")

    def trace(self, *names: str) -> Figure:
        """Trace plots and densities of the named quantities, of all if none is named."""
        az = _arviz()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            axes = az.plot_trace(self.inference_data(), var_names=list(names) or None, compact=True)
        figure = axes.ravel()[0].figure
        figure.tight_layout()
        return figure

    def _watched(self) -> dict[str, Moments]:
        if not self.moments:
            raise ValueError(
                f"Expected rounds after the burn-in of {self.burn_in}, but got {self.rounds} in all; run more rounds"
            )
        return self.moments

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, path: Path | str) -> None:
        """Writes all that a resumed run needs, but for files of draws, as safetensors."""
        number, server, clients = self._progress
        flat = {f"clients.{name}": leaf for name, leaf in clients.state_dict().items()}
        flat |= tree.flatten(server, "server")
        flat |= tree.flatten(self.moments, "moments")
        if self._recent:
            flat |= tree.flatten(tree.stack(self._recent), "recent")
        about = {"round": number, "files": self._files, **self._settings()}
        about |= {"bytes_up": self.bytes_up, "bytes_down": self.bytes_down}
        leaves = {name: [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)] for name, leaf in flat.items()}
        Path(path).write_bytes(wire.encode(flat, {"about": about, "leaves": leaves}))

    def load(self, path: Path | str) -> Sampler:
        """Goes on from what `save` wrote; the algorithm, population and settings must be the same. Returns itself.

        Raises:
            ValueError: the file is of a run with other settings.
        """
        payload = Path(path).read_bytes()
        header = wire.metadata(payload)
        about, leaves = header["about"], header["leaves"]
        mine = self._settings()
        other = {name: about.get(name) for name in mine}
        if other != mine:
            raise ValueError(f"Expected a run with settings {mine}, but got {other}")
        like = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in leaves.items()}
        flat = wire.decode(payload, like, finite=False)
        _, server, clients = self._progress
        clients.load_state_dict(_below("clients.", flat))
        loaded = tree.unflatten(flat, server, "server")
        self._progress = coordinator.Progress(
            int(about["round"]), tree.map(lambda new, old: new.to(old.device), loaded, server), clients
        )
        self.bytes_up, self.bytes_down, self._files = about["bytes_up"], about["bytes_down"], about["files"]
        parts = _below("moments.", flat)
        named = dict.fromkeys(name.rpartition(".")[0] for name in parts)
        self.moments = {name: Moments(*(parts[f"{name}.{field}"] for field in Moments._fields)) for name in named}
        recent = _below("recent.", flat)
        count = len(next(iter(recent.values()))) if recent else 0
        self._recent = [tree.map(lambda leaf, i=i: leaf[i], recent) for i in range(count)]
        return self

    def _settings(self) -> dict[str, int | bool]:
        return {
            "seed": self.seed,
            "burn_in": self.burn_in,
            "thin": self.thin,
            "block": self._block,
            "clients": len(self.population.data),
            "keep": self._keep,
            "folder": self._folder is not None,
        }


def _no_moments(leaf: Tensor) -> Moments:
    nothing = torch.zeros_like(leaf)
    return Moments(torch.zeros((), dtype=torch.float64), nothing, nothing)


def _add_draw(moments: Moments, draw: Tensor) -> Moments:
    """Welford's update."""
    count = moments.count + 1
    change = draw - moments.mean
    mean = moments.mean + change / count
    return Moments(count, mean, moments.squares + change * (draw - mean))


def _below(prefix: str, flat: Draws) -> Draws:
    return {name.removeprefix(prefix): leaf for name, leaf in flat.items() if name.startswith(prefix)}


def _arviz() -> Any:
    """ArviZ, whose import takes a second and announces its next version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import arviz

    return arviz
