"""Checks of a Trainer's settings: those that have no effect in a federation, or a wrong one, raise an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)

from fedtorch.federation.lightning.client_sharding import ClientSharding
from fedtorch.federation.local_schedule import LocalSchedule, check_length
from fedtorch.federation.populations.distributed import Distributed
from fedtorch.federation.populations.population import Population

_SOLVER = "tell the local solver: ft.gradient_descent({}) or ft.lightning_fit({})"


# Trainer arguments without effect in a federation: the value that would act on a module (None: any other), the remedy.
_REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "precision": (
        lambda trainer: trainer.precision if trainer.precision != "32-true" else None,
        _SOLVER.format('precision="bf16"', "precision="),
    ),
    "gradient_clip_val": (
        lambda trainer: trainer.gradient_clip_val,
        _SOLVER.format("clip=", "gradient_clip_val="),
    ),
    "gradient_clip_algorithm": (
        lambda trainer: trainer.gradient_clip_algorithm,
        _SOLVER.format("clip=", "gradient_clip_algorithm="),
    ),
    "accumulate_grad_batches": (
        lambda trainer: trainer.accumulate_grad_batches if trainer.accumulate_grad_batches != 1 else None,
        _SOLVER.format("batch_size=", "accumulate_grad_batches="),
    ),
    "overfit_batches": (
        lambda trainer: None if trainer.fast_dev_run else trainer.overfit_batches or None,
        "train on few rows or clients: data.select([0])",
    ),
    "limit_train_batches": (
        lambda trainer: limit_of(trainer, "train"),  # has an effect if clients' epochs are counted in minibatches
        _SOLVER.format("steps=", "limit_train_batches="),
    ),
    "limit_predict_batches": (
        lambda trainer: limit_of(trainer, "predict"),
        "predict for fewer clients or rows with federation.run.predict(data, clients=)",
    ),
    "reload_dataloaders_every_n_epochs": (
        lambda trainer: trainer.reload_dataloaders_every_n_epochs or None,
        "take ft.Growing for clients whose rows change",
    ),
    "val_check_interval": (
        lambda trainer: every if isinstance(every := trainer.val_check_interval, float) and every != 1 else None,
        "a round is a batch: check_val_every_n_epoch=2 scores every second round",
    ),
    "sync_batchnorm": (
        lambda trainer: True if trainer._accelerator_connector._layer_sync is not None else None,
        'average statistics by ft.gradient_descent(…, buffers="average")',
    ),
}
_CALLBACKS = {
    WeightAveraging: "take StochasticWeightAveraging, or keep averages in a recorder, record=",
    GradientAccumulationScheduler: "give it to ft.lightning_fit(callbacks=)",
    ModelPruning: "prune client_module(client) or global_module()",
    BackboneFinetuning: "set requires_grad=False, or take ft.personal_layers",
    BatchSizeFinder: "give batch_size= to the local solver",
    LearningRateFinder: "tune with ft.grid or ft.tune",
}
_FOLLOWERS = (LearningRateMonitor, StochasticWeightAveraging)  # they follow the clients' learning rates


def check_settings(trainer: L.Trainer, rates: bool, limits: bool) -> None:
    """Refuse Trainer settings that would act on modules, rows or optimisers, which the Trainer does not see.

    Args:
        trainer: the Trainer to check.
        rates: whether the clients' learning rates are known.
        limits: whether the clients' epochs can be limited.

    Raises:
        ValueError: names the setting, and where to set it instead.
    """
    for name, (acting, instead) in _REFUSED.items():
        if (value := acting(trainer)) is not None and not (limits and name == "limit_train_batches"):
            _refuse(f"{name}={value!r}", instead)
    if getattr(trainer, "datamodule", None) is not None:
        _refuse("datamodule=", "every client has its own: ft.data.from_datamodules({name: datamodule})")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        advice = {kind: remedy for kind, remedy in _CALLBACKS.items() if isinstance(callback, kind)}
        if isinstance(callback, _FOLLOWERS) and not rates:
            advice[type(callback)] = "these clients have no learning rates that are known to this process"
        for remedy in advice.values():
            _refuse(f"the callback {type(callback).__name__}", remedy)


def limit_of(trainer: L.Trainer, stage: str) -> float | None:
    """Return the batch limit of a stage ("train", "val", "test" or "predict"); None for no limit and for zero."""
    limit = getattr(trainer, f"limit_{stage}_batches")
    whole = (limit == 1 and isinstance(limit, float)) or limit == 0
    return None if whole or trainer.fast_dev_run else limit  # type: ignore[attr-defined]


def items_for(limit: float | None) -> list[int]:
    """Return loader items such that Lightning, which applies the limit again, takes one.

    Example:
        >>> [len(items_for(limit)) for limit in (None, 3, 0.5, 0.3)]
        [1, 1, 2, 4]
    """
    count = 1 if limit is None or isinstance(limit, int) else math.ceil(1 / limit)
    return [0] * (count + (limit is not None and int(count * limit) < 1))


def reads_rates(callback: L.Callback) -> bool:
    """Return whether a callback may read learning rates: some of Lightning's do, and any custom one may."""
    return isinstance(callback, _FOLLOWERS) or not type(callback).__module__.startswith(("lightning.", "fedtorch."))


def check_rounds(trainer: L.Trainer, schedule: LocalSchedule | None) -> None:
    """Refuse a number of rounds other than that of the clients' learning rate schedules.

    Raises:
        ValueError: names the Trainer's setting.
    """
    given = {name: getattr(trainer, name) for name in ("max_epochs", "max_steps")}
    limits = {name: value for name, value in given.items() if value not in (None, -1)}
    if limits and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        name = min(limits, key=lambda name: limits[name])
        check_length(schedule, limits[name], f"{name}={limits[name]} of the Trainer")


def check_loader(given: object, own_loader: object, name: str) -> None:
    """Refuse loaders other than the federation's `own_loader`, whose only purpose is that an epoch is a round."""
    if given is not None and given is not own_loader:
        instead = "its population has the rows" if name == "train" else "FederatedData as validation= or test="
        _refuse(f"a {name} loader", f"give it to the federation: {instead}, or call federation.evaluate(data)")


def check_place(trainer: L.Trainer, population: Population) -> None:
    """Refuse Trainer strategies that would train clients several times, or lose those of other ranks.

    Raises:
        ValueError: population, strategy and number of processes do not match; the message gives a combination that
            does.
    """
    place = trainer.global_rank, trainer.world_size
    if isinstance(population, Distributed):
        if place != (population.rank, population.world_size):
            raise ValueError(
                f"Expected the population and the Trainer in one place, but the population is rank "
                f"{population.rank} of {population.world_size} and the Trainer {place[0]} of {place[1]}; start "
                "with torchrun, and give the Trainer as many devices= and num_nodes="
            )
    elif trainer.world_size > 1:
        raise ValueError(
            f"Expected a ft.Distributed population for {trainer.world_size} processes, but got "
            f"{type(population).__name__}, whose clients would all run in every process; use ft.Distributed(data) "
            "and strategy=ft.ClientSharding()"
        )
    if trainer.world_size > 1 and not isinstance(trainer.strategy, ClientSharding):
        raise ValueError(
            f"Expected strategy=ft.ClientSharding() for {trainer.world_size} processes, but got "
            f"{type(trainer.strategy).__name__}, which would save the clients of one rank only"
        )


def _refuse(setting: str, instead: str) -> None:
    raise ValueError(f"Expected a Trainer without {setting}, which would do nothing for a federation; {instead}")
