"""A module's own optimiser and schedule on stacked parameters."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, LambdaLR, StepLR

from fedtorch.federation.solvers._configured import configure
from fedtorch.federation.solvers.gradient_descent import gradient_descent
from fedtorch.optimisers import elementwise, rebind


def made(make):
    net = nn.Linear(3, 3, bias=False)
    return configure(net, make)


INDEPENDENT = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: Adam(p),
    "amsgrad": lambda p: Adam(p, amsgrad=True, maximize=True),
    "fused": lambda p: Adam(p, fused=True),
    "foreach": lambda p: Adam(p, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rate_of_zero": lambda p: SGD(p, lr=0.0),
    "tensor_rate": lambda p: Adam(p, lr=torch.tensor(0.1), foreach=False),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_elementwise_optimisers_are_known_and_treat_rows_alone(name):
    original = made(INDEPENDENT[name]).optimizer.original
    assert elementwise(original)
    start = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, 4, 3)
    gradients = torch.sin(torch.arange(96, dtype=torch.float64)).reshape(4, 2, 4, 3)
    stack, rows = start.clone(), [start[k].clone() for k in range(2)]
    optimizers = [rebind(original, [[tensor]]) for tensor in (stack, *rows)]
    for gradient in gradients:
        for tensor, part in zip((stack, *rows), (gradient, *gradient)):
            tensor.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stack, torch.stack(rows), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), "needs no closure, but the step of LBFGS asks for closure; use ft.light"),
        (lambda p: torch.optim.SparseAdam(list(p)), "of dense gradients, but got SparseAdam; use Adam or ft.lightning"),
    ],
)
def test_optimisers_that_need_more_than_gradients_are_refused_by_name(make, message):
    with pytest.raises(TypeError, match=message):
        gradient_descent(nn.Linear(3, 3, bias=False), epochs=1, loss=nn.MSELoss(), optimizer=make)


class Counting(SGD):
    """Keeps a counter in its groups, as schedule-free optimisers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def test_state_outside_of_the_parameters_is_not_kept():
    options = {"epochs": 1, "loss": nn.MSELoss(), "optimizer": lambda p: Counting(p, lr=0.1)}
    gradient_descent(nn.Linear(2, 1), **options)
    with pytest.raises(
        TypeError, match=r"Counting keeps its state outside of the parameters, in .*count.*; use reset='round'"
    ):
        gradient_descent(nn.Linear(2, 1), reset="never", **options)


def lit(answer):
    class Lit(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 2)

        def training_step(self, batch):
            return self.net(batch[0]).mean()

        def configure_optimizers(self):
            return answer(self)

    return Lit()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda lit: None, "Expected one optimiser, but Lit configures 0"),
        (lambda lit: [SGD(lit.parameters()), SGD(lit.parameters())], "Expected one optimiser, but Lit configures 2"),
        (lambda lit: ([SGD(lit.parameters()), SGD(lit.parameters())], []), "but Lit configures 2"),
        (lambda lit: [{"optimizer": SGD(lit.parameters())}, {"optimizer": SGD(lit.parameters())}], "configures 2"),
        (lambda lit: "adam", "Expected a torch.optim.Optimizer, but got str"),
        (lambda lit: SGD([nn.Parameter(torch.zeros(7))]), r"hold the module's parameters, but got .*\(7,\)"),
        (
            lambda lit: ([o := SGD(lit.parameters())], [StepLR(o, 1), {"scheduler": StepLR(o, 1), "interval": "step"}]),
            r"schedulers of one interval and frequency.*use ft\.lightning_fit",
        ),
        (lambda lit: ([SGD(lit.parameters())], [print]), "LRScheduler, but got builtin_function_or_method"),
        (
            lambda lit: ([o := SGD(lit.parameters())], [{"scheduler": StepLR(o, 1), "interval": "batch"}]),
            "interval 'step' or 'epoch', but got 'batch'",
        ),
    ],
)
def test_what_configure_optimizers_may_not_return(answer, message):
    with pytest.raises(TypeError, match=message):
        gradient_descent(lit(answer), epochs=1)


def test_a_plain_module_needs_an_optimizer():
    with pytest.raises(TypeError, match="Expected optimizer= for Linear"):
        gradient_descent(nn.Linear(2, 1), epochs=1, loss=nn.MSELoss())


def test_optimizer_replaces_that_of_a_lightning_module():
    found = configure(lit(lambda lit: SGD(lit.parameters(), lr=0.1)), lambda p: Adam(p, lr=0.5))
    assert isinstance(found.optimizer.original, Adam)
    assert found.optimizer.names == [["net.weight", "net.bias"]]


SCHEDULES = {
    "step": lambda o: [StepLR(o, 2, 0.5)],
    "cosine": lambda o: [CosineAnnealingLR(o, 7)],
    "two": lambda o: [StepLR(o, 3, 0.5), LambdaLR(o, lambda t: 0.9**t)],
    "cyclic": lambda o: [CyclicLR(o, 0.01, 0.2, step_size_up=3)],  # changes the momentum too
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("frequency", [1, 2, 3])
@pytest.mark.parametrize("per_epoch", [1, 2, 5])
def test_a_schedule_by_position_is_the_schedule_step_by_step(name, interval, frequency, per_epoch):
    make = lambda p: SGD(p, lr=0.2, momentum=0.8)
    setting = {"interval": interval, "frequency": frequency}
    module = lit(lambda lit: ([o := make(lit.parameters())], [{"scheduler": s, **setting} for s in SCHEDULES[name](o)]))
    configured = configure(module, None)
    schedule = configured.schedule
    assert schedule.by_epoch == (interval == "epoch" or frequency > 1)
    plain = make(nn.Linear(3, 2).parameters())
    schedulers = SCHEDULES[name](plain)
    expected = []
    for position in range(17):
        expected.append((plain.param_groups[0]["lr"], plain.param_groups[0]["momentum"]))
        plain.step()
        within, epoch = position % per_epoch, position // per_epoch
        ends = within + 1 == per_epoch and (epoch + 1) % frequency == 0
        if ends if interval == "epoch" else (within + 1) % frequency == 0:
            for scheduler in schedulers:
                scheduler.step()
    target = rebind(configured.optimizer.original, [[torch.zeros(2)]])
    for position in [*range(17), 4, 0, 16]:
        schedule.apply(target, position, per_epoch)
        group = target.param_groups[0]
        again = rebind(configured.optimizer.original, [[torch.zeros(2)]])  # of an optimiser that has been stepped on
        schedule.apply(again, position, per_epoch)
        assert again.param_groups[0]["lr"] == group["lr"]
        assert (group["lr"], group["momentum"]) == pytest.approx(expected[position], rel=1e-12)


def test_a_schedule_leaves_other_entries_of_groups_alone():
    optimizer = Counting([torch.zeros(2, requires_grad=True)], lr=0.1)
    schedule = configure(lit(lambda lit: ([o := SGD(lit.parameters(), lr=0.1)], [StepLR(o, 1)])), None).schedule
    optimizer.param_groups[0].update(count=7, weight_decay=0.3)
    schedule.apply(optimizer, 2, 1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    assert (optimizer.param_groups[0]["count"], optimizer.param_groups[0]["weight_decay"]) == (7, 0.3)
