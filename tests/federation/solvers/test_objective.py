"""One client's training loss: what a module may do in it, and what it is refused."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn

from fedtorch.federation.solvers.gradient_descent import gradient_descent
from fedtorch.federation.solvers.objective import Objective, TrainerStandIn, training_copy

X = torch.arange(12.0).reshape(4, 3)
Y = torch.tensor([0, 1, 1, 0])


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def lit(**methods) -> L.LightningModule:
    return type("Custom", (Lit,), methods)()


def loss_of(module, weights=None, index=0):
    return Objective(training_copy(module))((X, Y), weights, index)


def test_the_loss_of_a_plain_module():
    net = nn.Linear(3, 2)
    loss, logs = Objective(training_copy(net), F.cross_entropy)((X, Y), None, 0)
    torch.testing.assert_close(loss, F.cross_entropy(net(X), Y))
    assert logs == {}


def test_weights_sum_over_examples_and_hide_padding():
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss_here", loss)
        return loss / (batch[0].sum() != 3).double()  # infinite on the first row

    module = lit(training_step=training_step)
    weights = torch.tensor([0.0, 0.5, 0.5, 0.0])
    loss, logs = loss_of(module, weights)
    torch.testing.assert_close(loss.float(), F.cross_entropy(module.net(X[1:3]), Y[1:3]))
    torch.testing.assert_close(logs["loss_here"].float(), F.cross_entropy(module.net(X[1:3]), Y[1:3]))


@pytest.mark.parametrize(
    "step",
    [
        lambda self, batch: self.net(batch[0]).sum(),
        lambda self, batch, batch_idx: self.net(batch[0]).sum() + 0 * batch_idx,
        lambda self, batch, batch_idx, dataloader_idx=0: {"loss": self.net(batch[0]).sum() + dataloader_idx},
        lambda self, *arguments: self.net(arguments[0][0]).sum() + 0 * arguments[1],
        lambda self, batch, batch_idx: self.net(batch[0]).sum().reshape(1),
    ],
    ids=["no_index", "index", "loader", "stars", "one_element"],
)
def test_signatures_of_training_step(step):
    module = lit(training_step=step)
    loss, _ = loss_of(module)
    torch.testing.assert_close(loss, module.net(X).sum())


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (None, "NoneType"),
        ({"value": 1}, "NoneType"),
        (2.0, "float"),
        (torch.zeros(4), r"a tensor of shape \(4,\)"),
        (torch.zeros(2, 2), r"a tensor of shape \(2, 2\)"),
    ],
    ids=str,
)
def test_refused_losses(answer, got):
    with pytest.raises(TypeError, match=f"Expected Custom to return a scalar loss, but got {got}"):
        loss_of(lit(training_step=lambda self, batch, batch_idx: answer))


def test_logs():
    def training_step(self, batch, batch_idx):
        self.log("number", 2)
        self.log("tensor", torch.tensor([3.0]), on_step=True, prog_bar=True)
        self.log_dict({"a": 1.5, "b": torch.tensor(4)})
        return self.net(batch[0]).sum()

    _, logs = loss_of(lit(training_step=training_step))
    assert {name: float(value) for name, value in logs.items()} == {"number": 2, "tensor": 3, "a": 1.5, "b": 4}


def test_metrics_are_recorded_in_the_copy_only():
    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("error", (1 - self.accuracy.compute()) * 100)
        self.metrics["inner"].update(logits, batch[1])
        self.log("inner", self.metrics["inner"])
        scores = self.scores(logits, batch[1])
        self.log_dict(scores)
        self.log("one", scores["MulticlassF1Score"])
        self.scores.reset()
        for score in self.listed:
            score(logits, batch[1])
        return logits.sum()

    module = lit(training_step=training_step)
    module.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)
    module.metrics = nn.ModuleDict({"inner": torchmetrics.MeanSquaredError()})
    module.listed = nn.ModuleList([torchmetrics.F1Score("multiclass", num_classes=2)])
    module.scores = torchmetrics.MetricCollection([torchmetrics.F1Score("multiclass", num_classes=2)])
    objective = Objective(training_copy(module))
    loss, logs = objective((X, Y), None, 0)
    assert logs == {}
    assert set(objective.metrics.form.logged) == {"accuracy", "error", "inner", "MulticlassF1Score", "one"}
    assert len(objective.recorded) == 2 * 4  # two tensors of each call
    torch.testing.assert_close(loss, module.net(X).sum())
    assert isinstance(module.accuracy, torchmetrics.Metric)
    assert isinstance(module.scores, torchmetrics.MetricCollection)


def test_the_trainer_stand_in():
    trainer = TrainerStandIn()
    assert trainer.training is True
    trainer.answers["global_step"] = trainer.DIFFERS
    with pytest.raises(RuntimeError, match=r"'trainer.global_step' differs between the clients"):
        trainer.global_step  # noqa: B018
    trainer.answers["global_step"] = 3
    assert trainer.global_step == 3
    with pytest.raises(RuntimeError, match=r"asked for 'trainer.datamodule'.*ft.lightning_fit"):
        trainer.datamodule  # noqa: B018
    assert trainer.asked == {"training", "global_step"}


def test_what_is_the_same_for_every_client_alone_is_answered():
    """Modules ask whether to gather over ranks, in which stage they are, and for callbacks that are theirs."""

    def training_step(self, batch, batch_idx):
        trainer = self.trainer
        assert (self.global_rank, trainer.world_size, trainer.is_global_zero) == (0, 1, True)
        assert not any((trainer.sanity_checking, trainer.validating, trainer.predicting, *trainer.callbacks))
        return self.net(batch[0]).sum() * (trainer.state.stage == "train")

    module = lit(training_step=training_step)
    objective = Objective(training_copy(module))
    torch.testing.assert_close(objective((X, Y), None, 0)[0], module.net(X).sum())
    assert not objective.trainer.asked


@pytest.mark.parametrize(
    ("question", "name"),
    [("trainer.datamodule", "datamodule"), ("logger", "loggers?"), ("optimizers()", "strategy")],
)
def test_questions_to_the_trainer_without_an_answer(question, name):
    def training_step(self, batch, batch_idx):
        return eval(f"self.{question}")

    with pytest.raises(RuntimeError, match=f"asked for 'trainer.{name}'"):
        loss_of(lit(training_step=training_step))


def test_a_module_that_was_trained_before_keeps_its_trainer():
    module = lit()
    module.trainer = trainer = object()
    copy = training_copy(module)
    Objective(copy)
    assert module._trainer is trainer
    assert copy._trainer is not trainer


HOOKS = (
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_epoch_end",
    "on_train_start",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "configure_callbacks",
    "configure_model",
    "lr_scheduler_step",
    "on_after_batch_transfer",
    "setup",
)


@pytest.mark.parametrize("hook", HOOKS)
def test_overridden_hooks_are_refused_by_name(hook):
    module = lit(**{hook: lambda self, *arguments, **keywords: None})
    with pytest.raises(TypeError, match=rf"overrides {hook}, .*ft.lightning_fit, or ignore_hooks=\['{hook}'\]"):
        gradient_descent(module, epochs=1)
    gradient_descent(module, epochs=1, ignore_hooks=[hook])


def test_several_hooks_and_hooks_on_the_instance():
    module = lit(setup=lambda self, stage: None)
    module.on_train_start = lambda: None
    with pytest.raises(TypeError, match="overrides on_train_start, setup,"):
        training_copy(module)
    with pytest.raises(TypeError, match="overrides on_train_start,"):
        training_copy(module, ["setup"])


def test_refused_training_modules():
    with pytest.raises(TypeError, match=r"Expected an nn.Module or a LightningModule, but got function"):
        gradient_descent(lambda x: x, epochs=1)
    with pytest.raises(TypeError, match="Expected Empty to define training_step"):
        gradient_descent(type("Empty", (L.LightningModule,), {})(), epochs=1)
    module = lit()
    module.automatic_optimization = False
    with pytest.raises(TypeError, match=r"Custom optimises manually .*ft.lightning_fit"):
        gradient_descent(module, epochs=1)


def test_losses_belong_to_plain_modules():
    with pytest.raises(TypeError, match="Expected loss= for Linear"):
        gradient_descent(nn.Linear(3, 2), epochs=1)
    with pytest.raises(TypeError, match="Expected loss=None for a LightningModule"):
        gradient_descent(lit(), epochs=1, loss=F.cross_entropy)
