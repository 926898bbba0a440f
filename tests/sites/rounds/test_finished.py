"""A server that is killed after the last round and started again: it waits for nobody who has left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.oracles.closed_forms import linear_clients, same_bits, sgd
from support.sites import Thread, offers

import fedtorch as ft
from fedtorch.sites import Hub, Remote, SiteConfiguration
from fedtorch.sites.rounds import population

DATA = linear_clients([5, 3, 8, 4, 6, 7])


def averaging() -> ft.Algorithm:
    return ft.scaffold(sgd(0.05, epochs=1, batch_size=4))


def started(host: Hub, brought: dict[str, SiteConfiguration], folder: Path) -> list[Thread]:
    threads = [Thread(host, name, configuration, folder / name) for name, configuration in brought.items()]
    for thread in threads:
        thread.start()
    return threads


class Killed(Exception):
    """The server's process ends here."""


def server(host: Hub, file: Path, timeout: float = 30.0) -> ft.Run:
    """A script that may be started again at any time."""
    sites = Remote(host, list("abc"), "it", quorum=1.0, seconds=20.0, timeout=timeout, checkpoint=file)
    run = ft.Run(averaging(), sites, seed=3)
    if file.exists():
        run.load(file)
    for _ in run.rounds(3):
        run.save(file)
    sites.finish(run)
    return run


def test_after_the_end_nobody_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, host, brought = tmp_path / "run.safetensors", Hub(), offers(DATA, averaging)
    threads = started(host, brought, tmp_path)
    run = server(host, file)
    for thread in threads:
        thread.join(10.0)
    assert all(thread.session is not None and thread.session.over for thread in threads)
    monkeypatch.setattr(population, "LAST_WORD", 0.3)
    began = time.monotonic()
    again = server(Hub(), file)
    assert 0.2 < time.monotonic() - began < 5.0
    assert again.number == 3
    assert same_bits(again.server, run.server)
    assert again.population.names == run.population.names


def test_a_site_that_has_missed_the_end_hears_it_from_the_server_that_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, host, brought = tmp_path / "run.safetensors", Hub(), offers(DATA, averaging)
    threads = started(host, brought, tmp_path)

    def kill(self: object, outbox: object, seconds: float) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("fedtorch.sites.rounds._clients.RemoteClients.finish", kill)
        with pytest.raises(Killed):
            server(host, file)
    hub = Hub()
    for thread in threads:
        thread.host = hub
    host.close()
    began = time.monotonic()
    run = server(hub, file)
    for thread in threads:
        thread.join(10.0)
    assert all(thread.session is not None and thread.session.over for thread in threads)
    assert time.monotonic() - began < 5.0
    assert run.number == 3


def test_a_run_that_is_not_over_waits_for_its_sites(tmp_path: Path) -> None:
    file, host, brought = tmp_path / "run.safetensors", Hub(), offers(DATA, averaging)
    threads = started(host, brought, tmp_path)
    sites = Remote(host, list("abc"), "it", quorum=1.0, seconds=20.0, checkpoint=file)
    run = ft.Run(averaging(), sites, seed=3)
    run.step()
    run.save(file)
    with pytest.raises(TimeoutError, match=r"Expected all 3 sites within 0\.1 s"):
        server(Hub(), file, timeout=0.1)
    sites.finish(run)
    with pytest.raises(TimeoutError, match=r"Expected all 2 sites within 0\.1 s"):
        Remote(Hub(), ["a", "b"], "it", timeout=0.1, checkpoint=file)  # of other sites
    for thread in threads:
        thread.join(10.0)
