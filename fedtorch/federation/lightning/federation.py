"""The federation as a LightningModule: the outer loop is a Lightning `Trainer`.

One communication round is one training step and one epoch, so validation, checkpoints, early stopping, loggers and
`max_time` act between rounds. A checkpoint holds everything, and a resumed run gives the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn

from fedtorch import tree
from fedtorch._representation import run_line
from fedtorch.checkpoint import describe
from fedtorch.checkpoint_io import keep_plain
from fedtorch.federation.algorithm import Algorithm, check_algorithm
from fedtorch.federation.budget import exhausted
from fedtorch.federation.lightning._callbacks import callbacks_of_rounds
from fedtorch.federation.lightning._clients_optimizers import ClientsOptimizers
from fedtorch.federation.lightning._evaluation import Evaluation, values_of
from fedtorch.federation.lightning._trainer_settings import (
    check_loader,
    check_place,
    check_rounds,
    check_settings,
    items_for,
    limit_of,
    reads_rates,
)
from fedtorch.federation.lightning.stopping import stopped_early
from fedtorch.federation.populations.population import Population, check_population
from fedtorch.federation.runs.cohorts import Asked
from fedtorch.federation.runs.evaluation import Evaluable, Split, inputs_and_targets
from fedtorch.federation.runs.faults import Faults
from fedtorch.federation.runs.run import Run
from fedtorch.history import Recorder, means
from fedtorch.metrics.scores import Score
from fedtorch.tree import Tree

if TYPE_CHECKING:
    import pandas as pd

_LARGE = 100 * 2**20  # bytes of a checkpoint that deserve a warning
# Lightning's `load_from_checkpoint` of any class reads who makes the module, and says that it does not know this one.
_INSTEAD = "of a federation: call fedtorch's load_module(path, module) instead of load_from_checkpoint."


class Federation(L.LightningModule):
    """A federated algorithm on a population, trained by a Lightning `Trainer`: an epoch is a communication round.

    Logged each round: `train_loss` and whatever the clients log (means over the cohort), `bytes_up`, `bytes_down`; and,
    with `validation`, `val_<metric>` over all rows, over clients `val_<metric>_mean`, `val_<metric>_min` and `_max`,
    and `val_<metric>_undefined`, on the rows of how many clients it is not defined. In a round that nobody answers,
    what clients log is NaN, which `EarlyStopping` passes over.

    Args:
        algorithm: what clients and server compute.
        population: who computes, and where.
        parameters: where training starts; default: the algorithm's own start.
        cohort: how many clients are asked each round (uniformly without replacement), which, by their ids, or a
            function of the round's key and number, see `ft.Run`; None asks everybody.
        validation: rows of the same clients, scored after every round.
        test: rows of the same clients, for `Trainer.test` and `Trainer.predict`, which take others as well, as
            `Trainer.validate` does: `trainer.test(federation, data)`. Predictions are a list for each client, of an
            output for each of its batches.
        metrics: by name, for `validation` and `test`: torchmetrics, `ft.metrics`, losses of torch, or functions of a
            client's predictions and targets `(N, ...)`. Default: what the LightningModule's own `validation_step` and
            `test_step` log, under their names; see `Run.evaluate`.
        split: rows -> (inputs, targets), for `metrics`, and predictions of a module without `predict_step`.
        evaluation_batch_size: rows of a client that are evaluated or predicted at once; default: all of them.
        seed: of all randomness.
        faults: what goes wrong; see `ft.dropouts`, `ft.stragglers`, `ft.lost_messages`.
        record: who follows the run, such as an `ft.Sampler`.
        keep_losses: at most so many of the clients' training losses are kept for `client_losses` (8 bytes each, also
            in checkpoints), those of the latest rounds; 0 keeps none.
        on_bad_message: what a message with NaN or Inf does; see `Run`.
        anyway: whether `trainer.fit(federation, ckpt_path=path)` takes a checkpoint of other settings or rows too.
        joined: "new" where it may be one of fewer clients, whom others have joined; see `Run.load_state_dict`.

    Attributes:
        run: the `Run` that the Trainer drives; all that came out is there.
        scores: those of the last validation, by name.

    Raises:
        ValueError: a cohort larger than the population, clients that cannot take part, data that do not fit.

    Example:
        >>> import lightning as L, torch, fedtorch as ft
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=5, seed=0)
        >>> local = ft.least_squares(torch.nn.Linear(10, 1))
        >>> federation = ft.Federation(ft.fedavg(local), ft.InProcess(data))
        >>> trainer = L.Trainer(max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        ...                     enable_model_summary=False, accelerator="cpu")
        >>> trainer.fit(federation)
        >>> federation.round, federation.run.bytes_up
        (3, 4140)
    """

    def __init__(
        self,
        algorithm: Algorithm,
        population: Population,
        parameters: Tree = None,
        *,
        cohort: Asked = None,
        validation: Evaluable | None = None,
        test: Evaluable | None = None,
        metrics: Mapping[str, Any] | None = None,
        split: Split = inputs_and_targets,
        evaluation_batch_size: int | None = None,
        seed: int = 0,
        faults: Faults | None = None,
        record: Recorder | Sequence[Recorder] = (),
        keep_losses: int = 1_000_000,
        on_bad_message: Literal["raise", "drop"] = "raise",
        anyway: bool = False,
        joined: Literal["new"] | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        check_algorithm(algorithm)
        check_population(population)
        self.run = Run(
            algorithm,
            population,
            parameters,
            cohort=cohort,
            faults=faults,
            seed=seed,
            record=record,
            keep_losses=keep_losses,
            on_bad_message=on_bad_message,
        )
        rows = {"validation": validation, "test": test, "predict": test}
        self._split, self._metrics, self._batch_size = split, metrics, evaluation_batch_size
        self._anyway, self._joined = anyway, joined
        self._evaluation = Evaluation(self.run, rows, metrics, split, evaluation_batch_size)
        self._optimizers = ClientsOptimizers(self.run)
        self._items = {stage: [0] for stage in ("train", "val", "test")}  # an epoch is a round, an evaluation a step
        self.scores: dict[str, Score] = {}
        self._waiting: list[tuple[EarlyStopping, bool, int]] = []  # with what they had before an unanswered round
        self._warned = False
        self._show_validation()

    def _show_validation(self) -> None:
        """Let Lightning see whether there is something to validate."""
        for name in ("validation_step", "val_dataloader"):
            vars(self).pop(name, None)
            if not self._evaluation.has("validation"):
                setattr(self, name, None)

    def __repr__(self) -> str:
        return run_line(
            "Federation", self.run, self.run.algorithm.settings, f"{len(self.run.population.names)} clients"
        )

    # -- what came out ---------------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Return the number of communication rounds done."""
        return self.run.number

    @property
    def server(self) -> Tree:
        """Return the server's state."""
        return self.run.server

    @property
    def history(self) -> pd.DataFrame:
        """Return the history, a row per round; see `Run.history`."""
        return self.run.history

    @property
    def client_losses(self) -> pd.DataFrame:
        """Return the clients' training losses; see `Run.client_losses`."""
        return self.run.client_losses

    def client_module(self, client: int | str) -> nn.Module:
        """Return a copy of the module with the tensors that `client` (number or name) predicts with."""
        return self.run.client_module(client)

    def global_module(self) -> nn.Module:
        """Return a copy of the module with the server's parameters; see `Run.global_module`."""
        return self.run.global_module()

    def evaluate(
        self,
        data: Evaluable,
        metrics: Mapping[str, Any] | None = None,
        split: Split | None = None,
        **options: Any,
    ) -> dict[str, Score]:
        """Return scores as `Run.evaluate` does, whose options are taken; metrics default to those of construction."""
        options = {"batch_size": self._batch_size, **options}
        return self.run.evaluate(data, metrics or self._metrics or None, split or self._split, **options)

    # -- Lightning -------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Run one communication round."""
        self._let_stopping_go_on()
        planned = self.trainer.max_epochs
        self.run.goal = planned if planned is not None and planned > 0 else None
        round = self.run.step(**self._optimizers.ask())
        self._optimizers.follow(round.ids)
        if not len(round.ids):
            self._let_stopping_wait(round.info)
        self._log_values(means(round.info), prog_bar=("train_loss",))
        self._log_values({name: float(value) for name, value in round.report.items() if name not in round.info})
        self._log_values({"bytes_up": self.run.bytes_up, "bytes_down": self.run.bytes_down})
        self.trainer.should_stop = self.trainer.should_stop or exhausted(self.run.algorithm.budget)
        counter = self.optimizers()
        (counter[0] if isinstance(counter, list) else counter).step()

    def _let_stopping_wait(self, names: Collection[str]) -> None:
        """Keep `EarlyStopping` from counting a round that nobody answers, whose metric is NaN."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EarlyStopping) and callback.monitor in {*names, "train_loss"}:
                self._waiting.append((callback, callback.check_finite, callback.wait_count))
                callback.check_finite = False
                callback.wait_count = min(callback.wait_count, callback.patience - 1) - 1  # NaN adds one

    def _let_stopping_go_on(self) -> None:
        for callback, checks, waited in self._waiting:
            callback.check_finite, callback.wait_count = checks, waited
        self._waiting.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Score every client's model on its validation rows."""
        self.run.log.validated(self.round, self._score("validation"))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Score every client's model on its test rows."""
        self._score("test")

    def predict_step(self, batch: Any, batch_idx: int) -> list[Any]:
        """Return the predictions of one client, an output for each of its batches."""
        return self._evaluation.predictions(int(batch), self.trainer)

    def _score(self, stage: str) -> dict[str, float]:
        self.scores = self._evaluation.scores(stage, self.trainer)
        values = values_of(self.scores)
        self._log_values(values, prog_bar=tuple(name for name in self.scores if name in values))
        return values

    def train_dataloader(self) -> Iterable[int]:
        """Return what gives one item: an epoch is a round."""
        return self._items_of("train")

    def val_dataloader(self) -> Iterable[int]:
        """Return what gives one item: all clients are scored in one step."""
        return self._items_of("val")

    def test_dataloader(self) -> Iterable[int]:
        """Return what gives one item: all clients are scored in one step."""
        return self._items_of("test")

    def _items_of(self, stage: str) -> list[int]:
        self._items[stage] = items_for(limit_of(self.trainer, stage))
        return self._items[stage]

    def predict_dataloader(self) -> Iterable[int]:
        """Return the clients' numbers."""
        return list(range(len(self._evaluation.rows("predict"))))

    def configure_optimizers(self) -> Any:
        """Return optimisers without parameters: they hold the clients' learning rates, and Lightning counts steps."""
        return self._optimizers.make(watched=any(map(reads_rates, self.trainer.callbacks)))  # type: ignore[attr-defined]

    def configure_callbacks(self) -> list[L.Callback]:
        """Add none; this is where a Trainer asks first, and what would do nothing is refused.

        Lightning's own progress bar, which begins anew every epoch, makes place for one over all rounds, and its weight
        averaging for one of the server's parameters.
        """
        schedule = self.run.algorithm.schedule
        limits = schedule is not None and schedule.takes_limit and self._optimizers.known
        check_settings(self.trainer, self._optimizers.known, limits)
        self._evaluation.attach(self.trainer, self)
        self._show_validation()
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = callbacks_of_rounds(callbacks)
        return []

    def on_fit_start(self) -> None:
        """Refuse a run of another length than its schedules; tell the loggers the settings, as `local/lr`."""
        check_rounds(self.trainer, self.run.algorithm.schedule)
        for logger in self.trainer.loggers if self.trainer.enable_autolog_hparams else ():
            logger.log_hyperparams(hyperparameters(self.run, self._optimizers.settings()))

    def on_train_start(self) -> None:
        """Refuse rows that the Trainer was given."""
        check_loader(self.trainer.train_dataloader, self._items["train"], "train")

    def on_train_end(self) -> None:
        """Note why the run has stopped before the rounds that the Trainer was given."""
        self._let_stopping_go_on()
        self.run.ended = stopped_early(self.trainer, self.round)

    def on_validation_start(self) -> None:
        """Refuse rows that the Trainer was given."""
        check_loader(self.trainer.val_dataloaders, self._items["val"], "validation")

    @classmethod
    def load_from_checkpoint(cls, *arguments: Any, **options: Any) -> Any:
        """Refuse: a checkpoint holds tensors, and not the functions that an algorithm is made of."""
        raise TypeError(
            "Expected a federation made as for the run that was saved, and trainer.fit(federation, ckpt_path=path), "
            "but got load_from_checkpoint, for which a checkpoint says too little; for its model alone "
            "fedtorch.load_module(path, module)"
        )

    def setup(self, stage: str) -> None:
        """Refuse to train the same clients several times over."""
        trainer = self.trainer
        self._optimizers.take(limit_of(trainer, "train") if stage == "fit" else None)
        check_place(trainer, getattr(self.run.population, "population", self.run.population))
        keep_plain(trainer.strategy, private=hasattr(self.run.population, "organisations"))
        # An epoch has one step; Lightning warns of longer intervals.
        trainer.log_every_n_steps = min(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]

    def _log_values(self, values: Mapping[str, float], prog_bar: tuple[str, ...] = ()) -> None:
        """Log what all ranks agree on: float64, for bytes, and the maximum of equal values, which is exact."""
        if self.trainer.barebones:
            return
        device = self.device if self.trainer.world_size > 1 else "cpu"
        for name, value in values.items():
            self.log(
                name,
                torch.tensor(value, dtype=torch.float64, device=device),
                on_step=False,
                on_epoch=True,
                prog_bar=name in prog_bar,
                batch_size=1,
                reduce_fx="max",
                sync_dist=True,
            )

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say in the file what to do where somebody loads it as the checkpoint of a module."""
        checkpoint.setdefault(self.CHECKPOINT_HYPER_PARAMS_KEY, {})["_instantiator"] = _INSTEAD

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return all of the run, flat; see `Run.state_dict`."""
        flat = self.run.state_dict()
        size = tree.nbytes(flat)
        if size > _LARGE and not self._warned:
            self._warned = True
            warnings.warn(
                f"A checkpoint of this federation takes {size / 2**20:.0f} MiB; save less often, for example with "
                "ModelCheckpoint(every_n_epochs=10)",
                stacklevel=2,
            )
        return flat

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: it belongs to another federation.
        """
        self.run.load_state_dict(state, anyway=self._anyway, joined=self._joined)


def hyperparameters(run: Run, of_clients: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run and of its module, flat: numbers and text as they are, other values as text.

    Args:
        run: not yet begun, or resumed.
        of_clients: settings of the clients' optimisers and schedules that depend on the run's length and the clients'
            rows, and stand in the place of those with which the local solver was made before it knew them.
    """
    local = {f"local.{name}": value for name, value in of_clients.items()}
    known = {name: local.get(name, value) for name, value in run.algorithm.settings.items()}
    of_run = {"seed": run.seed, "cohort": run.cohort, "faults": run.faults, "clients": len(run.population.names)}
    module = run.algorithm.module
    of_module = getattr(module, "hparams", {}) if getattr(module, "_log_hyperparams", False) else {}
    plain = (bool, int, float, str, type(None))
    return {
        name.replace(".", "/"): value if isinstance(value, plain) else describe(value)
        for name, value in {**known, **of_run, **_flat(of_module, "module")}.items()
    }


def _flat(settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return nested settings flat, their names joined by slashes."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        path = f"{prefix}/{name}"
        flat.update(_flat(value, path) if isinstance(value, Mapping) else {path: value})
    return flat
