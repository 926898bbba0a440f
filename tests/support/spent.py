"""A plugin that says what each file of tests takes: `make test PYTEST_ARGS="-p support.spent tests/networks"`.

At the end there is a line for each file: processor seconds of the process and of those that it has started, MB of
memory that stay when it is done, and MB at most beyond what there was before. Tests that leave more than `LARGE` MB
behind, or take more than `LARGE` seconds, are named below. Linux only.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest

LARGE = 20.0


class Use(NamedTuple):
    """What has been used: seconds since the process began, and MB now and at most since `forget`."""

    seconds: float
    children: float
    memory: float
    most: float


def used() -> Use:
    """What has been used so far."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    times = os.times()
    memory, most = (int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return Use(times.user + times.system, times.children_user + times.children_system, memory, most)


def forget() -> None:
    """Let the most of memory begin with what there is now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


_files: dict[str, list[float]] = {}
_large: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Count what a test takes, and what its file leaves once its fixtures are gone."""
    file = item.location[0]
    forget()
    before = used()
    result = yield
    if nextitem is None or nextitem.location[0] != file:
        gc.collect()
    after = used()
    seconds, children, grown = (
        after.seconds - before.seconds,
        after.children - before.children,
        after.memory - before.memory,
    )
    total = _files.setdefault(file, [0.0] * 4)
    total[:] = (
        total[0] + seconds,
        total[1] + children,
        total[2] + grown,
        max(total[3], total[2] + after.most - before.memory),
    )
    if seconds + children > LARGE or grown > LARGE:
        _large.append(f"{seconds + children:6.1f} s {grown:+6.0f} MB  {item.nodeid}")
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the table, the most seconds first."""
    terminalreporter.section("seconds, of other processes, MB left, MB at most")
    for file, (seconds, children, grown, most) in sorted(_files.items(), key=lambda each: -sum(each[1][:2])):
        terminalreporter.line(f"{seconds:6.1f} {children:6.1f} {grown:+6.0f} {most:+6.0f}  {file}")
    for line in _large:
        terminalreporter.line(line)
    terminalreporter.line(f"{used().memory:.0f} MB in the end")
