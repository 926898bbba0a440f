"""What a site says while it takes part, and one that waits for a run that is not its own."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from support.oracles.closed_forms import ROUNDING, distance, linear_clients, sgd
from support.sites import Thread, offers

import fedtorch as ft
from fedtorch.sites import Hub, Remote
from fedtorch.sites.rounds._site_log import SiteLog

DATA = linear_clients([5, 3, 8, 4, 6, 7])


def averaging(mu: float = 0.0) -> ft.Algorithm:
    return ft.fedavg(sgd(0.1), mu=mu)


def until(true, seconds: float = 10.0) -> bool:
    ends = time.monotonic() + seconds
    while not true() and time.monotonic() < ends:
        time.sleep(0.01)
    return true()


def test_a_site_says_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedtorch.sites")
    host, brought = Hub(), offers(DATA, averaging, sites=1)
    site = Thread(host, "a", brought["a"])
    site.start()
    sites = Remote(host, ["a"], "it", {"mu": 0.5}, quorum=1.0, seconds=20.0)
    run = ft.run(averaging(0.5), sites, rounds=5)
    sites.finish(run)
    site.join(10.0)
    begun, number = "connected, with 6 clients and 33 rows; waiting for a run", run.clients.run[:8]
    said = [record.getMessage() for record in caplog.records if record.name.startswith("fedtorch.sites")]
    assert said.pop(0).startswith("Policy(minimum=1) allows messages from only 3 rows")
    assert said[:2] == [begun, f"run {number} has begun: it(mu=0.5) with clients 0 to 5 of 6"]
    assert said[2].startswith(f"round 1 of run {number}: answered within 0.")
    assert said[3:] == [f"run {number} is over, after 5 answers"]  # one line about answers in ten seconds


def test_lines_about_answers_come_as_often_as_they_may(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "fedtorch.sites")
    monkeypatch.setattr(SiteLog.__init__, "__defaults__", (0.0,))
    host, brought = Hub(), offers(DATA, averaging, sites=1)
    site = Thread(host, "a", brought["a"])
    site.start()
    sites = Remote(host, ["a"], "it", quorum=1.0, seconds=20.0)
    sites.finish(ft.run(averaging(), sites, rounds=3))
    site.join(10.0)
    assert [f"round {k} of run" in caplog.text for k in range(5)] == [False, True, True, True, False]


def test_a_site_that_the_run_does_not_list_is_told_so_and_takes_part_in_the_next(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    host, brought = Hub(), offers(DATA, averaging, sites=3)
    waits = {"a": 20.0, "b": 20.0, "c": 0.2}
    threads = {name: Thread(host, name, configuration, timeout=waits[name]) for name, configuration in brought.items()}
    for thread in threads.values():
        thread.start()
    sites = Remote(host, ["a", "b"], "it", quorum=1.0, seconds=20.0)
    run = ft.Run(averaging(), sites)
    run.step()
    assert until(lambda: "the server's run does not include 'c'" in caplog.text)
    time.sleep(0.5)  # longer than it would wait for a server that says nothing
    run.step()
    assert threads["c"].is_alive()
    assert threads["c"].error is None
    sites.finish(run)
    threads["a"].join(10.0), threads["b"].join(10.0)
    for name in "ab":
        threads[name] = Thread(host, name, brought[name])
        threads[name].start()
    everybody = Remote(host, ["a", "b", "c"], "it", quorum=1.0, seconds=20.0)
    run = ft.run(averaging(), everybody, rounds=2)
    everybody.finish(run)
    for thread in threads.values():
        thread.join(10.0)
    assert all(thread.session is not None for thread in threads.values())
    assert distance(run.server, ft.run(averaging(), ft.InProcess(DATA), rounds=2).server) < ROUNDING
