"""Frames over Flower's messages: who is there, what travels together, failures, ends. Its engine has a stand-in."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.scripts.flower_grid import LIBRARY, Grid

from fedtorch.sites import Hub
from fedtorch.sites.flower import _post, transport as flower
from fedtorch.sites.streams.hub import Limits


class Place:
    """Nodes whose sites say hello, echo frames, and fail when told to; time passes when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, known: dict[str, int] | None = None, **limits: Any) -> None:
        self.now = 100.0
        monkeypatch.setattr(_post, "library", lambda: LIBRARY)
        monkeypatch.setattr(_post, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.names, self.fails = {1: "a", 2: "b"}, set[int]()
        self.grid = Grid({number: self.site(number) for number in self.names})
        self.hub = Hub(Limits(**{"seconds": 0.05, **limits}))
        self.post = _post.Post(self.hub, self.grid, known, 60.0)

    def site(self, number: int) -> _post.Deliver:
        def deliver(settings: Any, opens: bool, frames: Sequence[bytes]) -> tuple[str, list[bytes]]:
            if number in self.fails:
                raise RuntimeError("no disk")
            return self.names[number], [*[b"hello"] * opens, *frames]

        return deliver

    def turns(self, count: int = 4) -> None:
        for _ in range(count):
            self.now += 2.0
            self.post.turn()

    def heard(self) -> list[tuple[str, bytes]]:
        found = []
        while True:
            try:
                found.append(self.hub.receive(0.0))
            except TimeoutError:
                return found


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(monkeypatch)


def test_nodes_say_who_they_are_before_anything_is_asked(place: Place) -> None:
    place.turns()
    assert place.hub.connected == {"a", "b"}
    assert sorted(place.heard()) == [("a", b"hello"), ("b", b"hello")]
    assert sorted(place.grid.pushed) == [(1, True, []), (2, True, [])]


def test_what_waits_for_a_node_travels_together_and_one_message_at_a_time(place: Place) -> None:
    place.turns()
    place.heard()
    place.grid.slow = {1}
    place.hub.send("a", b"1"), place.hub.send("a", b"2"), place.hub.send("b", b"x")
    place.turns()
    place.hub.send("a", b"3")
    place.turns()
    assert place.heard() == [("b", b"x")]
    place.grid.slow = set()
    place.turns()
    assert place.heard() == [("a", b"1"), ("a", b"2"), ("a", b"3")]
    assert [frames for number, _, frames in place.grid.pushed if number == 1] == [[], [b"1", b"2"], [b"3"]]


def test_frames_that_nobody_takes_wait_and_their_node_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch, ahead=2)
    place.turns()
    for frame in (b"1", b"2"):
        place.hub.send("a", frame)
    place.turns()
    place.hub.send("a", b"3")
    pushed = len(place.grid.pushed)
    place.turns()
    assert len(place.grid.pushed) == pushed
    taken = [place.hub.receive(0.0) for _ in range(3)]
    assert [frame for name, frame in taken if name == "a"] == [b"hello", b"1"]
    place.turns()
    assert place.heard() == [("a", b"2"), ("a", b"3")]


def test_a_node_whose_app_fails_is_asked_again_after_a_while(place: Place) -> None:
    place.turns()
    place.heard()
    place.fails = {1}
    place.hub.send("a", b"1")
    place.turns(2)
    assert place.hub.connected == {"b"}
    place.fails = set()
    place.turns()
    assert place.hub.connected == {"a", "b"}
    assert place.heard() == [("a", b"hello")]
    place.fails, before = {1}, len(place.grid.pushed)
    place.hub.send("a", b"2")
    place.turns(60)
    assert len(place.grid.pushed) - before < 8  # pauses double, up to a minute


def test_a_node_that_does_not_reply_or_is_away_has_left(place: Place) -> None:
    place.turns()
    place.grid.slow = {1}
    place.hub.send("a", b"1")
    place.turns(40)
    assert place.hub.connected == {"b"}
    place.grid.online = {1}
    place.turns()
    assert place.hub.connected == frozenset()
    place.grid.slow, place.grid.online = set(), {1, 2}
    place.turns()
    assert place.hub.connected == {"a", "b"}


def test_a_site_that_did_not_take_what_was_sent_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch, ahead=1)
    place.turns()
    place.heard()
    place.grid.slow = {1}
    place.hub.send("a", b"1")
    place.turns()
    place.hub.send("a", b"2")
    with pytest.raises(TimeoutError):
        place.hub.send("a", b"3")
    assert place.hub.connected == {"b"}
    place.grid.slow = set()
    place.turns()
    assert place.heard() == [("a", b"hello")]
    assert [frames for number, _, frames in place.grid.pushed if number == 1] == [[], [b"1"], []]


def test_names_belong_to_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch)
    place.names[2] = "a"
    place.turns(10)
    assert place.hub.connected == {"a"}
    assert {name for name, _ in place.heard()} == {"a"}
    place = Place(monkeypatch, {"a": 2, "b": 1})
    place.turns(10)
    assert place.hub.connected == frozenset()
    place = Place(monkeypatch, {"b": 2, "a": 1})
    place.turns()
    assert place.hub.connected == {"a", "b"}
    place.names[1] = "c"
    place.hub.send("a", b"1")
    place.turns()
    assert place.hub.connected == {"b"}


def test_who_is_dropped_is_asked_no_more(place: Place) -> None:
    place.turns()
    place.hub.drop("a", "other rows than agreed")
    pushed = len(place.grid.pushed)
    place.turns(20)
    assert len(place.grid.pushed) == pushed
    assert place.hub.connected == {"b"}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"name": "a", "frames": "text"},
        {"name": "a", "frames": [b"x"] * 9},
        {"name": 1, "frames": []},
        {"name": "a", "frames": [b"123456"]},
    ],
)
def test_replies_that_hold_something_else(monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]) -> None:
    place = Place(monkeypatch, frame=5)
    place.grid.apps[1] = lambda message, context: LIBRARY.Message({"fedtorch": said}, reply_to=message)
    place.turns()
    assert place.hub.connected == {"b"}


def test_a_superlink_that_takes_no_message(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.turns()
    place.heard()

    def refuses(messages: Any) -> list[str]:
        raise OSError("away")

    monkeypatch.setattr(place.grid, "push_messages", refuses)
    place.hub.send("a", b"1")
    place.turns(1)
    assert place.hub.connected == {"b"}


def test_a_hub_that_closes_delivers_what_was_said_last(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch)
    monkeypatch.setattr(_post, "time", time)
    host = flower.serve(place.grid, limits=Limits(seconds=5.0), pause=0.001)
    assert {host.receive(5.0)[0] for _ in place.names} == {"a", "b"}
    host.send("a", b"over"), host.send("a", b"and out")
    host.close()
    assert [frames for number, _, frames in place.grid.pushed if number == 1][1:] == [[b"over", b"and out"]]
    with pytest.raises(ConnectionError):
        host.send("a", b"more")


def test_flwr_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(ImportError, match=r"pip install flwr==1\.41\.0"):
        _post.library()
