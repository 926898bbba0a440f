"""Changes of whole algorithms, one after another: `algorithm | wrapper`.

Read from left to right, a line of wrappers follows a message on its way from its client: the client's computation or
attack, clipping and noise, compression, the robust rule that averages it, the edges that lose it. The left wrapper is
the innermost, and wrappers stand in the order of `Stage`:

>>> import torch, fedtorch as ft
>>> from fedtorch.trust import attacks, robust
>>> average = ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1)))
>>> defended = average | attacks.sign_flip([0]) | robust.rule(robust.median())
>>> defended.settings["wrap"]
{'attacks.sign_flip': 1, 'robust.rule': 4}
>>> average | robust.rule(robust.median()) | attacks.sign_flip([0])
Traceback (most recent call last):
ValueError: Expected wrappers from the innermost to the outermost (local changes and attacks, clipping and noise, ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from fedtorch.federation.algorithm import Algorithm

APPLIED = "wrap"  # the name in `Algorithm.settings` under which `Algorithm.wrapped` is described


class Stage(IntEnum):
    """Order wrappers, from the innermost to the outermost.

    Example:
        >>> import fedtorch as ft
        >>> ft.Stage.LOCAL < ft.Stage.PRIVACY < ft.Stage.QUANTISING < ft.Stage.ROBUST < ft.Stage.EDGES
        True
    """

    LOCAL = 1  # clients' computation, or an attack on it
    PRIVACY = 2  # clipping and noise
    QUANTISING = 3  # fewer bits
    ROBUST = 4  # an average that some clients cannot move far
    EDGES = 5  # messages that are lost or late


@dataclass(frozen=True)
class Wrapper:
    """Change an algorithm, by `algorithm | wrapper`.

    Attributes:
        stage: its position among others.
        name: its name in code, such as `"robust.rule"`.
        wrap: algorithm -> the changed algorithm; raises ValueError where it does not fit.
        settings: its arguments, by name, for fingerprints and loggers.

    Example:
        >>> import dataclasses, torch, fedtorch as ft
        >>> def damped(share: float) -> ft.Wrapper:
        ...     def wrap(algorithm: ft.Algorithm) -> ft.Algorithm:
        ...         def client(inbox, state, data, turn):
        ...             reply = algorithm.client(inbox, state, data, turn)
        ...             change = reply.message.change
        ...             less = ft.Mean(ft.tree.scale(change.value, share), change.weight)
        ...             return reply._replace(message=reply.message._replace(change=less))
        ...         return dataclasses.replace(algorithm, client=client)
        ...     return ft.Wrapper(ft.Stage.LOCAL, "damped", wrap, {"share": share})
        >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.tensor([y])) for y in (1.0, 3.0)])
        >>> average = ft.fedavg(ft.least_squares(torch.nn.Linear(1, 1, bias=False)))
        >>> run = ft.run(average | damped(0.5), ft.InProcess(data), {"weight": torch.zeros(1, 1)}, rounds=1)
        >>> run.server["weight"], run.algorithm.settings["damped.share"]
        (tensor([[1.]]), 0.5)
    """

    stage: Stage
    name: str
    wrap: Callable[[Algorithm], Algorithm]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, algorithm: Algorithm) -> Algorithm:
        """Return `algorithm` wrapped.

        Raises:
            ValueError: a wrong position, or a wrapper that does not fit the algorithm or the wrappers inside it.
        """
        _check_place(self, algorithm.wrapped)
        wrapped = self.wrap(algorithm)
        settings = {f"{self.name}.{name}": value for name, value in self.settings.items()}
        applied = {**algorithm.wrapped, self.name: int(self.stage)}
        described = {**wrapped.settings, **settings, APPLIED: applied}
        return dataclasses.replace(wrapped, settings=described, wrapped=applied)


def line(names: Mapping[str, int]) -> str:
    """Return the line of code that applies wrappers of these names in the order of their stages."""
    return " | ".join(["algorithm", *(f"{name}(…)" for name in sorted(names, key=names.__getitem__))])


def _check_place(wrapper: Wrapper, applied: Mapping[str, int]) -> None:
    wanted = line({**applied, wrapper.name: int(wrapper.stage)})
    if wrapper.name in applied:
        raise ValueError(f"Expected each wrapper once, but got {wrapper.name} twice; write {wanted}")
    if applied and max(applied.values()) > wrapper.stage:
        raise ValueError(
            "Expected wrappers from the innermost to the outermost (local changes and attacks, clipping and noise, "
            f"quantising, robust rules, edges), but got {wrapper.name} after {', '.join(applied)}; write {wanted}"
        )
