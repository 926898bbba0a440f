"""What a site says while it takes part, and one that waits for a run that is not its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from support.loopback import Clock
from support.oracles.closed_forms import ROUNDING, distance, linear_clients, sgd
from support.sites import Thread, offers

import fedtorch as ft
from fedtorch.sites import Hub, Remote, join
from fedtorch.sites.rounds import _site_log as site_log, frames as frames
from fedtorch.sites.rounds._site_log import SiteLog
from fedtorch.sites.streams import timeout as timeouts

DATA = linear_clients([5, 3, 8, 4, 6, 7])
WAIT = 600.0  # seconds that nothing here takes
WAITS: dict[str, Any] = {"quorum": 1.0, "seconds": WAIT, "timeout": WAIT}


def averaging(mu: float = 0.0) -> ft.Algorithm:
    return ft.fedavg(sgd(0.1), mu=mu)


def test_a_site_says_what_it_does(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "fedtorch.sites")
    monkeypatch.setattr(site_log, "time", Clock)  # the rounds take no time, on a busy machine either
    host, brought = Hub(), offers(DATA, averaging, sites=1)
    site = Thread(host, "a", brought["a"], timeout=WAIT)
    site.start()
    sites = Remote(host, ["a"], "it", {"mu": 0.5}, **WAITS)
    run = ft.run(averaging(0.5), sites, rounds=5)
    sites.finish(run)
    site.join(WAIT)
    begun, number = "connected, with 6 clients and 33 rows; waiting for a run", run.clients.run[:8]
    said = [record.getMessage() for record in caplog.records if record.name.endswith("_site_log")]
    assert said.pop(0).startswith("Policy(minimum=1) allows messages from only 3 rows")
    assert said[:2] == [begun, f"run {number} has begun: it(mu=0.5) with clients 0 to 5 of 6"]
    assert said[2].startswith(f"round 1 of run {number}: answered within 0.00 s, 1 answers so far")
    assert said[3:] == [f"run {number} is over, after 5 answers"]  # one line about answers in ten seconds


def test_lines_about_answers_come_as_often_as_they_may(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "fedtorch.sites")
    monkeypatch.setattr(SiteLog.__init__, "__defaults__", (0.0,))
    host, brought = Hub(), offers(DATA, averaging, sites=1)
    site = Thread(host, "a", brought["a"], timeout=WAIT)
    site.start()
    sites = Remote(host, ["a"], "it", **WAITS)
    sites.finish(ft.run(averaging(), sites, rounds=3))
    site.join(WAIT)
    assert [f"round {k} of run" in caplog.text for k in range(5)] == [False, True, True, True, False]


class Scripted:
    """A link on which a server's frames come in their order; None is a silence for longer than the site waits."""

    heard = 0.0  # long ago, by `time.monotonic`

    def __init__(self, frames: Sequence[bytes | None]) -> None:
        self._frames = iter(frames)

    def send(self, frame: bytes) -> None:
        """Send nowhere."""

    def receive(self, seconds: float) -> bytes:
        frame = next(self._frames, b"")
        if frame == b"":
            raise PermissionError("the script is over")
        if frame is None:
            raise TimeoutError(f"Expected a frame within {seconds:g} s, but got none")
        return frame

    def close(self) -> None:
        """Close nothing."""


def test_a_site_that_waits_for_another_run_outlives_any_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "time", Clock)
    monkeypatch.setattr(Clock, "seconds", 100.0)
    (configuration,) = offers(DATA, averaging, sites=1).values()
    wait, who = frames.encode("wait", reason="the server's run is of other sites"), frames.encode("who")
    with pytest.raises(PermissionError, match="the script is over"):
        join(lambda: Scripted([wait, None, None]), configuration, timeout=1.0)  # type: ignore[arg-type,return-value]
    for silent in ([None], [wait, None, who, None]):
        with pytest.raises(TimeoutError, match="Expected a server within 1 s"):
            join(lambda script=silent: Scripted(script), configuration, timeout=1.0)  # type: ignore[misc]


def test_a_site_that_the_run_does_not_list_is_told_so_and_takes_part_in_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host, brought = Hub(), offers(DATA, averaging, sites=3)
    threads = {name: Thread(host, name, configuration, timeout=WAIT) for name, configuration in brought.items()}
    for thread in threads.values():
        thread.start()
    sites = Remote(host, ["a", "b"], "it", **WAITS)
    run = ft.Run(averaging(), sites)
    run.step()
    while "the server's run does not include 'c'" not in caplog.text:
        run.step()  # a server takes in who comes as it waits for others
    assert threads["c"].is_alive()
    assert threads["c"].error is None
    sites.finish(run)
    threads["a"].join(WAIT), threads["b"].join(WAIT)
    for name in "ab":
        threads[name] = Thread(host, name, brought[name], timeout=WAIT)
        threads[name].start()
    everybody = Remote(host, ["a", "b", "c"], "it", **WAITS)
    run = ft.run(averaging(), everybody, rounds=2)
    everybody.finish(run)
    for thread in threads.values():
        thread.join(WAIT)
    assert all(thread.session is not None for thread in threads.values())
    assert distance(run.server, ft.run(averaging(), ft.InProcess(DATA), rounds=2).server) < ROUNDING
