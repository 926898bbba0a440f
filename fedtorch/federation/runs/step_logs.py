"""What a LightningModule logs while it is evaluated, and what of it Lightning would report at the end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch.expected import loaded
from fedtorch.federation.solvers.objective import reduction_named
from fedtorch.federation.solvers.training_metrics import Reduction
from fedtorch.metrics.joined import value_at_client


@dataclass
class Logged:
    """What was logged under a name.

    Attributes:
        reduction: of numbers over batches.
        metric: the name of the module's metric that was logged; None for numbers.
        numbers: of the batches.
        rows: of these batches.
    """

    reduction: Reduction
    metric: str | None = None
    numbers: list[Tensor] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def reduced(self) -> Tensor:
        """Return the number of all batches, in float64."""
        if len(self.numbers) == 1:
            return self.numbers[0].to("cpu", torch.float64)
        numbers = torch.stack([number.to("cpu", torch.float64) for number in self.numbers])
        return self.reduction.of(numbers[:, None], torch.tensor(self.rows)[:, None])[0]


class StepLogs:
    """Takes the place of `self.log` and `self.log_dict` of a module, and of LightningModules in it.

    Args:
        module: which logs.

    Attributes:
        entries: what it has logged, by name.
        rows: of the batch that the module sees; 0 in hooks that see none.
    """

    def __init__(self, module: nn.Module) -> None:
        self.entries: dict[str, Logged] = {}
        self.rows = 0
        metric = loaded("torchmetrics", "Metric")
        self._metrics = {id(part): name for name, part in module.named_modules() if isinstance(part, metric)}
        self._module = module
        for part in module.modules():
            if isinstance(part, loaded("lightning.pytorch", "LightningModule")):
                part.log, part.log_dict = self.log, self.log_dict

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        """Take note of a number, or of a metric of the module.

        Raises:
            TypeError: it is neither.
        """
        reduction = Reduction(reduction_named(name, reduce_fx), weighted=True)
        if on_step and on_epoch is False:
            reduction = Reduction("last")
        rows = (batch_size or self.rows) if self.rows else 1
        self._add(name, value, reduction, rows)
        if on_step and on_epoch:
            self._add(f"{name}_epoch", value, reduction, rows)

    def log_dict(self, values: Any, *arguments: Any, **options: Any) -> None:
        """Take note of several."""
        collection = loaded("torchmetrics", "MetricCollection")
        pairs = values.items(keep_base=False, copy_state=False) if isinstance(values, collection) else values.items()
        for name, value in pairs:
            self.log(name, value, *arguments, **options)

    def _add(self, name: str, value: Any, reduction: Reduction, rows: int) -> None:
        if isinstance(value, loaded("torchmetrics", "Metric")) and id(value) in self._metrics:
            self.entries.setdefault(name, Logged(reduction, self._metrics[id(value)]))
            return
        value = torch.as_tensor(value) if isinstance(value, (int, float)) else value
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"Expected self.log({name!r}, …) of one number or a torchmetrics metric of the module, but got {got}"
            )
        entry = self.entries.setdefault(name, Logged(reduction))
        entry.numbers.append(value.detach().reshape(()))
        entry.rows.append(rows)

    def values(self, of_metric: Callable[[Any], float] = value_at_client) -> dict[str, float]:
        """Return what is known at the end, of metrics as they stand now."""
        return {name: self._value(entry, of_metric) for name, entry in self.entries.items()}

    def _value(self, entry: Logged, of_metric: Callable[[Any], float]) -> float:
        if entry.metric is None:
            return float(entry.reduced())
        return of_metric(self._module.get_submodule(entry.metric))


def over_batches(entries: Iterable[Logged]) -> float:
    """Return the number of all batches of several clients, as if one had logged it.

    Example:
        >>> of = lambda number, rows: Logged(Reduction("mean", True), None, [torch.tensor(number)], [rows])
        >>> over_batches([of(1.0, 3), of(5.0, 1)])
        2.0
    """
    every = list(entries)
    numbers, rows = [n for each in every for n in each.numbers], [n for each in every for n in each.rows]
    return float(Logged(every[0].reduction, None, numbers, rows).reduced())


def takes_index(step: Any) -> bool:
    """Return whether a step takes the number of its batch besides the batch."""
    takes = inspect.signature(step).parameters.values()
    return len(takes) > 1 or any(each.kind is each.VAR_POSITIONAL for each in takes)
