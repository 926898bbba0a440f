"""Stacked training equals a plain loop per client, in float64 and up to rounding; what cannot is refused by name."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import NamedTuple

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.core.optimizer import _configure_optimizers, _configure_schedulers_automatic_opt
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from fedtorch import functional, random, tree
from fedtorch.data import BadClients, FederatedData
from fedtorch.federation.algorithm import Quadratic
from fedtorch.federation.local_solvers.batches import PERMUTATIONS
from fedtorch.federation.local_solvers.gradient_descent import gradient_descent

RAGGED = (1, 4, 5, 8, 9, 40, 3)
CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # rounding of float64 over some dozens of steps


@pytest.fixture(autouse=True)
def _nothing_outside_changes():
    before = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == before[1:]


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

    def step(self, batch, index):
        if self.loss is not None:
            return self.loss(self.module(batch[0]), batch[1])
        arguments = (batch, index) if "index" in self.module.training_step.__code__.co_varnames else (batch,)
        answer = self.module.training_step(*arguments)
        return answer["loss"] if isinstance(answer, dict) else answer


def plain(session, rows, key, epochs=None, steps=None, batch_size=None, quadratic=None, project=None):
    """One round of one client as anybody would write it: (parameters, buffers, sum of learning rates, info)."""
    n = len(tree.leaves(rows)[0])
    size = n if batch_size is None else batch_size
    per_epoch = -(-n // size)
    session.logs = {}
    rate, losses, t = 0.0, [], 0
    for epoch in range(10**6):
        if t == (per_epoch * epochs if epochs else steps):
            break
        order = torch.arange(n)
        if batch_size is not None:
            order = random.permutation(random.fold_in(random.fold_in(key, PERMUTATIONS), epoch), n)
        for index, chosen in enumerate(order.split(size)):
            if steps is not None and t == steps:
                break
            session.trainer.global_step, session.trainer.current_epoch = session.taken, session.taken // per_epoch
            session.optimizer.zero_grad()
            loss = session.step(tree.take(rows, chosen), t)
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
            t, session.taken = t + 1, session.taken + 1
            ends = session.taken % per_epoch == 0
            for config in session.schedulers:
                if config.interval == "step" and (index + 1) % config.frequency == 0:
                    config.scheduler.step()
                if config.interval == "epoch" and ends and (session.taken // per_epoch) % config.frequency == 0:
                    config.scheduler.step()
    info = {name: torch.stack(values).mean() for name, values in session.logs.items()}
    info["loss"] = torch.stack(losses).mean()
    return functional.parameters(session.module), functional.buffers(session.module), rate, info


def own_rows(data, k):
    return tree.map(lambda leaf: leaf[k, : data.count[k]], data.batch)


def total_steps(data, k, epochs=None, steps=None, batch_size=None):
    n = int(data.count[k])
    return steps or epochs * -(-n // (batch_size or n))


def solve(local, data, key, quadratic=None, start=None, state=None):
    count = len(data.count)
    start = tree.expand(local.parameters, count) if start is None else start
    state = (
        tree.map(lambda leaf: leaf.expand(count, *leaf.shape).clone(), local.init(local.parameters))
        if state is None
        else state
    )
    return local(start, state, local.prepare(data), quadratic, key)


def check(module, data=None, loss=None, optimizer=None, quadratic=None, buffers="refuse", **options):
    """All of `Local` against the plain loop of each client."""
    data = stacked_data() if data is None else data
    key = keys(len(data.count))
    taken = {name: value for name, value in options.items() if name in ("epochs", "steps", "batch_size")}
    local = gradient_descent(module, loss=loss, optimizer=optimizer, buffers=buffers, **options)
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
        assert float(result.steps[k]) == pytest.approx(rate, rel=1e-12)
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


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers(name):
    check(net(), loss=F.cross_entropy, optimizer=OPTIMISERS[name], epochs=3, batch_size=4)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("options", [{"epochs": 1}, {"epochs": 3}, {"steps": 7}], ids=str)
@pytest.mark.parametrize("counts", [(3,), (4,), (5,), (3, 4, 5, 8), RAGGED], ids=str)
@pytest.mark.parametrize("batch_size", [4, None])
def test_batches_of_a_data_loader(optimizer, options, counts, batch_size):
    options = {**options, "batch_size": batch_size}
    check(net(), stacked_data(counts), F.cross_entropy, OPTIMISERS[optimizer], **options)


def test_groups_of_parameters_with_their_own_options():
    def optimizer(parameters):
        first, second, *rest = parameters
        return SGD([{"params": [second, first], "lr": 0.3}, {"params": rest, "momentum": 0.8}], lr=0.05)

    check(net(), loss=F.cross_entropy, optimizer=optimizer, epochs=2, batch_size=4)


class Weighted(nn.Module):
    """Class weights: the loss of a batch is not the mean of its examples' losses."""

    def forward(self, output, target):
        return F.cross_entropy(output, target, weight=torch.tensor([1.0, 3.0], dtype=torch.float64))


def summed(output, target):
    return F.cross_entropy(output, target, reduction="sum")


@pytest.mark.parametrize("loss", [Weighted(), summed], ids=["class_weights", "sum"])
@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("zero", [False, True])
def test_losses_that_are_not_means_of_examples(loss, batch_size, zero):
    module = net()
    if zero:  # every example has the same loss at the start
        for p in module.parameters():
            p.data.zero_()
    check(module, loss=loss, optimizer=OPTIMISERS["adam"], epochs=2, batch_size=batch_size)


def test_blocks_seen_later_may_not_split():
    """A first block of one class cannot show that a loss weights classes."""
    local = gradient_descent(net(), loss=Weighted(), optimizer=OPTIMISERS["sgd"], epochs=1, batch_size=4)
    data = stacked_data()
    local.prepare(data._replace(batch=(data.batch[0], torch.zeros_like(data.batch[1]))))
    result = solve(local, data, keys(len(data.count)))
    for k in range(len(data.count)):
        session = Session(net(), OPTIMISERS["sgd"], Weighted())
        parameters, *_ = plain(session, own_rows(data, k), keys(len(data.count))[k], epochs=1, batch_size=4)
        torch.testing.assert_close(tree.map(lambda leaf, k=k: leaf[k], result.parameters), parameters, **CLOSE)


def test_a_loss_that_is_infinite_on_rows_of_zeros():
    """Padding must not reach the gradient, not even as 0 · ∞."""

    def loss(output, target):
        return (output.sum(1) * target.log()).mean()

    x, y = stacked_data().batch
    count = torch.tensor(RAGGED)
    mask = torch.arange(40) < count[:, None]
    data = stacked_data()._replace(batch=(x, torch.where(mask, y + 1.0, 0.0)))
    for batch_size in (4, None):
        result = check(net(), data, loss, OPTIMISERS["sgd"], epochs=1, batch_size=batch_size)
        assert all(leaf.isfinite().all() for leaf in tree.leaves(result.parameters))


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


def test_a_lightning_module_with_metrics_and_logs():
    module = lit()
    before = copy.deepcopy(module.state_dict())
    local = gradient_descent(module, epochs=2, batch_size=4)
    data = stacked_data()
    result = solve(local, data, keys(7))
    assert result.info.keys() == {"train_loss", "size", "constant", "loss"}
    torch.testing.assert_close(result.info["train_loss"], result.info["loss"], **CLOSE)
    reference = check(lit(kind=NoMetrics), epochs=2, batch_size=4)
    torch.testing.assert_close(result.parameters, reference.parameters, **CLOSE)
    assert module._trainer is None
    assert "log" not in vars(module)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert isinstance(local.module.accuracy, torchmetrics.Metric)


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{"epochs": 1}, {"epochs": 3}, {"steps": 7}], ids=str)
def test_every_form_of_configure_optimizers_and_schedules(form, options):
    check(lit(FORMS[form], kind=NoMetrics), batch_size=4, **options)


class AsksTrainer(NoMetrics):
    def training_step(self, batch, index):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss * (1 + self.current_epoch) + self.global_step * self(batch[0]).square().mean() + 0.1 * index


def test_a_module_that_asks_for_the_epoch():
    check(lit(kind=AsksTrainer), epochs=3, batch_size=4)
    with pytest.raises(TypeError, match=r"trainer.current_epoch, trainer.global_step, batch_idx.*compile=False"):
        solve(gradient_descent(lit(kind=AsksTrainer), epochs=1, compile=True), stacked_data(), keys(7))


class AsksTotal(NoMetrics):
    def training_step(self, batch, index):
        share = self.trainer.global_step / self.trainer.estimated_stepping_batches
        return share * F.cross_entropy(self(batch[0]), batch[1])


def test_a_training_step_that_asks_for_the_number_of_steps():
    check(lit(kind=AsksTotal), epochs=3, batch_size=4)


class DictBatch(Lit):
    def training_step(self, batch):
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        return {"loss": loss, "other": 1}


class Pair(NamedTuple):
    inputs: Tensor
    labels: Tensor


class PairBatch(Lit):
    def training_step(self, batch):
        return F.cross_entropy(self(batch.inputs), batch.labels)


def test_batches_as_dicts_and_named_tuples_without_an_index():
    check(lit(kind=DictBatch), stacked_data(form=dict), epochs=2, batch_size=4)
    check(lit(kind=PairBatch), stacked_data(form=Pair), epochs=2, batch_size=4)


class OddLogs(NoMetrics):
    """Logs that are not means of the examples' values."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("perplexity", loss.exp())
        self.log("rows", float(len(batch[0])))
        return loss


def test_logs_that_are_not_means_of_examples():
    check(lit(kind=OddLogs), epochs=2, batch_size=4)


def with_norm(**keywords):
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **keywords), nn.Linear(4, 2)))


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_batch_norm(buffers):
    data = stacked_data((2, 4, 6, 8, 10))
    result = check(with_norm(), data, F.cross_entropy, OPTIMISERS["adam"], buffers=buffers, epochs=2, batch_size=4)
    averaged = {"1.running_mean", "1.running_var"} if buffers == "average" else set()
    assert averaged <= result.parameters.keys()
    assert result.state.buffers.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"} - averaged


def test_averaged_buffers_start_at_what_the_server_sends():
    local = gradient_descent(
        with_norm(), epochs=1, loss=F.cross_entropy, optimizer=OPTIMISERS["sgd"], buffers="average"
    )
    start = tree.expand({**local.parameters, "1.running_mean": torch.full((4,), 9.0, dtype=torch.float64)}, 2)
    result = solve(local, stacked_data((4, 6)), keys(2), start=start)
    module = functional.load(with_norm(), {"1.running_mean": torch.full((4,), 9.0, dtype=torch.float64)})
    _, after, *_ = plain(
        Session(module, OPTIMISERS["sgd"], F.cross_entropy), own_rows(stacked_data((4, 6)), 1), keys(2)[1], epochs=1
    )
    torch.testing.assert_close(result.parameters["1.running_mean"][1], after["1.running_mean"], **CLOSE)


def quadratic_of(module, count):
    shift = {
        name: random.normal(random.fold_in(random.key(4), i), (count, *p.shape), torch.float64)
        for i, (name, p) in enumerate(functional.parameters(module).items())
    }
    return Quadratic(random.uniform(random.key(5), (count,), torch.float64), shift)


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_quadratic_of_the_others(optimizer):
    check(net(), None, F.cross_entropy, OPTIMISERS[optimizer], quadratic_of(net(), 7), epochs=2, batch_size=4)


def test_projection():
    def project(tensors):
        return {name: value.clamp(-0.2, 0.2) for name, value in tensors.items()}

    result = check(net(), None, F.cross_entropy, OPTIMISERS["momentum"], epochs=2, batch_size=4, project=project)
    assert max(float(leaf.abs().max()) for leaf in tree.leaves(result.parameters)) == 0.2


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


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_tied_frozen_unused_and_scalar_parameters(optimizer, pulled, batched):
    module = seeded(Odd)
    quadratic = quadratic_of(module, 7) if pulled else None
    result = check(
        module, None, F.cross_entropy, OPTIMISERS[optimizer], quadratic, epochs=2, batch_size=4, batched=batched
    )
    assert result.parameters.keys() == {"first.weight", "first.bias", "second.bias", "unused", "scale"}


@pytest.mark.parametrize("module", ["plain", "odd"])
@pytest.mark.parametrize("optimizer", [name for name in OPTIMISERS if name != "tensor_rate"])
def test_optimisers_kept_over_rounds_of_partial_participation(optimizer, module):
    kept_over_rounds({"plain": net, "odd": lambda: seeded(Odd)}[module](), OPTIMISERS[optimizer], F.cross_entropy)


@pytest.mark.parametrize("form", ["two_schedulers", "lists_of_dicts", "dict_dict", "step_frequency", "warm_up"])
def test_schedules_kept_over_rounds_of_partial_participation(form):
    kept_over_rounds(lit(FORMS[form], kind=NoMetrics), None, None)


def kept_over_rounds(module, optimizer, loss):
    data, count = stacked_data(), len(RAGGED)
    local = gradient_descent(module, loss=loss, optimizer=optimizer, reset="never", epochs=2, batch_size=4)
    local.prepare(data)
    sessions = [Session(module, optimizer, loss, 2) for _ in RAGGED]
    start = tree.map(torch.clone, tree.expand(local.parameters, count))
    state = tree.map(lambda leaf: leaf.expand(count, *leaf.shape).clone(), local.init(local.parameters))
    for number, cohort in enumerate([[0, 2, 5], [1, 2, 3, 5], list(range(7)), [2, 6]]):
        key = random.fold_in(keys(count), number)
        at = torch.tensor(cohort)
        taken = tree.take((start, state, data, key), at)
        result = local(taken[0], taken[1], taken[2], None, taken[3])
        tree.map(
            lambda whole, some, at=at: whole.index_copy_(0, at, some), (start, state), (result.parameters, result.state)
        )
        for row, k in enumerate(cohort):
            parameters, _, rate, _ = plain(sessions[k], own_rows(data, k), key[k], epochs=2, batch_size=4)
            assert float(result.steps[row]) == pytest.approx(rate, rel=1e-12)
            mine = tree.map(lambda leaf, k=k: leaf[k], start)
            torch.testing.assert_close(mine, parameters, **CLOSE)
    assert state.steps.tolist() == [session.taken for session in sessions]


def test_a_solver_made_anew_continues_kept_states():
    make = lambda: gradient_descent(
        net(), loss=F.cross_entropy, optimizer=OPTIMISERS["adam"], reset="never", epochs=1, batch_size=4
    )
    local, data, key = make(), stacked_data(), keys(7)
    first = solve(local, data, key)
    again = solve(local, data, key, start=first.parameters, state=first.state)
    resumed = make()(first.parameters, first.state, data, None, key)
    torch.testing.assert_close(resumed, again, rtol=0, atol=0)


# -- company ---------------------------------------------------------------------------------------------------------


class Noisy(NoMetrics):
    """Several kinds of randomness, all per example."""

    def training_step(self, batch, index):
        x, y = batch
        x = F.dropout(x, 0.3) + 0.1 * torch.randn_like(x)
        x = x * torch.bernoulli(torch.full_like(x, 0.8)) + torch.rand(len(x), 1, dtype=x.dtype)
        return F.cross_entropy(self.net(x), y)


class SharedNoise(NoMetrics):
    """One draw for all examples of a batch: they cannot be computed one by one."""

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x + 0.1 * torch.randn(3, dtype=x.dtype)), y)


@pytest.mark.parametrize("kind", [NoMetrics, Noisy, SharedNoise])
@pytest.mark.parametrize("batched", [True, False])
def test_company_does_not_matter(kind, batched):
    """Draws are the same bits; sums over padded rows and stacked products are in another order, hence rounding."""
    data, key = stacked_data(), keys(7)
    local = gradient_descent(lit(kind=kind), epochs=2, batch_size=4, batched=batched)
    together = solve(gradient_descent(lit(kind=kind), epochs=2, batch_size=4), data, key)
    for cohort in ([0], [5], [1, 2], [6, 3, 0], [0, 1, 2, 3, 4, 5, 6]):
        at = torch.tensor(cohort)
        part = solve(local, tree.take(data, at), key[at])
        torch.testing.assert_close(part, tree.take(together, at), **CLOSE)


def test_permuting_the_clients():
    data, key = stacked_data(), keys(7)
    local = gradient_descent(lit(), epochs=2, batch_size=4)
    order = torch.tensor([3, 1, 6, 0, 5, 2, 4])
    permuted = solve(local, tree.take(data, order), key[order])
    torch.testing.assert_close(permuted, tree.take(solve(local, data, key), order), **CLOSE)


def test_draws_differ_between_steps_and_clients():
    data = stacked_data((8, 8))
    same = tree.map(lambda leaf: leaf[:1].expand(2, *leaf.shape[1:]).clone(), data)
    result = solve(gradient_descent(lit(kind=Noisy), epochs=1), same, keys(2))
    assert not torch.equal(result.parameters["net.0.weight"][0], result.parameters["net.0.weight"][1])


@pytest.mark.parametrize("reset", ["round", "never"])
@pytest.mark.parametrize("buffers", ["local", "average"])
@pytest.mark.parametrize("batched", [True, False])
def test_no_clients(reset, buffers, batched):
    local = gradient_descent(
        with_norm(),
        loss=F.cross_entropy,
        optimizer=OPTIMISERS["adam"],
        epochs=1,
        reset=reset,
        buffers=buffers,
        batched=batched,
    )
    result = solve(local, tree.take(stacked_data(), slice(0, 0)), keys(0))
    some = solve(local, stacked_data((4, 5)), keys(2))
    shapes = lambda found: tree.map(lambda leaf: leaf[:0], (found.parameters, found.state, found.steps))
    torch.testing.assert_close(shapes(result), shapes(some), rtol=0, atol=0)


# -- one by one ------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """What vmap cannot do: an LSTM, `.item()`, boolean masks."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        state = self.cell(x[:, None])[0][:, 0]
        keep = state[:, 0] > state.mean().item()
        return self.head(torch.cat([state[keep], state[~keep]]))


def test_modules_that_vmap_cannot_run():
    module = seeded(Recurrent)
    check(
        module,
        None,
        F.cross_entropy,
        OPTIMISERS["adam"],
        quadratic_of(module, 7),
        epochs=2,
        batch_size=4,
        batched=False,
    )
    with pytest.raises(RuntimeError, match=r"Recurrent cannot run on stacked clients.*\n.*batched=False"):
        solve(
            gradient_descent(module, loss=F.cross_entropy, optimizer=OPTIMISERS["sgd"], epochs=1),
            stacked_data(),
            keys(7),
        )


def test_batch_norm_one_by_one():
    data = stacked_data((2, 4, 6, 8, 10))
    for buffers in ("local", "average"):
        check(
            with_norm(),
            data,
            F.cross_entropy,
            OPTIMISERS["adam"],
            buffers=buffers,
            epochs=2,
            batch_size=4,
            batched=False,
        )


# -- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [net(), seeded(Odd)], ids=["net", "odd"])
def test_compiled_steps(module):
    check(
        module, None, F.cross_entropy, OPTIMISERS["adam"], quadratic_of(module, 7), epochs=3, batch_size=4, compile=True
    )


def test_compiled_steps_of_a_lightning_module():
    check(lit(FORMS["warm_up"], kind=NoMetrics), epochs=3, batch_size=4, compile=True)
    solve(gradient_descent(lit(), epochs=1, batch_size=4, compile=True), stacked_data(), keys(7))


def test_compile_leaves_random_and_buffered_modules_untraced():
    data, key = stacked_data(), keys(7)
    plainly, compiled = (
        solve(gradient_descent(lit(kind=Noisy), epochs=2, batch_size=4, compile=c), data, key) for c in (False, True)
    )
    torch.testing.assert_close(compiled, plainly, rtol=0, atol=0)
    check(
        with_norm(),
        stacked_data((4, 6)),
        F.cross_entropy,
        OPTIMISERS["sgd"],
        buffers="local",
        epochs=2,
        batch_size=4,
        compile=True,
    )


# -- the outside -----------------------------------------------------------------------------------------------------


def test_grad_and_inference_modes_outside():
    local, data, key = gradient_descent(lit(), epochs=1, batch_size=4), stacked_data(), keys(7)
    expected = solve(local, data, key)
    with torch.no_grad():
        torch.testing.assert_close(solve(local, data, key), expected, rtol=0, atol=0)
    with torch.inference_mode():
        start = tree.map(torch.clone, tree.expand(local.parameters, 7))
        inputs = tree.map(torch.clone, data)
        with torch.inference_mode(False):
            torch.testing.assert_close(solve(local, data, key, start=start), expected, rtol=0, atol=0)
            fresh = gradient_descent(lit(), epochs=1, batch_size=4)
            torch.testing.assert_close(solve(fresh, inputs, key.clone(), start=start), expected, rtol=0, atol=0)
    assert not any(leaf.requires_grad for leaf in tree.leaves(expected))


def test_arguments_stay_as_they_are():
    local, data, key = (
        gradient_descent(
            with_norm(), loss=F.cross_entropy, optimizer=OPTIMISERS["adam"], steps=3, reset="never", buffers="local"
        ),
        stacked_data((4, 6)),
        keys(2),
    )
    first = solve(local, data, key)
    before = tree.map(torch.clone, (tuple(first[:2]), data, key))
    local(first.parameters, first.state, data, None, key)
    torch.testing.assert_close((tuple(first[:2]), data, key), before, rtol=0, atol=0)


def test_the_mode_of_a_module_is_kept():
    module = with_norm()
    module[1].eval()
    check(module, None, F.cross_entropy, OPTIMISERS["sgd"], epochs=1, batch_size=4)
    assert (module.training, module[1].training) == (True, False)


def test_gradients_by_finite_differences():
    """One step of SGD with rate 1 is the gradient; central differences of the loss have an error O(h²)."""
    module, data = net(), stacked_data((3, 6))
    unit = lambda p: SGD(p, lr=1.0)
    local = gradient_descent(module, steps=1, loss=F.cross_entropy, optimizer=unit)
    slope = {n: p - q for (n, p), q in zip(local.parameters.items(), solve(local, data, keys(2)).parameters.values())}
    direction = {n: random.normal(random.key(8), p.shape, p.dtype) for n, p in local.parameters.items()}
    value = lambda h, k: F.cross_entropy(
        functional.load(module, tree.add_scaled(local.parameters, direction, h))(own_rows(data, k)[0]),
        own_rows(data, k)[1],
    )
    for k in range(2):
        inner = sum((slope[n][k] * direction[n]).sum() for n in direction)
        errors = [float(abs((value(h, k) - value(-h, k)).detach() / (2 * h) - inner)) for h in (2e-2, 1e-2)]
        assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)


def test_gradient_flow_is_reached_at_first_order():
    """Twice the steps of half the rate halve the distance to the gradient flow."""
    data, key = stacked_data((6, 9)), keys(2)
    end = lambda steps: solve(
        gradient_descent(net(), steps=steps, loss=F.cross_entropy, optimizer=lambda p: SGD(p, lr=1.0 / steps)),
        data,
        key,
    ).parameters["0.weight"]
    coarse, middle, fine = end(20), end(40), end(80)
    assert float((coarse - middle).norm() / (middle - fine).norm()) == pytest.approx(2, rel=0.05)


def test_float32_agrees_to_its_rounding():
    module, data = (
        net().float(),
        tree.map(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf, stacked_data()),
    )
    quadratic = quadratic_of(module, 7)
    local = gradient_descent(module, epochs=1, batch_size=4, loss=F.cross_entropy, optimizer=OPTIMISERS["sgd"])
    result = solve(local, data, keys(7), quadratic)
    double = solve(
        gradient_descent(net(), epochs=1, batch_size=4, loss=F.cross_entropy, optimizer=OPTIMISERS["sgd"]),
        stacked_data(),
        keys(7),
        quadratic,
    )
    assert result.parameters["0.weight"].dtype == torch.float32
    torch.testing.assert_close(tree.to(result.parameters, torch.float64), double.parameters, rtol=1e-4, atol=1e-5)


# -- refusals --------------------------------------------------------------------------------------------------------


def plain_solver(**options):
    return gradient_descent(net(), **{"loss": F.cross_entropy, "optimizer": OPTIMISERS["sgd"], "epochs": 1, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3}, "either epochs= or steps=, but got epochs=1 and steps=3"),
        ({"epochs": None}, "either epochs= or steps="),
        ({"epochs": 0}, "epochs to be a whole number of at least 1, but got 0"),
        ({"epochs": 1.5}, "epochs to be a whole number"),
        ({"epochs": None, "steps": -1}, "steps to be a whole number of at least 1, but got -1"),
        ({"batch_size": 0}, "batch_size to be a whole number of at least 1, but got 0"),
        ({"reset": "always"}, "reset='round' or reset='never', but got 'always'"),
        ({"buffers": "ignore"}, "buffers='refuse', 'local' or 'average', but got 'ignore'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        plain_solver(**options)


def test_no_trainable_parameters():
    with pytest.raises(ValueError, match="Sequential to have trainable parameters, but it has none"):
        gradient_descent(net().requires_grad_(False), epochs=1, loss=F.cross_entropy, optimizer=OPTIMISERS["sgd"])


def test_changed_buffers():
    local = gradient_descent(with_norm(), epochs=1, loss=F.cross_entropy, optimizer=OPTIMISERS["sgd"])
    with pytest.raises(ValueError, match=r"changes the buffers 1.running_mean, .*buffers='local'.*buffers='average'"):
        local.prepare(stacked_data())


def test_clients_without_rows():
    data = stacked_data((3, 2))._replace(count=torch.tensor([3, 0]))
    with pytest.raises(BadClients, match="at least one row") as caught:
        plain_solver().prepare(data)
    assert caught.value.rows == [1]


def test_plateaus():
    module = lit(
        lambda lit: {"optimizer": (o := rate(lit)), "lr_scheduler": {"scheduler": ReduceLROnPlateau(o), "monitor": "x"}}
    )
    with pytest.raises(TypeError, match=r"ReduceLROnPlateau watches a metric.*ft.lightning_fit"):
        gradient_descent(module, epochs=1)


def test_number_of_all_steps_is_unknown_when_schedules_are_kept():
    with pytest.raises(TypeError, match=r"estimated_stepping_batches with reset='never'.*reset='round'"):
        gradient_descent(lit(FORMS["one_cycle"]), epochs=1, reset="never")


class Branches(NoMetrics):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return loss * (1 + self.current_epoch) if index > 1 else loss


def test_questions_that_come_too_late_are_not_answered_wrongly():
    local = gradient_descent(lit(kind=Branches), epochs=2, batch_size=4)
    with pytest.raises(RuntimeError, match=r"'trainer.current_epoch' differs between the clients"):
        solve(local, stacked_data(), keys(7))


class Late(NoMetrics):
    def training_step(self, batch, index):
        x = batch[0] if index == 0 else F.dropout(batch[0])
        return F.cross_entropy(self.net(x), batch[1])


def test_draws_that_begin_late_never_come_from_the_global_generator():
    with pytest.raises(RuntimeError, match="random"):
        solve(gradient_descent(lit(kind=Late), epochs=2, batch_size=4), stacked_data(), keys(7))


class Every(NoMetrics):
    def training_step(self, batch, index):
        if index % 10 == 0:
            self.log("now_and_then", batch[0].mean())
        return F.cross_entropy(self(batch[0]), batch[1])


def test_batch_indices():
    check(lit(kind=Every), epochs=2, batch_size=4)
    with pytest.raises(TypeError, match=r"training_step of Every depends on batch_idx.*compile=False"):
        gradient_descent(lit(kind=Every), epochs=1, compile=True).prepare(stacked_data())


class Awakes(NoMetrics):
    """A parameter that has no gradient in the first rounds."""

    def __init__(self, configure) -> None:
        super().__init__(configure)
        self.later = nn.Parameter(torch.ones(2))

    def training_step(self, batch, index):
        logits = self(batch[0])
        return F.cross_entropy(logits * self.later if self.current_epoch >= 2 else logits, batch[1])


@pytest.mark.parametrize("optimizer", ["momentum", "nadam", "rprop", "adagrad"])
def test_kept_states_of_parameters_that_are_used_later(optimizer):
    kept_over_rounds(lit(lambda lit: OPTIMISERS[optimizer](lit.parameters()), kind=Awakes), None, None)


def test_batch_sizes_in_epochs_without_a_schedule_share_steps():
    """Plain optimisers need no groups: one call of the loss per step serves all clients."""
    calls = []

    def loss(output, target):
        calls.append(1)
        return F.cross_entropy(output, target)

    local = gradient_descent(net(), loss=loss, optimizer=OPTIMISERS["adam"], epochs=2, batch_size=4)
    local.prepare(stacked_data())
    calls.clear()
    start, state = tree.expand((local.parameters, local.init(local.parameters)), 7)
    local(start, state, stacked_data(), None, keys(7))
    assert len(calls) == 2 * 10


@pytest.mark.parametrize("kind", [NoMetrics, Noisy])
def test_one_by_one_gives_the_same_bits_in_any_company(kind):
    """The same operations on the same shapes, client by client; the optimiser's are elementwise."""
    data, key = stacked_data(), keys(7)
    local = gradient_descent(lit(kind=kind), epochs=2, batch_size=4, batched=False)
    together = solve(local, data, key)
    for cohort in ([0], [5], [6, 3, 0]):
        at = torch.tensor(cohort)
        part = solve(local, tree.take(data, at), key[at])
        torch.testing.assert_close(part.parameters, tree.take(together.parameters, at), rtol=0, atol=0)
