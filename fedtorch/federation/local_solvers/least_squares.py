r"""Least squares in closed form: the local problem solved exactly, or by T gradient steps at once, from Gram matrices.

For an `nn.Linear` with weight W and bias b, client k's objective is

.. math:: \frac1{n_k o}\|Y_k - X_k W' - b\|^2 + \frac{\lambda}{2}\|(W, b)\|^2 - \langle h, (W, b)\rangle,

that of `torch.nn.functional.mse_loss` plus the `Quadratic` of the others, o being the number of outputs. With its
curvature V diag(m) V' and its gradient g at the start x, both the minimiser and the end of T full-batch gradient steps
of size η are

.. math::
    x - V \mathrm{diag}(f) V' g, \qquad f = 1 / m \quad\text{or}\quad f = \eta \sum_{t < T} (1 - \eta m)^t.

A λ that all parameters share only adds to m, so V comes from one eigendecomposition of X'X when the data are prepared,
and a round costs O(p²) whatever the number of rows and steps. Everything is kept in float64, because X'X squares the
condition number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedtorch import tree
from fedtorch.federation.algorithm import Local, LocalSolver, Quadratic
from fedtorch.federation.local_solvers.gradient_descent import LocalState
from fedtorch.federation.local_solvers.prediction import predictor
from fedtorch.models import functional
from fedtorch.tree import Tree

__all__ = ["Gram", "least_squares"]

_NOISE = 64 * torch.finfo(torch.float64).eps  # eigenvalues below, times p, are rounding of the sums over rows


class Gram(NamedTuple):
    """Second moments of each client's rows, per row, in float64; p counts the features and the bias."""

    values: Tensor  # (K, p) eigenvalues of X'X / n
    vectors: Tensor  # (K, p, p) its eigenvectors V, as columns
    cross: Tensor  # (K, p, o) V'X'Y / n
    response: Tensor  # (K,) ‖Y‖² / n
    count: Tensor  # type: ignore[assignment]  # (K,)


def least_squares(module: nn.Linear, *, steps: int | None = None, lr: float | None = None) -> LocalSolver:
    """A local solver of the mean squared error of `module`: its minimiser, or the end of `steps` gradient steps.

    Where the minimiser is not unique (fewer rows than features and no quadratic), it is the one nearest to the start,
    which is where gradient descent would have gone. With `steps` and `lr` it is where full-batch `torch.optim.SGD` on
    `torch.nn.functional.mse_loss` stops. `Local.info` has the mean squared `loss` at the solution.

    Args:
        module: an `nn.Linear`; data are rows `(x, y)` with x `(N, d)` and y `(N, o)` or, for one output, `(N,)`.
        steps: gradient steps T of a round; None for the minimiser.
        lr: their step size η.

    Raises:
        TypeError: `module` is not an `nn.Linear`.
        ValueError: a parameter is frozen; one of `steps` and `lr` lacks the other, or is not positive; or the data do
            not fit the module (when a population is bound).
    """
    if not isinstance(module, nn.Linear):
        raise TypeError(f"Expected an nn.Linear, but got {type(module).__name__}; use ft.gradient_descent")
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise ValueError(f"Expected trainable parameters, but got frozen {', '.join(frozen)}; use ft.gradient_descent")
    filtered, taken = (_exact, 0.0) if steps is None and lr is None else _gradient_steps(steps, lr)
    module = copy.deepcopy(module)
    parameters = functional.parameters(module)
    outputs = module.out_features

    def prepare(data: Any) -> Gram:
        if isinstance(data, Gram):
            return data
        x, y = data.batch
        y = y[..., None] if y.ndim == 2 else y
        if x.shape[2:] != (module.in_features,) or y.shape[2:] != (outputs,):
            raise ValueError(
                f"Expected rows (x, y) of shapes ({module.in_features},) and ({outputs},), but got "
                f"{tuple(x.shape[2:])} and {tuple(y.shape[2:])}"
            )
        x, y = x.to(torch.float64), y.to(torch.float64)
        if "bias" in parameters:
            x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
        mask = (torch.arange(x.shape[1], device=x.device) < data.count[:, None]).to(x.dtype)[..., None]
        n = data.count.clamp(min=1).to(x.dtype)[:, None, None]  # a client without rows stays at the start
        x, y = x * mask, y * mask
        values, vectors = torch.linalg.eigh(x.mT @ x / n)
        response = (y.square().sum(1, keepdim=True) / n).sum((1, 2))
        return Gram(values, vectors, vectors.mT @ (x.mT @ y / n), response, data.count)

    def solve(start: Tree, state: Tree, data: Any, quadratic: Quadratic | None, key: Tensor) -> Local:
        gram = prepare(data)
        old = _join(start).to(torch.float64)
        basis, curvature = gram.vectors, gram.values * (2 / outputs)
        descent = gram.cross * (2 / outputs)  # minus the gradient, in the basis of the eigenvectors
        if quadratic is not None:
            precision = _precisions(quadratic, start).to(torch.float64)
            if isinstance(quadratic.precision, Tensor):
                curvature = curvature + precision
            else:
                curvature, basis = torch.linalg.eigh((basis * curvature[:, None]) @ basis.mT + precision.diag_embed())
                descent = basis.mT @ (gram.vectors @ descent)
            descent = descent + basis.mT @ _join(quadratic.shift).to(torch.float64)
        descent = descent - curvature[..., None] * (basis.mT @ old)
        new = old + basis @ (filtered(curvature)[..., None] * descent)
        rotated = gram.vectors.mT @ new
        fitted = (rotated * (gram.values[..., None] * rotated - 2 * gram.cross)).sum((1, 2))
        loss = ((gram.response + fitted) / outputs).clamp(min=0)
        solution = tree.map(lambda leaf, like: leaf.to(like.dtype), _split(new, "bias" in start), start)
        return Local(solution, state, torch.full_like(loss, taken), {"loss": loss})

    return LocalSolver(
        solve=solve,
        parameters=parameters,
        init=lambda parameters: LocalState({}, {}, None),
        predict=predictor(module),
        tensors=lambda parameters, state: parameters,
        prepare=prepare,
        module=module,
    )


def _exact(curvature: Tensor) -> Tensor:
    """1 / m, and 0 where m is rounding."""
    noise = _NOISE * curvature.shape[-1] * curvature.abs().amax(-1, keepdim=True)
    return torch.where(curvature.abs() > noise, 1 / curvature, 0.0)


def _gradient_steps(steps: int | None, lr: float | None) -> tuple[Callable[[Tensor], Tensor], float]:
    """m -> η Σ_{t<T} (1 − η m)^t, and the sum of the learning rates."""
    if steps is None or lr is None:
        missing, given = ("steps", "lr") if steps is None else ("lr", "steps")
        raise ValueError(f"Expected steps and lr together, but got {given} without {missing}")
    if steps < 1 or not lr > 0:
        raise ValueError(f"Expected steps of at least 1 and a positive lr, but got {steps} and {lr}")

    def filtered(curvature: Tensor) -> Tensor:
        # From T's binary digits: a sum of T powers twice over is that sum times 1 + q^T, and one more term is q^T.
        ratio = 1 - lr * curvature
        power, total = torch.ones_like(ratio), torch.zeros_like(ratio)
        for digit in f"{steps:b}":
            power, total = power * power, total + total * power
            if digit == "1":
                power, total = power * ratio, total + power
        return lr * total

    return filtered, steps * lr


def _join(parameters: Tree) -> Tensor:
    """Weight and bias as one matrix, `(K, p, o)`."""
    columns = [parameters["weight"].mT]
    if "bias" in parameters:
        columns.append(parameters["bias"][:, None, :])
    return torch.cat(columns, 1)


def _precisions(quadratic: Quadratic, parameters: Tree) -> Tensor:
    """λ of every row of `_join(parameters)`, `(K, p)`."""
    weight = quadratic.precision_of("weight")[:, None].expand(-1, parameters["weight"].shape[2])
    return torch.cat([weight, quadratic.precision_of("bias")[:, None]], 1) if "bias" in parameters else weight


def _split(joined: Tensor, bias: bool) -> dict[str, Tensor]:
    if not bias:
        return {"weight": joined.mT}
    return {"weight": joined[:, :-1].mT, "bias": joined[:, -1]}
