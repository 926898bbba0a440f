"""The history of a run, round by round: a table that travels in the checkpoint.

>>> import torch, fedtorch as ft
>>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=5, seed=0)
>>> run = ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1))), ft.InProcess(data), rounds=3, cohort=2)
>>> run.history[["round", "asked", "answered", "bytes_up"]]
   round  asked  answered  bytes_up
0      1      2         2       552
1      2      2         2      1104
2      3      2         2      1656
"""

from __future__ import annotations

import json
import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedtorch.tables.rendering import facts
from fedtorch.tree import Tree

if TYPE_CHECKING:
    import pandas as pd

_COUNTS = (
    "round",
    "asked",
    "answered",
    "lost_before",
    "late",
    "lost_after",
    "repeated",
    "refused",
    "round_bytes_up",
    "round_bytes_down",
)
_RESERVED = {*_COUNTS, "bytes_up", "bytes_down", "seconds"}
_MOST_HELD, _MOST_WAITING = 100_000, 1000  # clients' numbers, and rounds, that wait to be written
_NAMED = 3  # clients of each trouble whose names a round shows
_NOBODY = torch.zeros(0, dtype=torch.int64)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_SPREAD = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}


class Round(NamedTuple):
    """One communication round, done.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor([1.0, 2.0]))] * 3)
        >>> round = ft.Run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1))), ft.InProcess(data), cohort=2).step()
        >>> round
        Round(1: 2 of 2 clients answered, 488 B up, 280 B down, train_loss ...)
    """

    number: int  # from 1
    server: Tree = None  # the server's state after it
    clients: Any = None  # of the run's population, bound to its algorithm
    ids: Tensor = _NOBODY  # (M,) the clients that answered
    info: Mapping[str, Tensor] = _NOTHING  # (M,) each
    bytes_up: int = 0
    bytes_down: int = 0
    asked: Tensor = _NOBODY  # ids of the clients asked: those that answered, and the next three
    lost_before: Tensor = _NOBODY  # ids of those that did not receive the broadcast
    late: Tensor = _NOBODY  # ids of those that answered after the deadline
    lost_after: Tensor = _NOBODY  # ids of those whose message was lost
    repeated: Tensor = _NOBODY  # ids of those whose message came more than once, and was used once
    refused: Tensor = _NOBODY  # ids of those whose message had NaN or Inf and was dropped
    report: Mapping[str, float | Tensor] = _NOTHING  # the algorithm's report on the server's state
    # returns the tensors that all clients predict with, (K, ...), as `Run.tensors`
    tensors: Callable[[], Tree] | None = None
    names: Sequence[str] = ()  # of all clients, by id

    def __repr__(self) -> str:
        words = [f"{len(self.ids)} of {len(self.asked)} clients answered"]
        words += [f"{kind}: {who}" for kind, who in self._troubles().items()]
        words += [f"{self.bytes_up:,} B up", f"{self.bytes_down:,} B down"]
        words += [f"{name} {value}" for name, value in headline(self).items()]
        return f"Round({self.number}: {', '.join(words)})"

    def _repr_html_(self) -> str:
        answered = {"clients that answered": f"{len(self.ids)} of {len(self.asked)}"}
        sent = {"bytes up": f"{self.bytes_up:,}", "bytes down": f"{self.bytes_down:,}"}
        return facts(f"Round {self.number}", answered | self._troubles() | sent | headline(self))

    def named(self, ids: Tensor) -> list[str]:
        """Return the names of clients by their ids, such as `round.named(round.late)`.

        Example:
            >>> Round(1, ids=torch.tensor([1]), names=("ward 3", "ward 7")).named(torch.tensor([1, 0]))
            ['ward 7', 'ward 3']
        """
        return [self.names[i] for i in ids.tolist()]

    def _troubles(self) -> dict[str, str]:
        """Return the names of the clients that did not answer well, by what went wrong, a few of each."""
        kinds = {"not reached": self.lost_before, "late": self.late, "lost": self.lost_after, "refused": self.refused}
        found = {}
        for kind, ids in kinds.items():
            if len(ids):
                more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
                found[kind] = (
                    ", ".join(self.named(ids[:_NAMED]) if self.names else map(str, ids[:_NAMED].tolist())) + more
                )
        return found


class Recorder(Protocol):
    """An object that records the rounds of a run, and is part of its checkpoints."""

    def record(self, round: Round) -> None:
        """Record a round."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return its whole state, flat."""
        ...

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Restore the state."""
        ...


class History:
    """A row per round, and the clients' training losses; `history["name"]` is a column.

    Args:
        client_losses: most stored losses of clients (8 bytes each), those of the latest rounds; 0 stores none.

    Raises:
        ValueError: a negative number.
    """

    def __init__(self, client_losses: int = 1_000_000) -> None:
        if client_losses < 0:
            raise ValueError(f"Expected client_losses of at least 0, but got {client_losses}")
        self._limit, self._kept = client_losses, 0
        self._columns: dict[str, array[float]] = {name: array("d") for name in _COUNTS}
        self._seconds = array("d")
        self._waiting: list[tuple[Round, float]] = []  # rounds whose rows are not written yet
        self._held = 0  # the number of clients in the waiting rounds
        self._losses: deque[tuple[int, Tensor, Tensor]] = deque()  # round, ids (M,) int32, losses (M,) float32

    def __len__(self) -> int:
        return len(self._seconds) + len(self._waiting)

    def record(self, round: Round, seconds: float = math.nan) -> None:
        """Add a row for a round that took this many seconds; its statistics are computed on demand."""
        self._waiting.append((round._replace(server=None), seconds))
        self._held += len(round.ids)
        if self._held > _MOST_HELD or len(self._waiting) > _MOST_WAITING:
            self._catch_up()

    def _catch_up(self) -> None:
        waiting, self._waiting, self._held = self._waiting, [], 0
        for round, seconds in waiting:
            self._append(round, seconds)

    def _append(self, round: Round, seconds: float) -> None:
        values = means(round.info)
        ids = (round.asked, round.ids, round.lost_before, round.late, round.lost_after, round.repeated, round.refused)
        counts = (round.number, *map(len, ids), round.bytes_up, round.bytes_down)
        row = dict(zip(_COUNTS, map(float, counts)))
        losses = round.info.get("train_loss", round.info.get("loss"))
        if losses is not None:
            row.update({"train_loss": values["train_loss"], **_spread(losses)})
            self._keep(round.number, round.ids, losses)
        values.update({name: float(value) for name, value in round.report.items()})
        row.update({f"logged_{name}" if name in _RESERVED else name: value for name, value in values.items()})
        self._seconds.append(seconds)
        self._write(row)

    def __getitem__(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return a column, a number per round.

        Raises:
            KeyError: unknown column.
        """
        self._catch_up()
        if name not in self._columns:
            raise KeyError(f"Expected one of {list(self._columns)}, but got {name!r}")
        return np.array(self._columns[name])

    def validated(self, round: int, values: Mapping[str, float]) -> None:
        """Add the scores after a round to its row, if that is the last one.

        Lightning does not repeat a validation: a run that resumes from a checkpoint written before it lacks the scores.
        """
        if len(self) and self["round"][-1] == round:
            for name, value in values.items():
                self._column(name)[-1] = value

    def frame(self) -> pd.DataFrame:
        """Return the history as a table, a row per round.

        Columns: `round`; how many clients were `asked`, `answered`, `lost_before`, `late`, `lost_after`, `repeated` and
        `refused`; `train_loss`, the mean over the clients that answered, and its `_min`, `_q25`, `_median`, `_q75`,
        `_max` and `_worst_decile` (the mean of the largest tenth) over them; the means of the clients' other logs (as
        `logged_<name>` if a name is taken); `round_bytes_up` and `round_bytes_down`, and in total `bytes_up` and
        `bytes_down`; `val_<metric>` over all rows, its `_mean`, `_min` and `_max` over clients, and `_undefined`, the
        number of clients for whose rows it is not defined, all NaN without validation; the columns of
        `fairness.watch_groups`; `seconds`, NaN if unknown. Losses are NaN without answers.
        """
        import pandas as pd

        self._catch_up()
        table = pd.DataFrame({name: np.array(column) for name, column in self._columns.items()})
        table = table.astype(dict.fromkeys(_COUNTS, "int64"))
        table["bytes_up"], table["bytes_down"] = table["round_bytes_up"].cumsum(), table["round_bytes_down"].cumsum()
        table["seconds"] = np.array(self._seconds)
        return table

    def losses(self, names: Sequence[str]) -> pd.DataFrame:
        """Return the clients' training losses, in float32: columns `round`, `client` (of `names`) and `train_loss`."""
        import pandas as pd

        self._catch_up()
        clients = np.asarray(names, dtype=object)
        empty = torch.zeros(0, dtype=torch.int32)
        ids = torch.cat([empty, *(ids for _, ids, _ in self._losses)]).numpy()
        return pd.DataFrame(
            {
                "round": np.repeat([n for n, _, _ in self._losses], [len(i) for _, i, _ in self._losses]).astype(int),
                "client": clients[ids],
                "train_loss": torch.cat([empty.float(), *(values for _, _, values in self._losses)]).numpy(),
            }
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything as tensors, flat; the columns' names as the bytes of JSON."""
        self._catch_up()
        names = json.dumps(list(self._columns)).encode()
        values = np.array(list(self._columns.values()), dtype=np.float64)
        empty = torch.zeros(0, dtype=torch.int32)
        return {
            "names": torch.tensor(list(names), dtype=torch.uint8),
            "values": torch.from_numpy(values),
            "seconds": torch.tensor(self._seconds, dtype=torch.float64),
            "losses.rounds": torch.tensor([(n, len(ids)) for n, ids, _ in self._losses]).reshape(-1, 2).long(),
            "losses.ids": torch.cat([empty, *(ids for _, ids, _ in self._losses)]),
            "losses.values": torch.cat([empty.float(), *(values for _, _, values in self._losses)]),
        }

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Replace all rows."""
        self._waiting, self._held = [], 0
        names = json.loads(bytes(flat["names"].tolist()))
        self._columns = {name: array("d", row) for name, row in zip(names, flat["values"].tolist(), strict=True)}
        self._seconds = array("d", flat["seconds"].tolist())
        self._losses, self._kept = deque(), 0
        rounds = flat["losses.rounds"].tolist()
        counts = [count for _, count in rounds]
        for (number, _), ids, values in zip(
            rounds, flat["losses.ids"].split(counts), flat["losses.values"].split(counts)
        ):
            self._keep(number, ids.clone(), values.clone())

    def _write(self, row: Mapping[str, float]) -> None:
        """Add a row, whose other values are NaN."""
        for name in row:
            if name not in self._columns:
                self._column(name)
        for name, column in self._columns.items():
            column.append(row.get(name, math.nan))

    def _column(self, name: str) -> array[float]:
        """Return a column by name, a new one of NaN if need be."""
        return self._columns.setdefault(name, array("d", [math.nan] * len(self._columns["round"])))

    def _keep(self, number: int, ids: Tensor, losses: Tensor) -> None:
        if self._limit == 0:
            return
        self._losses.append((number, ids.to(torch.int32), losses.to("cpu", torch.float32)))
        self._kept += len(ids)
        while self._kept > self._limit:
            self._kept -= len(self._losses.popleft()[1])


def means(info: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the means over clients of their logs, `loss` as `train_loss`."""
    values = {name: float(value.nanmean()) for name, value in info.items()}
    if "loss" in values:
        values.setdefault("train_loss", values.pop("loss"))
    return values


def headline(round: Round) -> dict[str, str]:
    """Return a round's values for progress: the loss and ε or, without them, the first reported numbers.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.tensor([1.0, 3.0]))])
        >>> local = ft.least_squares(torch.nn.Linear(1, 1, bias=False))
        >>> round = ft.Run(ft.fedavg(local), ft.InProcess(data)).step()
        >>> headline(round)
        {'train_loss': '1'}
    """
    values = {**means(round.info), **round.report}
    names = [name for name in ("train_loss", "epsilon") if name in values] or list(values)[:2]
    return {name: f"{float(values[name]):.3g}" for name in names}


def _spread(values: Tensor) -> dict[str, float]:
    """Return least, quartiles and largest among `(M,)` values, interpolated, and their worst tenth's mean."""
    every = values.detach().to("cpu", torch.float64).numpy()
    known = every[~np.isnan(every)]
    count = len(known)
    if count == 0:
        return dict.fromkeys([*(f"train_loss_{name}" for name in _SPREAD), "train_loss_worst_decile"], math.nan)
    places = {name: math.modf(part * (count - 1)) for name, part in _SPREAD.items()}
    lower, tenth = {int(low) for _, low in places.values()}, count - math.ceil(count / 10)
    numbers = np.partition(known, sorted({*lower, *(min(low + 1, count - 1) for low in lower), tenth}))
    spread = {}
    for name, (between, low) in places.items():
        value = float(numbers[int(low)])
        larger = between * (float(numbers[int(low) + 1]) - value) if between else 0.0
        spread[f"train_loss_{name}"] = value + larger
    worst = np.sort(numbers[tenth:]).tolist()
    spread["train_loss_worst_decile"] = sum(worst) / len(worst)
    return spread
