"""Central training, and training from one message of each separately trained unit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from fedtorch.models.gaussian_process.algebra import GaussianSite, evidence, posterior
from fedtorch.models.gaussian_process.checks import check_rows
from fedtorch.models.gaussian_process.model import ConvolvedGP
from fedtorch.progress import Progress


def fit(
    model: ConvolvedGP,
    x: Tensor,
    y: Tensor,
    mask: Tensor | None = None,
    *,
    exact_units: bool = False,
    iterations: int = 200,
    start: bool = True,
) -> Tensor:
    """Maximise the bound plus the priors centrally by L-BFGS, for Gaussian noise, and set the posterior.

    Args:
        model: changed in place; its batch shape is that of y.
        x: inputs `(*b, N, d)`.
        y: outputs `(*b, N)`.
        mask: `(*b, N)`, which rows are there.
        exact_units: see `ConvolvedGP.bound`.
        iterations: most iterations of L-BFGS.
        start: whether units start from `ConvolvedGP.initial_units` and `initial_weights`.

    Returns:
        the bound, `()`.

    Raises:
        ValueError: rows that do not fit the model.
        TypeError: a likelihood that is not Gaussian.
    """
    check_rows(model, x, y)
    if start:
        model.start(y, mask)
        if model.chooses_weights:
            model.rebase()
            for _ in range(3):
                model.kernel.weight.data = model.initial_weights(x, y, mask, exact_units=exact_units)
                model.condition(x, y, mask, exact_units)
    parameters = [p for p in model.parameters() if p.requires_grad]
    _maximise(
        lambda: model.bound(x, y, mask, exact_units) + model.log_prior(True).sum() + model.log_prior(False),
        parameters,
        iterations,
        history=20,
    )
    model.condition(x, y, mask, exact_units)
    with torch.no_grad():
        return model.bound(x, y, mask, exact_units)


def fit_modules(
    model: ConvolvedGP, points: Tensor, modules: tuple[Tensor, Tensor, Tensor], *, iterations: int = 100
) -> Tensor:
    """Fit the model to modules that units have trained alone and sent once (ModularGP), and set the posterior.

    A unit's module is its own sparse Gaussian process: q(u_m) of its outputs u_m at its pseudo-inputs z_m, and the
    prior p(u_m) of its training. Their ratio is all the information about the unit's outputs, log q(u_m) / p(u_m) = c_m
    + a_m'u_m − ½ u_m'B_m u_m, and the bound is that of the model with this likelihood, E_q[Σ_m log q(u_m) / p(u_m)] −
    KL(q(g) ‖ p(g)). There is one exchange, and it discloses every unit's curve at its pseudo-inputs. With all inputs as
    pseudo-inputs and the noise known, it is the bound of `fit`.

    Args:
        model: changed in place, from where it stands: the kernel's hyperparameters, not the noise.
        points: pseudo-inputs `(M, J, d)`; M is the model's batch shape.
        modules: B `(M, J, J)`, a `(M, J)` and c `(M,)`, which is zeros where the bound's constant is of no interest.
        iterations: most iterations of L-BFGS.

    Returns:
        the bound, `()`.

    Raises:
        ValueError: pseudo-inputs or modules of other shapes.

    Source: Moreno-Muñoz, Artés and Álvarez (2021), "Modular Gaussian processes for transfer learning".

    Example:
        >>> import torch
        >>> from fedtorch.models.gaussian_process import ConvolvedGP, fit_modules
        >>> z = torch.linspace(0, 1, 8, dtype=torch.float64)[:, None].expand(2, -1, -1)
        >>> curves = torch.stack([(6 * z[0, :, 0]).sin(), -2 * (6 * z[0, :, 0]).sin()])
        >>> sure = 1e4 * torch.eye(8).double().expand(2, -1, -1)  # modules that know their curve to 0.01
        >>> model = ConvolvedGP(z[0], batch_shape=torch.Size([2]))
        >>> model.start(curves)
        >>> bound = fit_modules(model, z, (sure, 1e4 * curves, torch.zeros(2)), iterations=10)
        >>> bool((model(z).mean - curves).abs().max() < 0.1)
        True
    """
    sites, units, size = GaussianSite(*modules), model.batch_shape.numel(), points.shape[-2]
    shapes = tuple(points.shape), *(tuple(part.shape) for part in sites)
    if shapes != ((units, size, model.inducing.shape[1]), (units, size, size), (units, size), (units,)):
        raise ValueError(
            f"Expected points (M, J, d), B (M, J, J), a (M, J) and c (M,) of M = {units} units, but got {shapes}"
        )

    def site() -> GaussianSite:
        seen = model.see(points)
        residual = model.covariance(points, points) - seen.basis @ seen.basis.mT
        constant = sites.constant - 0.5 * (sites.precision * residual).sum((-1, -2))
        return sites._replace(constant=constant).turned(seen.basis).total()

    parameters = [p for p in model.kernel.parameters() if p.requires_grad]

    _maximise(lambda: evidence(site()) + model.log_prior(True).sum(), parameters, iterations)
    with torch.no_grad():
        model.rebase()
        model.posterior_mean, model.posterior_root, bound = posterior(model.change(), *site())
    return bound


def _maximise(value: Callable[[], Tensor], parameters: list[Parameter], iterations: int, history: int = 100) -> None:
    """Maximise a function of parameters by L-BFGS, with a progress line."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=iterations, line_search_fn="strong_wolfe", history_size=history)

    def loss() -> float:
        optimizer.zero_grad()
        minus = -value()
        minus.backward()
        shown.update()
        return minus  # type: ignore[return-value]

    with Progress("Gaussian process", unit="evaluation") as shown:
        optimizer.step(loss)
