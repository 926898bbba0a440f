"""The federation as a LightningModule: the outer loop is a Lightning `Trainer`.

One communication round is one training step and one epoch, so validation, checkpoints, early stopping, loggers and
`max_time` act between rounds. A checkpoint holds everything, and a resumed run gives the same bits.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor, nn

from fedtorch import functional, tree
from fedtorch import metrics as fm
from fedtorch.data import FederatedData
from fedtorch.federation import coordinator
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.client_sharding import ClientSharding, check_place
from fedtorch.federation.evaluation import Score, Split, check_same_clients, evaluate, inputs_and_targets
from fedtorch.federation.faults import Faults
from fedtorch.federation.history import History, means
from fedtorch.federation.population import Population
from fedtorch.federation.sampling import Cohort, check_cohort
from fedtorch.tree import Tree

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ClientSharding", "Federation"]

_LARGE = 100 * 2**20  # bytes of a checkpoint that deserve a warning


class Federation(L.LightningModule):
    """A federated algorithm on a population, trained by a Lightning `Trainer`: an epoch is a communication round.

    Logged each round: `train_loss` and whatever the clients log (means over the cohort), `bytes_up`, `bytes_down`; and,
    with `validation`, `val_<metric>` over all rows, `val_<metric>_mean` over clients, `val_<metric>_min` and `_max`.

    Args:
        algorithm: what clients and server compute.
        population: who computes, and where.
        parameters: where training starts; default: the parameters of the algorithm's local solver.
        cohort: how many clients are asked each round (uniformly without replacement), or a function of the round's
            key, such as `ft.poisson_cohort`; None asks everybody.
        validation: rows of the same clients, scored after every round.
        metrics: by name, for `validation`: torchmetrics with summed states, `ft.metrics`, or a function
            (prediction, target) -> per-example values.
        split: rows -> (inputs, targets), for `metrics`.
        seed: of all randomness.
        faults: what goes wrong; see `ft.dropouts`, `ft.stragglers`, `ft.lost_messages`.
        keep_losses: at most so many of the clients' training losses are kept for `client_losses` (8 bytes each, also
            in checkpoints), those of the latest rounds; 0 keeps none.

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
        >>> federation.round, federation.bytes_up
        (3, 4140)
    """

    def __init__(
        self,
        algorithm: Algorithm,
        population: Population,
        parameters: Tree = None,
        *,
        cohort: int | Cohort | None = None,
        validation: FederatedData | None = None,
        metrics: Mapping[str, Any] | None = None,
        split: Split = inputs_and_targets,
        seed: int = 0,
        faults: Faults | None = None,
        keep_losses: int = 1_000_000,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        check_cohort(cohort, len(population.data))
        if (validation is None) != (not metrics):
            raise ValueError("Expected validation= and metrics= together, but got only one of them")
        if validation is not None:
            check_same_clients(validation, population.data)
        self.algorithm, self.population = algorithm, population
        self.seed, self._default_dtype = seed, torch.get_default_dtype()
        self._cohort, self._faults, self._split = cohort, faults, split
        self._validation = validation
        self._metrics = {name: fm.as_stacked(metric) for name, metric in (metrics or {}).items()}
        self._progress = coordinator.begin(algorithm, population, parameters)
        self.bytes_up = self.bytes_down = 0
        self._history = History(keep_losses)
        self._warned = False
        if validation is None:
            # Lightning then sees that there is nothing to validate.
            self.validation_step = self.val_dataloader = None  # type: ignore[method-assign, assignment]

    # -- what came out ---------------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Communication rounds done."""
        return self._progress.number

    @property
    def server(self) -> Tree:
        """The server's state."""
        return self._progress.server

    @property
    def history(self) -> pd.DataFrame:
        """A row per round: who was asked and answered, losses, bytes, scores, seconds; see `ft.History.frame`."""
        return self._history.frame()

    @property
    def client_losses(self) -> pd.DataFrame:
        """The clients' training losses in the rounds that they answered: `round`, `client`, `train_loss`."""
        return self._history.losses(self.population.data.names)

    def client_module(self, client: int | str) -> nn.Module:
        """A copy of the module with the tensors that `client` (number or name) predicts with."""
        number = self._client(client)
        tensors = self._progress.clients.tensors(self._outbox(), number)
        return functional.load(self._local().module, tensors)

    def global_module(self) -> nn.Module:
        """A copy of the module with the server's parameters, for algorithms that send out all of them.

        Raises:
            ValueError: the server does not hold a whole model (personal layers, separate training, local buffers).
        """
        outbox, local = self._outbox(), self._local()
        tensors = local.tensors(local.parameters, local.init(local.parameters))
        whole = {name for name, tensor in tensors.items() if tensor.is_floating_point()}  # counters do not predict
        if not isinstance(outbox, dict) or not whole <= outbox.keys() <= tensors.keys():
            raise ValueError("Expected the server to hold a whole model, but it does not; use client_module(client)")
        return functional.load(local.module, outbox)

    def evaluate(
        self, data: FederatedData, metrics: Mapping[str, Any] | None = None, split: Split | None = None
    ) -> dict[str, Score]:
        """Scores of every client's model on its rows of `data`; metrics default to those of construction."""
        metrics = self._metrics if metrics is None else metrics
        split = self._split if split is None else split
        return evaluate(self._progress.clients, self._outbox(), self._local().predict, data, metrics, split)

    # -- Lightning -------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Runs one communication round."""
        began = time.perf_counter()
        with self._own_precision():
            rounds = coordinator.run(
                self.algorithm,
                self.population,
                cohort=self._cohort,
                seed=self.seed,
                faults=self._faults,
                start=self._progress,
            )
            done = next(rounds)
        self._progress = coordinator.Progress(done.number, done.server, done.clients)
        self.bytes_up += done.bytes_up
        self.bytes_down += done.bytes_down
        values = means(done.info)
        self._history.append(done, time.perf_counter() - began, values)
        self._log_values(values, prog_bar=("train_loss",))
        self._log_values({"bytes_up": self.bytes_up, "bytes_down": self.bytes_down})
        self.optimizers().step()  # type: ignore[union-attr]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Scores every client's model on its validation rows."""
        assert self._validation is not None
        with self._own_precision():
            scores = self.evaluate(self._validation)
        values: dict[str, float] = {}
        for name, score in scores.items():
            values[f"val_{name}"] = score.overall
            values[f"val_{name}_mean"] = score.mean()
            values[f"val_{name}_min"] = score.worst(largest_is_best=True)
            values[f"val_{name}_max"] = score.worst(largest_is_best=False)
        self._history.validated(self.round, values)
        self._log_values(values, prog_bar=tuple(f"val_{name}" for name in scores))

    def train_dataloader(self) -> Iterable[int]:
        """One item: an epoch is a round."""
        return [0]

    def val_dataloader(self) -> Iterable[int]:
        """One item: all clients are scored in one step."""
        return [0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """An optimiser without parameters, stepped once a round, because Lightning counts optimiser steps."""
        return _RoundCounter()

    def setup(self, stage: str) -> None:
        """Refuses to train the same clients several times over."""
        trainer = self.trainer
        check_place(trainer, getattr(self.population, "population", self.population))
        if trainer.scaler is not None:
            raise ValueError(
                f"Expected a Trainer that leaves precision to the clients' module, but got precision="
                f"{trainer.precision!r}, which scales losses; leave precision= away"
            )
        # An epoch has one step; Lightning warns of longer intervals.
        trainer.log_every_n_steps = min(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]

    def _log_values(self, values: Mapping[str, float], prog_bar: tuple[str, ...] = ()) -> None:
        """Logs what all ranks agree on: float64, for bytes, and the maximum of equal values, which is exact."""
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

    @contextmanager
    def _own_precision(self) -> Iterator[None]:
        """Trainer(precision=...) sets default dtype and autocast around its steps; the clients keep their own."""
        device = tree.leaves(self.population.data.rows)[0].device.type
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._default_dtype)
        try:
            with torch.autocast(device, enabled=False):
                yield
        finally:
            torch.set_default_dtype(before)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Tensor]:
        """Everything a resumed run needs, flat: server and client states, round, bytes, history, seed."""
        flat = self._extra_state()
        size = tree.nbytes(flat)
        if size > _LARGE and not self._warned:
            self._warned = True
            warnings.warn(
                f"A checkpoint of this federation takes {size / 2**20:.0f} MiB; save less often, for example with "
                "ModelCheckpoint(every_n_epochs=10)",
                stacklevel=2,
            )
        return flat

    def _extra_state(self) -> dict[str, Tensor]:
        number, server, clients = self._progress
        flat = {f"clients.{name}": leaf for name, leaf in clients.state_dict().items()}
        flat.update(tree.flatten(tree.to(server, "cpu", copy=True), "server"))
        flat.update({f"history.{name}": leaf for name, leaf in self._history.state_dict().items()})
        population = len(self.population.data)
        counts = {"round": number, "bytes_up": self.bytes_up, "bytes_down": self.bytes_down}
        flat.update({n: torch.tensor(v) for n, v in {**counts, "seed": self.seed, "population": population}.items()})
        return flat

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Goes on from a checkpoint.

        Raises:
            ValueError: it belongs to another federation.
        """
        _, server, clients = self._progress
        _check(state, self._extra_state())
        clients.load_state_dict(_below("clients.", state))
        self._history.load_state_dict(_below("history.", state))
        loaded = tree.unflatten(state, server, "server")
        loaded = tree.map(lambda new, old: new.to(old.device, copy=True), loaded, server)
        self._progress = coordinator.Progress(int(state["round"]), loaded, clients)
        self.bytes_up, self.bytes_down = int(state["bytes_up"]), int(state["bytes_down"])

    def _outbox(self) -> Tree:
        return self.algorithm.outbox(self._progress.server)

    def _local(self) -> Any:
        if self.algorithm.local is None:
            raise ValueError("Expected an algorithm with a local solver, whose module makes predictions; it has none")
        return self.algorithm.local

    def _client(self, client: int | str) -> int:
        names = self.population.data.names
        if isinstance(client, str):
            if client not in names:
                raise ValueError(f"Expected the name of one of {len(names)} clients, but got {client!r}")
            return names.index(client)
        if not 0 <= client < len(names):
            raise ValueError(f"Expected a client between 0 and {len(names) - 1}, but got {client}")
        return client


def _below(prefix: str, flat: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `flat` has under a prefix."""
    return {name.removeprefix(prefix): leaf for name, leaf in flat.items() if name.startswith(prefix)}


class _RoundCounter(torch.optim.Optimizer):
    """An optimiser of nothing."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Counts as one step."""
        return None if closure is None else closure()


def _check(state: dict[str, Tensor], mine: dict[str, Tensor]) -> None:
    """Refuses the checkpoint of a federation unlike `mine`, which may differ in the clients that have taken part."""
    if mine.keys() != state.keys():
        raise ValueError(
            f"Expected a checkpoint of this algorithm, with {sorted(mine.keys() - state.keys())}, but got one "
            f"with {sorted(state.keys() - mine.keys())} instead"
        )
    for name in ("seed", "population"):
        if int(state[name]) != int(mine[name]):
            raise ValueError(f"Expected a checkpoint of {name} {int(mine[name])}, but got {int(state[name])}")
    for name, leaf in mine.items():
        if name.startswith("history."):
            continue
        rows = name.startswith("clients.")
        want, got = leaf.shape[rows:], state[name].shape[rows:]
        if want != got or leaf.dtype != state[name].dtype:
            raise ValueError(
                f"Expected {name} in the checkpoint to be {leaf.dtype} of shape {tuple(want)}, but got "
                f"{state[name].dtype} of shape {tuple(got)}"
            )
