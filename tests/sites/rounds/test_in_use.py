"""Solvers that two sites of one process share: what would go wrong, and that it is refused."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, distance, linear, linear_clients, sgd
from support.sites import Thread, joined, offers, parts
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.federation.solvers import descent
from fedtorch.sites import Hub, Policy, Remote, SiteConfiguration, join
from fedtorch.sites.rounds import session
from fedtorch.sites.rounds.in_use import InUse
from fedtorch.sites.streams import memory

DATA = linear_clients([5, 3, 8, 4])
FEW = Policy(minimum=1)  # rows


class Meeting(nn.Linear):
    """A module in which forward passes of two sites meet, once there is a barrier, and see if their weights stay."""

    kept: list[bool]
    barrier: threading.Barrier | None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.barrier is not None and threading.current_thread().name.startswith("site "):
            self.barrier.wait()
            self.kept.append(weight is self.weight)
            self.barrier.wait()
        return super().forward(x)


def meeting() -> ft.Algorithm:
    return ft.fedavg(sgd(0.1, Meeting(3, 1, dtype=torch.float64), batched=False))


def averaging() -> ft.Algorithm:
    return ft.fedavg(sgd(0.1))


@contextmanager
def threads_of(brought: Mapping[str, SiteConfiguration]) -> Iterator[Hub]:
    """A hub, and such sites in threads."""
    host = Hub()
    threads = [Thread(host, name, configuration) for name, configuration in brought.items()]
    for thread in threads:
        thread.start()
    try:
        yield host
    finally:
        for thread in threads:
            host.drop(thread.site, "the test is over")
            thread.join(10.0)


@pytest.mark.parametrize("one", [True, False])
def test_a_shared_solver_has_another_sites_weights_in_a_forward_pass(
    one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused: that is what happens where it is not, whether or not a step happens to find it and fails."""
    monkeypatch.setattr(session, "take", lambda *arguments: None)
    monkeypatch.setattr(descent, "refuse_late", lambda *arguments: None)  # the module counts from its second round on
    Meeting.kept, Meeting.barrier = [], None
    shared = meeting()
    with joined(offers(DATA, (lambda: shared) if one else meeting, sites=2)) as (sites, _):
        run = ft.Run(meeting(), sites)
        with suppress(RuntimeError) if one else nullcontext():
            run.step()  # where each site tries its module; those of two may meet by chance
            Meeting.barrier = threading.Barrier(2, timeout=20.0)
            run.step()
        assert (bool(sites.troubles) or not all(Meeting.kept)) == one
    assert one or len(Meeting.kept) >= 2


@pytest.mark.parametrize("part", ["algorithm", "solver"])
def test_two_sites_with_one_solver_are_refused_by_name(part: str) -> None:
    solver = sgd(0.1)
    algorithm = ft.fedavg(solver)
    make = (lambda: algorithm) if part == "algorithm" else (lambda: ft.fedavg(solver))
    with joined(offers(DATA, make, sites=2), quorum=0.5) as (sites, _):
        run = ft.Run(averaging(), sites)
        run.step()
        (why,) = sites.troubles.values()
    assert "'it' returns an algorithm, or a solver in it, that another site of the same process uses" in why
    assert run.last is not None
    assert len(run.last.ids) == 2  # those of one site


def test_a_module_of_which_solvers_make_copies_may_be_shared() -> None:
    module = linear()
    with joined(offers(DATA, lambda: ft.fedavg(sgd(0.1, module)), sites=2)) as (sites, _):
        there = ft.run(averaging(), sites, rounds=2, seed=0)
        assert not sites.troubles
    assert distance(there.server, ft.run(averaging(), ft.InProcess(DATA), rounds=2, seed=0).server) < ROUNDING


def test_a_site_alone_may_return_one_algorithm_again_and_give_it_to_the_next() -> None:
    shared, half = averaging(), parts(DATA, 2)
    for name, data in zip("ab", half):
        for _ in range(2):  # sites that join one after the other
            host = Hub()
            site = Thread(host, name, SiteConfiguration(data, {"it": lambda: shared}, FEW))
            site.start()
            sites = Remote(host, [name], "it", quorum=1.0, seconds=20.0)
            for seed in range(2):  # runs of one site that is not told of the first one's end
                there = ft.run(averaging(), sites, rounds=2, seed=seed)
                here = ft.run(averaging(), ft.InProcess(data), rounds=2, seed=seed)
                assert distance(there.server, here.server) < ROUNDING
            sites.finish(there)
            site.join(10.0)
            assert site.session is not None


def test_what_a_site_has_taken_is_free_when_it_ends_with_an_error() -> None:
    shared, host = averaging(), Hub()
    lost = SiteConfiguration(DATA, {"it": lambda: shared})
    error: list[Exception] = []

    def ends() -> None:
        try:
            join(lambda: memory.link(host, "a"), lost, timeout=1.0)
        except TimeoutError as late:
            error.append(late)

    thread = threading.Thread(target=ends)
    thread.start()
    ft.run(averaging(), Remote(host, ["a"], "it", quorum=1.0), rounds=1)
    thread.join(20.0)
    assert error
    with joined({"b": SiteConfiguration(DATA, {"it": lambda: shared})}) as (sites, _):
        ft.run(averaging(), sites, rounds=1)


def test_a_site_that_has_begun_another_run_has_given_back_what_it_computed_with_before() -> None:
    """Also where it has not been told of the end; what it may go on with stays its own where it refuses the other."""
    one, two, half = averaging(), averaging(), parts(DATA, 2)
    brought = {
        "a": SiteConfiguration(half[0], {"one": lambda: one, "two": lambda: two, "not": lambda: 1 / 0}, FEW),
        "b": SiteConfiguration(half[1], {"one": lambda: one}, FEW),
    }
    with threads_of(brought) as host:

        def run(site: str, algorithm: str) -> ft.Run:
            more = {"quorum": 1.0, "seconds": 20.0}
            return ft.run(averaging(), Remote(host, [site], algorithm, **more), rounds=1, seed=0)

        run("a", "one")
        for offered in ("not", "unknown"):
            with pytest.raises(RuntimeError, match="the round was discarded"):
                run("a", offered)
        with pytest.raises(RuntimeError, match="that another site of the same process uses"):
            run("b", "one")
        run("a", "two")
        there = run("b", "one")
    assert distance(there.server, ft.run(averaging(), ft.InProcess(half[1]), rounds=1, seed=0).server) < ROUNDING


def test_nothing_is_kept_of_what_is_gone() -> None:
    used, first, second, module = InUse(), nn.Identity(), nn.Identity(), nn.Linear(1, 1)
    assert used.take(first, [module])
    del first
    gc.collect()
    assert used.take(second, [module])
    del module
    gc.collect()
    assert used.take(nn.Identity(), [])
    assert not used._users
