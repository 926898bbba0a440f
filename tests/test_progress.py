"""Progress: nothing of what is short, a bar on a terminal, few whole lines in a log, silence where it is asked for."""

from __future__ import annotations

import io
import sys

import pytest
import torch

from fedtorch import progress
from fedtorch.progress import Progress, quiet, tracked


class Clock:
    """A clock that moves when it is told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    return found


def work(clock: Clock, seconds: float, steps: int = 100, **settings: object) -> None:
    with Progress("Work", steps, **settings) as shown:  # type: ignore[arg-type]
        for step in range(steps):
            clock.now += seconds / steps
            shown.update(tell=lambda step=step: {"loss": f"{1 / (1 + step):.3g}"})


def test_short_operations_show_no_progress(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    work(clock, 1.99)
    assert capsys.readouterr() == ("", "")
    work(clock, 1.0, always=True)
    assert capsys.readouterr().err == "Work: 100 of 100 rounds in 1.0 s, loss 0.01\n"


def test_a_log_has_few_lines(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    work(clock, 100.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Work: 2 of 100 rounds in 2.0 s, loss 0.5"
    assert lines[1] == "Work: 12 of 100 rounds in 12 s, about 1 min 28 s left, loss 0.0833"
    assert lines[-1] == "Work: 100 of 100 rounds in 1 min 40 s, loss 0.01"
    assert len(lines) == 2 + 9  # after 2 s, 12 s, 22 s, …, and at the end
    work(clock, 36_000.0, steps=10_000)
    assert 60 < len(capsys.readouterr().err.splitlines()) < 120  # log(36000 / 100) / log(1.1) = 62, and ten before
    with Progress("Unknown", unit="step", initial=7) as shown:
        clock.now += 3
        shown.update(2)
        shown.update()
    assert capsys.readouterr().err.splitlines() == ["Unknown: 9 steps in 3.0 s", "Unknown: 10 steps in 3.0 s"]
    with Progress("File", 5_000_000, unit="B") as shown:
        for _ in range(4):
            clock.now += 1
            shown.update(250_000)
            shown._next = 4.0
    assert capsys.readouterr().err.startswith("File: 1.0 of 5.0 MB in 4.0 s, about 16 s left\n")


@pytest.mark.parametrize(("first", "middle"), [(26.0, 0.1), (0.1, 26.0), (26.0, 5.0)])
def test_remaining_time_ignores_one_long_wait(
    clock: Clock, capsys: pytest.CaptureFixture[str], first: float, middle: float
) -> None:
    """300 steps of 0.1 s, of which the first waits for others to come, or one in the middle."""
    with Progress("Vertical training", 300, unit="iteration") as shown:
        for step in range(300):
            clock.now += {0: first, 40: middle}.get(step, 0.1)
            shown.update()
    lines = capsys.readouterr().err.splitlines()
    left = [line.partition("about ")[2].removesuffix(" left") for line in lines if "about" in line]
    assert lines[0].startswith("Vertical training: 1 of 300 iterations in 26 s") or first < 1
    assert "left" not in lines[0] or first < 1
    assert left
    assert all("min" not in each and "h" not in each for each in left), lines


def test_remaining_time_follows_the_pace(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("Work", 2000) as shown:
        for step in range(1000):
            clock.now += 0.1 if step < 500 else 0.3
            shown.update()
        shown._show(200.0)
    assert "about 5 min 0 s left" in capsys.readouterr().err.splitlines()[-1]


def test_failed_operation_shows_its_progress(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with Progress("Work", 10) as shown:
            clock.now += 5
            shown.update()
            shown.update()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert capsys.readouterr().err.splitlines()[-1] == "Work: 2 of 10 rounds in 5.0 s"


def test_progress_can_be_silenced(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with quiet():
        work(clock, 100.0)
    work(clock, 100.0, shown=False)
    with monkeypatch.context() as patched:
        patched.setenv("TQDM_DISABLE", "1")
        work(clock, 100.0, always=True)
    assert capsys.readouterr().err == ""
    work(clock, 100.0)
    assert capsys.readouterr().err != ""


def test_only_the_outer_one_is_shown(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("Outer", 3) as outer:
        for _ in range(3):
            work(clock, 100.0)
            outer.update()
    assert {line.split(":")[0] for line in capsys.readouterr().err.splitlines()} == {"Outer"}
    with Progress("Outer", 1, shown=False):
        work(clock, 100.0)
    assert capsys.readouterr().err == ""


def test_an_error_leaves_nothing_open(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    kept = []
    for through in (lambda: tracked(range(9), "Loop"), lambda: iter([0])):
        try:
            for _ in through():
                clock.now += 5
                raise RuntimeError
        except RuntimeError as error:
            kept.append(error)  # with its frames, and what they hold
    with pytest.raises(RuntimeError), Progress("Work"):
        raise RuntimeError
    work(clock, 5.0)
    assert "Work: 100 of 100" in capsys.readouterr().err
    assert list(tracked((str(i) for i in range(3)), "Loop")) == ["0", "1", "2"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_bar(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    work(clock, 1.0)
    assert terminal.getvalue() == ""
    work(clock, 4.0)
    shown = terminal.getvalue()
    assert "Work:  50%" in shown
    assert "100/100" in shown
    assert "loss=0.01" in shown
    assert shown.count("\n") == 1
    assert 10 < shown.count("\r") < 60
    terminal.truncate(0)
    work(clock, 0.5, always=True, unit="B")
    assert "100/100" in terminal.getvalue()


def test_default_threads_are_logged_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_advised", False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    work(clock, 10.0)  # OMP_NUM_THREADS is set
    work(clock, 10.0, unit="step")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    work(clock, 1.9)
    work(clock, 10.0, unit="step")
    assert "threads" not in capsys.readouterr().err
    work(clock, 10.0)
    work(clock, 10.0)
    [line] = [each for each in capsys.readouterr().err.splitlines() if "threads" in each]
    assert line.startswith("torch uses 6 threads here; small models are often faster with one")
    monkeypatch.setattr(progress, "_advised", False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    work(clock, 10.0)
    assert "threads" not in capsys.readouterr().err
