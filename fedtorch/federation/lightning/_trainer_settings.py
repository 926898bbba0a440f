"""Check a Trainer's settings: those that would do nothing in a federation, or go wrong, are refused by name."""

from __future__ import annotations

import math

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
_CALLBACKS = {
    WeightAveraging: "take StochasticWeightAveraging, or keep averages in a recorder, record=",
    GradientAccumulationScheduler: "give it to ft.lightning_fit(callbacks=)",
    ModelPruning: "prune client_module(client) or global_module()",
    BackboneFinetuning: "set requires_grad=False, or take ft.personal_layers",
    BatchSizeFinder: "give batch_size= to the local solver",
    LearningRateFinder: "tune with ft.grid or ft.tune",
}
_FOLLOWERS = (LearningRateMonitor, StochasticWeightAveraging)  # of the clients' learning rates


def check_settings(trainer: L.Trainer, rates: bool, limits: bool) -> None:
    """Refuse what a Trainer cannot do for a federation, whose modules, rows and optimisers it does not see.

    Args:
        trainer: whose settings.
        rates: whether the clients' learning rates are known.
        limits: whether their epochs can be limited.

    Raises:
        ValueError: the message names the setting, and where to say it instead.
    """
    if trainer.precision != "32-true":
        _refuse(f"precision={trainer.precision!r}", _SOLVER.format('precision="bf16"', "precision="))
    if trainer.gradient_clip_val is not None:
        _refuse(f"gradient_clip_val={trainer.gradient_clip_val}", _SOLVER.format("clip=", "gradient_clip_val="))
    if trainer.accumulate_grad_batches != 1:
        _refuse(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}",
            _SOLVER.format("batch_size=", "accumulate_grad_batches="),
        )
    if trainer.gradient_clip_algorithm is not None:
        _refuse(
            f"gradient_clip_algorithm={trainer.gradient_clip_algorithm!r}",
            _SOLVER.format("clip=", "gradient_clip_algorithm="),
        )
    _check_batches(trainer, limits)
    if getattr(trainer, "datamodule", None) is not None:
        _refuse(
            "datamodule=",
            "every client has its own: ft.data.from_datamodules({name: datamodule})",
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, instead in _CALLBACKS.items():
            if isinstance(callback, kind):
                _refuse(f"the callback {type(callback).__name__}", instead)
        if isinstance(callback, _FOLLOWERS) and not rates:
            name = type(callback).__name__
            _refuse(f"the callback {name}", "these clients have no learning rates that are known to this process")


def limit_of(trainer: L.Trainer, stage: str) -> float | None:
    """Return the limit of a stage's batches, "train", "val", "test" or "predict"; None for all and for none."""
    limit = getattr(trainer, f"limit_{stage}_batches")
    whole = (limit == 1 and isinstance(limit, float)) or limit == 0
    return None if whole or trainer.fast_dev_run else limit  # type: ignore[attr-defined]


def items_for(limit: float | None) -> list[int]:
    """Return the items of a loader of which Lightning, limiting them too, takes one.

    Example:
        >>> [len(items_for(limit)) for limit in (None, 3, 0.5, 0.3)]
        [1, 1, 2, 4]
    """
    count = 1 if limit is None or isinstance(limit, int) else math.ceil(1 / limit)
    return [0] * (count + (limit is not None and int(count * limit) < 1))


def reads_rates(callback: L.Callback) -> bool:
    """Return whether a callback may look at learning rates: those of Lightning that do, and all of others."""
    return isinstance(callback, _FOLLOWERS) or not type(callback).__module__.startswith(("lightning.", "fedtorch."))


def _check_batches(trainer: L.Trainer, limits: bool) -> None:
    """Refuse settings of loaders: an epoch has one batch, which is the round, and clients have the rows."""
    few = trainer.overfit_batches  # type: ignore[attr-defined]
    if few and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        _refuse(f"overfit_batches={few}", "train on few rows or clients: data.select([0])")
    advice = {} if limits else {"train": _SOLVER.format("steps=", "limit_train_batches=")}
    advice["predict"] = "predict for fewer clients or rows with federation.run.predict(data, clients=)"
    for stage, instead in advice.items():
        if (limit := limit_of(trainer, stage)) is not None:
            _refuse(f"limit_{stage}_batches={limit}", instead)
    if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        every = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        _refuse(f"reload_dataloaders_every_n_epochs={every}", "take ft.Growing for clients whose rows change")
    every = trainer.val_check_interval
    if isinstance(every, float) and every != 1:
        _refuse(
            f"val_check_interval={every}", "a round is a batch: check_val_every_n_epoch=2 scores every second round"
        )
    if trainer._accelerator_connector._layer_sync is not None:
        _refuse("sync_batchnorm=True", 'average statistics by ft.gradient_descent(…, buffers="average")')


def check_rounds(trainer: L.Trainer, schedule: LocalSchedule | None) -> None:
    """Refuse to train for another number of rounds than the clients' schedules were made for.

    Raises:
        ValueError: the message names the setting of the Trainer.
    """
    given = {name: getattr(trainer, name) for name in ("max_epochs", "max_steps")}
    limits = {name: value for name, value in given.items() if value not in (None, -1)}
    if limits and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        name = min(limits, key=lambda name: limits[name])
        check_length(schedule, limits[name], f"{name}={limits[name]} of the Trainer")


def check_loader(given: object, own: object, name: str) -> None:
    """Refuse loaders in place of the federation's own `own`, which says only that an epoch is a round."""
    if given is not None and given is not own:
        instead = "its population has the rows" if name == "train" else "FederatedData as validation= or test="
        _refuse(f"a {name} loader", f"give it to the federation: {instead}, or call federation.evaluate(data)")


def check_place(trainer: L.Trainer, population: Population) -> None:
    """Refuse to train the same clients several times over, or to lose those of other ranks.

    Raises:
        ValueError: population, strategy and number of processes do not belong together; the message says what does.
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
