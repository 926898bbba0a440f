"""What a training step logs: torchmetrics of stacked clients, and reductions of numbers."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

import fedtorch as ft
from fedtorch.trust import privacy


class Classifier(L.LightningModule):
    """Logs metrics in every way that Lightning knows: objects, values, collections, after `update`."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3, dtype=torch.float64)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.macro = MulticlassAccuracy(3)
        self.macro_too = MulticlassAccuracy(3)
        self.auroc = MulticlassAUROC(3)
        self.mean_loss = torchmetrics.MeanMetric()
        self.steps = torchmetrics.SumMetric()
        self.scores = torchmetrics.MetricCollection([MulticlassF1Score(3, average="micro")], prefix="train/")

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        value = self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_epoch=True, on_step=False)
        self.log("error", 100 * (1 - value), on_epoch=True, on_step=False)
        self.macro.update(logits, y)
        self.macro_too(logits, y)
        self.log("macro", self.macro, on_epoch=True, on_step=False)
        self.auroc.update(logits, y)
        self.log("auroc", self.auroc, on_epoch=True, on_step=False)
        self.steps.update(1.0)
        self.log("steps", self.steps, on_epoch=True, on_step=False)
        self.mean_loss.update(loss)
        self.log("mean_loss", self.mean_loss, on_epoch=True, on_step=False)
        self.log_dict(self.scores(logits, y), on_epoch=True, on_step=False)
        self.log("largest", loss, reduce_fx="max", on_epoch=True, on_step=False)
        self.log("rows", float(len(y)), reduce_fx="sum", on_epoch=True, on_step=False)
        self.log("both", loss, on_epoch=True, on_step=True)
        self.log("by_default", loss, on_epoch=True)
        self.log("forked", self.macro_too, on_epoch=True, on_step=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def clients(sizes=(7, 12, 5)):
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.arange(n) % 3) for n in sizes]
    return ft.data.from_tensors(rows)


def logged(solver, data=None, rounds=2):
    run = ft.Run(ft.fedavg(solver), ft.InProcess(clients() if data is None else data))
    for _ in range(rounds):
        info = run.step().info
    return info


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return Classifier()


@pytest.fixture(scope="module")
def of_lightning(module):
    """By a Trainer for each client, whose minibatches are the same."""
    return logged(ft.lightning_fit(module, batch_size=4, max_epochs=1))


@pytest.mark.parametrize("options", [{}, {"batched": False}, {"compile": True}], ids=["stacked", "alone", "compiled"])
def test_logs_are_those_of_lightning(module, of_lightning, options):
    info = logged(ft.gradient_descent(module, epochs=1, batch_size=4, **options))
    assert info.keys() == of_lightning.keys()
    assert {"accuracy", "error", "macro", "auroc", "mean_loss", "train/MulticlassF1Score", "both_step"} < info.keys()
    last_step = {"both_step"}  # Lightning keeps float32
    for name in info.keys() - {"error", "train/MulticlassF1Score"} - last_step:
        torch.testing.assert_close(info[name], of_lightning[name], rtol=1e-6, atol=1e-6, msg=name)
    torch.testing.assert_close(info["both_step"], of_lightning["both_step"], rtol=1e-6, atol=1e-6)


def test_a_value_is_averaged_over_rows_on_epoch(module):
    data = clients((8, 8))
    info = logged(ft.gradient_descent(module, epochs=1, batch_size=4), data)
    torch.testing.assert_close(info["error"], 100 * (1 - info["accuracy"]))  # batches of one size
    torch.testing.assert_close(info["train/MulticlassF1Score"], info["accuracy"])
    uneven = logged(ft.gradient_descent(module, epochs=1, batch_size=4))
    torch.testing.assert_close(uneven["error"], 100 * (1 - uneven["accuracy"]))


def test_company_changes_nothing(module):
    solver = ft.gradient_descent(module, epochs=1, batch_size=4)
    together = logged(solver, clients(), rounds=1)
    run = ft.Run(ft.fedavg(solver), ft.InProcess(clients()), cohort=lambda key, round: torch.tensor([1]))
    for name, values in run.step().info.items():
        torch.testing.assert_close(values[0], together[name][1], msg=name)


def test_ways_of_one_number(module):
    run = ft.Run(ft.fedavg(ft.gradient_descent(module, epochs=1, batch_size=4)), ft.InProcess(clients()))
    assert run.step().info["rows"].tolist() == [7.0, 12.0, 5.0]


def test_history_and_loggers_have_them(module):
    federation = ft.Federation(ft.fedavg(ft.gradient_descent(module, epochs=1)), ft.InProcess(clients()))
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(federation)
    assert 0 <= float(trainer.callback_metrics["accuracy"]) <= 1
    assert federation.history["accuracy"].iloc[-1] == pytest.approx(float(trainer.callback_metrics["accuracy"]))


def test_private_training_publishes_no_metric(module):
    solver = privacy.example_level(
        module, clip=1.0, noise=1.0, sampling_rate=0.5, steps=2, delta=1e-3, entropy=privacy.from_seed(0)
    )
    assert "accuracy" not in logged(solver, clients((20, 20)), rounds=1)


class Odd(Classifier):
    """Logs what has no value."""

    def __init__(self, value, **options):
        super().__init__()
        self.value, self.options = value, options

    def training_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        self.log("odd", self.value(self, scores, batch[1]), **self.options)
        return F.cross_entropy(scores, batch[1])


def _loss(module, scores, y):
    return F.cross_entropy(scores, y)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (Odd(lambda m, z, y: m.accuracy(z, y) - m.macro(z, y)), "arithmetic of a metric's value with plain numbers"),
        (Odd(lambda m, z, y: z), r"one number or a torchmetrics metric of the module, but got shape \(5, 3\)"),
        (Odd(lambda m, z, y: torchmetrics.MeanMetric()), "metric of the module, but got MeanMetric"),
        (Odd(lambda m, z, y: z.sum(), reduce_fx=torch.median), "reduce_fx of self.log.'odd', …. to be mean, sum, min"),
    ],
)
def test_what_cannot_be_logged_is_refused(odd, message):
    with pytest.raises((TypeError, RuntimeError), match=message):
        logged(ft.gradient_descent(odd, epochs=1, batched=False), clients((5,)))
