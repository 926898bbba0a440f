"""LightningModules train stacked as they train alone: optimisers, schedules, logs and questions to the trainer."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from support.oracles.plain_training import CLOSE, FORMS, Lit, NoMetrics, check, keys, lit, rate, solve, stacked_data
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fedtorch.federation.solvers.gradient_descent import gradient_descent

pytestmark = pytest.mark.usefixtures("nothing_outside_changes")


def test_a_lightning_module_with_metrics_and_logs():
    module = lit()
    before = copy.deepcopy(module.state_dict())
    local = gradient_descent(module, epochs=2, batch_size=4)
    data = stacked_data()
    result = solve(local, data, keys(7))
    of_metrics = {"acc", "error", "MulticlassF1Score", "f1"}
    assert result.info.keys() == {"train_loss", "size", "constant", "loss"} | of_metrics
    torch.testing.assert_close(result.info["acc"] + result.info["error"], torch.ones(len(data.count)).double())
    torch.testing.assert_close(result.info["train_loss"], result.info["loss"], **CLOSE)
    reference = check(lit(kind=NoMetrics), epochs=2, batch_size=4)
    torch.testing.assert_close(result.parameters, reference.parameters, **CLOSE)
    assert module._trainer is None
    assert "log" not in vars(module)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert isinstance(local.module.accuracy, torchmetrics.Metric)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{"epochs": 3}, {"steps": 7}], ids=str)
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


def test_plateaus():
    module = lit(
        lambda lit: {"optimizer": (o := rate(lit)), "lr_scheduler": {"scheduler": ReduceLROnPlateau(o), "monitor": "x"}}
    )
    with pytest.raises(TypeError, match=r"ReduceLROnPlateau watches a metric.*ft.lightning_fit"):
        gradient_descent(module, epochs=1)


class Branches(NoMetrics):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return loss * (1 + self.current_epoch) if index > 1 else loss


def test_questions_that_come_late_are_answered_for_each_client():
    check(lit(kind=Branches), epochs=2, batch_size=4)


class Late(NoMetrics):
    def training_step(self, batch, index):
        x = batch[0] if index == 0 else F.dropout(batch[0])
        return F.cross_entropy(self.net(x), batch[1])


def test_draws_that_begin_late_come_from_the_clients_keys():
    before = torch.get_rng_state()
    solved = [
        solve(
            gradient_descent(lit(kind=Late), epochs=2, batch_size=4, batched=batched), stacked_data(), keys(7)
        ).parameters
        for batched in (True, False)
    ]
    torch.testing.assert_close(*solved)
    assert torch.equal(torch.get_rng_state(), before)


class Every(NoMetrics):
    def training_step(self, batch, index):
        if index % 10 == 0:
            self.log("now_and_then", batch[0].mean())
        return F.cross_entropy(self(batch[0]), batch[1])


def test_batch_indices():
    check(lit(kind=Every), epochs=2, batch_size=4)
    with pytest.raises(TypeError, match=r"training_step of Every depends on batch_idx.*compile=False"):
        gradient_descent(lit(kind=Every), epochs=1, compile=True).prepare(stacked_data())
