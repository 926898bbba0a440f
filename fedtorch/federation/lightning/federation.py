"""The federation as a LightningModule: the outer loop is a Lightning `Trainer`.

One communication round is one training step and one epoch, so validation, checkpoints, early stopping, loggers and
`max_time` act between rounds. A checkpoint holds everything, and a resumed run gives the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelSummary, RichProgressBar, TQDMProgressBar
from torch import Tensor, nn

from fedtorch import tree
from fedtorch.checkpoint import describe
from fedtorch.checkpoint_io import keep_plain
from fedtorch.data import FederatedData
from fedtorch.federation.algorithm import Algorithm, check_algorithm
from fedtorch.federation.budget import exhausted
from fedtorch.federation.lightning._trainer_settings import check_loader, check_place, check_rounds, check_settings
from fedtorch.federation.lightning._validation import OwnValidation, has_validation_step
from fedtorch.federation.lightning.round_progress_bar import RoundProgressBar
from fedtorch.federation.populations.population import Population, check_population
from fedtorch.federation.runs.cohorts import Asked
from fedtorch.federation.runs.evaluation import Split, check_same_clients, inputs_and_targets
from fedtorch.federation.runs.faults import Faults
from fedtorch.federation.runs.run import Run
from fedtorch.history import Recorder, means
from fedtorch.metrics.scores import Score, stacked_metrics
from fedtorch.tree import Tree

if TYPE_CHECKING:
    import pandas as pd

_ONE_ROUND = [0]  # what an epoch of the Trainer goes through
_OWN_BARS = (RichProgressBar, TQDMProgressBar)  # of Lightning's, one of which a Trainer has unless told
_LARGE = 100 * 2**20  # bytes of a checkpoint that deserve a warning


class Federation(L.LightningModule):
    """A federated algorithm on a population, trained by a Lightning `Trainer`: an epoch is a communication round.

    Logged each round: `train_loss` and whatever the clients log (means over the cohort), `bytes_up`, `bytes_down`; and,
    with `validation`, `val_<metric>` over all rows, `val_<metric>_mean` over clients, `val_<metric>_min` and `_max`.

    Args:
        algorithm: what clients and server compute.
        population: who computes, and where.
        parameters: where training starts; default: the algorithm's own start.
        cohort: how many clients are asked each round (uniformly without replacement), which, by their ids, or a
            function of the round's key, such as `ft.poisson_cohort`; None asks everybody.
        validation: rows of the same clients, scored after every round.
        metrics: by name, for `validation`: torchmetrics with summed states, `ft.metrics`, losses of torch, or functions
            (prediction, target) -> per-example values. Default: what the LightningModule's own `validation_step` logs,
            under its names, with each client's tensors on all of its rows as one batch.
        split: rows -> (inputs, targets), for `metrics`.
        seed: of all randomness.
        faults: what goes wrong; see `ft.dropouts`, `ft.stragglers`, `ft.lost_messages`.
        record: who follows the run, such as an `ft.Sampler`.
        keep_losses: at most so many of the clients' training losses are kept for `client_losses` (8 bytes each, also
            in checkpoints), those of the latest rounds; 0 keeps none.
        on_bad_message: what a message with NaN or Inf does; see `Run`.

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
        validation: FederatedData | None = None,
        metrics: Mapping[str, Any] | None = None,
        split: Split = inputs_and_targets,
        seed: int = 0,
        faults: Faults | None = None,
        record: Recorder | Sequence[Recorder] = (),
        keep_losses: int = 1_000_000,
        on_bad_message: Literal["raise", "drop"] = "raise",
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        check_algorithm(algorithm)
        check_population(population)
        validating = algorithm.module if has_validation_step(algorithm.module) and not metrics else None
        if (validation is None) != (not metrics) and (validation is None or validating is None):
            raise ValueError(
                "Expected validation= and metrics= together, but got only one of them, and a module that has no "
                "validation_step"
            )
        if validation is not None:
            check_same_clients(validation, population.names)
        self._own = OwnValidation(validating) if isinstance(validating, L.LightningModule) else None
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
        self._split, self._validation = split, validation
        self._metrics = stacked_metrics(metrics) if metrics else {}
        self.scores: dict[str, Score] = {}
        self._warned = False
        if validation is None:
            # Lightning then sees that there is nothing to validate.
            self.validation_step = self.val_dataloader = None  # type: ignore[method-assign, assignment]

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
        data: FederatedData,
        metrics: Mapping[str, Any] | None = None,
        split: Split | None = None,
        *,
        unseen: bool = False,
    ) -> dict[str, Score]:
        """Return scores as `Run.evaluate` does; metrics default to those of construction."""
        return self.run.evaluate(data, metrics or self._metrics, split or self._split, unseen=unseen)

    # -- Lightning -------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Run one communication round."""
        round = self.run.step()
        self._log_values(means(round.info), prog_bar=("train_loss",))
        self._log_values({name: float(value) for name, value in round.report.items() if name not in round.info})
        self._log_values({"bytes_up": self.run.bytes_up, "bytes_down": self.run.bytes_down})
        self.trainer.should_stop = self.trainer.should_stop or exhausted(self.run.algorithm.budget)
        self.optimizers().step()  # type: ignore[union-attr]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Score every client's model on its validation rows."""
        assert self._validation is not None
        if self._own is not None:
            scores = self._own(self.run, self._validation)
        else:
            scores = {f"val_{name}": score for name, score in self.evaluate(self._validation).items()}
        self.scores = scores
        values: dict[str, float] = {}
        for name, score in scores.items():
            values[name] = score.overall
            values[f"{name}_mean"] = score.mean()
            values[f"{name}_min"] = score.worst(largest_is_best=True)
            values[f"{name}_max"] = score.worst(largest_is_best=False)
        self.run.log.validated(self.round, values)
        self._log_values(values, prog_bar=tuple(scores))

    def train_dataloader(self) -> Iterable[int]:
        """Return one item: an epoch is a round."""
        return _ONE_ROUND

    def val_dataloader(self) -> Iterable[int]:
        """Return one item: all clients are scored in one step."""
        return _ONE_ROUND

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimiser without parameters, stepped once a round, because Lightning counts its steps."""
        return _RoundCounter()

    def configure_callbacks(self) -> list[L.Callback]:
        """Add none; this is where a Trainer asks first, and what would do nothing is refused.

        Lightning's own progress bar, which begins anew every epoch, makes place for one over all rounds.
        """
        check_settings(self.trainer)
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        kept = [each for each in callbacks if type(each) is not ModelSummary]  # of no parameters: clients have them
        callbacks[:] = [RoundProgressBar() if type(each) in _OWN_BARS else each for each in kept]
        return []

    def on_fit_start(self) -> None:
        """Refuse a run of another length than its schedules; tell the loggers the settings, as `local/lr`."""
        check_rounds(self.trainer, self.run.algorithm.schedule)
        for logger in self.trainer.loggers if self.trainer.enable_autolog_hparams else ():
            logger.log_hyperparams(_hyperparameters(self.run))

    def on_train_start(self) -> None:
        """Refuse rows that the Trainer was given."""
        check_loader(self.trainer.train_dataloader, _ONE_ROUND, "train")

    def on_validation_start(self) -> None:
        """Refuse rows that the Trainer was given."""
        check_loader(self.trainer.val_dataloaders, _ONE_ROUND, "validation")

    @classmethod
    def load_from_checkpoint(cls, *arguments: Any, **options: Any) -> Any:
        """Refuse: a checkpoint holds tensors, and not the functions that an algorithm is made of."""
        raise TypeError(
            "Expected a federation made as for the run that was saved, and trainer.fit(federation, ckpt_path=path), "
            "but got load_from_checkpoint, for which a checkpoint says too little"
        )

    def setup(self, stage: str) -> None:
        """Refuse to train the same clients several times over."""
        trainer = self.trainer
        check_place(trainer, getattr(self.run.population, "population", self.run.population))
        keep_plain(trainer.strategy)
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
        self.run.load_state_dict(state)


def _hyperparameters(run: Run) -> dict[str, Any]:
    """Return the settings of a run, flat: numbers and text as they are, other values described as text."""
    of_run = {"seed": run.seed, "cohort": run.cohort, "faults": run.faults, "clients": len(run.population.names)}
    plain = (bool, int, float, str, type(None))
    return {
        name.replace(".", "/"): value if isinstance(value, plain) else describe(value)
        for name, value in {**run.algorithm.settings, **of_run}.items()
    }


class _RoundCounter(torch.optim.Optimizer):
    """An optimiser of nothing."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count as one step."""
        return None if closure is None else closure()
