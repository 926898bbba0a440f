r"""HM1: linear models of many devices under a matrix-normal prior whose correlation between devices is learnt.

y_k ~ N(X_k θ_k, σ_k² I) and Θ = (θ_1 … θ_K) ~ MN(0, I, Ω). The server keeps Θ and Ω = aI + V diag(s) V'. Device k
receives only its own row, θ_k, with σ_k² and a `Quadratic`; it takes steps on its misfit ‖y_k − X_kθ‖²/(2σ_k²) plus the
quadratic, and sends the change. Then the server updates Ω. The objective L is stated in
`fedtorch.models.matrix_normal`.

**The prior in every local step.** With P = Ω⁻¹, the prior of device k given the others is λ/2 ‖θ‖² − ⟨h, θ⟩ with λ =
P_kk and h = −Σ_{i≠k} P_ik θ_i. All devices move at once, so the sweep is damped where necessary: for the least c with P
≼ c diag(P),

.. math:: \lambda_k = c P_{kk}, \qquad h_k = \lambda_k \theta_k - (P\Theta)_k,

majorises the prior and touches it at Θ. Any steps that do not increase the devices' own problems, whichever devices
take part, therefore do not increase L; at a fixed point Σ_i P_ki θ_i = X_k'(y_k − X_kθ_k)/σ_k².

**Against the paper.** The paper's shrinkage step uses the data's step size instead of that times σ_k², is taken once a
round instead of in every step, and diverges when the smallest eigenvalue of Ω has decayed. `proximal` is the other
stable form.

**Noise.** Once a round, a device sends the residual sum of squares of its own least squares fit and its degrees of
freedom f_k; σ_k² is their quotient, shrunk to that of all devices with the weight of four degrees of freedom. Devices
without a spare row thus have the others' noise. In its first round a device has no prior, and these first answers set
the scale of Ω: the median of σ_k² tr((X_k'X_k)⁺)/rank, the variance of a coefficient in a device's own estimate.
Rescaling all X or all y therefore rescales the answer.

**Generalised linear models.** In place of ½‖y − Xθ‖²/σ² stands the negative log-likelihood over an overdispersion φ;
all else is the same, and L descends alike. The sampling variance of a coefficient is that for rows with one common
mean, and in its first round a device shrinks its own estimate, which may be infinite, by about half.

Source: Yue, Al Kontar, Estrada Gómez, "Federated data analytics: a study on linear models", section 3, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import expected
from fedtorch.federation.algorithm import Algorithm, LocalSolver, Quadratic, Reply, check_solver, solved_by
from fedtorch.federation.algorithms.matrix_normal.noise import (
    PreparedRows,
    Summary,
    of_each,
    prepare,
    priors,
    renewed,
)
from fedtorch.federation.algorithms.matrix_normal.posterior import Correlated, estimates
from fedtorch.federation.exchanges.exchange import Mean, RowsOf, Sum
from fedtorch.federation.exchanges.rows import private_rows
from fedtorch.federation.turn import Turn
from fedtorch.learns import Learns, tells
from fedtorch.models import low_rank
from fedtorch.models.linear import LinearHead
from fedtorch.models.low_rank import LowRank
from fedtorch.models.matrix_normal import CovarianceUpdate, inverse_wishart
from fedtorch.tree import Tree

_HOPELESS = (
    "Expected a device with more rows than independent features, to estimate the noise from, but got none; pass noise="
)


class _Found(NamedTuple):
    """A device's results of a round; leaves `(K,)`."""

    summary: Summary
    step: Tensor  # the sum of the steps it took, in units of ½L


@tells(
    Learns(
        "the fit of a device, its error and its noise: of fewer rows than features, what a least squares fit tells",
        helps="privacy.sufficient_statistics",
    )
)
class _Message(NamedTuple):
    """A device's message."""

    parameters: Sum  # change of θ_k
    found: Mean  # the device's results


class MatrixNormalServer(NamedTuple):
    """State of the server."""

    parameters: Tensor  # (K, p) the θ_k, float64
    summary: Summary  # (K,)
    heard: Tensor  # (K,) bool
    covariance: LowRank  # Ω


class _Outbox(NamedTuple):
    """Broadcast to the devices, one row each."""

    parameters: Tensor  # (K, p)
    noise: Tensor  # (K,) σ_k²
    precision: Tensor  # (K,) λ_k
    shift: Tensor  # (K, p) h_k


class Shrinkage(NamedTuple):
    """How the prior acts on Θ: in the devices' problems, on the server after their steps, or both."""

    quadratic: Callable[[LowRank, Tensor], tuple[Tensor, Tensor]]  # (Ω, Θ) -> (λ (K,), h (K, p))
    # (Ω, Θ, devices that moved (M,), steps (M,)) -> Θ
    after: Callable[[LowRank, Tensor, Tensor, Tensor], Tensor] | None


class _Chosen(NamedTuple):
    """The arguments of `matrix_normal`, with defaults filled in."""

    covariance: CovarianceUpdate
    shrinkage: Shrinkage
    noise: float | Tensor | None
    start: float | None
    rank: int


def in_every_step() -> Shrinkage:
    """Apply the prior in every local step, exactly, and damped just enough that L never increases."""
    return Shrinkage(low_rank.majorised, after=None)


def proximal() -> Shrinkage:
    """Apply the prior on the server, by one proximal step after the devices' own: Θ ← (P + E⁻¹)⁻¹ E⁻¹ Θ.

    E = diag(η_k) are the devices' steps, in units of ½L; with one η for all it is Θ'Ω(Ω + ηI)⁻¹ in the paper's
    orientation. With one gradient step a round this is the proximal gradient method, which never increases L; with T
    steps the prior is as strong as Tη, but it is a splitting whose fixed point is not the mode. Devices that do not
    take part keep their rows.
    """
    return Shrinkage(lambda covariance, theta: (torch.zeros_like(theta[:, 0]), torch.zeros_like(theta)), _proximal_step)


def _proximal_step(covariance: LowRank, theta: Tensor, moved: Tensor, steps: Tensor) -> Tensor:
    if len(moved) == 0:
        return theta
    if not bool((steps > 0).all()):
        raise ValueError(
            f"Expected a local solver that takes gradient steps, but got a sum of learning rates of "
            f"{float(steps.min())}; use shrinkage=in_every_step() with an exact local solver"
        )
    pull = low_rank.solve(covariance, theta)[moved]
    return theta.index_add(0, moved, -low_rank.solve_rows(covariance, moved, 1 / steps, pull))


def matrix_normal(
    local: LocalSolver,
    *,
    covariance: CovarianceUpdate | None = None,
    shrinkage: Shrinkage | None = None,
    noise: float | Tensor | Sequence[float] | None = None,
    start: float | None = None,
    rank: int = 64,
) -> Algorithm:
    """Build HM1, in which devices borrow strength from devices with correlated coefficients.

    The prior has mean zero and treats the p coefficients alike: bring features to one scale first.

    Args:
        local: solver of a device's mean squared error: `ft.least_squares(head, steps=20)` for full-batch gradient steps
            in closed form, without `steps` exactly; `ft.gradient_descent(head, ..., loss=mse_loss)` for (stochastic)
            gradient steps with your own rate. With `ft.least_squares(head, family="logistic")` or "poisson" devices
            have generalised linear models, solved by reweighted least squares.
        covariance: the update of Ω; default `inverse_wishart()`, see also `exponential_average`, `zhang_yeung`.
        shrinkage: default `in_every_step()`, see also `proximal`.
        noise: σ², of every device or of each, `(K,)`; estimated unless given. For logistic and Poisson models the
            factor of the variance (overdispersion), 1 unless given.
        start: Ω = start · I at the start, the paper's 1; by default the first steps of a device have no prior.
        rank: largest rank of Ω beyond the multiple of the identity.

    Shapes: server state is `MatrixNormalServer`; the outbox has a row per device, `(K, ...)`: θ_k, σ_k², λ_k and h_k as
    `parameters`, `noise`, `precision` and `shift`; client state is the local solver's.

    Raises:
        TypeError: the solver's module is not a `LinearHead`.
        ValueError: `noise`, `start` or `rank` is not positive; a feature map that is not frozen; a solver with a
            budget that is not on noised sums; or no device has more rows than features, so that the noise cannot be
            estimated.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.linear import LinearHead
        >>> x = ft.random.normal(ft.random.key(0), (6, 5, 2), torch.float64)
        >>> y = x @ torch.tensor([1.0, -1.0], dtype=torch.float64)
        >>> y = y + 0.5 * ft.random.normal(ft.random.key(1), (6, 5), torch.float64)
        >>> head = LinearHead(2, intercept=False, dtype=torch.float64)
        >>> algorithm = ft.matrix_normal(ft.least_squares(head, steps=20))
        >>> run = ft.run(algorithm, ft.InProcess(ft.data.from_tensors(list(zip(x, y)))), rounds=30)
        >>> run.server.covariance.correlation(torch.arange(2))[0, 1] > 0.5
        tensor(True)
    """
    check_solver(local)
    head = local.module
    if not isinstance(head, LinearHead):
        raise TypeError(f"Expected a local solver of a LinearHead, but got {type(head).__name__}; see models.linear")
    trained = [name for name, parameter in head.named_parameters() if parameter.requires_grad]
    if trained != ["coefficients"]:
        raise ValueError(
            f"Expected a LinearHead of which the coefficients alone are trained, but got "
            f"{', '.join(trained) or 'none'}; freeze the feature map by feature_map.requires_grad_(False), or train it "
            "too, by ft.shared_body"
        )
    if local.budget is not None and local.statistics is None:
        raise ValueError(
            "Expected a local solver without a budget, or one on noised sums, because devices also send residual sums "
            "of their rows, which the solver's noise does not protect; use privacy.sufficient_statistics"
        )
    if noise is None and local.family != "gaussian":
        noise = 1.0
    if isinstance(noise, (Tensor, Sequence)):
        noise = of_each(noise)
    for name, value in (("noise", noise), ("start", start), ("rank", rank)):
        if value is not None and not isinstance(value, Tensor):
            expected.positive(**{name: value})
    chosen = _Chosen(covariance or inverse_wishart(), shrinkage or in_every_step(), noise, start, rank)
    return Algorithm(
        init=partial(_init, local=local, chosen=chosen),
        outbox=partial(_outbox, dtype=head.coefficients.dtype, chosen=chosen),
        client=partial(_client, local=local),
        server=partial(_server, chosen=chosen),
        model=lambda inbox, state: local.tensors({"coefficients": inbox.parameters}, state),
        exchange=private_rows(),
        prepare=partial(prepare, local=local),
        posterior=Correlated(estimates, noise, local.family),
        **solved_by(local, algorithm="matrix_normal", **chosen._asdict()),
    )


def _init(parameters: Tree, clients: int, *, local: LocalSolver, chosen: _Chosen) -> tuple[MatrixNormalServer, Tree]:
    """Start with all rows equal, before any answer."""
    if isinstance(chosen.noise, Tensor) and len(chosen.noise) != clients:
        raise ValueError(
            f"Expected the noise variances of {clients} devices, but got {len(chosen.noise)}; one for each"
        )
    rows = parameters["coefficients"].to(torch.float64).expand(clients, -1).clone()
    nothing = rows.new_zeros(clients)
    omega = low_rank.identity(clients, chosen.rank, float("inf") if chosen.start is None else chosen.start)
    return MatrixNormalServer(rows, Summary(nothing, nothing, nothing), nothing.bool(), omega), local.init(parameters)


def _outbox(server: MatrixNormalServer, *, dtype: torch.dtype, chosen: _Chosen) -> _Outbox:
    """Send each device its row, noise and prior; no prior before its first answer and noise estimate, unless Ω is
    given.
    """
    heard = server.heard if chosen.start is None else None
    prior = chosen.shrinkage.quadratic(server.covariance, server.parameters)
    variance, precision, shift = priors(server.summary, heard, chosen.noise, prior)
    return _Outbox(server.parameters.to(dtype), variance, precision, shift.to(dtype))


def _client(inbox: _Outbox, state: Tree, data: PreparedRows, turn: Turn, *, local: LocalSolver) -> Reply:
    """Take the device's steps on its misfit with the prior, in units of its mean squared error."""
    if inbox.noise.ndim != 1:
        raise TypeError(
            "Expected every device to receive its own row, but all receive all rows; do not replace HM1's exchange, "
            "private_rows: its server needs every device's coefficients, for which no sum, masked or not, is enough"
        )
    unit = inbox.noise * data.unit
    precision = inbox.precision
    if local.family != "gaussian":  # a device may have no finite estimate of its own: it is shrunk by half
        variance = inbox.noise * data.summary.spread
        precision = torch.where((precision > 0) | (variance == 0), precision, 1 / variance)
    quadratic = Quadratic(unit * precision, {"coefficients": unit[:, None].to(inbox.shift.dtype) * inbox.shift})
    solved = local.solve({"coefficients": inbox.parameters}, state, data.local, quadratic, turn)
    change = Sum(solved.parameters["coefficients"] - inbox.parameters)
    fresh = Mean(_Found(data.summary, solved.lr_sum * unit), torch.ones_like(unit))
    return Reply(_Message(change, fresh), solved.state, solved.info)


def _server(state: MatrixNormalServer, aggregate: RowsOf, key: Tensor, *, chosen: _Chosen) -> MatrixNormalServer:
    """Update Θ and the noise from the answers; then Ω."""
    ids, (change, (fresh, _)) = aggregate.ids.to(state.parameters.device), aggregate.message
    before = state.heard
    change = change.value.to(torch.float64)
    update = renewed(state.parameters, state.summary, before, ids, change, fresh.summary, chosen.noise)
    theta, summary, heard, known = update[:4]
    state = MatrixNormalServer(theta, summary, heard, state.covariance)
    if not update.finite:
        if update.units == len(theta):
            raise ValueError(_HOPELESS)
        return state
    if chosen.shrinkage.after is not None:
        had_a_prior = before[ids] | (chosen.start is not None)
        theta = chosen.shrinkage.after(state.covariance, theta, ids[had_a_prior], fresh.step[had_a_prior])
        state, known = state._replace(parameters=theta), torch.where(heard[:, None], theta, 0.0)
    if not math.isfinite(update.reach):  # steps too long for the objective: Θ shows it, Ω stays
        return state
    return state._replace(covariance=chosen.covariance.update(state.covariance, known, update.typical, update.units))
