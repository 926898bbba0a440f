"""Clients with loaders are evaluated on the batches that these give."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from support.small_federations import trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fedtorch as ft

SIZES = (7, 12, 5)


def rows() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 4, generator=generator), torch.arange(n) % 3) for n in SIZES]


def loaders(collate: Any = None, size: int = 4) -> ft.data.FederatedLoaders:
    every = {f"client {k}": list(zip(*each)) for k, each in enumerate(rows())}
    return ft.data.from_loaders({n: DataLoader(each, size, collate_fn=collate) for n, each in every.items()})  # type: ignore[arg-type]


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.auroc = torchmetrics.AUROC("multiclass", num_classes=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.auroc.update(self(batch[0]), batch[1])
        self.log("auroc", self.auroc)
        self.log("loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("rows", float(len(batch["rows"])), batch_size=len(batch["rows"]), reduce_fx="sum")
        self.log("first", batch["rows"][0][0].mean(), batch_size=1)
        assert batch["name"] is None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.fixture(scope="module")
def run() -> ft.Run:
    torch.manual_seed(0)
    local = ft.gradient_descent(Module(), epochs=1, batched=False)
    return ft.run(ft.fedavg(local), ft.InProcess(loaders()), rounds=1, progress=False)


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples")
def test_scores_are_those_of_a_trainer_on_each_loader(run: ft.Run) -> None:
    data = loaders()
    scores = run.evaluate(data)
    for k in range(3):
        alone = trainer().validate(run.client_module(k), data.loader(k), verbose=False)[0]
        for name in ("auroc", "loss"):
            assert float(scores[name].clients[k]) == pytest.approx(alone[name], rel=1e-6)
    whole = ft.data.from_tensors(rows(), names=data.names)
    assert scores["auroc"].overall == pytest.approx(run.evaluate(whole, batch_size=4)["auroc"].overall)
    metrics = {"auroc": torchmetrics.AUROC("multiclass", num_classes=3), "loss": F.cross_entropy}
    given, wanted = run.evaluate(data, metrics), run.evaluate(whole, metrics)
    for name in metrics:
        assert given[name].overall == pytest.approx(wanted[name].overall, rel=1e-6)
        torch.testing.assert_close(given[name].clients, wanted[name].clients)
    for name, batches in run.predict(data).items():
        torch.testing.assert_close(torch.cat(batches), torch.cat(run.predict(whole)[name]))


@pytest.mark.filterwarnings("ignore:Trying to infer the .batch_size.")
def test_batches_of_objects_reach_the_modules_own_steps(run: ft.Run) -> None:
    ragged = lambda items: {"rows": [x[: 1 + int(y)] for x, y in items], "name": None}
    data = loaders(ragged)
    scores = run.evaluate(data, stage="test")
    assert scores["rows"].clients.tolist() == list(SIZES)
    assert scores["rows"].overall == sum(SIZES)
    for k in range(3):
        alone = trainer().test(run.client_module(k), data.loader(k), verbose=False)[0]
        assert float(scores["first"].clients[k]) == pytest.approx(alone["first"], rel=1e-6)
    with pytest.raises(
        TypeError, match=r"batches of tensors for metrics=, but client 'client 0' has others.*log the metr"
    ):
        run.evaluate(data, {"loss": F.cross_entropy})


def test_a_federation_takes_loaders_for_validation_and_tests(run: ft.Run) -> None:
    model = ft.Federation(run.algorithm, run.population, validation=loaders(), test=loaders())
    (outer := trainer(max_epochs=1)).fit(model)
    assert float(outer.callback_metrics["loss"]) == pytest.approx(model.run.evaluate(loaders())["loss"].overall)
    (answer,) = trainer().validate(model, loaders(size=3), verbose=False)
    assert answer["auroc"] == pytest.approx(model.run.evaluate(loaders(size=3))["auroc"].overall)
    predictions = trainer().predict(model)
    assert [len(each) for each in predictions or ()] == [2, 3, 2]
    with pytest.raises(ValueError, match="no evaluation_batch_size= for clients with loaders"):
        ft.Federation(run.algorithm, run.population, validation=loaders(), evaluation_batch_size=3)
    with pytest.raises(ValueError, match="batch_size=None for clients with loaders"):
        run.evaluate(loaders(), batch_size=3)


def test_clients_in_another_order_are_refused(run: ft.Run) -> None:
    turned, whole = loaders().select([2, 0, 1]), ft.data.from_tensors(rows(), names=loaders().names)
    for data, metrics in ((turned, None), (turned, {"loss": F.cross_entropy}), (whole.select([2, 0, 1]), None)):
        with pytest.raises(ValueError, match="clients in its order, client 0, client 1, client 2, …, but got client 2"):
            run.evaluate(data, metrics)
    with pytest.raises(ValueError, match="Expected data of the population's clients in its order"):
        run.predict(turned)
    first = run.evaluate(whole, {"loss": F.cross_entropy})["loss"].clients
    torch.testing.assert_close(run.evaluate(turned.select([1, 2, 0]), {"loss": F.cross_entropy})["loss"].clients, first)


def test_a_bad_loader_names_the_client(run: ft.Run) -> None:
    def broken(items: Any) -> Any:
        if len(items) == 1:
            raise OSError("unreadable")
        return torch.utils.data.default_collate(items)

    with pytest.raises(ValueError, match=r"Client 'client 2': its loader raised at batch 1: OSError: unreadable"):
        run.evaluate(loaders(broken))


def test_a_function_is_given_all_rows_of_a_loader_at_once(run: ft.Run) -> None:
    largest = lambda prediction, target: (prediction.argmax(1) == target).double().std()
    score = run.evaluate(loaders(), {"m": largest, "loss": nn.CrossEntropyLoss(reduction="sum")})
    outputs = [run.client_module(k)(x).detach() for k, (x, _) in enumerate(rows())]
    targets = [y for _, y in rows()]
    each = [float(largest(output, y)) for output, y in zip(outputs, targets)]
    assert score["m"].clients.tolist() == pytest.approx(each, rel=1e-6)
    assert score["m"].overall == pytest.approx(float(largest(torch.cat(outputs), torch.cat(targets))), rel=1e-6)
    whole = F.cross_entropy(torch.cat(outputs), torch.cat(targets), reduction="sum")
    assert score["loss"].overall == pytest.approx(float(whole), rel=1e-6)


def test_batches_of_other_shapes_are_refused_for_a_function_by_name(run: ft.Run) -> None:
    widths = iter(range(3, 99))

    def collate(batch: Any) -> Any:
        x, y = (torch.stack(each) for each in zip(*batch))
        return x, y[:, None].expand(-1, next(widths))

    with pytest.raises(ValueError, match=r"Expected batches of one shape for the function of metric 'm', .*one length"):
        run.evaluate(loaders(collate), {"m": lambda prediction, target: prediction.mean()})
