"""Sites behind lines that are slow, break, or fall silent: a proxy in user space between them and their server."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from support.oracles.closed_forms import ROUNDING, distance, linear_clients, sgd
from support.sites import offers

import fedtorch as ft
from experiments.benchmarks.parts.proxy import Proxy
from fedtorch.sites import Remote, Roster, connect, join, serve
from fedtorch.sites.identity import identity
from fedtorch.sites.streams.hub import Limits

pytest.importorskip("grpc")
DATA = linear_clients([5, 2, 9, 4, 17, 6])
LIMITS = Limits(seconds=5.0, keepalive=1.0)


def scaffold() -> ft.Algorithm:
    """An algorithm whose clients have states, and tell something for good."""
    return ft.scaffold(sgd(0.05, epochs=1, batch_size=4))


class Lines:
    """Three sites in threads, each behind a line of its own."""

    def __init__(self, folder: Path, delay: float) -> None:
        own, roster = identity.make_server(folder / "server"), Roster(folder / "roster.json")
        self.host = serve("127.0.0.1:0", own, roster, LIMITS)
        self.proxies, self.threads, self.errors = {}, [], dict[str, Exception]()
        for name, configuration in offers(DATA, scaffold).items():
            made = identity.make_site(folder / "server", name)
            roster.add(name, identity.fingerprint(made.certificate))
            self.proxies[name] = proxy = Proxy(self.host.port, delay)
            dial = lambda made=made, proxy=proxy: connect(f"127.0.0.1:{proxy.port}", made, LIMITS)
            arguments = (name, dial, configuration, folder / name)
            self.threads.append(threading.Thread(target=self._join, args=arguments, daemon=True))
        for thread in self.threads:
            thread.start()

    def _join(self, name: str, *arguments: object) -> None:
        try:
            join(*arguments, timeout=60.0)
        except (TimeoutError, PermissionError) as error:
            self.errors[name] = error

    def close(self) -> None:
        """Once the sites have been told that it is over."""
        for thread in self.threads:
            thread.join(20.0)
        for proxy in self.proxies.values():
            proxy.close()
        self.host.close()


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Callable[[float], Lines]]:
    made: list[Lines] = []

    def make(delay: float = 0.0) -> Lines:
        made.append(Lines(tmp_path, delay))
        return made[-1]

    yield make
    for each in made:
        each.close()


def alone(rounds: int) -> ft.Run:
    return ft.run(scaffold(), ft.InProcess(DATA), rounds=rounds, seed=3)


def test_who_may_not_come_does_not_disturb_the_run(lines: Callable[[float], Lines], tmp_path: Path) -> None:
    """A certificate of another authority, a clock that is ahead, and a key that is revoked meanwhile."""
    made, folder = lines(0.0), tmp_path / "server"
    sites = Remote(made.host, list("abc"), "it", quorum=0.5, seconds=20.0)
    run = ft.Run(scaffold(), sites, seed=3)
    run.step()
    address, quick = f"127.0.0.1:{made.host.port}", LIMITS._replace(seconds=0.5)
    identity.make_server(tmp_path / "other")
    stranger = identity.make_site(tmp_path / "other", "b")._replace(authority=(folder / "authority.pem").read_bytes())
    with pytest.raises(ConnectionError):
        connect(address, stranger, quick).receive(1.0)
    stale = identity.make_site(folder, "b", timedelta(seconds=-1))  # as a clock that is ahead sees it
    with pytest.raises(ValueError, match="set the clock, or renew the certificate"):
        join(lambda: connect(address, stale, quick), offers(DATA, scaffold)["b"])
    run.step()
    assert distance(run.server, alone(2).server) < ROUNDING
    Roster(tmp_path / "roster.json").revoke("b", "stolen")
    for _ in range(3):
        run.step()
    assert run.last is not None
    assert run.last.ids.tolist() == [0, 1, 4, 5]
    made.threads[1].join(10.0)
    assert isinstance(made.errors["b"], PermissionError)
    assert "has been revoked: stolen" in str(made.errors["b"])
    sites.finish(run)


def test_lines_that_take_50_ms(lines: Callable[[float], Lines]) -> None:
    made = lines(0.05)
    sites = Remote(made.host, list("abc"), "it", quorum=1.0, seconds=20.0)
    run = ft.Run(scaffold(), sites, seed=3)
    run.step()
    began = time.perf_counter()
    for _ in range(5):
        run.step()
    assert time.perf_counter() - began > 5 * 2 * 0.05
    assert distance(run.server, alone(6).server) < ROUNDING
    sites.finish(run)


def cut_at_random(made: Lines, rounds: int, cuts: int) -> None:
    """Goes through rounds while lines break."""
    sites = Remote(made.host, list("abc"), "it", quorum=1.0, seconds=60.0)
    run, dice = ft.Run(scaffold(), sites, seed=3), random.Random(0)
    stop = threading.Event()

    def cut() -> None:
        for _ in range(cuts):
            if stop.wait(dice.uniform(0.05, 0.3)):
                return
            made.proxies[dice.choice("abc")].cut()

    thread = threading.Thread(target=cut, daemon=True)
    thread.start()
    while run.number < rounds or thread.is_alive():
        run.step()
    stop.set()
    assert sum(proxy.cuts for proxy in made.proxies.values()) >= cuts // 2
    wanted = alone(run.number)
    assert distance(run.server, wanted.server) < 1e-8  # hundreds of rounds of sums in another order
    assert distance(run.clients.total(), wanted.clients.total()) < 1e-8
    sites.finish(run)


def test_lines_that_break_at_random(lines: Callable[[float], Lines]) -> None:
    cut_at_random(lines(0.0), 10, cuts=6)


@pytest.mark.slow
def test_slow_lines_that_break_a_hundred_times(lines: Callable[[float], Lines]) -> None:
    cut_at_random(lines(0.02), 50, cuts=100)


def silent(made: Lines, seconds: float) -> None:
    """One line falls silent: the rounds go on without its site, which comes back and is on the same round."""
    sites = Remote(made.host, list("abc"), "it", quorum=0.5, seconds=seconds / 4)
    run = ft.Run(scaffold(), sites, seed=3)
    run.step()
    made.proxies["b"].fall_silent(seconds)
    began, alone_for = time.monotonic(), 0
    while time.monotonic() - began < seconds + 20:
        ids = run.step().ids.tolist()
        alone_for += ids == [0, 1, 4, 5]
        if ids == [0, 1, 2, 3, 4, 5] and alone_for:
            break
        time.sleep(0.05)
    assert alone_for > 0
    assert run.last is not None
    assert run.last.ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert distance(run.server.total, run.clients.total()) < ROUNDING
    sites.finish(run)


def test_a_line_that_is_silent_for_two_seconds(lines: Callable[[float], Lines]) -> None:
    silent(lines(0.0), 2.0)


@pytest.mark.slow
def test_a_line_that_is_silent_for_ten_seconds(lines: Callable[[float], Lines]) -> None:
    silent(lines(0.0), 10.0)
