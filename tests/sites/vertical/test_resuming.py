"""Vertical protocols go on after cuts and kills at any moment, with the bits of a run that nothing disturbed."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scripts import my_half
from support.verticals import GUIDES, nodes, noises, some_model, some_parameters

from experiments.benchmarks.parts.proxy import Proxy
from fedtorch import checkpoint, wire
from fedtorch.protocol import versions
from fedtorch.protocol.halves import Half, Receive, Send, together
from fedtorch.protocol.journal import Journal
from fedtorch.protocol.rollback import Entered
from fedtorch.sites import Hub, Roster, connect, serve
from fedtorch.sites.identity import identity
from fedtorch.sites.streams import memory
from fedtorch.sites.streams.hub import Limits, Link
from fedtorch.sites.vertical._peers import PeerLost
from fedtorch.sites.vertical.remote import over_hub, over_link
from fedtorch.vfl.nodes.iteration import party_half, server_half
from fedtorch.vfl.nodes.node import Iteration

WAITS = {"seconds": 20.0, "timeout": 20.0}


class Killed(BaseException):
    """A node ends at once, and is started again."""


class Fate:
    """What happens to frames of a node: at the numbers given its stream is cut, or the node killed."""

    def __init__(self, at: set[int] | Callable[[], bool], error: type[BaseException] = ConnectionResetError) -> None:
        self.at, self.error, self.frames, self.struck = at, error, 0, 0

    def pass_on(self, frame: bytes, link: Link) -> None:
        if not frame and self.error is Killed:
            return  # all are done, and a party that begins anew finds nobody
        self.frames += 1
        if self.at() if callable(self.at) else self.frames - 1 in self.at:
            self.struck += 1
            link.close()
            raise self.error("struck")


class Watched:
    """A link whose frames have a fate."""

    def __init__(self, link: Link, fate: Fate) -> None:
        self.link, self.fate, self.close = link, fate, link.close

    def send(self, frame: bytes) -> None:
        self.fate.pass_on(frame, self.link)
        self.link.send(frame)

    def receive(self, seconds: float) -> bytes:
        frame = self.link.receive(seconds)
        self.fate.pass_on(frame, self.link)
        return frame


class WatchedHub(Hub):
    """A server whose frames have a fate."""

    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self.fate = fate

    def meet(self, peer: str, seconds: float) -> Any:
        return Watched(super().meet(peer, seconds), self.fate)


def until_done(attempt: Callable[[], Any]) -> Any:
    """Starts a node again whenever it has been killed."""
    while True:
        try:
            return attempt()
        except Killed:
            pass


def federation(folder: Path | None, **fates: Fate) -> dict[str, Any]:
    """What all nodes of `my_half` find, whatever befalls them."""
    own = lambda name: None if folder is None else folder / name
    hub = WatchedHub(fates.get("leader", Fate(set())))

    def party(name: str) -> Any:
        fate, half = fates.get(name, Fate(set())), partial(my_half.half, name=name)
        dial = lambda: Watched(memory.link(hub, name), fate)
        return until_done(lambda: over_link(half, dial, own(name), **WAITS))[0]

    with ThreadPoolExecutor(len(my_half.PARTIES)) as pool:
        futures = {name: pool.submit(party, name) for name in my_half.PARTIES}
        serve_all = lambda: over_hub(my_half.leader, hub, my_half.PARTIES, own("leader"), **WAITS)
        return {"leader": until_done(serve_all)[0], **{name: each.result(20) for name, each in futures.items()}}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    return federation(None)


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, (rows, numbers) in wanted.items():
        assert torch.equal(found[name][0], rows)
        assert found[name][1].keys() == numbers.keys()
        assert all(torch.equal(found[name][1][key], value) for key, value in numbers.items())


def test_nothing_disturbed_gives_what_one_process_gives(undisturbed: dict[str, Any]) -> None:
    """Names differ between drivers, so the numbers of a server and parties that are trained alone."""
    rows = {name: rows for name, (rows, _) in undisturbed.items()}
    made = my_half.network()
    known = torch.arange(8.0, dtype=torch.float64) % 2
    features = tuple(my_half.features(name)[rows[name]] for name in my_half.PARTIES)
    server, parties = made.nodes(my_half.vfl.VerticalData(features, known[rows["leader"]]), my_half.sgd)
    halves = {0: server_half(server, my_half.ITERATIONS)}
    together(halves | {party.index: party_half(party, my_half.ITERATIONS) for party in parties})
    for name, part in zip(("leader", *my_half.PARTIES), (made.server, *made.parties)):
        wanted = dict(part.named_parameters())
        assert all(torch.equal(value, wanted[key]) for key, value in undisturbed[name][1].items())


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pauses for long."""
    monkeypatch.setattr("fedtorch.sites.streams.timeout._PAUSES", (0.005, 0.1))
    monkeypatch.setattr("fedtorch.sites.vertical._resuming.CLOSING", 1.0)


@pytest.mark.usefixtures("at_once")
def test_a_stream_that_is_cut_now_and_then(undisturbed: dict[str, Any]) -> None:
    fates = {"clinic": Fate({2, 6, 11, 27}), "laboratory": Fate({9, 18})}
    check(federation(None, **fates), undisturbed)
    assert all(fate.struck == len(fate.at) for fate in fates.values())


@pytest.mark.usefixtures("at_once")
def test_parties_that_run_ahead_go_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(my_half, "EVERY", 4)
    monkeypatch.setattr(my_half, "DELAY", 2)
    with longer(8, monkeypatch) as wanted:
        check(federation(tmp_path, clinic=Fate({11, 24}, Killed), leader=Fate({25, 60}, Killed)), wanted)


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_a_stream_that_is_cut_at_any_frame(undisturbed: dict[str, Any]) -> None:
    """Also at the last words, after which nobody may be there any more."""
    count = Fate(set())
    federation(None, clinic=count)
    for frame in range(count.frames):
        fate = Fate({frame})
        check(federation(None, clinic=fate), undisturbed)
        assert fate.struck == 1


@pytest.mark.parametrize(("victim", "frames"), [
    ("leader", {0, 18, 30, 52}), ("laboratory", {0, 9, 13}),
])  # fmt: skip
@pytest.mark.usefixtures("at_once")
def test_a_node_that_is_killed_goes_on_from_its_files(
    tmp_path: Path, undisturbed: dict[str, Any], victim: str, frames: set[int]
) -> None:
    fate = Fate(frames, Killed)
    check(federation(tmp_path, **{victim: fate}), undisturbed)
    assert fate.struck == len(frames)


@pytest.mark.usefixtures("at_once")
def test_random_kills_of_all_nodes(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    assert killed_at_random(tmp_path / "7", undisturbed) > 2


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_a_hundred_random_kills_of_all_nodes(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    kills = 0
    for run in range(100):
        kills += killed_at_random(tmp_path / str(run), undisturbed)
        if kills >= 100:
            break
    assert kills >= 100


def killed_at_random(folder: Path, undisturbed: dict[str, Any]) -> int:
    """How many nodes have been killed, and have gone on."""
    dice = random.Random(int(folder.name))
    fates = {name: Fate(lambda: dice.random() < 0.08, Killed) for name in ("leader", *my_half.PARTIES)}
    check(federation(folder, **fates), undisturbed)
    return sum(fate.struck for fate in fates.values())


@pytest.mark.parametrize(("name", "guide", "shared"), [
    ("augmented", "amortised", True), ("power", "sums", False), ("power", "mean field", True),
])  # fmt: skip
def test_a_node_s_state_is_all_that_changes(name: str, guide: str, shared: bool, tmp_path: Path) -> None:
    """New nodes go on from files bit by bit, the parties idle at once, in any model."""
    model, data = some_model(name, "negative binomial")
    family = GUIDES[guide]()
    q = some_parameters(model, family, data)
    active = [None, [True, False, True], [False, True, True], [True, False, False], None, [True, True, False]]
    drawn = noises(model, family, 12, len(active))
    iterations = [Iteration(noise, 0.05, None, away) for noise, away in zip(drawn, active)]
    sides = [nodes(model, family, q, data, shared) for _ in range(3)]

    def train(side: Any, some: list[Iteration]) -> None:
        halves = {0: server_half(side[0], some)} | {party.index: party_half(party, some) for party in side[1]}
        together(halves)

    whole, begun, later = sides
    train(whole, iterations), train(begun, iterations[:3])
    for first, second in zip((begun[0], *begun[1]), (later[0], *later[1])):
        checkpoint.write(tmp_path / "state", first.state_dict())
        second.load_state_dict(checkpoint.read(tmp_path / "state"))
    train(later, iterations[3:])
    for one, two in zip((whole[0], *whole[1]), (later[0], *later[1])):
        assert all(torch.equal(a, b) for a, b in zip(one.part.parameters(), two.part.parameters(), strict=True))


def test_any_optimiser_s_state_is_flat_tensors(tmp_path: Path) -> None:
    state = {
        "state": {0: {"step": torch.tensor(3.0), "on": None}},
        "groups": [{"betas": (0.9, 0.99), "recent": {"n": 2}}],
    }
    checkpoint.write(tmp_path / "state", checkpoint.pack(state))
    assert checkpoint.unpack(checkpoint.read(tmp_path / "state")) == state
    with pytest.raises(TypeError, match="JSON"):
        checkpoint.pack({"schedule": object()})


def test_a_party_that_does_not_come_back_ends_it_at_all_nodes() -> None:
    hub = Hub()

    def killed(journal: Journal) -> Half:
        yield Receive(0, torch.zeros(1))
        raise Killed

    def listens(journal: Journal) -> Half:
        yield Receive(0, torch.zeros(1))
        yield Receive(0, torch.zeros(1))

    def server(journal: Journal) -> Half:
        for j in (1, 2):
            yield Send(j, torch.zeros(1))
        yield Receive(2, torch.zeros(1))

    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(over_link, half, partial(memory.link, hub, name), **WAITS)
            for name, half in (("good", listens), ("bad", killed))
        ]
        with pytest.raises(PeerLost, match="bad is lost: Expected 'bad' to connect within"):
            over_hub(server, hub, ["good", "bad"], seconds=20, timeout=0.3)
        assert isinstance(futures[1].exception(20), Killed)
        heard = futures[0].exception(20)
    assert isinstance(heard, ConnectionError)
    assert "bad is lost" in str(heard)


def test_lines_that_break_wherever_all_begin_end_the_protocol_one_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtorch.sites.streams.timeout._PAUSES", (0.001, 0.001))
    monkeypatch.setattr("fedtorch.sites.vertical._resuming._TRIES", 5)
    hub, fate = Hub(), Fate(lambda: True)
    with ThreadPoolExecutor(1) as pool:
        dial = lambda: Watched(memory.link(hub, "a"), fate)
        future = pool.submit(over_link, lambda journal: iter(()), dial, seconds=0.2, timeout=0.5)
        with pytest.raises(PeerLost, match="a is lost"):
            over_hub(lambda journal: iter(()), hub, ["a"], **WAITS)
        with pytest.raises(TimeoutError, match=r"Expected a server within 0\.5 s, but got none"):
            future.result(20)
    assert fate.struck >= 5


def full_once(monkeypatch: pytest.MonkeyPatch, node: str) -> None:
    """A node's disk is full once; whoever runs it makes room, and starts it again."""
    write, full = checkpoint.write, [True]

    def writes(path: Path, flat: Any, **how: Any) -> None:
        if full[0] and node in str(path) and path.stem == "3":
            full[0] = False
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, flat, **how)

    def begun_again(attempt: Callable[[], Any]) -> Any:
        try:
            return attempt()
        except OSError as error:
            assert "No space left on device" in str(error)  # noqa: PT017
            return attempt()

    monkeypatch.setattr(checkpoint, "write", writes)
    monkeypatch.setitem(globals(), "until_done", begun_again)


def test_a_full_disk_at_a_party_is_its_own_error_and_the_others_wait(
    tmp_path: Path, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    full_once(monkeypatch, "clinic")
    check(federation(tmp_path), undisturbed)


def test_a_full_disk_at_the_server_is_its_own_error_and_the_parties_wait(
    tmp_path: Path, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    full_once(monkeypatch, "leader")
    check(federation(tmp_path), undisturbed)


def test_a_message_that_is_refused_ends_it_at_all_nodes() -> None:
    hub = Hub()

    def says(journal: Journal) -> Half:
        yield Send(0, torch.full((1,), torch.nan))

    def server(journal: Journal) -> Half:
        return (yield Receive(1, torch.zeros(1)))

    def listens(journal: Journal) -> Half:
        yield Receive(0, torch.zeros(1))

    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(over_link, listens, partial(memory.link, hub, "good"), **WAITS)
        pool.submit(over_link, says, partial(memory.link, hub, "bad"), **WAITS)
        with pytest.raises(wire.PayloadError, match=r"'bad'.*NaN"):
            over_hub(server, hub, ["bad", "good"], **WAITS)
        heard = good.exception(20)
    assert isinstance(heard, ConnectionError)
    assert "the server failed with PayloadError" in str(heard)


def test_a_server_of_another_version() -> None:
    hub = Hub()

    def server() -> Half:
        yield Send("clinic", Entered(torch.zeros(16, dtype=torch.uint8), torch.tensor(2)))
        yield Receive("clinic", torch.zeros(1))

    with ThreadPoolExecutor(1) as pool:
        party = pool.submit(over_link, my_half.half, partial(memory.link, hub, "clinic"), **WAITS)
        with pytest.raises(PeerLost, match="clinic is lost"):
            over_hub(server(), hub, ["clinic"], **WAITS)
        with pytest.raises(wire.PayloadError, match="speaks protocol 1, but got one of 2; install the same version"):
            party.result(20)


def test_what_a_journal_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Expected one of the points \[0\], but got 7"):
        Journal().begin(7)
    away = [Iteration(active=[True, False])] * 4
    for every, iterations in ((2, [*away, Iteration()]), (4, away)):
        with pytest.raises(ValueError, match="but one does not; raise every"):
            next(Journal().through(lambda block: iter(()), None, iterations, every))  # type: ignore[arg-type]
    for run in ("a" * 32, "b" * 32):
        versions.Versions(tmp_path / run)
    with pytest.raises(ValueError, match="Expected the folder of one run"):
        over_hub(my_half.leader, Hub(), my_half.PARTIES, tmp_path)
    with versions.alone_in(tmp_path), pytest.raises(FileExistsError, match="that no other process uses"):
        over_link(my_half.half, Hub, tmp_path)


@contextmanager
def behind_proxies(folder: Path, delay: float, seconds: float) -> Iterator[tuple[dict[str, Proxy], Callable[[], Any]]]:
    """(the lines of the parties, what all nodes find over gRPC with TLS)."""
    limits = Limits(seconds=5.0, keepalive=1.0)
    own, roster = identity.make_server(folder / "server"), Roster(folder / "roster.json")
    hub = serve("127.0.0.1:0", own, roster, limits)
    proxies, waits = {}, {"seconds": seconds, "timeout": 60.0}

    def run() -> dict[str, Any]:
        with ThreadPoolExecutor(len(proxies)) as pool:
            futures = {}
            for name, proxy in proxies.items():
                made = identity.make_site(folder / "server", name)
                roster.add(name, identity.fingerprint(made.certificate))
                dial, half = partial(connect, f"127.0.0.1:{proxy.port}", made, limits), partial(my_half.half, name=name)
                futures[name] = pool.submit(over_link, half, dial, folder / name, **waits)
            leader = over_hub(my_half.leader, hub, my_half.PARTIES, folder / "leader", **waits)[0]
            return {"leader": leader, **{name: future.result(60)[0] for name, future in futures.items()}}

    try:
        proxies |= {name: Proxy(hub.port, delay) for name in my_half.PARTIES}
        yield proxies, run
    finally:
        for proxy in proxies.values():
            proxy.close()
        hub.close()


@contextmanager
def longer(iterations: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What so many iterations find when nothing disturbs them."""
    monkeypatch.setattr(my_half, "ITERATIONS", [Iteration(step=step) for step in range(iterations)])
    yield federation(None)


def cut_at_random(folder: Path, monkeypatch: pytest.MonkeyPatch, iterations: int, cuts: int) -> None:
    dice, stop = random.Random(1), threading.Event()
    with longer(iterations, monkeypatch) as wanted, behind_proxies(folder, 0.05, 20.0) as (proxies, run):

        def cut() -> None:
            for _ in range(cuts):
                if stop.wait(dice.uniform(0.4, 1.2)):
                    return
                proxies[dice.choice(my_half.PARTIES)].cut()

        thread = threading.Thread(target=cut, daemon=True)
        thread.start()
        found = run()
        stop.set()
        thread.join()
        assert sum(proxy.cuts for proxy in proxies.values()) > cuts // 2
        check(found, wanted)


def test_slow_lines_that_break(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpc")
    cut_at_random(tmp_path, monkeypatch, iterations=10, cuts=2)


@pytest.mark.slow
def test_slow_lines_that_break_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpc")
    cut_at_random(tmp_path, monkeypatch, iterations=200, cuts=20)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2.0, 30.0])
def test_a_line_that_is_silent_for_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Nodes that wait for less begin again at a point; those that wait longer notice nothing."""
    pytest.importorskip("grpc")
    with longer(40, monkeypatch) as wanted, behind_proxies(tmp_path, 0.0, seconds) as (proxies, run):
        timer = threading.Timer(0.3, lambda: proxies["laboratory"].fall_silent(10.0))
        began = time.monotonic()
        timer.start()
        check(run(), wanted)
        assert time.monotonic() - began > 10.0


@pytest.mark.slow
def test_a_party_s_process_that_is_killed_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command that parties use."""
    pytest.importorskip("grpc")
    monkeypatch.setenv("ITERATIONS", "2000")
    monkeypatch.setenv("EVERY", "50")
    monkeypatch.setattr(my_half, "EVERY", 50)
    own, roster = identity.make_server(tmp_path / "server"), Roster(tmp_path / "server" / "roster.json")
    hub, started = serve("127.0.0.1:0", own, roster), {}
    for name in my_half.PARTIES:
        made = identity.make_site(tmp_path / "server", name)
        made.save(tmp_path / name)
        roster.add(name, identity.fingerprint(made.certificate))
        started[name] = party_process(tmp_path / name, hub.port)
    try:
        with longer(2000, monkeypatch) as wanted, ThreadPoolExecutor(1) as pool:
            future = pool.submit(over_hub, my_half.leader, hub, my_half.PARTIES, tmp_path / "leader", **SLOW)
            for _ in range(4):
                before = newest(tmp_path / "leader")
                while newest(tmp_path / "leader") < before + 100 and not future.done():
                    time.sleep(0.02)
                assert not future.done(), "it was over before the next kill"
                started["clinic"].kill()
                started["clinic"].communicate()
                started["clinic"] = party_process(tmp_path / "clinic", hub.port)
            found = future.result(300)[0]
        said = {name: process.communicate(timeout=60)[0].decode() for name, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
            process.communicate()
        hub.close()
    assert all("the protocol is over" in text for text in said.values()), said
    check({"leader": found}, {"leader": wanted["leader"]})


SLOW = {"seconds": 60.0, "timeout": 120.0}


def newest(folder: Path) -> int:
    """The last point that a node has kept."""
    kept = versions.runs(folder)
    return max(versions.Versions(folder / kept[0].run).numbers) if kept else 0


def party_process(folder: Path, port: int) -> subprocess.Popen[bytes]:
    tests = Path(__file__).parents[2]
    command = [sys.executable, "-m", "fedtorch.cli", "join", f"127.0.0.1:{port}", "--identity", str(folder)]
    command += ["--half", str(tests / "support" / "scripts" / "my_half.py"), "--timeout", "60"]
    more = {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]), "OMP_NUM_THREADS": "1", "SITE": folder.name}
    return subprocess.Popen(command, env={**os.environ, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
