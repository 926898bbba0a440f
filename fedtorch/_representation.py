"""One-line text of objects for `repr`: calls as in code, with as many settings as fit.

>>> from fedtorch._representation import call, one_line
>>> call("fedavg", ["local"], {"mu": 0.0, "weight": len, "cohort": None}, most=9)
'fedavg(local, mu=0.0, weight=len)'
>>> settings = {"alpha": 0.1, "beta": 0.2, "gamma": 0.3}
>>> one_line(lambda most: call("fit", [], settings, most), longest=20)
'fit(alpha=0.1, …)'
>>> one_line(lambda most: call("fit", [], settings, most), longest=40)
'fit(alpha=0.1, beta=0.2, gamma=0.3)'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from fedtorch.history import headline
from fedtorch.tables.rendering import facts

_Class = TypeVar("_Class", bound=type)
LONGEST = 120  # characters of a line
_LEVELS = (99, 6, 4, 3, 2, 1, 0)  # numbers of settings per call that are tried
_LONGEST_VALUE = 40


def one_line(text: Callable[[int], str], longest: int = LONGEST) -> str:
    """Return `text(most)` with the largest number of settings of each call for which it fits on a line."""
    shortest = ""
    for most in _LEVELS:
        shortest = text(most)
        if len(shortest) <= longest:
            return shortest
    return shortest[: longest - 1] + "…"


def call(name: str, positional: Sequence[str], settings: Mapping[str, Any], most: int) -> str:
    """Return a call as in code, with at most this many settings, without those that are None."""
    given = [f"{key}={value_text(value)}" for key, value in settings.items() if value is not None]
    return f"{name}({', '.join([*positional, *given[:most], *(['…'] if len(given) > most else [])])})"


def value_text(value: Any) -> str:
    """Return a setting's value: numbers and text as they are, tensors by their shape, functions by their name.

    Example:
        >>> import torch
        >>> [value_text(value) for value in (0.1, "local", torch.ones(2, 3), torch.nn.Linear, [1, 2])]
        ['0.1', "'local'", 'Tensor(2, 3)', 'Linear', '[1, 2]']
    """
    if isinstance(value, Tensor):
        return f"Tensor{tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    name = getattr(value, "__name__", None)
    text = name.replace("<lambda>", "lambda") if isinstance(name, str) else repr(value)
    numbers = "tensor(" in text or "array(" in text  # a list or dict of them
    short = len(text) <= _LONGEST_VALUE or getattr(value, "shows_no_rows", False)  # a line of shapes already
    plain = short and "\n" not in text and " object at 0x" not in text and not numbers
    return text if plain else f"{type(value).__name__}(…)"


def without_rows(kind: _Class) -> _Class:
    """Decorate a `NamedTuple` of rows: its `repr` is a line of shapes without numbers, fit for logs.

    Example:
        >>> import torch
        >>> from typing import NamedTuple
        >>> @without_rows
        ... class Value(NamedTuple):
        ...     value: torch.Tensor
        >>> Value(torch.ones(2, 3))
        Value(value=Tensor(2, 3))
    """

    def shown(value: Any) -> str:
        plain = isinstance(value, Tensor | int) or getattr(value, "shows_no_rows", False)
        return value_text(value) if plain else f"{type(value).__name__}(…)"

    def __repr__(self: Any) -> str:
        fields = self._asdict().items()
        given = [f"{name}={shown(value)}" for name, value in fields if value is not None]
        return one_line(
            lambda most: call(type(self).__name__, [*given[:most], *(["…"] if len(given) > most else [])], {}, most)
        )

    kind.shows_no_rows = True  # type: ignore[attr-defined]  # also where it is a part of another
    kind.__repr__ = __repr__  # type: ignore[assignment]  # a NamedTuple has no base class to inherit it from
    return kind


def method(settings: Mapping[str, Any], most: int) -> str:
    """Return the text of an algorithm's or a solver's settings: `algorithm(solver(Module, …), …) | wrapper(…)`.

    Example:
        >>> method({"algorithm": "fedavg", "mu": 0.0, "local.solver": "least_squares", "local.lr": 1.0}, most=9)
        'fedavg(least_squares(lr=1.0), mu=0.0)'
        >>> method({"solver": "least_squares", "lr": 1.0}, most=0)
        'least_squares(…)'
    """
    wrappers = settings.get("wrap", {})
    inner = below("local.", settings)
    outside = ("local.", *(f"{wrapper}." for wrapper in wrappers))
    mine = {name: value for name, value in settings.items() if name != "wrap" and not name.startswith(outside)}
    kind = mine.pop("algorithm", None) or mine.pop("solver", None) or "algorithm"
    module = mine.pop("module", None)
    inside = [method(inner, most)] if inner else [] if module is None else [value_text(module)]
    text = call(str(kind), inside, mine, most)
    for wrapper in wrappers:
        text += " | " + call(wrapper, [], below(f"{wrapper}.", settings), most)
    return text


def run_line(kind: str, run: Any, settings: Mapping[str, Any], members: str) -> str:
    """Return a run in one line: its method, numbers of clients and finished rounds, bytes sent, and the last loss.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.eye(1), torch.tensor([1.0]))] * 3)
        >>> ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(1, 1))), ft.InProcess(data), rounds=2)
        Run(fedavg(least_squares(Linear), mu=0.0, lr=1.0, …), 3 clients, round 2, 1.44 kB up, 816 B down, train_loss 0)
    """
    numbers = [members, f"round {run.number}"]
    if run.number:
        numbers += [f"{bytes_text(run.bytes_up)} up", f"{bytes_text(run.bytes_down)} down"]
    if run.last is not None:
        numbers += [f"{name} {value}" for name, value in headline(run.last).items()]
    return one_line(lambda most: f"{kind}({', '.join([method(settings, most), *numbers])})")


def run_html(kind: str, run: Any, settings: Mapping[str, Any], members: str) -> str:
    """Return a run as a table of what `run_line` says, and why it stopped."""
    count, _, who = members.partition(" ")
    values = {"method": one_line(partial(method, settings)), who: count, "rounds": str(run.number)}
    if run.number:
        values |= {"sent up": bytes_text(run.bytes_up), "sent down": bytes_text(run.bytes_down)}
    if run.last is not None:
        values |= headline(run.last)
    if run.ended:
        values["ended"] = run.ended
    return facts(kind, values)


def below(prefix: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with a prefix in their names, without it."""
    return {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}


def bytes_text(count: int) -> str:
    """Return a number of bytes with a unit.

    Example:
        >>> [bytes_text(count) for count in (12, 3456, 7_890_000_000)]
        ['12 B', '3.46 kB', '7.89 GB']
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
