r"""Families q(z | θ) of the auxiliary variables, reparametrised by standard normal τ.

- `mean_field`: :math:`z_{ij} = m_{ij} + b_{ij}\tau_{ij}`, parameters for every row (equation 10).
- `amortised`: :math:`z_{ij} = \eta_{ij} + \rho(m + b\tau_{ij})` with (m, log b√(1 + ρ²)) from party j's encoder of
  :math:`\eta_{ij}`; with `sees_response` also of :math:`y_i` (equation 9, centred at η so that m = 0, b = 1 is the
  prior). `sees_response` decides whether the parties need y: the augmented model takes False when y stays with the
  server, and may take True where y is shared; the power model's parties know y anyway.
- `sums`: :math:`q(s | \theta)\,q(z | s, \theta)`, s = Σ_j z_j. With e_j = z_j − η_j,

  .. math:: e_j = \rho\,[x/\sqrt J + a(u_j - \bar u)], \qquad x = m + b\,T(\sqrt J \bar u), \qquad u_j \sim N(0, 1),

  with (m, log b, the shape of T, log a) from one encoder of :math:`(y_i, b + o_i + \sum_j \eta_{ij})` at the server.
  Where the likelihood has a normal approximation (`ResponseLikelihood.normal`), the encoder's outputs are in units of
  the mean and sd that x then has, so that the same output suits all rows, however large ρ and the counts are. The
  exact posterior of a Gaussian likelihood has this form, with T the identity. In the augmented model a = 1 is exact
  for any likelihood, so only s is drawn.
  A factorised q(z_j | θ_j) instead has a floor of :math:`\tfrac12[J\log(1 + \rho^2/\sigma^2) - \log(1 + J\rho^2/
  \sigma^2)]` nats a row. In return the server needs Σ_j η_j, which has no noise; nodes sum it securely.

The first two start with sds of ρ/√(1 + ρ²), the posterior's for a normal response of variance 1. For small ρ that is
close to the prior's sd; for large ρ, draws from the prior would block the optimiser for counts.

Log ratios are log p(z | θ) − log q(z | θ), `(B, M, n)`, with the parameters of log q taken from `fixed`: if these are
detached, the noise of the gradient vanishes where q is exact ("sticking the landing", equation 4).

The numbers of parameters besides those of q(θ), for 10 and for 1000 rows:

>>> import torch, fedtorch as ft
>>> from fedtorch.models.encoders import affine
>>> model = ft.vfl.augmented(ft.vfl.likelihoods.bernoulli(), [ft.vfl.linear(2), ft.vfl.linear(3)], rho=1.0)
>>> from fedtorch.vfl.fit.guide import count_parameters
>>> def count(auxiliary, rows):
...     start = ft.vfl.fit.guide.initial(model, ft.vfl.Guide(auxiliary, ft.vfl.diagonal()), rows, 1, ft.random.key(0))
...     return count_parameters(start) - 2 * sum(model.sizes)
>>> families = [noiseless(), mean_field(), amortised(affine()), sums(affine(), skewed=False)]
>>> [(count(family, 10), count(family, 1000)) for family in families]
[(0, 0), (40, 4000), (8, 8), (6, 6)]

Source: Hassan et al., sections 4.1, 4.2; `sums` is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedtorch._representation import without_rows
from fedtorch.models.encoders import EncoderFactory, encoded
from fedtorch.models.own_encoders import Laws, factory
from fedtorch.vfl.model.vertical import VerticalModel
from fedtorch.vfl.rows.data import VerticalData

Tensors = dict[str, Tensor]


@without_rows
class Sampled(NamedTuple):
    """A draw at the server."""

    total: Tensor  # (B, M, C, n) intercept + offset + s
    deviations: Tensor | None  # (J, B, M, C, n) e_j, where the model needs them
    log_ratio: Tensor | None  # (B, M, n)


@dataclass(frozen=True)
class Auxiliary:
    """A family q(z | θ): either drawn by every party, or by the server.

    Attributes:
        init: (model, outputs C, batch size, rows, key, dtype) -> parameters of one party or the server.
        party: (parameters, fixed parameters, η `(B, M, C, n)`, τ, minibatch, model) -> (z, log ratio), or None.
        server: (parameters, fixed parameters, intercept + offset + Σ η, the likelihood's own parameters, τ, minibatch,
            model) -> `Sampled`, or None.
        noises: (model) -> how many standard normal numbers a draw takes for each row and output.
        sees_response: whether the parties need y.

    >>> import fedtorch as ft
    >>> def drawn(q, fixed, eta, noise, data, model):
    ...     return eta + model.noise_sd.to(eta) * noise, torch.zeros_like(eta).sum(-2)
    >>> prior = Auxiliary(lambda *_: {}, party=drawn, server=None, noises=lambda model: 1)  # q(z | θ) = p(z | θ)
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.bernoulli(), [ft.vfl.linear(2), ft.vfl.linear(3)], rho=2.0)
    >>> data = ft.vfl.VerticalData((torch.zeros(3, 2), torch.zeros(3, 3)), torch.tensor([0.0, 1.0, 1.0]))
    >>> ft.vfl.sfvi(model, ft.vfl.Guide(prior), data, steps=2).bounds.shape
    torch.Size([1, 1])
    """

    init: Callable[[VerticalModel, int, int, int, Tensor, torch.dtype], Tensors]
    party: Callable[[Tensors, Tensors, Tensor, Tensor, VerticalData, VerticalModel], tuple[Tensor, Tensor]] | None
    server: Callable[[Tensors, Tensors, Tensor, Tensor, Tensor, VerticalData, VerticalModel], Sampled] | None
    noises: Callable[[VerticalModel], int]
    sees_response: bool = False


def mean_field() -> Auxiliary:
    """Make a family with a mean and a standard deviation for every row and party, whose number grows with the rows."""

    def init(model: VerticalModel, outputs: int, batch: int, rows: int, key: Tensor, dtype: torch.dtype) -> Tensors:
        shape = (batch, 1, outputs, rows)
        log_sd = (model.noise_sd.log() + _log_shrinkage(model)).to(key.device, dtype).expand(shape)
        return {"mean": torch.zeros(shape, dtype=dtype, device=key.device), "log_sd": log_sd.clone()}

    def party(
        q: Tensors, fixed: Tensors, eta: Tensor, noise: Tensor, data: VerticalData, model: VerticalModel
    ) -> tuple[Tensor, Tensor]:
        of = lambda values: values if data.rows is None else values.index_select(-1, data.rows)
        z = torch.addcmul(of(q["mean"]), of(q["log_sd"]).exp(), noise)
        log_sd = of(fixed["log_sd"])
        rho = model.noise_sd.to(z)
        standard = _standardised(z, noise, of(fixed["mean"]), log_sd)
        ratio = 0.5 * (standard.square() - ((z - eta) / rho).square()) + log_sd - rho.log()
        return z, ratio.sum(-2)

    return Auxiliary(init, party, None, noises=lambda model: 1)


def amortised(encoder: EncoderFactory | nn.Module | None = None, *, sees_response: bool = False) -> Auxiliary:
    """Make a family with one encoder per party, whose size does not grow with the rows.

    Args:
        encoder: a perceptron of 16 hidden units by default; or any module from rows `(N, F)` to a pair of means and
            log standard deviations, or to a distribution of z: see `fedtorch.models.own_encoders`, and `pyro_guide`.
        sees_response: whether its inputs include y besides η_j; for the power model, and where y is shared.

    >>> import fedtorch as ft
    >>> class OwnNetwork(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.shift, self.log_sd = nn.Linear(1, 1), nn.Parameter(torch.zeros(()))
    ...     def forward(self, eta):  # (N, 1)
    ...         return torch.distributions.Normal(eta + self.shift(eta), self.log_sd.exp())
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.bernoulli(), [ft.vfl.linear(1), ft.vfl.linear(2)], rho=1.0)
    >>> data = ft.vfl.VerticalData((torch.ones(3, 1), torch.ones(3, 2)), torch.tensor([0.0, 1.0, 1.0]))
    >>> guide = ft.vfl.Guide(amortised(OwnNetwork()))
    >>> fit = ft.vfl.sfvi(model, guide, data, steps=2)
    >>> sorted(fit.parameters.parties[0]["z"])  # each party trains its own copy
    ['log_sd', 'shift/bias', 'shift/weight']
    """
    make = factory(encoder)

    def init(model: VerticalModel, outputs: int, batch: int, rows: int, key: Tensor, dtype: torch.dtype) -> Tensors:
        return make(outputs + _response_inputs(model, outputs) * sees_response, 2 * outputs).start(key, batch, dtype)

    def party(
        q: Tensors, fixed: Tensors, eta: Tensor, noise: Tensor, data: VerticalData, model: VerticalModel
    ) -> tuple[Tensor, Tensor]:
        inputs, count = _encoder_inputs(eta, data, model) if sees_response else eta, 2 * eta.shape[-2]
        shrinkage = _log_shrinkage(model).to(eta)
        answer = encoded(make, q, inputs, count)
        if isinstance(answer, Laws):
            held = answer if fixed is q else encoded(make, fixed, inputs, count)
            return answer.drawn(held, eta, model.noise_sd.to(eta), noise)
        mean, log_sd = answer.chunk(2, -2)
        log_sd = log_sd + shrinkage
        e = torch.addcmul(mean, log_sd.exp(), noise)
        if fixed is not q:
            mean, log_sd = encoded(make, fixed, inputs, count).chunk(2, -2)
            log_sd = log_sd + shrinkage
        ratio = 0.5 * (_standardised(e, noise, mean, log_sd).square() - e.square()) + log_sd
        return torch.addcmul(eta, model.noise_sd.to(eta), e), ratio.sum(-2)

    return Auxiliary(init, party, None, noises=lambda model: 1, sees_response=sees_response)


def sums(encoder: EncoderFactory | nn.Module | None = None, *, skewed: bool = True) -> Auxiliary:
    """Make q(s | θ) q(z | s, θ) with one encoder at the server, which receives Σ_j η_j.

    Args:
        encoder: a perceptron of 16 hidden units by default; `encoders.affine()` is exact for a Gaussian likelihood. Or
            a module as for `amortised`; if it returns a distribution, that is the distribution of the likelihood's
            predictor with its noise, in the augmented model.
        skewed: whether x also has a sinh–arcsinh transformation (Jones and Pewsey, 2009) whose shape the encoder gives,
            because s given y and θ is not normal where Jρ² is large. Without it ten parties at ρ = 1 shift a logistic
            posterior by up to 0.18 standard deviations.
    """
    make = factory(encoder)
    shapes = 4 if skewed else 2

    def init(model: VerticalModel, outputs: int, batch: int, rows: int, key: Tensor, dtype: torch.dtype) -> Tensors:
        count = (shapes + model.power) * outputs
        return make(outputs + _response_inputs(model, outputs), count).start(key, batch, dtype)

    def server(
        q: Tensors, fixed: Tensors, centre: Tensor, shared: Tensor, noise: Tensor, data: VerticalData,
        model: VerticalModel,
    ) -> Sampled:  # fmt: skip
        parties = len(model.predictors)
        inputs, count = _encoder_inputs(centre, data, model), shapes + model.power
        first = _conditional(centre, shared, data, model)
        outputs, rho = count * centre.shape[-2], model.noise_sd.to(centre)
        raw = encoded(make, q, inputs, outputs)
        if isinstance(raw, Laws):
            if model.power:
                raise ValueError(
                    "Expected the augmented model for an encoder's own distribution, but got a power model"
                )
            held = raw if fixed is q else encoded(make, fixed, inputs, outputs)
            total, ratio = raw.drawn(held, centre, rho * math.sqrt(parties), noise)
            return Sampled(total, None, ratio)
        answer = lambda answered: _from(first, answered.chunk(count, -2), model.power)
        answers = answer(raw)
        fixed_answers = answers if fixed is q else answer(encoded(make, fixed, inputs, outputs))
        u = noise.unflatten(-2, (-1, model.likelihood.outputs))  # (B, M, J or 1, C, n)
        tau = u.sum(-3) / math.sqrt(u.shape[-3])
        bent = _bend(tau, answers[2:4]) if skewed else tau
        x = torch.addcmul(answers[0], answers[1].exp(), bent)
        standard = _standardised(x, bent, fixed_answers[0], fixed_answers[1])
        ratio = _minus_log_density(standard, fixed_answers, skewed) - 0.5 * x.square()
        total = torch.addcmul(centre, rho * math.sqrt(parties), x)
        if not model.power:
            return Sampled(total, None, ratio.sum(-2))
        apart = u - tau.unsqueeze(-3) / math.sqrt(parties)
        spread = apart.square().sum(-3)
        away = (2 * (answers[-1] - fixed_answers[-1])).exp() - (2 * answers[-1]).exp()
        ratio = ratio + 0.5 * spread * away + (parties - 1) * fixed_answers[-1]
        around = (answers[-1].exp() * rho).unsqueeze(-3) * apart
        deviations = (around + (rho * x / math.sqrt(parties)).unsqueeze(-3)).movedim(-3, 0)
        return Sampled(total, deviations, ratio.sum(-2))

    return Auxiliary(init, None, server, noises=lambda model: len(model.predictors) if model.power else 1)


def _conditional(
    centre: Tensor, shared: Tensor, data: VerticalData, model: VerticalModel
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return mean and log sd of x, and log a, given y and θ, by the normal approximation; None if there is none."""
    if model.likelihood.normal is None:
        return None
    parties = len(model.predictors)
    s, precision = (part.unsqueeze(-2) for part in model.likelihood.normal(data.y, shared))
    rho = model.noise_sd.to(centre)
    slope = rho * (parties - model.power) / math.sqrt(parties)  # of the predictor in x
    log_sd = -0.5 * (slope.square() * precision).log1p()
    mean = (2 * log_sd).exp() * slope * precision * (s - centre)
    return mean, log_sd, -0.5 * (rho.square() * precision / parties).log1p()


def _from(first: tuple[Tensor, Tensor, Tensor] | None, raw: Sequence[Tensor], power: bool) -> list[Tensor]:
    """Convert an encoder's outputs (m, log b, …, log a) from units of the normal conditional to those of x and e."""
    if first is None:
        return list(raw)
    mean, log_sd, log_apart = first
    answers = [torch.addcmul(mean, log_sd.exp(), raw[0]), log_sd + raw[1], *raw[2:]]
    return [*answers[:-1], answers[-1] + log_apart] if power else answers


def noiseless() -> Auxiliary:
    """Make a family without auxiliary variables: s = Σ_j η_j whatever ρ is, and the parties send η_j itself."""
    return Auxiliary(lambda *_: {}, None, None, noises=lambda model: 0)


def _bend(tau: Tensor, shape: Sequence[Tensor]) -> Tensor:
    """Return sinh(e^λ (asinh τ + κ)), where (κ, λ) give skewness and weight of the tails."""
    return ((tau.asinh() + shape[0]) * shape[1].exp()).sinh()


def _minus_log_density(standard: Tensor, held: Sequence[Tensor], skewed: bool) -> Tensor:
    """Return −log q(x) without ½ log 2π, of (x − m)/b."""
    if not skewed:
        return 0.5 * standard.square() + held[1]
    tau_square = (standard.asinh() * torch.exp(-held[3]) - held[2]).sinh().square()
    slopes = standard.square().log1p() - tau_square.log1p()
    return 0.5 * (tau_square + slopes) + held[3] + held[1]


class _Standardised(torch.autograd.Function):
    """(value − mean)/sd of a draw mean + sd · noise: the noise itself, as subtracting loses digits for small sd."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, noise: Tensor, mean: Tensor, log_sd: Tensor) -> Tensor:
        ctx.save_for_backward(noise, log_sd)
        return noise.expand_as(value).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (noise, log_sd) = gradients, ctx.saved_tensors
        of_value = gradient * torch.exp(-log_sd)
        of_mean = -of_value if ctx.needs_input_grad[2] else None
        return of_value, None, of_mean, -gradient * noise if ctx.needs_input_grad[3] else None


def _standardised(value: Tensor, noise: Tensor, mean: Tensor, log_sd: Tensor) -> Tensor:
    """Return the noise with the gradient of (value − mean)/sd; all share one shape but for draws."""
    shape = value.shape
    return _Standardised.apply(value, noise.detach().expand(shape), mean.expand(shape), log_sd.expand(shape))


def _log_shrinkage(model: VerticalModel) -> Tensor:
    """Return log(posterior sd / ρ) for a normal response of variance 1."""
    return -0.5 * model.noise_sd.square().log1p()


def _response_inputs(model: VerticalModel, outputs: int) -> int:
    """Return how many inputs an encoder has from the response, besides the predictor."""
    one = torch.zeros(1, 1, 1)
    return model.likelihood.features(one, one.new_zeros(outputs, 1)).shape[-2]


def _encoder_inputs(predictor: Tensor, data: VerticalData, model: VerticalModel) -> Tensor:
    """Return the predictor with the response's features below it, `(B, M, C + F, n)`."""
    features = model.likelihood.features(data.y, predictor)
    return torch.cat([predictor, features.expand(*predictor.shape[:2], *features.shape[-2:])], -2)
