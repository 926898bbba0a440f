"""A module's own evaluation steps for every client: the numbers of a Trainer on each client's rows, and on all rows."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from support.small_federations import trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

import fedtorch as ft
from fedtorch.metrics.joined import JoinedStates

SIZES = (7, 12, 5)


class Classifier(L.LightningModule):
    """Logs in every way that Lightning knows, from steps and from hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3, dtype=torch.float64)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.auroc = MulticlassAUROC(3)
        self.confusion = MulticlassConfusionMatrix(3)
        self.pearson = torchmetrics.PearsonCorrCoef()
        self.largest = torchmetrics.MaxMetric()
        self.ndcg = torchmetrics.retrieval.RetrievalNormalizedDCG()
        self.scores = torchmetrics.MetricCollection(
            [MulticlassF1Score(3), MulticlassAccuracy(3), torchmetrics.CohenKappa("multiclass", num_classes=3)],
            prefix="test/",
        )
        self.outputs: list[Tensor] = []
        self.by_name: dict[str, list[Tensor]] = {"targets": []}

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, prog_bar=True)
        self.auroc.update(logits, y)
        self.log("auroc", self.auroc, on_epoch=True)
        self.pearson.update(logits[:, 0], x[:, 0])
        self.log("pearson", self.pearson)
        self.ndcg.update(logits[:, 0], y == 0, indexes=torch.zeros_like(y))
        self.log("ndcg", self.ndcg)
        self.largest.update(loss)
        self.log_dict({"loss": loss, "largest": self.largest})
        self.log("total", loss, reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("plain", 3.0)
        self.log("weighted", loss, batch_size=len(y) ** 2)
        self.confusion.update(logits, y)
        self.outputs.append(logits.argmax(1))
        self.by_name["targets"].append(y)
        return loss

    def on_validation_epoch_end(self) -> None:
        matrix = self.confusion.compute()
        self.log("right", matrix.diagonal().sum() / matrix.sum())
        hits = torch.cat(self.outputs) == torch.cat(self.by_name["targets"])
        self.log("hits", hits.double().mean())
        self.outputs.clear()
        self.by_name["targets"].clear()

    def test_step(self, batch: Any) -> None:
        self.scores.update(self(batch[0]), batch[1])
        self.log_dict(self.scores)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"classes": self(batch[0]).argmax(1), "batch": torch.tensor(batch_idx)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def clients(sizes: Any = SIZES, names: Any = ()) -> ft.data.FederatedData:
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.arange(n) % 3) for n in sizes]
    whole = tuple(torch.cat(leaf) for leaf in zip(*rows))
    return ft.data.FederatedData(whole, torch.tensor(sizes), names, allow_empty=True)


def trained(make: Any = ft.fedavg, module: Any = None, data: Any = None) -> ft.Run:
    torch.manual_seed(0)
    local = ft.gradient_descent(
        Classifier() if module is None else module, epochs=1, batch_size=4, ignore_hooks=["setup"]
    )
    return ft.run(make(local), ft.InProcess(data or clients()), rounds=2, progress=False)


def loader(rows: Any, size: int | None = None) -> DataLoader:
    return DataLoader(list(zip(*rows)), batch_size=size or len(rows[0]))


def by_lightning(run: ft.Run, rows: Any, size: int | None, how: str, client: int | None = None) -> Any:
    """What a plain Trainer gives on a client's module and rows, or on all rows with the global module."""
    module = run.global_module() if client is None else run.client_module(client)
    alone = trainer()
    answer = getattr(alone, how)(module, loader(rows, size), **({} if how == "predict" else {"verbose": False}))
    return answer if how == "predict" else {n: float(v) for n, v in alone.callback_metrics.items()}


@pytest.fixture(scope="module")
def run() -> ft.Run:
    return trained()


@pytest.mark.filterwarnings("ignore:.*(samples in|batch_size|You are using).*")
@pytest.mark.parametrize(("step", "how"), [("validation", "validate"), ("test", "test")])
@pytest.mark.parametrize("size", [None, 4])
def test_scores_are_those_of_a_trainer_per_client_and_of_all_rows(run: ft.Run, step: str, how: Any, size: Any) -> None:
    data = clients()
    scores = run.evaluate(data, stage=how, batch_size=size)
    each = [by_lightning(run, rows, size, how, k) for k, rows in enumerate(data)]
    assert set(scores) == set(each[0])
    assert {"validation": "hits", "test": "test/MulticlassF1Score"}[step] in scores
    for name, score in scores.items():
        assert score.clients.tolist() == pytest.approx([values[name] for values in each], rel=1e-6, abs=1e-6), name
    cuts = [
        (rows, start, start + (size or len(rows[0]))) for rows in data for start in range(0, len(rows[0]), size or 99)
    ]
    batches = [tuple(leaf[start:stop] for leaf in rows) for rows, start, stop in cuts]
    alone = trainer()
    getattr(alone, how)(run.global_module(), DataLoader(batches, batch_size=None), verbose=False)  # type: ignore[arg-type]
    for name, score in scores.items():
        assert score.overall == pytest.approx(float(alone.callback_metrics[name]), rel=1e-5, abs=1e-6), name


def test_a_metric_of_all_rows_is_not_the_mean_of_the_clients(run: ft.Run) -> None:
    score = run.evaluate(clients())["auroc"]
    assert abs(score.overall - score.mean()) > 1e-3
    assert score.largest_is_best


def test_it_is_each_clients_own_model() -> None:
    run = trained(lambda local: ft.personal_layers(local, "net.bias"))
    data = clients()
    scores = run.evaluate(data, batch_size=4)
    for k, rows in enumerate(data):
        assert float(scores["loss"].clients[k]) == pytest.approx(
            by_lightning(run, rows, 4, "validate", k)["loss"], rel=1e-6
        )


@pytest.mark.parametrize("size", [None, 4])
def test_predictions_are_those_of_a_trainer(run: ft.Run, size: Any) -> None:
    predictions = run.predict(data := clients(), batch_size=size)
    for k, rows in enumerate(data):
        for one, other in zip(predictions[str(k)], by_lightning(run, rows, size, "predict", k), strict=True):
            assert torch.equal(one["classes"], other["classes"])
            assert int(one["batch"]) == int(other["batch"])
    assert list(run.predict(data, clients=[2])) == ["2"]


def test_predictions_of_a_plain_module_take_its_inputs() -> None:
    local = ft.gradient_descent(
        nn.Linear(4, 3, dtype=torch.float64), epochs=1, loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    run = ft.run(ft.fedavg(local), ft.InProcess(data := clients()), rounds=1, progress=False)
    for k, (x, _) in enumerate(data):
        given = torch.cat(run.predict(data, batch_size=3)[str(k)])
        torch.testing.assert_close(given, torch.cat([run.client_module(k)(part) for part in x.split(3)]).detach())
        named = torch.cat(run.predict(data, split=lambda rows: (rows[0], None))[str(k)])
        torch.testing.assert_close(named, given)


def test_clients_without_rows_have_no_scores_and_other_clients_have_theirs(run: ft.Run) -> None:
    data = clients((7, 0, 5))
    scores = run.evaluate(data)
    assert scores["accuracy"].clients.isnan().tolist() == [False, True, False]
    assert not torch.isnan(torch.tensor(scores["accuracy"].mean()))
    unseen = run.evaluate(clients((9, 8)), unseen=True)["loss"]
    for k, rows in enumerate(clients((9, 8))):
        assert float(unseen.clients[k]) == pytest.approx(by_lightning(run, rows, None, "validate")["loss"], rel=1e-6)
    pooled = ft.run(run.algorithm, ft.InProcess(clients().pool()), rounds=1, progress=False)
    assert len(pooled.evaluate(clients())["loss"].clients) == 3


class Box:
    """What is no module and no tensor."""

    batches = 0


class Counting(Classifier):
    """Keeps a number of its own, which cannot be joined, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0.0
        self.box = Box()
        self.window = torchmetrics.wrappers.Running(torchmetrics.MeanMetric(), 2)
        self.weights = torch.ones(2)  # neither parameter nor buffer
        self.register_buffer("rows", torch.zeros(()))

    def setup(self, stage: str) -> None:
        self.stage = stage

    def on_validation_start(self) -> None:
        self.starts = self.trainer.current_epoch

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.rows += len(batch[1])
        self.box.batches += 1
        self.weights.mul_(2)
        self.last = batch_idx
        self.seen += float(F.cross_entropy(self(batch[0]), batch[1])) * len(batch[1])
        self.log("noise", torch.rand(()))
        self.window.update(batch[0].mean())
        self.log("window", self.window)
        self.log("rounds", float(self.starts))
        assert self.stage == "validate"

    def on_validation_epoch_end(self) -> None:
        self.log("seen", self.seen / max(self.seen, 7))
        self.log("all", self.rows + 100 * self.box.batches + 1000 * self.weights[0].log2() + 1e4 * self.last)


@pytest.mark.filterwarnings("ignore:.*(samples in|batch_size|does not have many workers).*")
def test_hooks_see_one_epoch_over_all_clients_and_draws_come_from_the_seed() -> None:
    run = trained(module=Counting(), data=clients())
    before = torch.get_rng_state()
    scores = run.evaluate(clients(), batch_size=3)
    assert torch.equal(before, torch.get_rng_state())
    alone = trainer()
    batches = [batch for rows in clients() for batch in zip(*(leaf.split(3) for leaf in rows))]
    alone.validate(run.global_module(), DataLoader(batches, batch_size=None), verbose=False)  # type: ignore[arg-type]
    for name in ("seen", "window", "all"):
        assert scores[name].overall == pytest.approx(float(alone.callback_metrics[name])), name
    for k, (x, _) in enumerate(clients()):
        last = [float(part.mean()) for part in x.split(3)[-2:]]
        assert float(scores["window"].clients[k]) == pytest.approx(sum(last) / 2, rel=1e-5)
    torch.manual_seed(5)
    assert run.evaluate(clients(), batch_size=3)["noise"].clients.tolist() == scores["noise"].clients.tolist()
    assert scores["rounds"].overall == 2
    assert scores["all"].clients.tolist() == [n + 1100 * (b := -(-n // 3)) + 1e4 * (b - 1) for n in SIZES]


class Broken(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if len(batch[1]) == 5:
            raise RuntimeError("odd rows")
        self.log("odd", batch[0])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("nan", self(batch[0]).sum() * (torch.nan if len(batch[1]) == 5 else 1.0))


def test_what_fails_names_the_client() -> None:
    run = trained(module=Broken())
    with pytest.raises(TypeError, match=r"self.log\('odd', …\) of one number or a torchmetrics metric of the module"):
        run.evaluate(clients())
    with pytest.raises(RuntimeError) as caught:
        run.evaluate(clients((5, 5, 5), names=["a", "b", "c"]))
    assert caught.value.__notes__ == ["in validation_step of client 'a', or the hooks around it"]
    score = run.evaluate(clients(), stage="test")["nan"]
    assert score.failed is not None
    assert score.failed.tolist() == [False, False, True]
    assert score.overall != score.overall  # a client that fails is not left out
    with pytest.raises(ValueError, match=r"data of the population's 3 clients, but got 2.*unseen=True"):
        run.evaluate(clients((5, 5)))
    with pytest.raises(ValueError, match=r"Expected batch_size of at least 1, but got 0"):
        run.evaluate(clients(), batch_size=0)
    with pytest.raises(ValueError, match=r"at least one metric, or a LightningModule with a test_step, but got Linear"):
        ft.Run(ft.fedavg(ft.least_squares(nn.Linear(4, 1))), ft.InProcess(clients())).evaluate(clients(), stage="test")
    for stage in ("validation", "tst"):
        with pytest.raises(ValueError, match=rf"Expected stage='validate' or 'test', but got '{stage}'"):
            run.evaluate(clients(), stage=stage)
    with pytest.raises(TypeError, match=r"Expected FederatedData to evaluate on, but got list"):
        run.evaluate(list(clients()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Expected rows to evaluate on, but got none"):
        run.evaluate(clients((0, 0, 0)))


@pytest.mark.filterwarnings("ignore:Metric .Spearman")
@pytest.mark.parametrize("kind", ["min", "cat", "spearman", "thresholds"])
def test_states_of_any_kind_are_joined(kind: str) -> None:
    make: Any = {
        "min": torchmetrics.MinMetric,
        "cat": torchmetrics.CatMetric,
        "spearman": torchmetrics.SpearmanCorrCoef,
        "thresholds": lambda: BinaryAUROC(thresholds=5),
    }[kind]
    generator = torch.Generator().manual_seed(0)
    states, whole = JoinedStates(), make()
    for size in SIZES:
        target = torch.arange(size) % 2
        given = [torch.rand(size, generator=generator), target.float() if kind == "spearman" else target]
        given = given[: 1 if kind in ("min", "cat") else 2]
        (part := make()).update(*given)
        whole.update(*given)
        states.add(part)
    states.write(joined := make())
    assert torch.equal(joined.compute(), whole.compute())


class Scores(L.LightningModule):
    """Logs metrics of what some clients' rows do not define."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3, dtype=torch.float64)
        self.auroc, self.binned = BinaryAUROC(), BinaryAUROC(thresholds=7)
        self.r2 = torchmetrics.R2Score()
        self.ignoring = BinaryAUROC(ignore_index=0)
        self.spread = torchmetrics.NormalizedRootMeanSquaredError("std")
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        score, truth = self.net(x)[:, 0], x[:, 1]
        for name in ("auroc", "binned", "ignoring"):
            metric = getattr(self, name)
            metric.update(score.sigmoid(), (y == 1).long())
            self.log(name, metric)
        for name in ("r2", "spread", "error"):
            getattr(self, name).update(torch.where(x[:, 2] > 90, torch.nan, score), truth)
            self.log(name, getattr(self, name))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")
def test_undefined_scores_are_counted_and_nan_predictions_fail() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = [
        (torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.arange(n) % 2 * (k != 1))
        for k, n in enumerate((6, 5, 1, 8))
    ]
    rows[3][0][0, 2] = 99.0
    data, module = ft.data.from_tensors(rows), Scores()
    scores = ft.Run(ft.fedavg(ft.gradient_descent(module, epochs=1)), ft.InProcess(data)).evaluate(data)
    undefined = {name: score.undefined.tolist() for name, score in scores.items()}  # type: ignore[union-attr]
    failed = {name: score.failed.tolist() for name, score in scores.items()}  # type: ignore[union-attr]
    for name in ("auroc", "binned"):
        assert undefined[name] == [False, True, True, False]
        assert scores[name].mean() == pytest.approx(float(scores[name].clients[[0, 3]].mean()))
    assert undefined["ignoring"] == [True] * 4  # one class is left, or none
    assert undefined["r2"] == [False, False, True, False]
    for name in ("r2", "spread", "error"):
        assert failed[name] == [False, False, False, True]
        assert math.isnan(scores[name].mean())
    x, y = (torch.cat(part) for part in zip(*rows))
    assert scores["auroc"].overall == pytest.approx(float(BinaryAUROC()(module.net(x)[:, 0].sigmoid(), y)))


def test_a_spread_of_three_clients_and_more_is_that_of_all_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = [(torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.zeros(n)) for n in (6, 5, 7, 8)]
    data, module = ft.data.from_tensors(rows), Scores()
    scores = ft.Run(ft.fedavg(ft.gradient_descent(module, epochs=1)), ft.InProcess(data)).evaluate(data)
    x = torch.cat([x for x, _ in rows])
    whole = torchmetrics.NormalizedRootMeanSquaredError("std")
    assert scores["spread"].overall == pytest.approx(float(whole(module.net(x)[:, 0].detach(), x[:, 1])), rel=1e-5)
