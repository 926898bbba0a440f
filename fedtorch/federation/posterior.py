"""Post-fit queries: `Algorithm.posterior`, the only interface that inference, reports, plots and sites use.

An algorithm's settings are for fingerprints, loggers and people. Queries about its runs are the methods of its
posterior; for the others, `Posterior` raises a TypeError that names fits with an answer.

An algorithm of one's own whose summary has the server's parameters:

>>> import dataclasses, torch, fedtorch as ft
>>> from fedtorch.federation.posterior import Named
>>> from fedtorch.models.estimates import Estimates
>>> weights = Named(lambda run: Estimates(("slope", "level"), run.server["weight"].double(), coefficients=2))
>>> averaged = ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1, bias=False)))
>>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor(y)) for y in ([1.0, 2.0], [3.0, 4.0])])
>>> run = ft.run(dataclasses.replace(averaged, posterior=weights), ft.InProcess(data), rounds=1)
>>> print(run.summary()[["estimate"]].to_markdown())
| coefficient | estimate |
| :-- | --: |
| slope | 2.00 |
| level | 3.00 |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.data import ClientData
    from fedtorch.data.formulas.design import Design
    from fedtorch.models.device_posterior import DevicePosterior
    from fedtorch.models.estimates import Estimates
    from fedtorch.models.hierarchical.families import Family, Ordered

WIDE = 25.0  # width of a flat prior, in sds of the sites' coefficients
_ANSWERS = {
    "estimates": "named quantities in run.summary()",
    "coefficients": "coefficients and predictions of its own sites in ft.inference.ranef(run, total=True) and predict",
}
_HAS = {
    "module": "models in run.client_module(client) and run.global_module()",
    "predict": "predictions in run.predict(data), scores in run.evaluate(data, metrics)",
    "server": "its server's state in run.server",
}
_EP, _ML = "ft.ep with a hierarchical model", "ft.maximum_likelihood"
_OTHERS = "know by which coefficients of another site are known"


class Coefficients(NamedTuple):
    """Posterior of the coefficients of `K` sites, in the units of rows; `back` maps them to named coefficients."""

    sites: tuple[str, ...]
    names: tuple[str, ...]
    posterior: DevicePosterior
    back: Tensor  # (q, d)
    family: Family | None
    design: Design | None = None
    intercept: bool = False  # whether the first one is an intercept that rows have no column for
    features: Callable[[Tensor], Tensor] | None = None  # rows x `(N, q)` -> `(N, d)`, where coefficients are of these
    ordered: Ordered | None = None  # the levels of an ordered response
    draws: Tensor | None = None  # (C, T, K, q) of a sampler, of which `posterior` has some

    def __repr__(self) -> str:
        sites = ", ".join(self.sites[:3]) + (", …" if len(self.sites) > 3 else "")
        return f"Coefficients({len(self.sites)} sites: {sites}; {', '.join(self.names)})"

    def totals(self) -> DevicePosterior:
        """Return the coefficients in the units of the frame."""
        return moved(self.posterior, self.back)


def moved(posterior: DevicePosterior, back: Tensor) -> DevicePosterior:
    """Return the posterior of linear combinations of coefficients, the rows of `back` `(q, d)`."""
    if len(back) == back.shape[1] and bool((back == torch.eye(len(back)).to(back)).all()):
        return posterior
    covariances = back @ posterior.covariances @ back.mT
    return posterior._replace(means=posterior.means @ back.mT, covariances=covariances)


class Pooling(NamedTuple):
    """Unpooled and partially pooled estimates of `d` coefficients at `K` sites, in the data's units."""

    names: tuple[str, ...]
    place: list[int]  # positions of the coefficients that differ by site
    pooled: DevicePosterior
    own: DevicePosterior  # under a flat prior, see `wide`
    centre: Tensor  # (d,) common part of the sites' coefficients
    centre_low: Tensor
    centre_high: Tensor
    spread: Tensor  # (d,) sd of the sites' coefficients
    family: Family | None


def wide(model: Any, mean: Tensor, sd: Tensor) -> Tensor:
    """Return φ of a flat prior around the sites' mean.

    Args:
        model: a `hierarchical.Model`.
        mean: mean of φ.
        sd: of the coefficients over sites, `(d,)`.
    """
    m, scales = model.hierarchy.mean.shape[1], len(model.hierarchy.names)
    phi = mean.clone()
    phi[m:scales] = model.hierarchy.scales(torch.diag((WIDE * sd) ** 2), mean.new_zeros(()))
    return phi


class Draws(NamedTuple):
    """Draws of a joint posterior, in the form in which holders of rows compute them."""

    family: Family  # distribution of one response
    at: Callable[[ClientData, Tensor, Tensor], Any]  # as `runs.posterior_draws.DrawnAt`
    sent: Mapping[str, Tensor] = {}  # for other holders of rows, who rebuild the draws by `Posterior.received`


class Posterior:
    """Post-fit queries of a run, as methods; queries that a subclass lacks raise an error that names other fits.

    `given` is the result of `ep.corrected`, in place of q(φ), and `tolerance` that of `ep.posterior`, which warns about
    runs that have not converged; fits by draws have neither.

    Attributes:
        model: the hierarchical model that fits are of, None of others.
        title: of the posterior in a report, "" if it is not shown.

    Raises:
        TypeError: by each method, for a fit without this query.
    """

    model: Any = None
    title: str = ""

    @property
    def design(self) -> Design | None:
        """Return the formula that the model is of, None without one."""
        return getattr(self.model, "design", None)

    @property
    def size(self) -> int:
        """Return how many coefficients a client has by the model, 0 without one."""
        hierarchy = getattr(self.model, "hierarchy", None)
        return 0 if hierarchy is None else len(hierarchy.mean)

    def estimates(self, *run: Any, **options: Any) -> Estimates:
        """Return the posterior of named quantities, of which `Run.summary` makes a table."""
        who = "ft.ep, ft.maximum_likelihood, ft.gibbs, ft.matrix_normal or ft.normal_em"
        raise self._unanswered(run[0], who, "have named quantities")

    def coefficients(self, run: Any, given: Any = None, tolerance: float = 0.01) -> Coefficients:
        """Return the coefficients of the run's clients."""
        raise self._unanswered(run, f"{_EP}, {_ML}, ft.gibbs or ft.matrix_normal", "have coefficients of each site")

    def deviations(self, run: Any, given: Any = None, tolerance: float = 0.01) -> Coefficients:
        """Return the deviations of clients' coefficients from the shared ones, in the units of the frame."""
        raise self._unanswered(run, f"{_EP}, {_ML} or ft.gibbs", "have deviations of each site from what all share")

    def newcomers(self, run: Any, given: Any = None, tolerance: float = 0.01) -> Coefficients:
        """Return the coefficients of a client without rows, which vary as those of all clients do."""
        raise self._unanswered(run, f"{_EP}, {_ML} or ft.gibbs", _OTHERS)

    def adapted(self, run: Any, data: Any, tolerance: float = 0.01) -> Coefficients:
        """Return the coefficients of clients that took no part, from their rows and the shared posterior."""
        raise self._unanswered(run, _EP, _OTHERS)

    def pooling(self, run: Any, level: float, tolerance: float = 0.01) -> Pooling:
        """Return each client's unpooled and partially pooled estimates, with intervals of `level`."""
        raise self._unanswered(
            run, f"{_EP}, {_ML} or ft.gibbs", "have each site's own estimates beside the pooled ones"
        )

    def draws(self, run: Any, draws: int, given: Any, tolerance: float, seed: int) -> Draws:
        """Return at least this many draws of the joint posterior for rows."""
        raise self._unanswered(
            run, f"{_EP} of known family (linear, logistic, poisson) or ft.gibbs", "have draws for rows"
        )

    def even_draws(self, run: Any, draws: int, given: Any, tolerance: float, seed: int) -> Draws:
        """Return draws for means, spread evenly where that is possible; by default those of `draws`."""
        return self.draws(run, draws, given, tolerance, seed)

    def received(self, sent: Mapping[str, Tensor]) -> Draws:
        """Rebuild draws at a holder of rows from `Draws.sent`; sites answer by draws of fits that override this."""
        raise NotImplementedError

    def evidence(self, run: Any, *, each: bool = False, tolerance: float = 0.01) -> Tree:
        """Return log p(a client's rows | the others'): sums over clients of it and of its square, or `each`, (K,)."""
        raise self._unanswered(run, _EP, "have the density of a site's rows given the other sites'")

    def columns(self, run: Any) -> tuple[tuple[str, ...], Design | None]:
        """Return names of the columns of x of rows to predict for, and the formula that they are of."""
        who = f"{_EP}, {_ML}, ft.gibbs or, for rows of its own sites, ft.matrix_normal"
        raise self._unanswered(run, who, "have predictions with intervals")

    def inferencedata(self, run: Any, *, draws: int, chains: int, given: Any, tolerance: float) -> Any:
        """Return draws by name, as ArviZ's `InferenceData`."""
        raise self._unanswered(run, f"{_EP} or ft.gibbs", "have draws")

    def head(self, algorithm: Any, inbox: Tree, before: Tree, reply: Any, rows: Any) -> Tensor:
        """Return the coefficients of clients after their part of a round, `(K, p)`; default: those in their state.

        Args:
            algorithm: the algorithm of this posterior.
            inbox, before, rows: the clients' inbox, their states before the round, and their prepared rows.
            reply: return value of the algorithm's `client`.
        """
        coefficients: Tensor = algorithm.model(inbox, reply.state)["coefficients"]
        return coefficients

    def finish(self, module: Any, rows: Tree) -> None:
        """Condition a module with a client's tensors on the client's rows, in place; by default do nothing."""

    def _unanswered(self, run: Any, who: str, what: str) -> TypeError:
        """Return the error for a missing query: which fits have it, and which queries this one has."""
        has = [said for name, said in _ANSWERS.items() if getattr(type(self), name) is not getattr(Posterior, name)]
        known = lambda name: getattr(run.algorithm, name, getattr(run, name, None))  # a vertical fit's is in its run
        has += [said for name, said in _HAS.items() if known(name) is not None]
        name = run.algorithm.settings.get("algorithm", "another")
        return TypeError(f"Expected a run of {who}, which {what}, but got one of {name}; it has {', '.join(has)}")


@dataclass(frozen=True)
class Named(Posterior):
    """Named quantities, from a function; alone, or with a subclass's further queries.

    Attributes:
        of: (run, options) -> the posterior of named quantities.
    """

    of: Callable[..., Estimates]

    def estimates(self, run: Any, **options: Any) -> Estimates:
        """Return the posterior of named quantities."""
        return self.of(run, **options)


def posterior_of(algorithm: Any) -> Posterior:
    """Return the post-fit queries of an algorithm; none without a posterior, and for vertical fits."""
    return getattr(algorithm, "posterior", None) or Posterior()
