"""The federation under a Lightning Trainer: rounds are epochs and steps, and Lightning changes nothing else."""

from __future__ import annotations

import csv
import dataclasses
import re
import time
import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from support.oracles.closed_forms import linear, linear_clients, same_bits, sgd
from support.small_federations import CLASSES, Classifier, classes, everything, solver, trainer
from torch import nn
from torch.utils.data import DataLoader

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.runs import evaluation

DATA = classes()
TRAINING, VALIDATION = DATA.split(0.7, seed=1)
METRICS = {"accuracy": ft.metrics.accuracy(), "cross_entropy": ft.metrics.cross_entropy()}


@pytest.fixture(scope="module")
def local() -> ft.LocalSolver:
    return solver()


def federation(local: ft.LocalSolver, validate: bool = False, **arguments: Any) -> ft.Federation:
    if validate:
        arguments = {"validation": VALIDATION, "metrics": METRICS, **arguments}
    return ft.Federation(ft.personal_layers(local, "head.*"), ft.InProcess(TRAINING), **arguments)


def quadratic(**arguments: Any) -> ft.Federation:
    """Cheap rounds."""
    data = linear_clients([4, 5, 6])
    return ft.Federation(ft.fedavg(sgd(0.05)), ft.InProcess(data), **arguments)


@pytest.mark.parametrize("limit", [{"max_steps": 12}, {"max_epochs": 12}, {"max_epochs": 20, "max_steps": 12}])
def test_a_round_is_a_step_and_an_epoch(limit: dict[str, int]) -> None:
    model, outer = quadratic(), trainer(**limit)
    outer.fit(model)
    assert (model.round, outer.global_step, outer.current_epoch) == (12, 12, 12)


def test_the_time_limit_stops_between_rounds() -> None:
    model = quadratic()
    began = time.monotonic()
    trainer(max_time={"seconds": 1}, max_epochs=-1).fit(model)
    assert time.monotonic() - began < 10
    assert model.round > 2
    rounds = list(ft.Run(model.run.algorithm, model.run.population).rounds(model.round))
    assert same_bits(rounds[-1].server, model.server)


def test_early_stopping_on_a_validation_metric() -> None:
    data = linear_clients([4, 5, 6])
    scores = iter([5.0, 4.0, 3.0, 3.5, 3.6, 3.7, 1.0])

    def scripted(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.full(target.shape, value)

    class Next(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            nonlocal value
            value = next(scores)

    value = 9.0
    model = ft.Federation(ft.fedavg(sgd(0.05)), ft.InProcess(data), validation=data, metrics={"scripted": scripted})
    stop = EarlyStopping("val_scripted", patience=2)
    trainer(max_epochs=50, callbacks=[Next(), stop]).fit(model)
    assert model.round == 5
    assert float(stop.best_score) == 3.0


@pytest.mark.parametrize("faults", [None, ft.Faults(after=lambda keys, ids: ids % 2 == 0)])
def test_a_trainer_gives_the_bits_of_run(local: ft.LocalSolver, faults: ft.Faults | None) -> None:
    model = federation(local, cohort=3, seed=4, faults=faults)
    trainer(max_epochs=4).fit(model)
    rounds = list(ft.Run(model.run.algorithm, ft.InProcess(TRAINING), cohort=3, seed=4, faults=faults).rounds(4))
    assert same_bits(model.server, rounds[-1].server)
    clients = {n.removeprefix("clients."): t for n, t in everything(model).items() if n.startswith("clients.")}
    assert same_bits(clients, rounds[-1].clients.state_dict())
    assert model.run.bytes_up == sum(r.bytes_up for r in rounds) > 0
    assert model.run.bytes_down == sum(r.bytes_down for r in rounds) > 0


def test_validation_does_not_change_training(local: ft.LocalSolver) -> None:
    plain, validated = federation(local, cohort=3), federation(local, validate=True, cohort=3)
    for model in (plain, validated):
        trainer(max_epochs=3).fit(model)
    assert same_bits(everything(plain), everything(validated))


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        *(({"precision": precision}, "ft.gradient_descent") for precision in ("16-true", "bf16-mixed", "64-true")),
        ({"gradient_clip_val": 1.0}, "ft.gradient_descent(clip="),
        ({"accumulate_grad_batches": 2}, "ft.lightning_fit(accumulate_grad_batches="),
        ({"callbacks": EMAWeightAveraging()}, "recorder"),
        ({"callbacks": GradientAccumulationScheduler({0: 2})}, "ft.lightning_fit"),
    ],
)
def test_settings_that_would_do_nothing_are_refused_by_name(setting: dict[str, Any], instead: str) -> None:
    name = next(iter(setting))
    told = type(setting[name]).__name__ if name == "callbacks" else name
    with pytest.raises(
        ValueError, match=f"Expected a Trainer without .*{told}.*would do nothing.*{re.escape(instead)}"
    ):
        trainer(max_epochs=1, **setting).fit(quadratic())


class Module(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(torch.zeros(4, 1))


def test_rows_are_the_populations_and_not_the_trainers(local: ft.LocalSolver) -> None:
    model, loader = federation(local, validate=True), DataLoader(torch.zeros(4, 1))
    for call, name in (
        (lambda: trainer(max_epochs=1).fit(model, loader), "a train loader"),
        (lambda: trainer(max_epochs=1).fit(model, datamodule=Module()), "datamodule="),
        (lambda: trainer(max_epochs=1).fit(model, val_dataloaders=loader), "a validation loader"),
        (lambda: trainer().validate(model, loader, verbose=False), "a validation loader"),
    ):
        with pytest.raises(ValueError, match=f"Expected a Trainer without {name}, which would do nothing"):
            call()
    assert model.round == 0


def test_refused_trainer_features_name_alternatives(local: ft.LocalSolver) -> None:
    model = federation(local)
    with pytest.raises(ValueError, match=r"rows for trainer\.test, but got none; pass trainer\.test\(federation, data"):
        trainer().test(model)
    with pytest.raises(ValueError, match=r"without a test loader.*FederatedData as validation= or test="):
        trainer().test(model, DataLoader(torch.zeros(4, 1)))
    with pytest.raises(ValueError, match=r"without a prediction loader.*FederatedData"):
        trainer().predict(model, DataLoader(torch.zeros(4, 1)))
    with pytest.raises(TypeError, match=r"Expected .*trainer\.fit\(federation, ckpt_path=path\)"):
        ft.Federation.load_from_checkpoint("http://localhost/last.ckpt")


def test_a_run_goes_on_after_an_error() -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("no client today")

    model = quadratic()
    algorithm = model.run.algorithm
    model.run.algorithm = dataclasses.replace(algorithm, outbox=fail)
    with pytest.raises(RuntimeError, match="no client today"):
        trainer(max_epochs=2).fit(model)
    assert torch.get_default_dtype() == torch.float32
    model.run.algorithm = algorithm
    trainer(max_epochs=2).fit(model)
    assert model.round == 2


def test_fitting_twice_continues() -> None:
    twice, once = quadratic(cohort=2), quadratic(cohort=2)
    trainer(max_epochs=3).fit(twice)
    trainer(max_epochs=4).fit(twice)
    trainer(max_epochs=7).fit(once)
    assert twice.round == 7
    assert same_bits(everything(twice), everything(once))


def test_what_is_logged(local: ft.LocalSolver, tmp_path: Any) -> None:
    model = federation(local, validate=True, cohort=3, seed=2)
    trainer(max_epochs=4, logger=CSVLogger(tmp_path, name="", version="")).fit(model)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    told = {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}
    told.pop("step")
    told.pop("epoch")
    rounds, scores = [], []
    for done in ft.Run(model.run.algorithm, ft.InProcess(TRAINING), cohort=3, seed=2).rounds(4):
        rounds.append(done)
        scores.append(evaluation.evaluate(done.clients, done.server, local.predict, VALIDATION, METRICS))
    assert told.pop("train_loss") == [float(r.info["loss"].nanmean()) for r in rounds]
    assert told.pop("size") == [float(r.info["size"].nanmean()) for r in rounds]
    assert told.pop("bytes_up") == torch.tensor([r.bytes_up for r in rounds]).cumsum(0).tolist()
    assert told.pop("bytes_down") == torch.tensor([r.bytes_down for r in rounds]).cumsum(0).tolist()
    for name in METRICS:
        assert told.pop(f"val_{name}") == [s[name].overall for s in scores]
        assert told.pop(f"val_{name}_mean") == [float(s[name].clients.nanmean()) for s in scores]
        assert told.pop(f"val_{name}_min") == [float(s[name].clients.min()) for s in scores]
        assert told.pop(f"val_{name}_max") == [float(s[name].clients.max()) for s in scores]
        assert told.pop(f"val_{name}_undefined") == [0.0] * len(scores)
    assert not told
    assert sorted({int(row["step"]) for row in rows}) == [0, 1, 2, 3]


def test_large_byte_counts_are_logged_exactly(tmp_path: Any) -> None:
    model = quadratic()
    model.run.bytes_up = 2**40
    outer = trainer(max_epochs=1)
    outer.fit(model)
    assert int(outer.callback_metrics["bytes_up"]) == model.run.bytes_up > 2**40


def test_what_the_progress_bar_shows(local: ft.LocalSolver) -> None:
    outer = trainer(max_epochs=2)
    outer.fit(federation(local, validate=True))
    assert {"train_loss", "val_accuracy", "val_cross_entropy"} <= outer.progress_bar_metrics.keys()
    assert not any("bytes" in name for name in outer.progress_bar_metrics)


def test_the_best_checkpoint_is_kept(local: ft.LocalSolver, tmp_path: Any) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val_cross_entropy", save_top_k=1, filename="{epoch}")
    outer = trainer(max_epochs=6, callbacks=[best], enable_checkpointing=True)
    model = federation(local, validate=True, cohort=3)
    outer.fit(model)
    scores = []
    for done in ft.Run(model.run.algorithm, ft.InProcess(TRAINING), cohort=3).rounds(6):
        found = evaluation.evaluate(done.clients, done.server, local.predict, VALIDATION, METRICS)
        scores.append(found["cross_entropy"].overall)
    assert float(best.best_model_score) == min(scores)
    assert [p.name for p in tmp_path.iterdir()] == [f"epoch={scores.index(min(scores))}.ckpt"]
    restored = federation(local, validate=True, cohort=3)
    outer.validate(restored, ckpt_path=best.best_model_path, verbose=False)
    assert restored.round == scores.index(min(scores)) + 1
    assert restored.evaluate(VALIDATION)["cross_entropy"].overall == min(scores)


def test_validate_alone(local: ft.LocalSolver) -> None:
    model = federation(local, validate=True)
    [logged] = trainer().validate(model, verbose=False)
    assert logged["val_accuracy"] == model.evaluate(VALIDATION)["accuracy"].overall


def test_evaluation_equals_torchmetrics(local: ft.LocalSolver) -> None:
    model = federation(local)
    trainer(max_epochs=3).fit(model)
    torch_accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES, average="macro")
    scores = model.evaluate(
        VALIDATION, {**METRICS, "macro": torch_accuracy, "mine": lambda p, t: (p.argmax(-1) == t).double()}
    )
    logits, targets = [], []
    for k, (x, y) in enumerate(VALIDATION):
        module = model.client_module(k).eval()
        with torch.no_grad():
            logits.append(module(x))
        targets.append(y)
    pooled, target = torch.cat(logits), torch.cat(targets)
    micro = torchmetrics.Accuracy("multiclass", num_classes=CLASSES, average="micro")
    macro = torchmetrics.Accuracy("multiclass", num_classes=CLASSES, average="macro")
    rounding = {"rel": 1e-6}  # of float32
    for name in ("accuracy", "mine"):
        assert scores[name].overall == pytest.approx(float(micro(pooled, target)), **rounding)
        each = [float(micro(p, t)) for p, t in zip(logits, targets)]
        assert scores[name].clients.tolist() == pytest.approx(each, **rounding)
        assert scores[name].mean() == pytest.approx(sum(each) / len(each), **rounding)
        assert scores[name].worst(True) == pytest.approx(min(each), **rounding)
    assert scores["macro"].overall == pytest.approx(float(macro(pooled, target)), **rounding)
    assert scores["cross_entropy"].overall == pytest.approx(
        float(nn.functional.cross_entropy(pooled, target)), **rounding
    )
    assert torch_accuracy.update_count == 0


def test_client_modules_are_the_users_own_class(local: ft.LocalSolver) -> None:
    model = federation(local)
    trainer(max_epochs=2).fit(model)
    by_number, by_name = model.client_module(3), model.client_module("site 3")
    assert type(by_number) is Classifier
    assert same_bits(dict(by_number.state_dict()), dict(by_name.state_dict()))
    assert type(by_number.accuracy) is type(torchmetrics.Accuracy("multiclass", num_classes=CLASSES))
    x, y = VALIDATION[3]
    trainer(max_epochs=1).fit(by_number, torch.utils.data.DataLoader([(x[0], y[0])], num_workers=0))
    assert not same_bits(dict(by_number.state_dict()), dict(by_name.state_dict()))
    assert same_bits(dict(model.client_module(3).state_dict()), dict(by_name.state_dict()))
    for unknown in (5, -1, "site 9"):
        with pytest.raises(ValueError, match="Expected"):
            model.client_module(unknown)


def test_global_module(local: ft.LocalSolver) -> None:
    model = ft.Federation(ft.fedavg(local), ft.InProcess(TRAINING))
    trainer(max_epochs=2).fit(model)
    module = model.global_module()
    assert type(module) is Classifier
    assert same_bits(dict(module.named_parameters()), model.server)
    with pytest.raises(ValueError, match="client_module"):
        federation(local).global_module()


def test_no_global_module_with_buffers_of_the_clients() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    data = linear_clients([4, 5, 6])
    for buffers, whole in (("local", False), ("average", True)):
        model = ft.Federation(ft.fedavg(sgd(0.05, module, buffers=buffers)), ft.InProcess(data))
        if whole:
            assert isinstance(model.global_module(), nn.Sequential)
        else:
            with pytest.raises(ValueError, match="client_module"):
                model.global_module()


def test_pooled_client_is_scored_on_all_rows(local: ft.LocalSolver) -> None:
    model = ft.Federation(ft.pooled(local), ft.InProcess(TRAINING.pool()), validation=VALIDATION, metrics=METRICS)
    outer = trainer(max_epochs=2)
    outer.fit(model)
    score = model.evaluate(VALIDATION)["accuracy"]
    assert score.clients.shape == (5,)
    module = model.client_module("pool").eval()
    for k, (x, y) in enumerate(VALIDATION):
        assert float(score.clients[k]) == pytest.approx(float((module(x).argmax(1) == y).double().mean()))
    assert float(outer.callback_metrics["val_accuracy"]) == score.overall


def test_refusals_at_construction(local: ft.LocalSolver) -> None:
    with pytest.raises(ValueError, match="cohort between 1 and the population's 5 clients, but got 6"):
        federation(local, cohort=6)
    with pytest.raises(ValueError, match="together"):
        federation(local, validation=VALIDATION)
    with pytest.raises(ValueError, match="together"):
        federation(local, metrics=METRICS)
    with pytest.raises(ValueError, match="5 clients, but got 2"):
        federation(local, validate=True, validation=VALIDATION.select([0, 1]))
    with pytest.raises(ValueError, match="client 0 is 'site 4' there and 'site 0'"):
        federation(local, validate=True, validation=VALIDATION.select([4, 3, 2, 1, 0]))
    with pytest.raises(TypeError, match="call it first"):
        federation(local, validate=True, metrics={"accuracy": torchmetrics.Accuracy})
    with pytest.raises(ValueError, match="at least one metric"):
        federation(local).evaluate(VALIDATION)


def test_the_users_module_is_not_changed() -> None:
    module = Classifier()
    before = tree.map(torch.clone, dict(module.state_dict()))
    state = dict(module.__dict__)
    model = ft.Federation(ft.fedavg(ft.gradient_descent(module, epochs=1, batch_size=4)), ft.InProcess(TRAINING))
    trainer(max_epochs=2).fit(model)
    assert same_bits(before, dict(module.state_dict()))
    assert module.__dict__.keys() == state.keys()
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    assert module._trainer is None
    assert module.accuracy.update_count == 0
    assert not list(model.parameters())
    assert not list(model.buffers())
    assert list(model.modules()) == [model]


@pytest.mark.parametrize("validate", [False, True])
def test_an_ordinary_run_warns_of_nothing(local: ft.LocalSolver, tmp_path: Any, validate: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outer = L.Trainer(max_epochs=3, accelerator="cpu", logger=CSVLogger(tmp_path), default_root_dir=tmp_path)
        outer.fit(federation(local, validate))
    said = [str(w.message) for w in caught if "LeafSpec" not in str(w.message)]
    assert said == []


def test_a_starting_point_of_ones_own() -> None:
    start = dict(linear(seed=5).named_parameters())
    model = quadratic(parameters=start)
    assert same_bits(model.server, start)


def test_loss_scaling_is_refused() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="Expected a Trainer without precision='16-mixed'"):
        trainer(max_epochs=1, plugins=[plugin]).fit(quadratic())


def test_a_barebones_trainer() -> None:
    model = quadratic()
    L.Trainer(max_epochs=2, accelerator="cpu", barebones=True).fit(model)
    assert model.round == 2
