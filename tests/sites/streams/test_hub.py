"""Frames between a hub and its links: order, turns, room, ends, and what is refused."""

from __future__ import annotations

import threading
import time

import pytest

from fedtorch.sites import Hub
from fedtorch.sites.streams import memory
from fedtorch.sites.streams.hub import Limits


def hub(**limits: float) -> Hub:
    return Hub(Limits(**{"seconds": 0.05, **limits}))


def test_frames_keep_their_order_both_ways() -> None:
    host = hub()
    site = memory.link(host, "a")
    for k in range(3):
        site.send(bytes([k]))
        host.send("a", bytes([k + 10]))
    assert [host.receive(1.0) for _ in range(3)] == [("a", bytes([k])) for k in range(3)]
    assert [site.receive(1.0) for _ in range(3)] == [bytes([k + 10]) for k in range(3)]


def test_peers_that_have_sent_several_take_turns() -> None:
    host = hub()
    for name in ("a", "b"):
        site = memory.link(host, name)
        for k in range(3):
            site.send(bytes([k]))
    assert [host.receive(1.0)[0] for _ in range(6)] == ["a", "b"] * 3


def test_who_has_sent_first_is_taken_first_and_nobody_who_has_gone_or_whom_a_link_has() -> None:
    host = hub()
    names = ("gone", "met", "late", "early")
    sites = {name: memory.link(host, name) for name in names}
    met = host.meet("met", 1.0)
    for name in ("gone", "met", "early", "late", "early"):
        sites[name].send(name.encode())
    assert met.receive(1.0) == b"met"
    host.drop("gone", "it is not wanted")
    assert [host.receive(1.0)[0] for _ in range(3)] == ["early", "late", "early"]
    with pytest.raises(TimeoutError):
        host.receive(0.05)
    sites["met"].send(b"again")
    sites["late"].send(b"again")
    assert met.receive(1.0) == b"again"
    assert host.receive(1.0) == ("late", b"again")


def test_a_site_that_sends_more_than_is_taken_waits_and_holds_up_nobody() -> None:
    host = hub(ahead=2)
    loud, quiet = memory.link(host, "loud"), memory.link(host, "quiet")
    loud.send(b"1"), loud.send(b"2")
    with pytest.raises(TimeoutError, match=r"taken within 0\.05 s, but 2 wait"):
        loud.send(b"3")
    quiet.send(b"x")
    assert {host.receive(1.0)[0] for _ in range(2)} == {"loud", "quiet"}
    loud.send(b"3")


def test_a_site_that_does_not_read_is_disconnected() -> None:
    host = hub(ahead=1)
    site = memory.link(host, "a")
    host.send("a", b"1")
    with pytest.raises(TimeoutError):
        host.send("a", b"2")
    assert host.connected == frozenset()
    assert site.receive(1.0) == b"1"
    with pytest.raises(ConnectionError, match="to be taken within"):
        site.receive(1.0)


def test_waits_end() -> None:
    host = hub()
    site = memory.link(host, "a")
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        host.receive(0.05)
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        site.receive(0.05)
    assert time.monotonic() - began < 5
    with pytest.raises(ConnectionError, match="'b' to be connected"):
        host.send("b", b"")


def test_a_wait_ends_with_the_frame() -> None:
    host = hub()
    site = memory.link(host, "a")
    timer = threading.Timer(0.05, site.send, [b"late"])
    timer.start()
    assert host.receive(10.0) == ("a", b"late")


def test_the_newer_of_two_streams_of_a_site_counts() -> None:
    host = hub()
    old = memory.link(host, "a")
    new = memory.link(host, "a")
    with pytest.raises(ConnectionError, match="connected anew"):
        old.send(b"old")
    new.send(b"new")
    assert host.receive(1.0) == ("a", b"new")
    old.close()
    assert host.connected == {"a"}
    new.close()
    assert host.connected == frozenset()


def test_too_many_peers_and_too_long_frames_are_refused() -> None:
    host = hub(peers=1, frame=3)
    site = memory.link(host, "a")
    with pytest.raises(ConnectionRefusedError, match="at most 1 peers"):
        memory.link(host, "b")
    for send in (site.send, lambda frame: host.send("a", frame)):
        with pytest.raises(ValueError, match="at most 3 bytes, but got one of 4"):
            send(b"1234")


def test_who_is_not_admitted_any_more_is_disconnected_with_the_next_frame() -> None:
    revoked: set[str] = set()

    def check() -> None:
        if "a" in revoked:
            raise PermissionError("the key was stolen")

    host = hub()
    site = memory.link(host, "a", check)
    site.send(b"1")
    assert host.receive(1.0) == ("a", b"1")
    revoked.add("a")
    site.send(b"2")
    with pytest.raises(TimeoutError):
        host.receive(0.05)
    with pytest.raises(PermissionError, match="stolen"):
        site.receive(1.0)


def test_a_hub_that_closes_ends_all_streams() -> None:
    host, done = hub(), []
    site = memory.link(host, "a")
    host.on_close(lambda: done.append(1))
    host.send("a", b"last")
    host.close()
    assert site.receive(1.0) == b"last"
    with pytest.raises(ConnectionError, match="closed"):
        site.receive(1.0)
    assert done == [1]
