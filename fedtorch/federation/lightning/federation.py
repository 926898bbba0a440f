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
from fedtorch._representation import run_html, run_line
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
# Lightning's `load_from_checkpoint` looks up the class's constructor, and states that it does not know this one.
_INSTEAD = "of a federation: call fedtorch's load_module(path, module) instead of load_from_checkpoint."


class Federation(L.LightningModule):
    """A federated algorithm on a population, trained by a Lightning `Trainer`: an epoch is a communication round.

    Logged each round: `train_loss` and the clients' own logs (means over the cohort), `bytes_up`, `bytes_down`; and,
    with `validation`, `val_<metric>` over all rows, over clients `val_<metric>_mean`, `val_<metric>_min` and `_max`,
    and `val_<metric>_undefined`, the number of clients for whose rows it is not defined. In a round without answers the
    clients' logs are NaN, which `EarlyStopping` passes over.

    Args:
        algorithm: computations of clients and server.
        population: the clients, and where they run.
        parameters: start of training; default: the algorithm's own start.
        cohort: clients asked in each round: a number (drawn uniformly without replacement), their ids, or a function of
            the round's key and number, see `ft.Run`; None asks all.
        validation: rows of the same clients, scored after every round.
        test: rows of the same clients, for `Trainer.test` and `Trainer.predict`, which take others as well, as
            `Trainer.validate` does: `trainer.test(federation, data)`. Predictions are a list for each client, of an
            output for each of its batches.
        metrics: by name, for `validation` and `test`: torchmetrics, `ft.metrics`, losses of torch, or functions of a
            client's predictions and targets `(N, ...)`. Default: the logs of the LightningModule's own
            `validation_step` and `test_step`, under their names; see `Run.evaluate`.
        split: rows -> (inputs, targets), for `metrics`, and predictions of a module without `predict_step`.
        evaluation_batch_size: rows of a client in one evaluation or prediction batch; default: all of them.
        seed: seed of all randomness.
        faults: simulated faults; see `ft.dropouts`, `ft.stragglers`, `ft.lost_messages`.
        record: recorders that follow the run, such as an `ft.Sampler`.
        keep_losses: number of the clients' training losses stored for `client_losses` (8 bytes each, also in
            checkpoints), those of the latest rounds; 0 stores none.
        on_bad_message: reaction to a message with NaN or Inf; see `Run`.
        anyway: whether `trainer.fit(federation, ckpt_path=path)` takes a checkpoint of other settings or rows too.
        joined: "new" if a checkpoint may be one of fewer clients; see `Run.load_state_dict`.

    Attributes:
        run: the `Run` that the Trainer drives, with all results.
        scores: scores of the last validation, by name.

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
        self._waiting: list[tuple[EarlyStopping, bool, int]] = []  # with their state before an unanswered round
        self._warned = False
        self._show_validation()

    def _show_validation(self) -> None:
        """Set whether Lightning runs validation."""
        for name in ("validation_step", "val_dataloader"):
            vars(self).pop(name, None)
            if not self._evaluation.has("validation"):
                setattr(self, name, None)

    def __repr__(self) -> str:
        return run_line(
            "Federation", self.run, self.run.algorithm.settings, f"{len(self.run.population.names)} clients"
        )

    def _repr_html_(self) -> str:
        return run_html(
            "Federation", self.run, self.run.algorithm.settings, f"{len(self.run.population.names)} clients"
        )

    # -- results ------------------------------------------------------------------------------------------------------

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
        """Return scores like `Run.evaluate`, with its options; metrics default to those of construction."""
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
        """Keep `EarlyStopping` from counting a round without answers, whose metric is NaN."""
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
        """Return a loader of one item: an epoch is a round."""
        return self._items_of("train")

    def val_dataloader(self) -> Iterable[int]:
        """Return a loader of one item: all clients are scored in one step."""
        return self._items_of("val")

    def test_dataloader(self) -> Iterable[int]:
        """Return a loader of one item: all clients are scored in one step."""
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
        """Check the Trainer's settings, because Lightning calls this hook first; add no callbacks.

        Lightning's own progress bar, which restarts every epoch, is replaced by one over all rounds, and its weight
        averaging by one of the server's parameters.
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
        """Refuse a run of another length than its schedules; log the settings, as `local/lr`."""
        check_rounds(self.trainer, self.run.algorithm.schedule)
        for logger in self.trainer.loggers if self.trainer.enable_autolog_hparams else ():
            logger.log_hyperparams(hyperparameters(self.run, self._optimizers.settings()))

    def on_train_start(self) -> None:
        """Refuse rows passed to the Trainer."""
        check_loader(self.trainer.train_dataloader, self._items["train"], "train")

    def on_train_end(self) -> None:
        """Record why the run has stopped before the Trainer's number of rounds."""
        self._let_stopping_go_on()
        self.run.ended = stopped_early(self.trainer, self.round)

    def on_validation_start(self) -> None:
        """Refuse rows passed to the Trainer."""
        check_loader(self.trainer.val_dataloaders, self._items["val"], "validation")

    @classmethod
    def load_from_checkpoint(cls, *arguments: Any, **options: Any) -> Any:
        """Refuse: a checkpoint has tensors, and not the functions of an algorithm."""
        raise TypeError(
            "Expected a federation made as for the saved run, and trainer.fit(federation, ckpt_path=path), but got "
            "load_from_checkpoint, which needs more than a checkpoint contains; for the model alone use "
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
        """Log values that are equal on all ranks: in float64, for bytes, reduced by the maximum, which is exact."""
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
        """Add instructions for readers who load the file as the checkpoint of a module."""
        checkpoint.setdefault(self.CHECKPOINT_HYPER_PARAMS_KEY, {})["_instantiator"] = _INSTEAD

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return the whole state of the run, flat; see `Run.state_dict`."""
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
        """Resume from a checkpoint.

        Raises:
            ValueError: the checkpoint is of another federation.
        """
        self.run.load_state_dict(state, anyway=self._anyway, joined=self._joined)


def hyperparameters(run: Run, of_clients: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run and of its module, flat: numbers and text as they are, other values as text.

    Args:
        run: before its first round, or resumed.
        of_clients: settings of the clients' optimisers and schedules that depend on the run's length and the clients'
            rows; they replace the local solver's original ones.
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
