"""What the peers of a hub can make it hold: bounded, refused unless asked for, and freed when they leave."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedtorch.sites import Hub, Roster, connect, serve
from fedtorch.sites.identity import identity
from fedtorch.sites.identity.identity import Identity
from fedtorch.sites.streams import memory
from fedtorch.sites.streams._chunks import CHUNK, HEAD, join, split
from fedtorch.sites.streams._pipe import Pipe
from fedtorch.sites.streams.hub import Limits, Link

MIB = 2**20
SMALL = Limits(seconds=5.0, frame=16 * MIB, unasked=2 * MIB, member=16 * MIB, total=24 * MIB)


def rss() -> int:
    """Bytes of this process in memory."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


def until(true, seconds: float = 5.0) -> bool:
    ends = time.monotonic() + seconds
    while not true() and time.monotonic() < ends:
        time.sleep(0.01)
    return true()


class Place:
    """A server that listens, and sites that it knows."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.roster = folder, Roster(folder / "roster.json")
        self.host = serve("127.0.0.1:0", identity.make_server(folder / "authority"), self.roster, SMALL)

    def link(self, name: str) -> Link:
        made: Identity = identity.make_site(self.folder / "authority", name)
        self.roster.add(name, identity.fingerprint(made.certificate))
        return connect(f"127.0.0.1:{self.host.port}", made, SMALL)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    pytest.importorskip("grpc")
    made = Place(tmp_path)
    yield made
    made.host.close()


def flood(link: Link, frame: bytes, heard: list[Exception]) -> threading.Thread:
    """Eight frames on a link, in a thread, that goes on until it hears why not."""

    def send() -> None:
        try:
            for _ in range(8):
                link.send(frame)
            link.receive(20.0)
        except OSError as error:
            heard.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def test_long_frames_that_nobody_asked_for_are_refused_before_they_are_held(place: Place) -> None:
    link, heard = place.link("flood"), []
    link.send(b"hello")
    assert place.host.receive(5.0) == ("flood", b"hello")
    most, before = 0, rss()
    thread = flood(link, bytes(16 * MIB), heard)
    while thread.is_alive():
        most = max(most, *place.host.held.values(), 0, rss() - before)
        time.sleep(0.001)
    assert "bytes unless they were requested, but got one of 16777216" in str(heard[0])
    assert isinstance(heard[0], PermissionError)
    assert most < 12 * MIB
    assert place.host.connected == frozenset()
    link.close()


def test_long_frames_before_anybody_has_said_what_is_expected_wait_at_the_site(place: Place) -> None:
    link = place.link("early")
    thread = flood(link, bytes(8 * MIB), [])
    assert until(lambda: place.host.connected == {"early"})
    time.sleep(0.2)
    assert place.host.held == {"early": 0}
    at_server = place.host.meet("early", 5.0)
    assert [len(at_server.receive(5.0)) for _ in range(8)] == [8 * MIB] * 8
    link.close()
    thread.join(5.0)


def test_an_honest_large_model_passes_as_often_as_it_is_asked_for(place: Place) -> None:
    links, model = {name: place.link(name) for name in "abcd"}, bytes(range(256)) * (16 * MIB // 256)
    for link in links.values():
        link.send(b"hello")
    assert {place.host.receive(5.0)[0] for _ in links} == set(links)

    def answer(link: Link) -> None:
        for _ in range(2):
            link.receive(20.0)
            link.send(model)

    threads = [threading.Thread(target=answer, args=(link,), daemon=True) for link in links.values()]
    for thread in threads:
        thread.start()
    for _ in range(2):
        for name in links:
            place.host.send(name, b"round")
        for _ in links:
            assert place.host.receive(20.0)[1] == model
            assert sum(place.host.held.values()) <= SMALL.total
    for link in links.values():
        link.close()


def test_what_waits_is_bounded_for_each_and_for_all() -> None:
    host = Hub(Limits(frame=4, member=8, total=10, unasked=4, ahead=4, seconds=0.05))
    links = [memory.link(host, name) for name in "ab"]
    links[0].send(b"1234"), links[0].send(b"1234")
    with pytest.raises(TimeoutError, match="2 wait, with 8 bytes"):
        links[0].send(b"1")
    links[1].send(b"12")
    with pytest.raises(TimeoutError, match="1 wait, with 2 bytes"):
        links[1].send(b"1")
    assert host.receive(0.0) == ("a", b"1234")
    links[1].send(b"1234")
    links[0].close()
    assert host.held == {"b": 6}
    links[1].send(b"12")
    assert [host.receive(0.0)[1] for _ in range(3)] == [b"12", b"1234", b"12"]
    assert host.held == {"b": 0}
    with pytest.raises(ValueError, match=r"frame <= member <= total bytes, but got 4, 3 and 10; raise"):
        Hub(Limits(frame=4, member=3, total=10))


@pytest.mark.parametrize("linked", [False, True])
def test_all_is_freed_when_a_site_leaves_without_the_collector(place: Place, linked: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        link, before = place.link("gone"), rss()
        link.send(b"hello")
        assert place.host.receive(5.0) == ("gone", b"hello")
        at_server = place.host.meet("gone", 1.0) if linked else None
        place.host.send("gone", b"", answers=8)
        thread = flood(link, bytes(8 * MIB), [])
        assert until(lambda: place.host.held["gone"] == 16 * MIB)
        pipe = weakref.ref(place.host._lines["gone"].inward)
        link.close()
        thread.join(5.0)
        assert until(lambda: not place.host.connected)
        del at_server
        assert until(lambda: pipe() is None)
        assert place.host._room.used == 0
        del link, thread
        assert until(lambda: rss() - before < 50 * MIB)
    finally:
        gc.enable()


def test_who_holds_room_for_a_frame_and_sends_no_more_of_it_is_disconnected() -> None:
    host = Hub(Limits(seconds=0.02))
    line = host.join("slow")
    line.inward.ask(1)
    line.inward.reserve(2**27)
    host.end_stalled()
    assert host.connected == {"slow"}
    time.sleep(0.03)
    host.end_stalled()
    assert host.connected == frozenset()
    assert host._room.used == 0
    with pytest.raises(ConnectionError, match=r"no part of it came for 0\.02 s"):
        line.outward.get(1.0)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_frames_are_the_same_in_chunks(size: int) -> None:
    frames, pipe = [bytes([7]) * size, b"next"], Pipe(4)
    chunks = list(split(frames))
    assert max(map(len, chunks)) <= CHUNK + HEAD.size
    join(iter(chunks), pipe, 2**30)
    assert [pipe.get(0.0), pipe.get(0.0)] == frames
    if len(chunks) > 2:  # a stream that ends within a frame
        join(iter(chunks[: len(chunks) - 2]), pipe, 2**30)
        assert not pipe.waiting


def test_chunks_that_are_not_as_they_should_be() -> None:
    long = HEAD.pack(2 * CHUNK)
    wrong = {
        "at most 100 bytes, but got one of 101": [HEAD.pack(101) + bytes(101)],
        "got one of -1": [b"1234567"],
        "Expected 5 bytes of a frame, but got 4": [HEAD.pack(5) + bytes(4)],
        "Expected 5 bytes of a frame, but got 6": [HEAD.pack(5) + bytes(6)],
    }
    for said, chunks in wrong.items():
        with pytest.raises(ValueError, match=said):
            join(iter(chunks), Pipe(1), 100)
    with pytest.raises(ValueError, match=r"Expected 1048576 bytes of a frame, but got 1\b"):
        join(iter([long + bytes(CHUNK), b"1"]), Pipe(1), 2**30)
