r"""FedOpt: the server takes the mean of the clients' changes as a gradient for an optimiser of its own.

.. math::
    \Delta = \sum_{k \in S} \frac{w_k}{\sum_{j \in S} w_j} (\theta_k - \theta), \qquad
    \theta \leftarrow \text{optimizer}(\theta, \text{gradient} = -\Delta).

Any `torch.optim.Optimizer` will do: `SGD(lr=1)` is FedAvg, with `momentum` it is FedAvgM (Hsu et al. 2019).

Source: Reddi et al. (2021), "Adaptive federated optimization", Algorithm 1; FedAdagrad, FedYogi and FedAdam are its
Algorithm 2 (τ is `eps`). Libraries differ in three places, which are arguments here: where the second moment v begins
(`initial`: τ² in the paper, 0 in Flower and FLamby), whether the bias of Adam's moments is corrected
(`bias_correction`: not in the paper, in FLamby nor in Flower's older strategies; PyTorch's Adam, which `fedadam` is by
default, does and has v = 0), and the momentum of FedAdagrad (`beta`: β₁ of Algorithm 2, which the paper's
experiments and Flower set to 0 and FLamby to 0.9). Flower's FedAdam of today has v = 0 and multiplies η in round t by
√(1 − β₂ᵗ⁺¹) / (1 − β₁ᵗ⁺¹), one round ahead of Adam's correction: `fedopt` with an optimiser of that rate does so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedtorch import expected, tree
from fedtorch.federation.algorithm import Algorithm, LocalSolver, check_solver, solved_by
from fedtorch.federation.algorithms.fedavg import (
    Message,
    Weight,
    averaged_buffers,
    fedavg,
    rows_weight,
    stepped,
    trained,
)
from fedtorch.optimisers import MakeOptimizer, State, TreeOptimizer
from fedtorch.tree import Tree


class FedOptServer(NamedTuple):
    """State of the server."""

    parameters: Tree
    optimizer: State
    steps: Tensor  # () server steps taken


def fedopt(local: LocalSolver, optimizer: MakeOptimizer, *, mu: float = 0.0, weight: Weight = rows_weight) -> Algorithm:
    """Build federated averaging whose server steps by an optimiser; its state is part of the server's.

    Averaged buffers (`gradient_descent(buffers="average")`) have no gradient: their values are averaged as in FedAvg.

    Args:
        local: solver of a client's own problem.
        optimizer: `parameters -> torch.optim.Optimizer`, the server's.
        mu: weight of a proximal term, as in FedProx.
        weight: data -> `(K,)` positive weights; default: the number of rows.

    Shapes: server state is `FedOptServer`; outbox the parameters; client state is the solver's, `(K, ...)`.

    Raises:
        TypeError: the optimiser needs a closure, or keeps its state where it cannot be saved.

    Example:
        >>> import torch, fedtorch as ft
        >>> local = ft.least_squares(torch.nn.Linear(3, 1))
        >>> fedavgm = ft.fedopt(local, lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9))
        >>> server, _ = fedavgm.init(local.parameters, 2)
        >>> sorted(server.optimizer["weight"])
        ['momentum_buffer']
    """
    check_solver(local)
    plain = fedavg(local, mu=mu, weight=weight)
    parameters = trained(local.parameters, averaged_buffers(local))
    steps = TreeOptimizer.made(optimizer, parameters)
    for group in steps.original.param_groups:
        expected.positive(lr=group.get("lr", 1.0))
    steps.init(parameters)  # refuses, at construction, state that cannot be saved
    return Algorithm(
        init=functools.partial(_init, steps, plain),
        outbox=lambda server: server.parameters,
        client=plain.client,
        server=functools.partial(_server, steps),
        model=plain.model,
        prepare=plain.prepare,
        **solved_by(local, algorithm="fedopt", optimizer=optimizer, mu=mu, weight=weight),
    )


def _init(steps: TreeOptimizer, plain: Algorithm, parameters: Tree, clients: int) -> tuple[FedOptServer, Tree]:
    return FedOptServer(parameters, steps.init(parameters), torch.tensor(0)), plain.init(parameters, clients)[1]


def _server(steps: TreeOptimizer, state: FedOptServer, aggregate: Message, key: Tensor) -> FedOptServer:
    mean = stepped(state.parameters, aggregate)
    moved, optimizer_state = steps.step(state.parameters, tree.scale(aggregate.change.value, -1.0), state.optimizer)
    return FedOptServer({**mean, **moved}, optimizer_state, state.steps + 1)


def fedadam(
    local: LocalSolver,
    *,
    lr: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-3,
    bias_correction: bool = True,
    initial: float | None = None,
    mu: float = 0.0,
    weight: Weight = rows_weight,
) -> Algorithm:
    """Build FedAdam: `fedopt` with `torch.optim.Adam`, or without correction of bias (Reddi et al. 2021, Algorithm 2).

    Args:
        local: solver of a client's own problem.
        lr: the server's learning rate η.
        betas: decay β₁ and β₂ of the moments.
        eps: degree of adaptivity τ, in units of a change of the parameters.
        bias_correction: whether the moments are divided by 1 − βᵗ, as PyTorch does.
        initial: start of the second moment without bias correction; default τ², as in the paper; 0 in Flower and
            FLamby.
        mu: weight of a proximal term, as in FedProx.
        weight: data -> `(K,)` positive weights; default: the number of rows.

    Raises:
        ValueError: an initial moment together with bias correction, which assumes 0; or a negative one.

    Example:
        >>> import torch, fedtorch as ft
        >>> algorithm = ft.fedadam(ft.least_squares(torch.nn.Linear(3, 1)), lr=0.1, bias_correction=False)
    """
    if bias_correction:
        if initial is not None:
            raise ValueError(
                "Expected no initial second moment with correction of bias, which takes it to be 0, but got "
                f"{initial}; pass bias_correction=False"
            )
        return fedopt(local, lambda p: torch.optim.Adam(p, lr=lr, betas=betas, eps=eps), mu=mu, weight=weight)
    return fedopt(local, lambda p: Adam(p, lr=lr, betas=betas, eps=eps, initial=initial), mu=mu, weight=weight)


def fedyogi(
    local: LocalSolver,
    *,
    lr: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-3,
    initial: float | None = None,
    mu: float = 0.0,
    weight: Weight = rows_weight,
) -> Algorithm:
    """Build FedYogi: `fedopt` with `Yogi` (Reddi et al. 2021, Algorithm 2). Arguments as those of `fedadam`.

    Example:
        >>> import torch, fedtorch as ft
        >>> algorithm = ft.fedyogi(ft.least_squares(torch.nn.Linear(3, 1)), lr=0.1)
    """
    return fedopt(local, lambda p: Yogi(p, lr=lr, betas=betas, eps=eps, initial=initial), mu=mu, weight=weight)


def fedadagrad(
    local: LocalSolver,
    *,
    lr: float = 0.01,
    beta: float = 0.0,
    eps: float = 1e-3,
    initial: float | None = None,
    mu: float = 0.0,
    weight: Weight = rows_weight,
) -> Algorithm:
    """Build FedAdagrad: `fedopt` with `torch.optim.Adagrad`, or with momentum (Reddi et al. 2021, Algorithm 2).

    Arguments as those of `fedadam`; `beta` is β₁, the decay of the mean gradient, and `initial` the start of the sum of
    squares, by default τ² as in the paper.

    Example:
        >>> import torch, fedtorch as ft
        >>> algorithm = ft.fedadagrad(ft.least_squares(torch.nn.Linear(3, 1)), lr=0.1)
    """
    if beta:
        make = lambda p: Adagrad(p, lr=lr, betas=(beta, 0.0), eps=eps, initial=initial)
        return fedopt(local, make, mu=mu, weight=weight)
    return fedopt(
        local,
        lambda p: torch.optim.Adagrad(p, lr=lr, eps=eps, initial_accumulator_value=_begins(initial, eps)),
        mu=mu,
        weight=weight,
    )


def _begins(initial: float | None, eps: float) -> float:
    """Return the start of the second moments: the given one, or τ²."""
    if initial is not None and not 0 <= initial < math.inf:
        raise ValueError(f"Expected an initial second moment of at least 0, but got {initial}")
    return eps**2 if initial is None else initial


class Yogi(Optimizer):
    r"""Optimiser like Adam without bias correction, whose second moment grows and shrinks at a bounded rate.

    .. math::
        m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad
        v \leftarrow v - (1 - \beta_2) g^2 \operatorname{sign}(v - g^2), \quad
        \theta \leftarrow \theta - \eta\, m / (\sqrt v + \tau),

    from m = 0 and v = τ², or `initial`. A complex number is two real ones, as in torch.

    Source: Zaheer et al. (2018), Algorithm 2, as in Reddi et al. (2021), Algorithm 2.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate η.
        betas: decay β₁ and β₂ of the moments.
        eps: degree of adaptivity τ.
        initial: where v begins; default: τ².
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-3,
        initial: float | None = None,
    ) -> None:
        if not (lr > 0 and eps > 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(
                f"Expected lr > 0, eps > 0 and betas of at least 0 and below 1, but got lr={lr}, eps={eps}, "
                f"betas={betas}"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "initial": _begins(initial, eps)})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return the value of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    begins = complex(group["initial"], group["initial"]) if parameter.is_complex() else group["initial"]
                    state["exp_avg_sq"] = torch.full_like(parameter, begins)
                values, gradient, mean, square = tree.as_real(
                    (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                )
                mean.lerp_(gradient, 1 - beta1)
                self._update(square, gradient.square(), beta2)
                values.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-group["lr"])
        return loss

    @staticmethod
    def _update(square: Tensor, new: Tensor, beta: float) -> None:
        square.addcmul_((square - new).sign(), new, value=beta - 1)


class Adam(Yogi):
    r"""Step like `Yogi`, with v ← β₂ v + (1 − β₂) g²: Adam without correction of bias (Reddi et al. 2021, Alg. 2)."""

    @staticmethod
    def _update(square: Tensor, new: Tensor, beta: float) -> None:
        square.lerp_(new, 1 - beta)


class Adagrad(Yogi):
    r"""Step like `Yogi`, with v ← v + g²: Adagrad with momentum β₁ (Reddi et al. 2021, Algorithm 2)."""

    @staticmethod
    def _update(square: Tensor, new: Tensor, beta: float) -> None:
        square.add_(new)
