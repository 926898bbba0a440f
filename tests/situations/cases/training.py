"""Optimisers, schedules, clipping and the numbers of rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from situations.case import Case, MakeOptimizer, Step, adam, mlp, net, sgd


def loss_of(s: Any, batch: Any) -> Tensor:
    return F.mse_loss(s(batch[0]), batch[1])


def optimiser(name: str, kind: Callable[..., Any], **options: Any) -> Case:
    """Return a case of three epochs with an optimiser of torch."""
    make = lambda p: kind(p, **{"lr": 0.05, **options})
    return net(f"optimiser: {name}", mlp, optimizer=make, epochs=3, rowwise=True)


def schedule(
    name: str, make: Callable[[Any], Any], interval: str = "epoch", base: MakeOptimizer | None = None, **more: Any
) -> Case:
    """Return a case of minibatches under a schedule of torch."""

    def configured(parameters: Any) -> Any:
        made = (base or sgd())(parameters)
        entry = {"scheduler": make(made), "interval": interval, "frequency": more.get("frequency", 1)}
        return {"optimizer": made, "lr_scheduler": entry}

    return Case(f"schedule: {name}", lambda: Step(mlp(), loss_of, configured), epochs=3, size=2)


class Groups(Step):
    """Groups of parameters with options of their own."""

    def __init__(self, kind: Any, common: dict[str, Any], *options: dict[str, Any]) -> None:
        super().__init__(mlp(), loss_of)
        self.kind, self.common, self.options = kind, common, options

    def configure_optimizers(self) -> Any:
        layers = [self.net[0], self.net[2]]
        groups = [{"params": list(m.parameters()), **o} for m, o in zip(layers, self.options)]
        return self.kind(groups, **self.common)


class Part(Step):
    """An optimiser of the last layer only; the first has gradients, but does not move."""

    def __init__(self) -> None:
        super().__init__(mlp(), loss_of)

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.net[2].parameters(), lr=0.1)


class Tuple(Step):
    """The optimiser and schedule as two lists."""

    def __init__(self) -> None:
        super().__init__(mlp(), loss_of)

    def configure_optimizers(self) -> Any:
        made = optim.SGD(self.parameters(), lr=0.1)
        return [made], [{"scheduler": lr_scheduler.StepLR(made, 1, 0.3), "interval": "step"}]


class Own(optim.Optimizer):
    """Sign descent with a state of its own, as people write optimisers."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["mean"] = 0.5 * state.get("mean", torch.zeros_like(p)) + 0.5 * p.grad
                p.add_(state["mean"].sign(), alpha=-group["lr"])


class Normed(optim.Optimizer):
    """Descent by the gradient over its own norm."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / (p.grad.norm() + 1e-6), alpha=-group["lr"])


class Cut(optim.SGD):
    """Cuts the norm of each gradient, in place, from a step on."""

    def __init__(self, parameters: Any, lr: float, most: float, after: int) -> None:
        super().__init__(parameters, lr=lr)
        self.most, self.after = most, after

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        loss = None if closure is None else closure()
        self.after -= 1
        for p in self.param_groups[0]["params"] if self.after < 0 else ():
            p.grad.mul_((self.most / p.grad.norm()).clamp(max=1))
        super().step()
        return loss  # type: ignore[no-any-return]


class Lookahead(optim.Optimizer):
    """Steps another optimiser, and goes half of the way back after every second step."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.fast, self.steps = optim.Adam(self.param_groups[0]["params"], lr), 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        loss = self.fast.step(closure)
        self.steps += 1
        for p, slow in zip(self.param_groups[0]["params"], self.slow) if self.steps % 2 == 0 else ():
            slow.lerp_(p.detach(), 0.5)
            p.data.copy_(slow)
        return loss  # type: ignore[return-value]


def counting_steps(s: Any, batch: Any) -> Tensor:
    return loss_of(s, batch) * math.cos(s.global_step)


SPECIAL: dict[str, Callable[[Any], Any]] = {
    "warm-up by LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: min(1.0, (t + 1) / 4)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, 1.0, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.6),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.7),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
}


def sequence(o: Any) -> Any:
    parts = [lr_scheduler.LinearLR(o, 0.3, 1.0, 2), lr_scheduler.ExponentialLR(o, 0.6)]
    return lr_scheduler.SequentialLR(o, parts, [2])


def chain(o: Any) -> Any:
    return lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.3, 2), lr_scheduler.ExponentialLR(o, 0.8)])


CASES: list[Case] = [
    optimiser("SGD", optim.SGD),
    optimiser("SGD, momentum, dampening", optim.SGD, momentum=0.9, dampening=0.3),
    optimiser("SGD, Nesterov, decay", optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    optimiser("SGD, ascending", optim.SGD, maximize=True),
    optimiser("Adam", optim.Adam),
    optimiser("Adam, AMSGrad, decay", optim.Adam, amsgrad=True, weight_decay=0.1),
    optimiser("Adam, decoupled decay", optim.Adam, weight_decay=0.1, decoupled_weight_decay=True),
    optimiser("Adam, own betas and ε", optim.Adam, betas=(0.5, 0.7), eps=1e-3),
    optimiser("AdamW, ascending, AMSGrad", optim.AdamW, maximize=True, amsgrad=True),
    optimiser("NAdam", optim.NAdam, weight_decay=0.1),
    optimiser("RAdam", optim.RAdam, weight_decay=0.1),
    optimiser("Adamax", optim.Adamax),
    optimiser("Adagrad", optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.1),
    optimiser("Adadelta", optim.Adadelta, lr=1.0),
    optimiser("RMSprop, centred, momentum", optim.RMSprop, centered=True, momentum=0.5),
    optimiser("Rprop", optim.Rprop),
    optimiser("ASGD", optim.ASGD, t0=1),
    optimiser("own, with signs and a state", Own),
    optimiser("own, by each parameter's norm", Normed),
    optimiser("Adafactor", optim.Adafactor),
    optimiser("own, cut at a norm that one client seldom has AGC", Cut, most=1.0, after=0),
    optimiser("own, cut from the third step on LARS", Cut, most=0.1, after=2),
    optimiser("around another one, look-ahead", Lookahead),
    net(
        "optimiser: Adam, moments kept over two rounds",
        mlp,
        optimizer=adam(),
        rounds=1,
        says={"reset": "never"},
        rowwise=True,
    ),
    Case(
        "optimiser: groups with rates, decay and momentum",
        lambda: Groups(optim.SGD, {"lr": 0.1, "momentum": 0.5}, {"weight_decay": 0.5}, {"lr": 0.02, "momentum": 0.9}),
        epochs=3,
    ),
    Case(
        "optimiser: groups with betas",
        lambda: Groups(optim.Adam, {"lr": 0.05}, {"betas": (0.5, 0.9)}, {"amsgrad": True}),
        epochs=3,
    ),
    Case(
        "optimiser: a group with rate zero",
        lambda: Groups(optim.AdamW, {"lr": 0.05}, {"lr": 0.0}, {"weight_decay": 0.5}),
        epochs=3,
    ),
    Case("optimiser: of one layer only", Part),
    Case("schedule: two lists lightning#1476", Tuple, size=2),
    Case("schedule: the loss by global_step", lambda: Step(mlp(), counting_steps), size=2),
    *(schedule(f"{name}, by epochs", make) for name, make in SPECIAL.items()),
    *(schedule(f"{name}, by steps lightning#20436", make, "step") for name, make in SPECIAL.items()),
    schedule("sequence, by steps", sequence, "step"),
    schedule("chain, by epochs", chain),
    schedule("StepLR, every second step", lambda o: lr_scheduler.StepLR(o, 1, 0.5), "step", frequency=2),
    schedule("Adam under a cosine", lambda o: lr_scheduler.CosineAnnealingLR(o, 8), "step", adam()),
    schedule(
        "one cycle with momentum", lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=40), "step", sgd(momentum=0.9)
    ),
    net("clipped by norm", mlp, says={"clip": 0.1}),
    net("clipped by norm, Adam", mlp, optimizer=adam(), says={"clip": 0.1}),
    net("clipped by norm, minibatches", mlp, says={"clip": 0.1}, size=2),
    net("clipped above every norm", mlp, says={"clip": 1e3}),
    net("three rounds", mlp, rounds=3, rowwise=True, compiles=True),
    net("three rounds, minibatches", mlp, rounds=3, size=2),
    net("a linear model", lambda: nn.Linear(4, 1), epochs=5, rowwise=True, compiles=True),
    net("a linear model, L1", lambda: nn.Linear(4, 1), loss=F.l1_loss, rowwise=True),
    net("a linear model, Adam, minibatches", lambda: nn.Linear(4, 1), optimizer=adam(), size=2),
    net("a linear model, twenty epochs", lambda: nn.Linear(4, 1), epochs=20, optimizer=sgd(momentum=0.9), rowwise=True),
]
