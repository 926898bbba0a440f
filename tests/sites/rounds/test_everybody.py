"""Frames to all clients of a site, and of all of them, without their ids; and what is refused in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.loopback import Loopback
from support.oracles.closed_forms import ROUNDING, distance, linear, linear_clients
from support.sites import offers

import fedtorch as ft
from fedtorch import tree, wire
from fedtorch.sites import Remote
from fedtorch.sites.rounds import frames as frames

OWN, LIKE = torch.arange(3, 7), {"w": torch.empty(2), "b": torch.empty(())}
DATA = linear_clients([5, 2, 9, 4, 17, 6])


def fedavg() -> ft.Algorithm:
    return ft.fedavg(ft.least_squares(linear(), steps=3))


def inboxes(ids: torch.Tensor, same: bool) -> frames.Inboxes:
    values = tree.expand({"w": torch.ones(2), "b": torch.tensor(3.0)}, len(ids))
    return frames.Inboxes(ids, values if same else tree.map(lambda leaf: leaf.clone(), values))


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("known", [None, {}])
def test_all_or_some_clients_hear_the_same(same: bool, known: frames.Known | None) -> None:
    for ids in (OWN, OWN[1:3], OWN[:0], OWN[-1:]):
        for everybody in {False, len(ids) == len(OWN)}:
            frame = frames.read(frames.encode_inboxes("round", inboxes(ids, same), everybody=everybody), "server")
            for _ in range(2):
                heard, more = frames.decode_inboxes(frame, LIKE, OWN, None, known)
                assert torch.equal(heard.ids, ids)
                assert (heard.ids is OWN) == everybody
                assert more is None
                assert tree.map(lambda leaf: leaf.shape[0], heard.inbox) == {"w": len(ids), "b": len(ids)}
                assert all(
                    torch.equal(a, b) for a, b in zip(tree.leaves(heard.inbox), tree.leaves(inboxes(ids, same)[1]))
                )


@pytest.mark.parametrize(
    ("ids", "everybody", "expected"),
    [
        (OWN[:2], True, "clients between 4 and 4"),
        (torch.arange(3, 8), False, "clients between 0 and 4"),
        (OWN.flip(0), False, "ascending ids"),
        (OWN + 1, False, "clients from 3 to 6"),
        (OWN - 1, False, "clients from 3 to 6"),
        (torch.tensor([3, 3]), False, "ascending ids"),
    ],
)
def test_clients_of_others_are_refused(ids: torch.Tensor, everybody: bool, expected: str) -> None:
    known: frames.Known = {}
    frame = frames.read(frames.encode_inboxes("round", inboxes(ids, True), everybody=everybody), "server")
    for _ in range(2):
        with pytest.raises(wire.PayloadError, match=expected):
            frames.decode_inboxes(frame, LIKE, OWN, None, known)


def run(change: Callable[[dict[str, Any], Any], Any], cohort: Any = None) -> ft.Run:
    """One in which what site b answers is changed: what it says, and its tensors."""
    host = Loopback(offers(DATA, fedavg), None)

    def answered(name: str, reply: bytes) -> bytes:
        frame = frames.read(reply, name)
        if name != "b" or frame.kind != "answer":
            return reply
        about = dict(frame.about)
        mean = {"value": {"weight": torch.zeros(1, 3).double(), "bias": torch.zeros(1).double()}}
        tensors: dict[str, Any] = {"ids": None, "info": {name: torch.zeros(2).double() for name in about["info"]}}
        tensors["partial"] = {"change": {**mean, "weight": torch.tensor(13.0).double()}}
        change(about, tensors)
        return frames.encode(tensors=tensors, **about)

    host.after = answered
    sites = Remote(host, ["a", "b", "c"], "it", seconds=60.0, quorum=0.5)
    return ft.Run(fedavg(), sites, seed=3, cohort=cohort)


@pytest.mark.parametrize(
    ("about", "ids", "expected"),
    [
        ({}, None, None),
        ({"everybody": False}, torch.tensor([2, 3]), None),
        ({"everybody": False}, torch.tensor([3, 2]), None),
        ({"everybody": 1}, torch.tensor([2, 3]), None),
        ({}, torch.tensor([2, 3]), "the fields of the tree"),
        ({"everybody": False}, None, "the fields of the tree"),
        ({"clients": 1}, None, "expected clients between 2 and 2"),
        ({"refused": {"2": "weight"}}, None, "expected different clients from 2 to 3"),
        ({"refused": {"9": "weight"}}, None, "expected different clients from 2 to 3"),
        ({"everybody": False}, torch.tensor([2, 4]), "expected different clients from 2 to 3"),
        ({"everybody": False}, torch.tensor([2, 2]), "expected different clients from 2 to 3"),
    ],
)
def test_a_site_answers_for_its_own_clients(about: dict[str, Any], ids: Any, expected: str | None) -> None:
    def change(said: dict[str, Any], tensors: Any) -> None:
        said.update(about)
        tensors["ids"] = ids

    made = run(change)
    for _ in range(2):  # the second time the header is known
        assert made.step().ids.tolist() == ([0, 1, 2, 3, 4, 5] if expected is None else [0, 1, 4, 5])
        assert expected is None or expected in made.population.troubles["b"]


@pytest.mark.parametrize("cohort", [None, 3, [0, 1, 2, 3, 4, 5], [1, 2, 3], [2]])
def test_numbers_are_those_of_one_process_whoever_is_asked(cohort: Any) -> None:
    host = Loopback(offers(DATA, fedavg), None)
    there = ft.Run(fedavg(), Remote(host, ["a", "b", "c"], "it", quorum=0.5), seed=3, cohort=cohort)
    here = ft.Run(fedavg(), ft.InProcess(DATA), seed=3, cohort=cohort)
    for _ in range(4):
        assert there.step().ids.tolist() == here.step().ids.tolist()
        assert distance(there.server, here.server) < ROUNDING
