"""Sites that do not bring rows of one kind: who is told so, and that nobody leaves for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import linear_clients, sgd
from support.sites import Thread, offers

import fedtorch as ft
from fedtorch.sites import Hub, Remote, SiteConfiguration
from fedtorch.sites.rounds import sites as meeting

DATA = linear_clients([5, 2, 9, 4, 17, 6])
NAMES = list("abc")


def fedavg() -> ft.Algorithm:
    return ft.fedavg(sgd(0.1))


def brought(odd: Sequence[str]) -> dict[str, SiteConfiguration]:
    """Three sites, some of which have their rows in another dtype each."""
    every = offers(DATA, fedavg)
    for name, dtype in zip(odd, (torch.float16, torch.bfloat16)):
        cast = lambda rows, dtype=dtype: (rows[0].to(dtype), rows[1])
        every[name] = replace(every[name], data=every[name].data.map(cast))
    return every


def heard(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What sites log of meetings from which they were turned away."""
    return [each.getMessage() for each in caplog.records if each.name.endswith("_site_log")]


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)), ids="".join)
def test_who_differs_from_the_others_is_named_whoever_came_first(
    order: Sequence[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "time", Clock)
    before, every = Clock.seconds, brought("b")
    host = Loopback({name: every[name] for name in order}, None)
    with pytest.raises(ValueError, match=r"at all sites, but 'b' has rows like .*float16.*, and the other 2 have rows"):
        Remote(host, NAMES, "it", timeout=60.0)
    assert Clock.seconds == before, "all is known"
    (said,) = heard(caplog)
    assert "'b' has rows like" in said
    assert said.endswith("bring the same fields in the same dtypes and shapes; waiting for a run")
    assert [name for name, site in host.sites.items() if site.unlisted] == ["b"]
    assert host.dropped == {}
    host.brought["b"] = Loopback(brought(""), None).brought["b"]
    host.start("b")
    assert len(ft.run(fedavg(), Remote(host, NAMES, "it"), rounds=1).last.ids) == 6


def test_without_a_majority_it_is_said_who_has_what(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "time", Clock)
    host = Loopback(brought("ac"), None)
    with pytest.raises(ValueError, match=r"but 'a' has .*float16.*, and 'b' has .*float64.*, and 'c' has .*bfloat16"):
        Remote(host, NAMES, "it")
    assert len(heard(caplog)) == 3
    assert host.dropped == {}


def test_the_last_that_a_site_says_counts_as_long_as_others_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)
    host = Loopback(brought("b"), None)
    wrong = next(frame for frame in host.frames if frame[0] == "b")
    host.brought["b"] = Loopback(brought(""), None).brought["b"]
    host.start("b")
    host.frames.appendleft(wrong)
    assert Remote(host, NAMES, "it").counts.tolist() == [5, 2, 9, 4, 17, 6]


def test_sites_with_a_client_in_common_are_named_and_stay(caplog: pytest.LogCaptureFixture) -> None:
    every = brought("")
    every["c"] = replace(every["c"], data=replace(every["c"].data, names=("client 0", "client 5")))
    host = Loopback(every, None)
    with pytest.raises(ValueError, match=r"\['a', 'c'\] have \['client 0'\] in common; rename them"):
        Remote(host, NAMES, "it")
    assert len(said := heard(caplog)) == 2
    assert not any("client 0" in line for line in said), "nor does a site that has guessed names hear which are there"
    assert host.dropped == {}


def test_no_process_of_a_site_ends_for_another_s_rows() -> None:
    """Sites in threads: the two that are alike then run without the third, and all three once that is mended."""
    host, every = Hub(), brought("b")
    threads = {name: Thread(host, name, every[name]) for name in NAMES}
    for thread in threads.values():
        thread.start()
    with pytest.raises(ValueError, match="but 'b' has rows like"):
        Remote(host, NAMES, "it", timeout=20.0)
    assert all(thread.is_alive() for thread in threads.values())
    two = Remote(host, ["a", "c"], "it", quorum=1.0)
    run = ft.run(fedavg(), two, rounds=2)
    assert run.population.troubles == {}
    assert threads["b"].is_alive()
    host.drop("b", "its side starts it again, mended")
    threads["b"].join(10.0)
    mended = Thread(host, "b", brought("")["b"])
    mended.start()
    three = Remote(host, NAMES, "it", quorum=1.0, timeout=20.0)
    three.finish(ft.run(fedavg(), three, rounds=1))
    for thread in (threads["a"], mended, threads["c"]):
        thread.join(10.0)
        assert thread.error is None
        assert thread.session is not None
