"""What happened, round by round: a table that travels in the checkpoint.

>>> import torch, fedtorch as ft
>>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=5, seed=0)
>>> history = ft.History()
>>> for round in ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1))), ft.InProcess(data), rounds=3, cohort=2):
...     history.append(round)
>>> history.frame()[["round", "asked", "answered", "bytes_up"]]
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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedtorch.federation.coordinator import Round

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["History", "means"]

_COUNTS = (
    "round",
    "asked",
    "answered",
    "lost_before",
    "late",
    "lost_after",
    "repeated",
    "round_bytes_up",
    "round_bytes_down",
)
_RESERVED = {*_COUNTS, "bytes_up", "bytes_down", "seconds"}
_SPREAD = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}


class History:
    """A row per round, and the clients' training losses.

    Args:
        client_losses: at most so many losses of clients are kept (8 bytes each), those of the latest rounds; 0 keeps
            none.

    Raises:
        ValueError: a negative number.
    """

    def __init__(self, client_losses: int = 1_000_000) -> None:
        if client_losses < 0:
            raise ValueError(f"Expected client_losses of at least 0, but got {client_losses}")
        self._limit, self._kept = client_losses, 0
        self._columns: dict[str, array[float]] = {name: array("d") for name in _COUNTS}
        self._seconds = array("d")
        self._losses: deque[tuple[int, Tensor, Tensor]] = deque()  # round, ids (M,) int32, losses (M,) float32

    def __len__(self) -> int:
        return len(self._seconds)

    def append(self, round: Round, seconds: float = math.nan, values: Mapping[str, float] | None = None) -> None:
        """Adds a row.

        Args:
            round: that is done.
            seconds: that it took.
            values: the means of what the clients logged; default: `means(round.info)`.
        """
        values = means(round.info) if values is None else values
        ids = (round.asked, round.ids, round.lost_before, round.late, round.lost_after, round.repeated)
        counts = (round.number, *map(len, ids), round.bytes_up, round.bytes_down)
        row = dict(zip(_COUNTS, map(float, counts)))
        losses = round.info.get("train_loss", round.info.get("loss"))
        if losses is not None:
            row.update({"train_loss": values["train_loss"], **_spread(losses)})
            self._keep(round.number, round.ids, losses)
        row.update({f"logged_{name}" if name in _RESERVED else name: value for name, value in values.items()})
        self._seconds.append(seconds)
        self._write(row, new=True)

    def validated(self, round: int, values: Mapping[str, float]) -> None:
        """Adds the scores after a round to its row, if that is the last one.

        Lightning does not repeat a validation: a run that resumes from a checkpoint written before it lacks the scores.
        """
        if len(self) and self._columns["round"][-1] == round:
            self._write(values, new=False)

    def frame(self) -> pd.DataFrame:
        """A row per round.

        Columns: `round`; how many clients were `asked`, `answered`, `lost_before`, `late`, `lost_after`, and
        `repeated`; `train_loss`, the mean over the clients that answered, and its `_min`, `_q25`, `_median`, `_q75`
        and `_max` over them; the means of all else that the clients log (as `logged_<name>` where a name is taken);
        `round_bytes_up` and `round_bytes_down`, and in total `bytes_up` and `bytes_down`; `val_<metric>` over all rows,
        and its `_mean`, `_min` and `_max` over clients, NaN where validation did not run; `seconds`, NaN where unknown.
        Losses are NaN where nobody answered.
        """
        import pandas as pd

        table = pd.DataFrame({name: np.array(column) for name, column in self._columns.items()})
        table = table.astype(dict.fromkeys(_COUNTS, "int64"))
        table["bytes_up"], table["bytes_down"] = table["round_bytes_up"].cumsum(), table["round_bytes_down"].cumsum()
        table["seconds"] = np.array(self._seconds)
        return table

    def losses(self, names: Sequence[str]) -> pd.DataFrame:
        """The clients' training losses, in float32: columns `round`, `client` (of `names`) and `train_loss`."""
        import pandas as pd

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
        """Everything as tensors, flat; the columns' names as the bytes of JSON."""
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
        """Replaces all rows."""
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

    def _write(self, row: Mapping[str, float], new: bool) -> None:
        """Writes into the last row, or into a new one whose other values are NaN."""
        for name in row:
            if name not in self._columns:
                self._columns[name] = array("d", [math.nan] * (len(self) - new))
        if new:
            for column in self._columns.values():
                column.append(math.nan)
        for name, value in row.items():
            self._columns[name][-1] = value

    def _keep(self, number: int, ids: Tensor, losses: Tensor) -> None:
        if self._limit == 0:
            return
        self._losses.append((number, ids.to(torch.int32), losses.to("cpu", torch.float32)))
        self._kept += len(ids)
        while self._kept > self._limit:
            self._kept -= len(self._losses.popleft()[1])


def means(info: Mapping[str, Tensor]) -> dict[str, float]:
    """The means over clients of what they log, `loss` as `train_loss`."""
    values = {name: float(value.nanmean()) for name, value in info.items()}
    if "loss" in values:
        values.setdefault("train_loss", values.pop("loss"))
    return values


def _spread(values: Tensor) -> dict[str, float]:
    """Least, quartiles and largest of the numbers among `(M,)` values, interpolated linearly."""
    known = values[~values.isnan()].sort().values
    if len(known) == 0:
        return {}
    numbers = known.tolist()
    spread = {}
    for name, part in _SPREAD.items():
        between, low = math.modf(part * (len(numbers) - 1))
        value = numbers[int(low)]
        spread[f"train_loss_{name}"] = value + between * (numbers[int(low) + 1] - value) if between else value
    return spread
