"""What a stacked solver is held against: a plain training loop per client, in float64, and modules for it."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.core.optimizer import _configure_optimizers, _configure_schedulers_automatic_opt
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR

from fedtorch import functional, random, tree
from fedtorch.data import FederatedData
from fedtorch.federation.algorithm import Quadratic
from fedtorch.federation.solvers.batches import PERMUTATIONS
from fedtorch.federation.solvers.gradient_descent import gradient_descent
from fedtorch.federation.turn import Turn

RAGGED = (1, 4, 5, 8, 9, 40, 3)


CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # rounding of float64 over some dozens of steps


def seeded(make):
    """Modules are initialised from the global generator; give it back as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return make().double()


def net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def stacked_data(counts=RAGGED, form=tuple, classes=2):
    total = sum(counts)
    x = random.normal(random.key(1), (total, 3), torch.float64)
    y = random.randint(random.key(2), classes, (total,))
    rows = {tuple: (x, y), dict: {"x": x, "y": y}}.get(form) or form(x, y)
    return FederatedData(rows, torch.tensor(counts)).stack(range(len(counts)))


def keys(count: int) -> Tensor:
    return random.fold_in(random.key(3), torch.arange(count))


class Session:
    """One client's plain training: its module, optimiser and schedulers, and how many steps they have taken."""

    def __init__(self, module, optimizer=None, loss=None, epochs=None, total=None) -> None:
        self.module, self.loss, self.taken, self.logs = copy.deepcopy(module), loss, 0, {}
        self.trainer = SimpleNamespace(max_epochs=-1 if epochs is None else epochs, training=True)
        self.trainer.estimated_stepping_batches = total
        self.schedulers = []
        if isinstance(module, L.LightningModule):
            self.module.trainer, self.module.log, self.module.log_dict = self.trainer, self.log, self.log_dict
        if optimizer is not None:
            self.optimizer = optimizer(p for p in self.module.parameters() if p.requires_grad)
        else:
            optimizers, schedulers, monitor = _configure_optimizers(self.module.configure_optimizers())
            (self.optimizer,) = optimizers
            self.schedulers = _configure_schedulers_automatic_opt(schedulers, monitor)

    def log(self, name, value, **_) -> None:
        if not isinstance(value, torchmetrics.Metric):
            self.logs.setdefault(name, []).append(torch.as_tensor(value, dtype=torch.float64).detach())

    def log_dict(self, values, **_) -> None:
        for name, value in values.items():
            self.log(name, value)

    def passed(self, per_epoch) -> None:
        """A step has been taken, or missed by a client that was away: schedules go on."""
        self.taken += 1
        within, ends = (self.taken - 1) % per_epoch, self.taken % per_epoch == 0
        for config in self.schedulers:
            if config.interval == "step" and (within + 1) % config.frequency == 0:
                config.scheduler.step()
            if config.interval == "epoch" and ends and (self.taken // per_epoch) % config.frequency == 0:
                config.scheduler.step()

    def catch_up(self, position, per_epoch) -> None:
        """Goes on to step `position` without training."""
        self.optimizer.zero_grad()
        self.optimizer.step()
        while self.taken < position:
            self.passed(per_epoch)

    def step(self, batch, index):
        if self.loss is not None:
            return self.loss(self.module(batch[0]), batch[1])
        arguments = (batch, index) if "index" in self.module.training_step.__code__.co_varnames else (batch,)
        answer = self.module.training_step(*arguments)
        return answer["loss"] if isinstance(answer, dict) else answer


def plain(session, rows, key, epochs=None, steps=None, batch_size=None, quadratic=None, project=None, round=0):
    """Round `round` of one client as anybody would write it: (parameters, buffers, sum of learning rates, info)."""
    n = len(tree.leaves(rows)[0])
    size = n if batch_size is None else batch_size
    per_epoch = -(-n // size)
    session.logs = {}
    rate, losses, t = 0.0, [], 0
    session.catch_up(round * (per_epoch * epochs if epochs else steps), per_epoch)
    for epoch in range(10**6):
        if t == (per_epoch * epochs if epochs else steps):
            break
        order = torch.arange(n)
        if batch_size is not None:
            order = random.permutation(random.fold_in(random.fold_in(key, PERMUTATIONS), epoch), n)
        for chosen in order.split(size):
            if steps is not None and t == steps:
                break
            session.trainer.global_step, session.trainer.current_epoch = session.taken, session.taken // per_epoch
            session.optimizer.zero_grad()
            loss = session.step(tree.take(rows, chosen), t % per_epoch)  # as Lightning numbers batches
            loss.backward()
            losses.append(loss.detach())
            named = dict(session.module.named_parameters())
            for name, p in named.items() if quadratic is not None else ():
                if p.requires_grad:
                    pull = quadratic[0] * p.detach() - quadratic[1][name]
                    p.grad = pull if p.grad is None else p.grad + pull
            rate += float(session.optimizer.param_groups[0]["lr"])
            session.optimizer.step()
            if project is not None:
                with torch.no_grad():
                    for name, value in project({n: p.detach() for n, p in named.items()}).items():
                        named[name].copy_(value)
            t += 1
            session.passed(per_epoch)
    info = {name: torch.stack(values).mean() for name, values in session.logs.items()}
    info["loss"] = torch.stack(losses).mean()
    return functional.parameters(session.module), functional.buffers(session.module), rate, info


def own_rows(data, k):
    return tree.map(lambda leaf: leaf[k, : data.count[k]], data.batch)


def total_steps(data, k, epochs=None, steps=None, batch_size=None):
    n = int(data.count[k])
    return steps or epochs * -(-n // (batch_size or n))


def solve(local, data, key, quadratic=None, start=None, state=None, round=0):
    count = len(data.count)
    start = tree.expand(local.parameters, count) if start is None else start
    state = (
        tree.map(lambda leaf: leaf.expand(count, *leaf.shape).clone(), local.init(local.parameters))
        if state is None
        else state
    )
    return local.solve(start, state, local.prepare(data), quadratic, Turn(key, round))


def check(module, data=None, loss=None, optimizer=None, quadratic=None, buffers="refuse", **options):
    """All of `Local` against the plain loop of each client."""
    data = stacked_data() if data is None else data
    key = keys(len(data.count))
    taken = {name: value for name, value in options.items() if name in ("epochs", "steps", "batch_size")}
    local = gradient_descent(module, loss=loss, optimizer=optimizer, buffers=buffers, rounds=1, **options)
    result = solve(local, data, key, quadratic)
    for k in range(len(data.count)):
        session = Session(module, optimizer, loss, options.get("epochs"), total_steps(data, k, **taken))
        mine = None if quadratic is None else tree.map(lambda leaf, k=k: leaf[k], quadratic)
        parameters, after, rate, info = plain(
            session, own_rows(data, k), key[k], quadratic=mine, project=options.get("project"), **taken
        )
        for name, value in parameters.items():
            torch.testing.assert_close(result.parameters[name][k], value, **CLOSE)
        for name, value in result.state.buffers.items():
            torch.testing.assert_close(value[k], after[name], **CLOSE)
        assert float(result.lr_sum[k]) == pytest.approx(rate, rel=1e-12)
        assert result.info.keys() == info.keys()
        for name, value in info.items():
            torch.testing.assert_close(result.info[name][k].double(), value.double(), **CLOSE)
    return result


OPTIMISERS = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.02),
    "adam": lambda p: Adam(p, lr=0.05, weight_decay=0.01),
    "amsgrad": lambda p: Adam(p, lr=0.05, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=0.05, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "tensor_rate": lambda p: Adam(p, lr=torch.tensor(0.05, dtype=torch.float64), foreach=False),
}


class Lit(L.LightningModule):
    """The normal case: metrics, logs, and whatever `configure` returns."""

    def __init__(self, configure=None, layers=None, classes: int = 2) -> None:
        super().__init__()
        self.configure = configure or (lambda lit: SGD(lit.parameters(), lr=0.1))
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, classes)) if layers is None else layers
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=classes)
        self.others = torchmetrics.MetricCollection([torchmetrics.F1Score("multiclass", num_classes=classes)])

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("acc", self.accuracy(logits, y))
        self.log("error", 1 - self.accuracy(logits, y))
        self.others.update(logits, y)
        self.log_dict(self.others(logits, y))
        self.log("f1", self.others["MulticlassF1Score"])
        self.log_dict({"size": logits.abs().mean(), "constant": 3})
        return loss

    def configure_optimizers(self):
        return self.configure(self)


def lit(*arguments, kind=Lit, **keywords):
    return seeded(lambda: kind(*arguments, **keywords))


class NoMetrics(Lit):
    def training_step(self, batch, index):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss


def rate(lit):
    return SGD(lit.parameters(), lr=0.2, momentum=0.5)


FORMS = {
    "optimizer": rate,
    "list": lambda lit: [rate(lit)],
    "two_lists": lambda lit: ([o := rate(lit)], [StepLR(o, 1, 0.5)]),
    "list_and_scheduler": lambda lit: ([o := rate(lit)], StepLR(o, 1, 0.5)),
    "two_schedulers": lambda lit: ([o := rate(lit)], [StepLR(o, 2, 0.5), LambdaLR(o, lambda e: 0.9**e)]),
    "lists_of_dicts": lambda lit: ([o := rate(lit)], [{"scheduler": StepLR(o, 2, 0.5), "interval": "step"}]),
    "dict": lambda lit: {"optimizer": rate(lit)},
    "dict_scheduler": lambda lit: {"optimizer": (o := rate(lit)), "lr_scheduler": StepLR(o, 1, 0.5)},
    "dict_dict": lambda lit: {
        "optimizer": (o := rate(lit)),
        "lr_scheduler": {"scheduler": CosineAnnealingLR(o, 6), "interval": "step", "name": "cosine"},
    },
    "dicts": lambda lit: [{"optimizer": (o := rate(lit)), "lr_scheduler": {"scheduler": CosineAnnealingLR(o, 3)}}],
    "frequency": lambda lit: {
        "optimizer": (o := rate(lit)),
        "lr_scheduler": {"scheduler": StepLR(o, 1, 0.5), "frequency": 2},
    },
    "step_frequency": lambda lit: {
        "optimizer": (o := rate(lit)),
        "lr_scheduler": {"scheduler": StepLR(o, 1, 0.9), "interval": "step", "frequency": 2},
    },
    "one_cycle": lambda lit: {
        "optimizer": (o := rate(lit)),
        "lr_scheduler": {
            "scheduler": OneCycleLR(o, 0.3, total_steps=lit.trainer.estimated_stepping_batches + 1),
            "interval": "step",
        },
    },
    "warm_up": lambda lit: {
        "optimizer": (o := rate(lit)),
        "lr_scheduler": {"scheduler": LambdaLR(o, lambda t: min(1, t / 5)), "interval": "step"},
    },
    "max_epochs": lambda lit: ([o := rate(lit)], [CosineAnnealingLR(o, abs(lit.trainer.max_epochs))]),
}


def with_norm(**keywords):
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **keywords), nn.Linear(4, 2)))


def quadratic_of(module, count):
    shift = {
        name: random.normal(random.fold_in(random.key(4), i), (count, *p.shape), torch.float64)
        for i, (name, p) in enumerate(functional.parameters(module).items())
    }
    return Quadratic(random.uniform(random.key(5), (count,), torch.float64), shift)


class Odd(nn.Module):
    """Tied, frozen, unused and scalar parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.unused, self.scale = nn.Parameter(torch.ones(2)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale * self.second(torch.tanh(self.frozen(self.first(x))))


def over_rounds(module, optimizer, loss, reset="never", **options):
    """Rounds of partial participation against each client's plain loop on the federation's clock."""
    options = options or {"epochs": 2, "batch_size": 4}
    data, count = stacked_data(), len(RAGGED)
    local = gradient_descent(module, loss=loss, optimizer=optimizer, reset=reset, rounds=4, **options)
    local.prepare(data)
    total = [4 * total_steps(data, k, **options) for k in range(count)]
    begin = lambda k: Session(module, optimizer, loss, 4 * options["epochs"] if "epochs" in options else None, total[k])
    sessions = [begin(k) for k in range(count)]
    taken = [0] * count
    start = tree.map(torch.clone, tree.expand(local.parameters, count))
    state = tree.map(lambda leaf: leaf.expand(count, *leaf.shape).clone(), local.init(local.parameters))
    for number, cohort in enumerate([[0, 2, 5], [1, 2, 3, 5], list(range(7)), [2, 6]]):
        key = random.fold_in(keys(count), number)
        at = torch.tensor(cohort)
        some = tree.take((start, state, data, key), at)
        result = local.solve(some[0], some[1], some[2], None, Turn(some[3], number))
        if reset == "round":
            sessions = [begin(k) for k in range(count)]
            for k, session in enumerate(sessions):
                session.module.load_state_dict({name: leaf[k] for name, leaf in start.items()}, strict=False)
        tree.map(
            lambda whole, some, at=at: whole.index_copy_(0, at, some), (start, state), (result.parameters, result.state)
        )
        for row, k in enumerate(cohort):
            parameters, _, rate, info = plain(sessions[k], own_rows(data, k), key[k], round=number, **options)
            taken[k] += total_steps(data, k, **options)
            assert float(result.lr_sum[row]) == pytest.approx(rate, rel=1e-12)
            torch.testing.assert_close(result.info["loss"][row].double(), info["loss"].double(), **CLOSE)
            mine = tree.map(lambda leaf, k=k: leaf[k], start)
            torch.testing.assert_close(mine, parameters, **CLOSE)
    assert reset == "round" or state.steps.tolist() == taken


class Noisy(NoMetrics):
    """Several kinds of randomness, all per example."""

    def training_step(self, batch, index):
        x, y = batch
        x = F.dropout(x, 0.3) + 0.1 * torch.randn_like(x)
        x = x * torch.bernoulli(torch.full_like(x, 0.8)) + torch.rand(len(x), 1, dtype=x.dtype)
        return F.cross_entropy(self.net(x), y)
