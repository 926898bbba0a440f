"""Recording a sampling algorithm: burn-in, thinning, summaries on the way, draws on disk, diagnostics.

A `Sampler` follows a run whose server keeps draws of several chains (`ft.gibbs`), and records some variables. Means and
variances are updated as draws arrive (Welford, "Note on a method for calculating corrected sums of squares and
products", Technometrics 4, 1962), so a long run need not store its draws; stored draws are in memory or in safetensors
files in a folder. A sampler is part of its run's checkpoints, and resumes with it, bit for bit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtorch import _files as files, checkpoint, tree
from fedtorch.checkpoint import below
from fedtorch.history import Round

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Draws = dict[str, Tensor]

SITES = "sites."  # prefix of the names of clients' variables
_OF_SITES = ("theta", "intercept", "noise")
_FEWEST = 8  # draws of a chain that diagnostics need


class RunningMoments(NamedTuple):
    """Running moments of one quantity; chains in front, `(C, ...)`."""

    count: Tensor  # type: ignore[assignment]  # () draws per chain
    mean: Tensor
    squares: Tensor  # Σ (x − mean)²

    def sd(self) -> Tensor:
        """Return the standard deviation within each chain, `(C, ...)`."""
        return (self.squares / (self.count - 1).clamp(min=1)).sqrt()


def global_variables(round: Round) -> Draws:
    """Return the server's variables by name, `(C, ...)` each; if they name their `quantities`, those of the model.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.gibbs import sparse
        >>> data = ft.data.from_tensors([(torch.eye(3), torch.ones(3))] * 2)
        >>> algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), chains=2)
        >>> round = ft.Run(algorithm, ft.InProcess(data), torch.zeros(3)).step()
        >>> global_variables(round)["theta"].shape
        torch.Size([2, 3])
    """
    variables = round.server.variables
    return tree.flatten(variables.quantities() if hasattr(variables, "quantities") else variables)


def site_variables(round: Round) -> Draws:
    """Return the clients' coefficients by name, `(C, K, ...)` each: `sites.theta`, intercepts and noise precisions.

    Raises:
        ValueError: clients whose variables are at their sites.
    """
    assert round.tensors is not None
    variables = round.tensors()
    watched = {name: getattr(variables, name) for name in _OF_SITES if hasattr(variables, name)}
    return {f"{SITES}{name}": leaf.transpose(0, 1) for name, leaf in watched.items()}


class Sampler:
    """A recorder of the draws of a sampling algorithm: `ft.run(..., record=sampler)`.

    Args:
        burn_in: rounds that are not watched.
        thin: one of this many rounds is recorded.
        watch: a round -> variables by name, `(C, ...)` each; default: `global_variables`. In research it may read
            clients' own variables from `round.clients`; in a federation they are not available.
        keep: whether draws are stored, not only their moments.
        folder: folder for draws, as files of `block` draws each, readable by this user alone; default: in memory.
        block: draws per file.
        sites: whether the coefficients of every client are watched too, as `sites.theta`, for `ft.inference.ranef` and
            `predict`; in populations that have their clients' variables.

    Raises:
        ValueError: a count out of range.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.gibbs import sparse
        >>> x = ft.random.normal(ft.random.key(0), (2, 50, 3))
        >>> data = ft.data.from_tensors([(x[k], x[k, :, 0]) for k in range(2)])
        >>> algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=5, chains=2)
        >>> sampler = ft.Sampler(burn_in=20)
        >>> run = ft.run(algorithm, ft.InProcess(data), torch.zeros(3), rounds=70, record=sampler)
        >>> sampler.draws()["theta"].shape
        torch.Size([2, 50, 3])
        >>> sampler.mean()["prior.included"].round()
        tensor([1., 0., 0.], dtype=torch.float64)
    """

    def __init__(
        self,
        *,
        burn_in: int = 0,
        thin: int = 1,
        watch: Callable[[Round], Draws] = global_variables,
        keep: bool = True,
        folder: Path | str | None = None,
        block: int = 1000,
        sites: bool = False,
    ) -> None:
        for name, count, least in (("burn_in", burn_in, 0), ("thin", thin, 1), ("block", block, 1)):
            if count < least:
                raise ValueError(f"Expected {name} of at least {least}, but got {count}")
        self.burn_in, self.thin = burn_in, thin
        self.moments: dict[str, RunningMoments] = {}
        self._watch, self._keep, self._block, self._sites = watch, keep, block, sites
        self._folder = None if folder is None else Path(folder)
        self._recent: list[Draws] = []  # draws that are not yet in a file
        self._files = 0

    def record(self, round: Round) -> None:
        """Record a round, if it is one of those to record."""
        after = round.number - self.burn_in
        if after <= 0 or after % self.thin:
            return
        watched = {**self._watch(round), **(site_variables(round) if self._sites else {})}
        if unreal := [name for name, leaf in watched.items() if leaf.is_complex()]:
            raise TypeError(
                f"Expected real numbers to keep draws of, but got complex ones in {unreal[0]!r}; give watch= a "
                "function that returns torch.view_as_real of them"
            )
        draws = {name: leaf.detach().to("cpu", torch.float64, copy=True) for name, leaf in watched.items()}
        self.moments = {
            name: _add_draw(self.moments.get(name, _no_moments(leaf)), leaf) for name, leaf in draws.items()
        }
        if not self._keep:
            return
        self._recent.append(draws)
        if self._folder is not None and len(self._recent) == self._block:
            files.private_folder(self._folder, log=False)
            checkpoint.write(self._path(self._files), tree.stack(self._recent), private=True)
            self._files, self._recent = self._files + 1, []

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"draws-{number:06d}.safetensors"

    # -- results ------------------------------------------------------------------------------------------------------

    def mean(self) -> Draws:
        """Return the posterior means over all chains, without the chains' dimension."""
        return {name: moments.mean.mean(0) for name, moments in self._watched().items()}

    def sd(self) -> Draws:
        """Return the posterior standard deviations over all chains, without the chains' dimension."""
        deviations = {}
        for name, moments in self._watched().items():
            between = (moments.mean - moments.mean.mean(0)).square() * moments.count
            total = (moments.squares + between).sum(0)
            deviations[name] = (total / (moments.count * len(moments.mean) - 1).clamp(min=1)).sqrt()
        return deviations

    def draws(self) -> Draws:
        """Return the stored draws, `(C, T, ...)` by name."""
        self._watched()
        if not self._keep:
            raise ValueError("Expected draws that were kept, but got keep=False; pass keep=True, or use the moments")
        parts = []
        if self._recent:
            parts.append(tree.stack(self._recent))
        parts = [*(checkpoint.read(self._path(i)) for i in range(self._files)), *parts]
        return {name: leaf.transpose(0, 1) for name, leaf in tree.concatenate(parts).items()}

    def inference_data(self) -> Any:
        """Return the draws for ArviZ, group `posterior`, with the names of the recorded variables.

        That is its `InferenceData`, and from ArviZ 1.0 on an xarray `DataTree`.
        """
        return arviz_of(self.draws())

    def summary(self) -> pd.DataFrame:
        """Return ArviZ's table: mean, sd, 95 % interval, Monte Carlo errors, effective sizes and R-hat by component.

        Rows are named as ArviZ does, `theta[1]`; columns and numbers are the same with any ArviZ.
        """
        az, data = load_arviz(), self.inference_data()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a constant, such as γ = 1, has no R-hat
            if not _is_new(az):
                return az.summary(data, hdi_prob=0.95, round_to="none")
            with az.rc_context({"stats.ci_prob": 0.95}):  # of the interval, and of the tails of `ess_tail`
                table = az.summary(data, ci_kind="hdi", round_to="none")
        return table.rename(columns={"hdi95_lb": "hdi_2.5%", "hdi95_ub": "hdi_97.5%"})

    def trace(self, *names: str) -> Figure:
        """Return trace plots and densities of the named quantities, of all if none is named."""
        az, data = load_arviz(), self.inference_data()
        given = {"var_names": list(names) or None, "compact": True, "backend": "matplotlib"}
        with warnings.catch_warnings(), az.rc_context({"plot.max_subplots": None}):
            warnings.simplefilter("ignore")
            if _is_new(az):
                figure = az.plot_trace_dist(data, **given).viz["figure"].item()
            else:
                figure = az.plot_trace(data, **given).ravel()[0].figure
        figure.tight_layout()
        return figure

    def _watched(self) -> dict[str, RunningMoments]:
        if not self.moments:
            raise ValueError(
                f"Expected rounds after the burn-in of {self.burn_in}, but got none; run more with record=sampler"
            )
        return self.moments

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> Draws:
        """Return all that a resumed run needs, but for files of draws, flat."""
        flat = tree.flatten(self.moments, "moments")
        if self._recent:
            flat |= tree.flatten(tree.stack(self._recent), "recent")
        flat |= {name: torch.tensor(value) for name, value in self._settings().items()}
        return {**flat, "files": torch.tensor(self._files)}

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Resume from the result of `state_dict`.

        Raises:
            ValueError: the sampler had other settings.
        """
        mine = self._settings()
        other = {name: flat[name].item() if name in flat else None for name in mine}
        if other != mine:
            raise ValueError(f"Expected the draws of a sampler with settings {mine}, but got {other}")
        self._files = int(flat["files"])
        parts = below("moments.", flat)
        named = dict.fromkeys(name.rpartition(".")[0] for name in parts)
        fields = RunningMoments._fields
        self.moments = {name: RunningMoments(*(parts[f"{name}.{field}"] for field in fields)) for name in named}
        recent = below("recent.", flat)
        count = len(next(iter(recent.values()))) if recent else 0
        self._recent = [tree.map(lambda leaf, i=i: leaf[i], recent) for i in range(count)]

    def _settings(self) -> dict[str, int | bool]:
        about = {"burn_in": self.burn_in, "thin": self.thin, "block": self._block, "keep": self._keep}
        return {**about, "folder": self._folder is not None, **({"sites": True} if self._sites else {})}


def _no_moments(leaf: Tensor) -> RunningMoments:
    nothing = torch.zeros_like(leaf)
    return RunningMoments(torch.zeros((), dtype=torch.float64), nothing, nothing)


def _add_draw(moments: RunningMoments, draw: Tensor) -> RunningMoments:
    """Take Welford's step: update mean and sum of squares."""
    count = moments.count + 1
    change = draw - moments.mean
    mean = moments.mean + change / count
    return RunningMoments(count, mean, moments.squares + change * (draw - mean))


def load_arviz() -> Any:
    """Import ArviZ, which takes a second and announces its next version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import arviz

    return arviz


def diagnostics(stack: np.ndarray[Any, Any]) -> tuple[list[float], list[float]]:
    """Return R-hat and bulk effective size of each component of `(C, T, components)`, NaN with too few draws."""
    if stack.shape[1] < _FEWEST:
        nothing = [math.nan] * stack.shape[2]
        return nothing, nothing
    az = load_arviz()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # neither a constant nor a single chain has an R-hat
        ess = [float(az.ess(stack[..., i])) for i in range(stack.shape[2])]
        rhat = [float(az.rhat(stack[..., i])) if len(stack) > 1 else math.nan for i in range(stack.shape[2])]
    return rhat, ess


def arviz_of(
    draws: Draws, coords: Mapping[str, Sequence[str]] | None = None, dims: Mapping[str, Sequence[str]] | None = None
) -> Any:
    """Return draws `(C, T, ...)` by name for ArviZ, with names of dimensions and coordinates."""
    az, arrays = load_arviz(), {name: leaf.numpy() for name, leaf in draws.items()}
    named = {"coords": {name: list(each) for name, each in (coords or {}).items()}, "dims": dict(dims or {})}
    return az.from_dict({"posterior": arrays}, **named) if _is_new(az) else az.from_dict(posterior=arrays, **named)


def _is_new(az: Any) -> bool:
    """Return whether ArviZ is 1.0 or later, which has other arguments and results."""
    return int(az.__version__.partition(".")[0]) >= 1
