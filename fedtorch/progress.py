"""Progress of operations that take longer than two seconds.

On a terminal and in a notebook it is a bar, in a log a line now and then, on the standard error. The remaining time is
estimated from the latest steps, once there are a few, without the longest wait among them.

Long rounds also log torch's number of threads, once in a process, unless the user has chosen it.

Within a `Progress` no other is shown. `progress=False` in a function's arguments, `with quiet():` around any code, and
the environment variable `TQDM_DISABLE=1` silence it.

>>> with quiet():
...     sum(step for step in tracked(range(4), "Adding"))
6
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, TypeVar

from fedtorch._lazy import only

__all__ = ["quiet", "tracked"]
__dir__ = only(__all__)

T = TypeVar("T")
Told = Mapping[str, Any]  # values shown beside the progress

_SHORT = 2.0  # seconds before progress is shown
_BETWEEN = 10.0  # least seconds between two lines in a log; in a long run a tenth of the elapsed time
_REFRESHED = 0.1  # seconds between two states of a bar
_RECENT = 64  # steps used in the estimate of the remaining time
_FEW = 3  # least number of intervals between them
_advised = False  # whether this process has logged the advice on threads
_inside: ContextVar[bool] = ContextVar("inside", default=False)  # whether another progress is shown, or none may be


class Progress:
    """Context that shows progress, within which other progress is not shown.

    Args:
        title: text in front.
        total: steps in all; None if unknown.
        unit: of a step; "B" for bytes.
        initial: steps that were done before.
        shown: False shows nothing.
        always: whether short operations are shown, too: a bar at once, in a log a line at the end.

    Attributes:
        done: steps so far.

    >>> with Progress("Solving", total=10, unit="step") as shown:
    ...     for loss in (0.5, 0.25):
    ...         shown.update(tell=lambda: {"loss": loss})
    >>> shown.done
    2
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        *,
        unit: str = "round",
        initial: int = 0,
        shown: bool = True,
        always: bool = False,
    ) -> None:
        self.title, self.total, self.unit, self.done, self.always = title, total, unit, initial, always
        self._initial, self._began, self._outer = initial, time.monotonic(), _inside.get()
        self._moments = deque([(0.0, initial)], _RECENT)  # (seconds since it began, steps)
        disabled = self._outer or os.environ.get("TQDM_DISABLE") or sys.stderr is None
        self._shown = shown and not disabled
        # otherwise chosen when something is first shown
        self._kind: Any = _bar_kind() if self._shown and always else None
        self._bar: Any = None
        self._tell: Callable[[], Told] = dict
        self._left: Callable[[], float | None] | None = None
        self._said, self._next = -1, _SHORT
        if always and self._kind is not None:
            self._draw(0.0)

    def __enter__(self) -> Progress:
        self._outer = _inside.get()
        _inside.set(True)
        return self

    def __exit__(self, *error: object) -> None:
        _inside.set(self._outer)
        self.close()

    def update(
        self,
        steps: int = 1,
        tell: Callable[[], Told] | None = None,
        left: Callable[[], float | None] | None = None,
    ) -> None:
        """Advance by this many steps.

        Args:
            steps: done since.
            tell: returns further values such as a loss; called when something is shown.
            left: estimate of the remaining steps, if the end may come before `total`, or None; called when something is
                shown.
        """
        self.done += steps
        self._tell, self._left = tell or self._tell, left or self._left
        if not self._shown:
            return
        passed = time.monotonic() - self._began
        if passed - self._moments[-1][0] >= passed / _RECENT:
            self._moments.append((passed, self.done))
        if passed >= _SHORT and self.unit == "round":
            self._advise_on_threads()
        if passed >= self._next:
            self._show(passed)

    def close(self) -> None:
        """Show the end, if the start was shown or with `always`."""
        passed = time.monotonic() - self._began
        if self._bar is not None:
            self._draw(passed)
            self._bar.close()
        elif self._shown and self._kind is None and self._said != self.done and (self._said >= 0 or self.always):
            self._write(passed, ended=True)
        self._shown, self._bar = False, None

    def _show(self, passed: float) -> None:
        if self._bar is None and self._said < 0:
            self._kind = _bar_kind()
        if self._kind is not None:
            self._draw(passed)
            self._next = passed + _REFRESHED
        else:
            self._write(passed, ended=self.done == self.total)
            self._next = passed + max(_BETWEEN, passed / 10)

    def _draw(self, passed: float) -> None:
        """Draw the present bar, made by the first call."""
        if self._bar is None:
            scale = {"unit_scale": True} if self.unit == "B" else {}
            self._bar = self._kind(
                total=self.total, initial=self._initial, desc=self.title, unit=self.unit, dynamic_ncols=True, **scale
            )
            self._bar.start_t -= passed
            self._bar.n = self.done
        if self._left is not None and (expected := self._left()) is not None:
            self._bar.total = self.done + self._within(expected)
        self._bar.update(self.done - self._bar.n)  # updates its estimate of the pace
        self._bar.set_postfix(self._tell(), refresh=True)

    def _write(self, passed: float, ended: bool) -> None:
        """Write a line."""
        amount = (lambda count: f"{count / 1e6:.1f}") if self.unit == "B" else (lambda count: f"{count:,}")
        of = "" if self.total is None else f" of {amount(self.total)}"
        what = "MB" if self.unit == "B" else f"{self.unit}s"
        parts = [f"{self.title}: {amount(self.done)}{of} {what} in {_duration(passed)}"]
        seconds = self._seconds_of_a_step()
        expected = None if self._left is None else self._left()
        if not ended and seconds is not None:
            if expected is not None:
                parts.append(f"about {_duration(seconds * self._within(expected))} left")
            elif self.total is not None and self.done < self.total:
                word = "about" if self._left is None else "at most"
                parts.append(f"{word} {_duration(seconds * (self.total - self.done))} left")
        parts += [f"{name} {value}" for name, value in self._tell().items()]
        sys.stderr.write(", ".join(parts) + "\n")
        sys.stderr.flush()
        self._said = self.done

    def _advise_on_threads(self) -> None:
        """Log once in a process that small models are often faster with one thread, if torch has more by default."""
        global _advised
        if _advised or {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
            return
        import torch

        _advised = True
        threads = torch.get_num_threads()
        if threads == 1 or torch.cuda.is_initialized():
            return
        write = sys.stderr.write if self._kind is None else self._kind.write
        write(
            f"torch uses {threads} threads here; small models are often faster with one, above all beside other work: "
            "set OMP_NUM_THREADS=1, or call torch.set_num_threads(1)" + "\n" * (self._kind is None)
        )

    def _within(self, expected: float) -> int:
        """Return this many steps, at least one and no more than are left in all."""
        steps = max(1, math.ceil(expected))
        return steps if self.total is None else min(steps, self.total - self.done)

    def _seconds_of_a_step(self) -> float | None:
        """Return the recent pace without the slowest stretch, which may be a wait; None before there are a few."""
        stretches = [(later[0] - sooner[0], later[1] - sooner[1]) for sooner, later in pairwise(self._moments)]
        stretches = sorted([each for each in stretches if each[1] > 0], key=lambda each: each[0] / each[1])[:-1]
        if len(stretches) < _FEW - 1:
            return None
        return sum(each[0] for each in stretches) / sum(each[1] for each in stretches)


def tracked(
    items: Iterable[T], title: str, total: int | None = None, *, unit: str = "step", shown: bool = True
) -> Iterator[T]:
    """Yield the items one by one, with progress.

    Args:
        items: to iterate over.
        title: text in front.
        total: their number; default: their length, if they have one.
        unit: of an item.
        shown: False shows nothing.
    """
    length = len(items) if total is None and isinstance(items, Sized) else total
    # not a context manager: an error outside would leave it open
    progress = Progress(title, length, unit=unit, shown=shown)
    try:
        for item in items:
            yield item
            progress.update()
    finally:
        progress.close()


@contextmanager
def quiet() -> Iterator[None]:
    """Return a context within which no progress is shown."""
    before = _inside.get()
    _inside.set(True)
    try:
        yield
    finally:
        _inside.set(before)


def _bar_kind() -> Any:
    """Return tqdm's bar for a terminal or a notebook; None for neither."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        return tqdm
    if "ipykernel" in sys.modules and find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm as widget

        return widget
    return None


def _duration(seconds: float) -> str:
    """Return seconds in words.

    >>> [_duration(seconds) for seconds in (0.42, 17.3, 200.0, 10_000.0)]
    ['0.4 s', '17 s', '3 min 20 s', '2 h 46 min']
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
