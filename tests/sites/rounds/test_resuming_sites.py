"""A run over sites goes on with the rows that these had, which they alone know, and with sites that join."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.certified import certified
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import ROUNDING, distance, linear_clients, sgd
from support.sites import Carried, offers

import fedtorch as ft
from fedtorch import checkpoint
from fedtorch.protocol.versions import runs
from fedtorch.sites import Remote, Roster, connect, join, secure, serve
from fedtorch.sites.carry import masked
from fedtorch.sites.identity import identity
from fedtorch.sites.rounds import past_sums, sites as meeting

DATA = linear_clients([5, 2, 9, 4, 17, 6, 3, 8])  # of four sites
Make = Callable[..., ft.Algorithm]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Deadlines pass while nothing comes, however long sites take in the same thread."""
    if "grpc" not in request.node.name:
        monkeypatch.setattr(meeting, "time", Clock)


def scaffold(**settings: Any) -> ft.Algorithm:
    return ft.scaffold(sgd(0.05, epochs=1, batch_size=4))


def fedavg(**settings: Any) -> ft.Algorithm:
    return ft.fedavg(sgd(0.05))


def gtv(nodes: int) -> ft.Algorithm:
    return ft.gtv(sgd(0.05), ft.Network.ring(nodes), 0.3)


class Server:
    """Of sites in this process, the first three of which are there from the beginning."""

    def __init__(self, folder: Path | None, make: Make = scaffold, settings: Any = None, **hidden: Any) -> None:
        brought = offers(DATA, make, sites=4)
        self.last, self.make, self.settings, self.folder = brought.pop("d"), make, settings, folder
        self.host, self.hidden = Loopback(brought, folder, certified("abcd").identities if hidden else None), hidden

    def run(self, settings: Any = None, **more: Any) -> ft.Run:
        asked, settings = list(self.host.brought), settings or self.settings
        population = Remote(self.host, asked, "it", settings, **{"seconds": 0.2, "quorum": 1.0, **self.hidden, **more})
        return ft.Run(self.make(**(settings or {})), population, seed=3)

    def take_in(self) -> None:
        """The fourth site comes."""
        kept = self.folder is not None
        self.host.brought["d"] = replace(self.last, policy=self.last.policy._replace(remember_sums=kept))
        if self.folder is not None:
            past_sums.begin(self.folder / "d")
        self.host.start("d")

    def restart(self, site: str, by: float) -> None:
        """A site is started anew, and every number of its rows has changed by so much."""
        brought = self.host.brought[site]
        data = brought.data.map(lambda rows: (rows[0], rows[1] + by))
        self.host.brought[site] = replace(brought, data=data)
        self.host.start(site)


@pytest.mark.parametrize("make", [scaffold, fedavg])
def test_other_rows_at_a_site_are_refused_by_it_alone(make: Make, tmp_path: Path) -> None:
    """The server learns that they are others and nothing else of them."""
    server, file = Server(tmp_path, make), tmp_path / "run.safetensors"
    run = server.run()
    run.step()
    run.save(file)
    noted = checkpoint.read(file)
    assert noted["rows.counts"].tolist() == DATA.counts[:6].tolist()
    assert "rows.digests" not in noted
    server.restart("b", 0.0)
    server.run().load(file).step()  # of the same
    server.restart("b", 1.0)
    resumed = server.run().load(file)
    replies: list[bytes] = []
    server.host.after = lambda name, reply: (name == "b" and replies.append(reply)) or reply
    with pytest.raises(
        ValueError, match=r"rows that sites have, but those of \['b'\] have changed since.*pass anyway=True"
    ):
        resumed.step()
    assert resumed.number == 1
    digests = checkpoint.read(next((tmp_path / "b").glob("*/began.safetensors")))["digests"]
    assert all(int(digest).to_bytes(8, "little", signed=True) not in b"".join(replies) for digest in digests)
    assert all(str(int(digest)).encode() not in b"".join(replies) for digest in digests)
    going_on = server.run().load(file, anyway=True)
    assert len(going_on.step().ids) == 6
    going_on.save(file)
    assert len(server.run().load(file).step().ids) == 6  # the site has noted the rows that were taken anyway


def test_a_site_whose_rows_change_within_a_run_is_left_out_of_it(tmp_path: Path) -> None:
    """The others go on, as where a site fails."""
    server = Server(tmp_path)
    run = server.run(quorum=0.5)
    run.step()
    server.restart("b", 1.0)
    assert run.step().ids.tolist() == [0, 1, 4, 5]
    assert run.population.troubles["b"].startswith("the site's rows are others")


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_goes_on_as_the_algorithm_that_it_began_as(killed: bool, tmp_path: Path) -> None:
    server, file = Server(tmp_path, fedavg), tmp_path / "run.safetensors"
    run = server.run()
    run.step()
    run.save(file)
    for name, brought in server.host.brought.items():
        other = replace(brought, algorithms={**brought.algorithms, "other": fedavg})
        server.host.brought[name] = server.host.sites[name].configuration = other
        if killed:
            server.host.start(name)
    population = Remote(server.host, list(server.host.brought), "other", seconds=0.2)
    with pytest.raises(RuntimeError, match="the run has begun as 'it' at the site, and does not go on as 'other'"):
        ft.Run(fedavg(), population, seed=3).load(file).step()


def test_the_server_knows_how_many_rows_there_were(tmp_path: Path) -> None:
    server, file = Server(tmp_path), tmp_path / "run.safetensors"
    server.run().save(file)
    brought = server.host.brought["b"]
    fewer = ft.data.from_tensors([tuple(leaf[:2] for leaf in rows) for rows in brought.data], brought.data.names)
    server.host.brought["b"] = replace(brought, data=fewer)
    server.host.start("b")
    with pytest.raises(ValueError, match="rows that are here, but client 'client 2' has 2 rows and had 9"):
        server.run().load(file)


@pytest.mark.parametrize(
    ("make", "killed", "memory"),
    [(scaffold, False, False), (scaffold, True, False), (scaffold, False, True), (fedavg, True, False)],
)
def test_a_fourth_site_joins(make: Make, killed: bool, memory: bool, tmp_path: Path) -> None:
    """It is the run in this process whose clients have joined, up to rounding; also where the sites are killed."""
    server, file = Server(None if memory else tmp_path, make), tmp_path / "run.safetensors"
    few = server.run(withdrawals=True)
    list(few.rounds(2))
    few.save(file)
    server.take_in()
    for site in "abc" if killed else "":
        server.host.start(site)
    run = server.run(withdrawals=True).load(file, joined="new")
    here = ft.Run(make(), ft.InProcess(DATA.select(range(6))), seed=3)
    list(here.rounds(2))
    wanted = ft.Run(make(), ft.InProcess(DATA), seed=3)
    wanted.load_state_dict(here.state_dict(), joined="new")
    for each in (run, wanted):
        list(each.rounds(4))
    assert run.last.ids.tolist() == list(range(8))
    assert distance(run.server, wanted.server) < ROUNDING
    if run.algorithm.told is not None:
        assert distance(run.server.total, run.clients.total()) < ROUNDING
        run.population.withdraw(run, "d")
        assert run.step().ids.tolist() == list(range(6))
    run.save(file)
    assert server.run(withdrawals=True).load(file).number == run.number


def test_a_site_joins_sums_under_masks(tmp_path: Path) -> None:
    """It announces its keys to the others, which go on with theirs; numbers are rounded to those of the grid."""
    make = Carried(scaffold, masked(secure.Grid(30, 2.0**20), dropouts=0))
    server, file = (
        Server(tmp_path, make, carry=make.carry, roster=certified("abcd").roster),
        tmp_path / "run.safetensors",
    )
    few = server.run()
    few.step()
    few.save(file)
    server.take_in()
    run = server.run().load(file, joined="new")
    here = ft.Run(scaffold(), ft.InProcess(DATA.select(range(6))), seed=3)
    here.step()
    wanted = ft.Run(scaffold(), ft.InProcess(DATA), seed=3)
    wanted.load_state_dict(here.state_dict(), joined="new")
    for each in (run, wanted):
        list(each.rounds(2))
    assert run.last.ids.tolist() == list(range(8))
    assert distance(run.server, wanted.server) < len(DATA) * 2.0**-30  # a grid's step for each client


def test_a_site_joins_a_network(tmp_path: Path) -> None:
    """Another network is another setting; the total, a row for each node, is made anew of what all sites tell."""
    server, file = Server(tmp_path, gtv, {"nodes": 6}), tmp_path / "run.safetensors"
    few = server.run()
    list(few.rounds(2))
    few.save(file)
    server.take_in()
    run = server.run({"nodes": 8}).load(file, joined="new", anyway=True)
    here = ft.Run(gtv(6), ft.InProcess(DATA.select(range(6))), seed=3)
    list(here.rounds(2))
    wanted = ft.Run(gtv(8), ft.InProcess(DATA), seed=3)
    wanted.load_state_dict(here.state_dict(), joined="new", anyway=True)
    for each in (run, wanted):
        list(each.rounds(4))
    assert distance(run.server, wanted.server) < ROUNDING


def test_runs_without_states_are_known_to_their_sites(tmp_path: Path) -> None:
    server = Server(tmp_path, fedavg)
    run = server.run()
    run.step()
    (kept,) = runs(tmp_path / "a")
    assert (kept.run, kept.over) == (run.clients.run, False)
    run.population.finish(run)
    (kept,) = runs(tmp_path / "a")
    assert kept.over


def test_a_fourth_site_joins_over_grpc(tmp_path: Path) -> None:
    """Sites with certificates, three of which have gone on waiting; the server is another one on the same address."""
    pytest.importorskip("grpc")
    own, roster = identity.make_server(tmp_path / "server"), Roster(tmp_path / "roster.json")
    brought, file, ended = offers(DATA, scaffold, sites=4), tmp_path / "run.safetensors", dict[str, Any]()
    made = {name: identity.make_site(tmp_path / "server", name) for name in brought}
    for name in brought:
        roster.add(name, identity.fingerprint(made[name].certificate))
    host = serve("127.0.0.1:0", own, roster)
    address = f"127.0.0.1:{host.port}"

    def take_part(name: str) -> None:
        ended[name] = join(partial(connect, address, made[name]), brought[name], tmp_path / name, timeout=60.0)

    threads = {name: threading.Thread(target=take_part, args=name, daemon=True) for name in brought}
    for name in "abc":
        threads[name].start()
    few = ft.Run(scaffold(), Remote(host, list("abc"), "it", quorum=1.0), seed=3)
    list(few.rounds(2))
    few.save(file)
    host.close()
    host = serve(address, own, roster)
    threads["d"].start()
    population = Remote(host, list("abcd"), "it", quorum=1.0)
    run = ft.Run(scaffold(), population, seed=3).load(file, joined="new")
    list(run.rounds(3))
    assert run.last is not None
    assert run.last.ids.tolist() == list(range(8))
    assert distance(run.server.total, run.clients.total()) < ROUNDING
    population.finish(run)
    for thread in threads.values():
        thread.join(20.0)
    host.close()
    assert {name: session.run for name, session in ended.items()} == dict.fromkeys("abcd", run.clients.run)
