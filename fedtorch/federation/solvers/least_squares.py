r"""Least squares in closed form: the local problem solved exactly, or by T gradient steps at once, from Gram matrices.

For an `nn.Linear` or a `LinearHead` with coefficients θ on features X, client k's objective is

.. math:: \frac1{n_k o}\|Y_k - X_k \theta\|^2 + \frac{\lambda}{2}\|\theta\|^2 - \langle h, \theta\rangle,

that of `torch.nn.functional.mse_loss` plus the `Quadratic` of the others, o being the number of outputs. With its
curvature V diag(m) V' and its gradient g at the start θ⁰, both the minimiser and the end of T full-batch gradient steps
of size η are

.. math::
    \theta^0 - V \mathrm{diag}(f) V' g, \qquad f = 1 / m \quad\text{or}\quad f = \eta \sum_{t < T} (1 - \eta m)^t.

A λ that all parameters share only adds to m, so V comes from one eigendecomposition of X'X when the data are prepared,
and a round costs O(p²) for any number of rows and steps. All numbers are in float64, because X'X squares the condition
number.

Features may have any units. If the m differ by more than 1e6, V is too inexact for the minimiser, which then comes from
the curvature with columns scaled to one size (`fedtorch.linalg`), O(p³) a round. Gradient steps are those in the units
of the given features: along a comparatively small feature they make no progress.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedtorch import expected, functional, linalg, tree
from fedtorch.data.federated import described_rows
from fedtorch.federation.algorithm import Local, LocalSolver, Quadratic
from fedtorch.federation.solvers._state import LocalState
from fedtorch.federation.solvers.prediction import predictor
from fedtorch.federation.turn import Turn
from fedtorch.models.hierarchical.penalised import Rows, check_family, negative_log_likelihood, observed, penalised_mode
from fedtorch.models.linear import CLEAR, LinearHead, Spectral, is_rowwise, spectral_rows
from fedtorch.tree import Tree


def least_squares(
    module: nn.Linear | LinearHead, *, steps: int | None = None, lr: float | None = None, family: str = "gaussian"
) -> LocalSolver:
    """Return a local solver of the mean squared error of `module`: its minimiser, or the end of `steps` gradient steps.

    If the minimiser is not unique (fewer rows than features, or linearly dependent features, and no quadratic), the
    result is the one nearest to the start in the units of the features, the limit of gradient descent; a feature that
    is always zero keeps its coefficient. Dependent features give a warning. With `steps` the result is that of
    full-batch `torch.optim.SGD` on `torch.nn.functional.mse_loss`. `Local.info` has the mean squared `loss` at the
    solution.

    Logistic and Poisson regression use iteratively reweighted least squares, the steps of Newton's method on the mean
    negative log-likelihood; the module's output is the log-odds, or the log rate.

    Args:
        module: an `nn.Linear`, whose data are rows `(x, y)` with x `(N, d)` and y `(N, o)` or, for one output, `(N,)`;
            or a `LinearHead`, with the inputs of its feature map and y `(N,)`. A feature map that is a module, the
            body of a network, is frozen, and evaluated as in `eval()`.
        steps: gradient steps T of a round; None for the minimiser.
        lr: their size η; default: 1 / the largest curvature of each client with its quadratic, by which its objective
            never increases.
        family: "gaussian", "logistic" (responses 0 or 1) or "poisson" (counts). For the latter two `steps` is the most
            Newton steps, there is no `lr`, and the module has one output. If a client's responses are separable there
            is no finite minimiser without a quadratic, such as that of `ft.matrix_normal`; steps then end far out,
            where they gain nothing more.

    Raises:
        TypeError: `module` is neither.
        ValueError: a coefficient is frozen, or the feature map is not; `steps` or `lr` is not positive, or there is
            `lr` without `steps`; or the data do not fit the module (when a population is bound).

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.tensor([1.0, 3.0]))])
        >>> local = ft.least_squares(ft.LinearHead(1, intercept=False), steps=1, lr=0.25)
        >>> ft.Run(ft.fedavg(local), ft.InProcess(data)).step().server
        {'coefficients': tensor([1.])}
    """
    functional.check_made(module)
    module = copy.deepcopy(module)
    form = linear_form(module)
    body = getattr(module, "feature_map", None)
    within = {f"feature_map.{name}" for name, _ in body.named_parameters()} if isinstance(body, nn.Module) else set()
    frozen = [n for n, parameter in module.named_parameters() if not parameter.requires_grad and n not in within]
    trained = [n for n, parameter in module.named_parameters() if parameter.requires_grad and n in within]
    if frozen:
        raise ValueError(f"Expected trainable parameters, but got frozen {', '.join(frozen)}; use ft.gradient_descent")
    if trained:
        raise ValueError(
            f"Expected a frozen feature map, because a closed form does not train it, but got trainable "
            f"{', '.join(trained)}; freeze it by feature_map.requires_grad_(False), or use ft.gradient_descent"
        )
    if within:
        body.eval()  # type: ignore[union-attr]
    if steps is None and lr is not None:
        raise ValueError("Expected steps with lr, but got lr alone; leave both out for the minimiser")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ValueError(f"Expected steps to be a whole number of at least 1, or None, but got {steps}")
    if lr is not None:
        expected.positive(lr=lr)
    normal = family == "gaussian"
    if not normal:
        _check_generalised(form, family, lr)
    return LocalSolver(
        solve=partial(_solve, form, steps, lr) if normal else partial(_reweighted, form, steps, family),
        parameters=functional.parameters(module),
        init=lambda parameters: LocalState({}, {}, None),
        predict=predictor(module, rowwise=is_rowwise(module)),
        tensors=lambda parameters, state: parameters,
        prepare=partial(_prepare, form) if normal else partial(_observed, form, family),
        module=module,
        settings={"solver": "least_squares", "module": type(module), "steps": steps, "lr": lr}
        | ({} if normal else {"family": family}),
        statistics=(lambda prepared: prepared.statistics.all_rows()) if normal else None,
        family=family,
    )


def _check_generalised(form: LinearForm, family: str, lr: float | None) -> None:
    check_family(family)
    if lr is not None:
        raise ValueError(f"Expected no lr with family={family!r}, whose steps are Newton's, but got {lr}")
    if form.outputs != 1:
        raise ValueError(f"Expected a module of one output with family={family!r}, but got {form.outputs}")


def _observed(form: LinearForm, family: str, data: Any) -> Rows:
    if not (isinstance(data.batch, tuple) and len(data.batch) == 2 and data.batch[0].is_floating_point()):
        raise ValueError(
            f"Expected rows (x, y) of real x, but got {described_rows(data.batch)}; see ft.data.from_tensors"
        )
    with torch.no_grad():
        x = form.design(data.batch[0]).to(torch.float64)
    return observed(family, data._replace(batch=(x, data.batch[1])), x.shape[-1])


def _reweighted(
    form: LinearForm,
    steps: int | None,
    family: str,
    start: Tree,
    state: Tree,
    data: Rows,
    quadratic: Quadratic | None,
    turn: Turn,
) -> Local:
    old, rows = form.join(start)[..., 0].to(torch.float64), data.count.clamp(min=1).to(torch.float64)
    precision, shift = torch.zeros_like(rows), torch.zeros_like(old)
    if quadratic is not None:
        added = _added(quadratic, start, form)
        precision, shift = added.precision, added.shift[..., 0]
        if precision.shape[1] != 1:
            raise ValueError(
                "Expected one precision for all coefficients, but got one for each; use ft.gradient_descent"
            )
        precision = precision[:, 0]
    new = penalised_mode(family, data, old, rows * precision, rows[:, None] * shift, steps)
    solution = tree.map(lambda leaf, like: leaf.to(like.dtype), form.split(new[..., None]), start)
    loss = negative_log_likelihood(family, data, new) / rows
    return Local(solution, state, torch.zeros_like(rows), {"loss": loss})


def _prepare(form: LinearForm, data: Any) -> Spectral:
    if not (isinstance(data.batch, tuple) and len(data.batch) == 2 and data.batch[0].is_floating_point()):
        raise ValueError(
            f"Expected rows (x, y) of real x, but got {described_rows(data.batch)}; see ft.data.from_tensors"
        )
    x, y = data.batch
    y = y[..., None] if y.ndim == 2 else y
    with torch.no_grad():
        x = form.design(x)
    if y.shape[2:] != (form.outputs,):
        raise ValueError(f"Expected targets of shape ({form.outputs},), but got {tuple(y.shape[2:])}")
    return spectral_rows(x, y, data.mask)._replace(count=data.count)  # a client without rows stays at the start


def _solve(
    form: LinearForm,
    steps: int | None,
    lr: float | None,
    start: Tree,
    state: Tree,
    data: Spectral,
    quadratic: Quadratic | None,
    turn: Turn,
) -> Local:
    share, fit = 2 / form.outputs, data.fit.solution  # from here on θ is relative to the fit
    old = form.join(start).to(torch.float64) - fit
    added = None if quadratic is None else _added(quadratic, start, form, fit)
    if steps is None:
        new, taken = _minimiser(data, share, added, old), torch.zeros_like(data.values[:, 0])
    else:
        new, taken = _descended(data, share, added, old, steps, lr)
    away = torch.baddbmm(data.left, data.statistics.gram, new, beta=-2)
    loss = ((data.rest + (new * away).sum((1, 2))) / form.outputs).clamp(min=0)
    solution = tree.map(lambda leaf, like: leaf.to(like.dtype), form.split(new + fit), start)
    return Local(solution, state, taken, {"loss": loss})


class _Added(NamedTuple):
    """A quadratic ½ Σ λ_j θ_j² − ⟨h, θ⟩."""

    precision: Tensor  # (K, 1) or (K, p) λ
    shift: Tensor  # (K, p, o) h


def _added(quadratic: Quadratic, parameters: Tree, form: LinearForm, fit: Tensor | float = 0.0) -> _Added:
    """Return the quadratic relative to a fit `(K, p, o)`, up to a constant."""
    common = quadratic.precision
    precision = common[:, None] if isinstance(common, Tensor) else _precisions(quadratic, parameters, form)
    precision = precision.to(torch.float64)
    return _Added(precision, form.join(quadratic.shift).to(torch.float64) - precision[..., None] * fit)


def _minimiser(data: Spectral, share: float, added: _Added | None, old: Tensor) -> Tensor:
    """Return the minimiser `(K, p, o)` nearest to `old`; `share` of X'X is the curvature of the loss."""
    if added is not None and added.precision.shape[1] != 1:
        return _exact_minimiser(data, share, added, old)
    curvature, target = data.values * share, data.cross * share
    if added is not None:
        curvature, target = curvature + added.precision, target + data.vectors.mT @ added.shift
    known = curvature > 0
    inside = target / curvature[..., None]
    inexact = (known & (curvature < CLEAR * curvature.amax(-1, keepdim=True))).any(-1)
    some_open, some_inexact = torch.stack([~known.all(), inexact.any()]).tolist()
    if some_open:
        inside = torch.where(known[..., None], inside, data.vectors.mT @ old)
    new = data.vectors @ inside
    if some_inexact:
        own, more, start = tree.map(lambda leaf: leaf[inexact], (data, added, old))
        new[inexact] = _exact_minimiser(own, share, more, start)
    return new


def _exact_minimiser(data: Spectral, share: float, added: _Added | None, old: Tensor) -> Tensor:
    """Return the minimiser in a way that does not depend on the units of the features."""
    matrix, right = data.statistics.gram * share, data.left * share
    if added is not None:
        matrix, right = matrix + added.precision.expand(right.shape[:2]).diag_embed(), right + added.shift
    parts = linalg.equilibrated(matrix)
    null = parts.null()
    root = parts.inverse_root(null)
    return root @ (root.mT @ right) + null @ (null.mT @ old)


def _descended(
    data: Spectral, share: float, added: _Added | None, old: Tensor, steps: int, lr: float | None
) -> tuple[Tensor, Tensor]:
    """Return the end of gradient steps from `old`, `(K, p, o)`, and the sum of the learning rates `(K,)`."""
    basis, curvature, descent = data.vectors, data.values * share, data.cross * share
    if added is not None:
        if added.precision.shape[1] == 1:
            curvature = curvature + added.precision
        else:
            curvature, basis = torch.linalg.eigh(data.statistics.gram * share + added.precision.diag_embed())
            descent = basis.mT @ (data.left * share)
        descent = torch.baddbmm(descent, basis.mT, added.shift)
    reach, taken = _gradient_steps(curvature, steps, lr)
    slope = torch.addcmul(descent, curvature[..., None], basis.mT.bmm(old), value=-1)
    return torch.baddbmm(old, basis, slope.mul_(reach[..., None])), taken


def _gradient_steps(curvature: Tensor, steps: int, lr: float | None) -> tuple[Tensor, Tensor]:
    """Return η Σ_{t<T} (1 − η m)^t of every curvature m `(K, p)`, and the sum of the learning rates `(K,)`."""
    largest = curvature.amax(1, keepdim=True)
    rate = largest.reciprocal().masked_fill_(largest <= 0, 0.0) if lr is None else torch.full_like(largest, lr)
    # From T's binary digits: a sum of T powers twice over is that sum times 1 + q^T, and one more term is q^T.
    ratio = 1 - rate * curvature
    power, total = ratio, torch.ones_like(ratio)  # of the first binary digit, which is 1
    for digit in f"{steps:b}"[1:]:
        total, power = total.addcmul(total, power), power * power
        if digit == "1":
            total, power = total + power, power * ratio
    return rate * total, steps * rate[:, 0]


def _precisions(quadratic: Quadratic, parameters: Tree, form: LinearForm) -> Tensor:
    """Return λ of every row of θ, `(K, p)`."""
    each = {
        name: tree.along(quadratic.precision_of(name), leaf) * torch.ones_like(leaf)
        for name, leaf in parameters.items()
    }
    return form.join(each)[..., 0]


class LinearForm(NamedTuple):
    """Coefficients θ on features, of any of the modules, an intercept at their end."""

    outputs: int  # o
    features: int  # d, the intercept not among them
    design: Callable[[Tensor], Tensor]  # inputs (K, N, ...) -> features (K, N, p)
    join: Callable[[Tree], Tensor]  # parameters -> θ (K, p, o)
    split: Callable[[Tensor], dict[str, Tensor]]  # inverse of `join`


def linear_form(module: nn.Module) -> LinearForm:
    """Return the form of an `nn.Linear` or a `LinearHead`.

    Raises:
        TypeError: another module.

    Example:
        >>> import torch
        >>> linear_form(torch.nn.Linear(2, 1)).design(torch.tensor([[[3.0, 4.0]]]))  # the intercept's feature is 1
        tensor([[[3., 4., 1.]]], dtype=torch.float64)
    """
    if isinstance(module, LinearHead):
        return LinearForm(
            1,
            module.features,
            module.block_design,
            lambda tensors: tensors["coefficients"][..., None],
            lambda θ: {"coefficients": θ[..., 0]},
        )
    if not isinstance(module, nn.Linear):
        raise TypeError(
            f"Expected an nn.Linear or a LinearHead, but got {type(module).__name__}; use ft.gradient_descent"
        )
    features, bias = module.in_features, module.bias is not None

    def design(x: Tensor) -> Tensor:
        if x.shape[2:] != (features,):
            raise ValueError(f"Expected inputs of shape ({features},), but got {tuple(x.shape[2:])}")
        x = x.to(torch.float64)
        return torch.cat([x, torch.ones_like(x[..., :1])], -1) if bias else x

    def join(tensors: Tree) -> Tensor:
        weight = tensors["weight"].mT
        return torch.cat([weight, tensors["bias"][:, None, :]], 1) if bias else weight

    def split(joined: Tensor) -> dict[str, Tensor]:
        weight = {"weight": joined[:, :features].mT}
        return {**weight, "bias": joined[:, -1]} if bias else weight

    return LinearForm(module.out_features, features, design, join, split)
