"""What a Trainer can be told of a federation, and what would do nothing and is refused by name."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn

_SOLVER = "tell the local solver: ft.gradient_descent({}) or ft.lightning_fit({})"
_AVERAGING = "keep averages of the server's parameters in a recorder, record=, or take ft.fedopt"
_CALLBACKS = {
    StochasticWeightAveraging: _AVERAGING,
    WeightAveraging: _AVERAGING,
    GradientAccumulationScheduler: "give it to ft.lightning_fit(callbacks=)",
    ModelPruning: "prune client_module(client) or global_module()",
    BackboneFinetuning: "set requires_grad=False, or take ft.personal_layers",
    BatchSizeFinder: "give batch_size= to the local solver",
    LearningRateFinder: "tune with ft.grid",
}


def check_settings(trainer: L.Trainer) -> None:
    """Refuses what a Trainer cannot do for a federation, whose modules, rows and optimisers it does not see.

    Raises:
        ValueError: the message names the setting, and where to say it instead.
    """
    doing = trainer.state.fn
    if doing in (TrainerFn.TESTING, TrainerFn.PREDICTING):
        instead = {
            TrainerFn.TESTING: "federation.evaluate(data, metrics)",
            TrainerFn.PREDICTING: "federation.client_module(client) or federation.global_module()",
        }[doing]
        raise ValueError(f"Expected trainer.fit or trainer.validate, but got trainer.{doing.value}; use {instead}")
    if trainer.precision != "32-true":
        _refuse(f"precision={trainer.precision!r}", _SOLVER.format('precision="bf16"', "precision="))
    if trainer.gradient_clip_val is not None:
        _refuse(f"gradient_clip_val={trainer.gradient_clip_val}", _SOLVER.format("clip=", "gradient_clip_val="))
    if trainer.accumulate_grad_batches != 1:
        _refuse(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}",
            _SOLVER.format("batch_size=", "accumulate_grad_batches="),
        )
    if getattr(trainer, "datamodule", None) is not None:
        _refuse("datamodule=", "make ft.data.from_datasets of the clients' data sets, or ft.data.partition one")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, instead in _CALLBACKS.items():
            if isinstance(callback, kind):
                _refuse(f"the callback {type(callback).__name__}", instead)


def check_loader(given: object, own: object, name: str) -> None:
    """Refuses loaders in place of the federation's own `own`, which says only that an epoch is a round."""
    if given is not None and given is not own:
        instead = "its population has the rows" if name == "train" else "validation= and metrics= at its construction"
        _refuse(f"a {name} loader", f"give it to the federation: {instead}, or call federation.evaluate(data)")


def _refuse(setting: str, instead: str) -> None:
    raise ValueError(f"Expected a Trainer without {setting}, which would do nothing for a federation; {instead}")
