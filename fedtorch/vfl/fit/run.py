"""The methods of `ft.Run` for vertical fits: iterations, history, checkpoints and evaluation, called as for any run.

`VariationalFit` is a fit in one graph, `fedtorch.vfl.nodes.run.NodesRun` one among nodes in this process, and
`SplitNetwork.run` belongs to a network that a Lightning `Trainer` trains.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from fedtorch import checkpoint
from fedtorch._representation import run_html, run_line, without_rows
from fedtorch.checkpoint import below, describe
from fedtorch.history import History, Round
from fedtorch.metrics.scores import Score, score_of, stacked_metrics
from fedtorch.vfl.model.likelihoods import ResponseLikelihood
from fedtorch.vfl.rows.data import VerticalData

if TYPE_CHECKING:
    import pandas as pd

_COUNTS = ("number", "bytes_up", "bytes_down")


@without_rows
class Iterated(NamedTuple):
    """Numbers of an iteration of a fit, for the history."""

    report: Mapping[str, float | Tensor]
    active: Tensor  # (M,) numbers of the parties that took part, from 0 on
    bytes_up: int = 0
    bytes_down: int = 0


class VerticalRun:
    """Base class of vertical fits: iterations with their history, and checkpoints of both.

    A kind of fit overrides `_iterate`, `_state`, `_load` and `predict`.

    Args:
        names: of the parties.
        settings: by name, among them "algorithm"; a checkpoint belongs to a fit of the same settings.

    Attributes:
        names, settings: as passed.
        number: iterations done.
        log: the history.
        last: the last iteration done by this object, None before; its ids are the parties' numbers.
        ended: the reason why `rounds` stopped before the iterations asked for, "" if it did not.
    """

    likelihood: ResponseLikelihood
    last: Round | None = None
    ended = ""

    def __init__(self, names: Sequence[str], settings: Mapping[str, Any]) -> None:
        self.names, self.settings = tuple(names), dict(settings)
        self.number = self.bytes_up = self.bytes_down = 0
        self.log = History()

    def __repr__(self) -> str:
        return run_line(type(self).__name__, self, self.settings, f"{len(self.names)} parties")

    def _repr_html_(self) -> str:
        return run_html(type(self).__name__, self, self.settings, f"{len(self.names)} parties")

    def step(self) -> Round:
        """Do one iteration."""
        began = time.perf_counter()
        done = self._iterate(self.number)
        return self._record(done, time.perf_counter() - began)

    def _record(self, done: Iterated, seconds: float) -> Round:
        self.number += 1
        self.bytes_up, self.bytes_down = self.bytes_up + done.bytes_up, self.bytes_down + done.bytes_down
        self.last = Round(
            self.number,
            ids=done.active,
            asked=done.active,
            bytes_up=done.bytes_up,
            bytes_down=done.bytes_down,
            report=done.report,
            names=self.names,
        )
        self.log.record(self.last, seconds)
        return self.last

    def rounds(self, rounds: int | None = None, until: Callable[[History], bool] | None = None) -> Iterator[Round]:
        """Do iterations and yield each, until `rounds` are done in total or `until(history)` holds.

        Iterations before this call count, so that a fit that was stopped and resumed ends where it would have ended.

        Raises:
            ValueError: neither is given.
        """
        if rounds is None and until is None:
            raise ValueError("Expected rounds= or until=, but got neither; to do a single iteration use fit.step()")
        return self._rounds(rounds, until)

    def _rounds(self, rounds: int | None, until: Callable[[History], bool] | None) -> Iterator[Round]:
        while rounds is None or self.number < rounds:
            if self.number and until is not None and until(self.log):
                many = f"{self.number} iterations" if rounds is None else f"{self.number} of {rounds} iterations"
                self.ended = f"stopped after {many} by until="
                return
            self.ended = ""
            yield self.step()

    @property
    def history(self) -> pd.DataFrame:
        """Return a row per iteration: loss, parties that took part, bytes, seconds; see `ft.History.frame`."""
        return self.log.frame()

    def predict(
        self,
        features: Sequence[Tensor] | VerticalData,
        *,
        draws: int = 100,
        seed: int = 0,
        noise: bool = True,
    ) -> Tensor:
        """Return the predictive mean of new rows, averaged over draws, `(B, n)`; categorical: `(B, C, n)`."""
        raise NotImplementedError

    def evaluate(
        self, data: VerticalData, metrics: Mapping[str, Any], *, draws: int = 100, seed: int = 0
    ) -> dict[str, Score]:
        """Return scores of the predictive mean, for each element of the batch and for all together; see `ft.metrics`.

        Args:
            data: aligned rows; those of weight zero do not count, all others count alike.
            metrics: by name: torchmetrics with summed states, `ft.metrics`, a loss such as
                `torch.nn.functional.mse_loss`, or a function (prediction `(N, ...)`, target `(N, ...)`) -> `(N,)`, a
                value per row. Predictions are logits where the likelihood is one of classes, and otherwise means.
            draws: of the parameters.
            seed: of the draws.

        Returns:
            By name; `Score.clients` has a number for each element of the batch.
        """
        stacked = stacked_metrics(metrics)
        mean = self.predict(data.features, draws=draws, seed=seed)
        prediction = mean if self.likelihood.logits is None else self.likelihood.logits(mean.double())
        rows = (len(mean), mean.shape[-1])
        target = data.response.expand(rows)
        mask = torch.ones(rows, dtype=torch.bool) if data.weight is None else (data.weight > 0).expand(rows)
        kinds = target.to(mean.dtype) if self.likelihood.logits is None else target
        scored = lambda metric: score_of(metric, metric.update(prediction, kinds, mask.to(mean.device)))
        return {name: scored(metric) for name, metric in stacked.items()}

    def fingerprint(self) -> dict[str, str]:
        """Return the settings and parties that a checkpoint belongs to, by name."""
        known = {name: describe(value) for name, value in self.settings.items()}
        return {**known, "parties": describe(self.names)}

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that a resumed fit needs, flat."""
        flat = {f"fit.{name}": leaf for name, leaf in self._state().items()}
        flat |= {f"history.{name}": leaf for name, leaf in self.log.state_dict().items()}
        flat |= {name: torch.tensor(getattr(self, name)) for name in _COUNTS}
        return flat | {"fingerprint": torch.tensor(list(json.dumps(self.fingerprint()).encode()), dtype=torch.uint8)}

    def load_state_dict(self, flat: Mapping[str, Tensor], *, anyway: bool = False) -> None:
        """Restore the state that `state_dict` returned.

        Args:
            flat: of a fit of the same model, guide and settings; data are not compared.
            anyway: whether to accept the state of a fit of other settings.

        Raises:
            ValueError: the state belongs to another fit.
        """
        if not {"fingerprint", *_COUNTS} <= flat.keys():
            raise ValueError(f"Expected a checkpoint of a vertical fit, but got one with {sorted(flat)[:5]}")
        if not anyway:
            checkpoint.check_fingerprint(json.loads(bytes(flat["fingerprint"].tolist())), self.fingerprint())
        self._load(below("fit.", flat))
        self.log.load_state_dict(below("history.", flat))
        self.number, self.bytes_up, self.bytes_down = (int(flat[name]) for name in _COUNTS)
        self.last = None

    def save(self, path: Path | str) -> None:
        """Write the fit to a safetensors file, atomically."""
        checkpoint.write(path, self.state_dict())

    def load(self, path: Path | str, *, anyway: bool = False) -> Self:
        """Restore the fit from a file that `save` wrote, and return it; see `load_state_dict`."""
        self.load_state_dict(checkpoint.read(path), anyway=anyway)
        return self

    def _iterate(self, number: int) -> Iterated:
        """Do the iteration of this number."""
        raise NotImplementedError

    def _state(self) -> dict[str, Tensor]:
        """Return the state of the fit, flat."""
        raise NotImplementedError

    def _load(self, flat: Mapping[str, Tensor]) -> None:
        """Restore the state that `_state` returned."""
        raise NotImplementedError
