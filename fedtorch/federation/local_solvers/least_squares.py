r"""Least squares in closed form: the local problem solved exactly from Gram matrices.

For an `nn.Linear` with weight W and bias b, client k minimises

.. math:: \frac1{n_k o}\|Y_k - X_k W' - b\|^2 + \frac{\lambda}{2}\|(W, b)\|^2 - \langle h, (W, b)\rangle,

the objective of `torch.nn.functional.mse_loss` plus the `Quadratic` of the others, o being the number of outputs. Only
X'X and X'Y are kept of the data, so a round costs O(d³) whatever the number of rows. They are kept in float64, because
forming them squares the condition number.
"""

from __future__ import annotations

import copy
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

    features: Tensor  # (K, p, p) X'X / n
    cross: Tensor  # (K, p, o) X'Y / n
    response: Tensor  # (K,) ‖Y‖² / n
    count: Tensor  # type: ignore[assignment]  # (K,)


def least_squares(module: nn.Linear) -> LocalSolver:
    """A local solver that minimises the mean squared error of `module` exactly.

    Where the minimiser is not unique (fewer rows than features and no quadratic), it is the one nearest to the start,
    which is where gradient descent would have gone. `Local.info` has the mean squared `loss` at the solution.

    Args:
        module: an `nn.Linear`; data are rows `(x, y)` with x `(N, d)` and y `(N, o)` or, for one output, `(N,)`.

    Raises:
        TypeError: `module` is not an `nn.Linear`.
        ValueError: a parameter is frozen; or the data do not fit the module (when a population is bound).
    """
    if not isinstance(module, nn.Linear):
        raise TypeError(f"Expected an nn.Linear, but got {type(module).__name__}; use ft.gradient_descent")
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise ValueError(f"Expected trainable parameters, but got frozen {', '.join(frozen)}; use ft.gradient_descent")
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
        return Gram(x.mT @ x / n, x.mT @ y / n, (y.square().sum(1, keepdim=True) / n).sum((1, 2)), data.count)

    def solve(start: Tree, state: Tree, data: Any, quadratic: Quadratic | None, key: Tensor) -> Local:
        gram = prepare(data)
        old = _join(start).to(torch.float64)
        matrix = gram.features * (2 / outputs)
        vector = gram.cross * (2 / outputs)
        if quadratic is not None:
            matrix = matrix + _precisions(quadratic, start).to(matrix.dtype).diag_embed()
            vector = vector + _join(quadratic.shift)
        inverse = torch.linalg.pinv(matrix, rtol=_NOISE * matrix.shape[-1], hermitian=True)
        new = old + inverse @ (vector - matrix @ old)
        fitted = (new * (gram.features @ new - 2 * gram.cross)).sum((1, 2))
        loss = ((gram.response + fitted) / outputs).clamp(min=0)
        solution = tree.map(lambda leaf, like: leaf.to(like.dtype), _split(new, "bias" in start), start)
        return Local(solution, state, torch.zeros_like(loss), {"loss": loss})

    return LocalSolver(
        solve=solve,
        parameters=parameters,
        init=lambda parameters: LocalState({}, {}, None),
        predict=predictor(module),
        tensors=lambda parameters, state: parameters,
        prepare=prepare,
        module=module,
    )


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
