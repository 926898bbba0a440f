"""Faults: how often they hit, who is in the log, and that sums and states survive all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from support.oracles.closed_forms import (
    ROUNDING,
    copy_of,
    distance,
    fedprox_fixed_point,
    joined,
    last,
    linear,
    linear_clients,
    same_bits,
    sgd,
)
from torch import Tensor

import fedtorch as ft
from fedtorch import random, tree, wire
from fedtorch.data import ClientData
from fedtorch.federation.runs import faults
from fedtorch.federation.runs.deliveries import Receiver
from fedtorch.federation.runs.faults import lognormal_noise
from fedtorch.tree import Tree

SIZES = [5, 9, 4, 7, 6, 8]
K = len(SIZES)
DATA = linear_clients(SIZES)
SECONDS = 0.1 * DATA.counts
FAULTS = {
    "drop-outs": ft.dropouts(0.4),
    "stragglers": ft.stragglers(0.7, SECONDS),
    "lost before": ft.lost_messages(before=0.3),
    "lost after": ft.lost_messages(after=0.3),
    "all": ft.dropouts(0.2) | ft.stragglers(1.0, SECONDS, lognormal_noise(0.5)) | ft.lost_messages(0.1, 0.2),
}
every_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)


class State(NamedTuple):
    told: Tensor


class Server(NamedTuple):
    mean: Tensor
    total: Tensor | None = None


def telling() -> ft.Algorithm:
    """Clients tell new values every round; the server keeps the sum of all clients' and the mean of a round."""

    def client(inbox: Tree, state: State, data: ClientData, turn: ft.Turn) -> ft.Reply:
        new = 0.3 * state.told + random.normal(turn.key, (3,), torch.float64) + 0.1 * inbox["sum"]
        return ft.Reply(ft.Mean(new, data.count), State(new), {"loss": new.square().sum(1)})

    return ft.Algorithm(
        init=lambda parameters, clients: (
            Server(torch.zeros(3, dtype=torch.float64)),
            State(torch.zeros(3, dtype=torch.float64)),
        ),
        outbox=lambda server: {"sum": server.total},
        client=client,
        server=lambda server, aggregate, key: server._replace(mean=aggregate.value),
        model=lambda inbox, state: state.told,
        told=ft.Told(lambda state: state.told),
    )


def rounds(population: Any = None, count: int = 8, **arguments: Any) -> Iterator[ft.Round]:
    """Rounds of `telling`."""
    return ft.Run(telling(), population or ft.InProcess(DATA), {}, **arguments).rounds(count)


def hits(fault: Any, count: int = 2000) -> Tensor:
    """How often each client is hit."""
    keys = random.fold_in(random.key(3), torch.arange(count))
    return fault(keys[:, None], torch.arange(K)).double().mean(0)


def assert_probability(found: Tensor, expected: Tensor, count: int = 2000) -> None:
    error = (expected * (1 - expected) / count).sqrt()
    assert float(((found - expected) / error).abs().max()) < 4


def test_drop_outs_and_losses_have_their_probabilities() -> None:
    expected = torch.full((K,), 0.3, dtype=torch.float64)
    assert_probability(hits(ft.dropouts(0.3).before), expected)
    assert_probability(hits(ft.lost_messages(after=0.3).after), expected)
    both = ft.dropouts(0.3) | ft.lost_messages(before=0.3)
    assert_probability(hits(both.before), 1 - (1 - expected) ** 2)


def test_stragglers_follow_their_durations() -> None:
    mean = SECONDS.double()
    assert_probability(hits(ft.stragglers(0.7, mean).late), (-0.7 / mean).exp())
    sigma = 0.5
    lognormal = torch.distributions.LogNormal(mean.log() - sigma**2 / 2, sigma)
    late = ft.stragglers(0.7, mean, lognormal_noise(sigma)).late
    assert_probability(hits(late), 1 - lognormal.cdf(torch.tensor(0.7, dtype=torch.float64)))
    certain = ft.stragglers(0.65, mean, lognormal_noise(0.0)).late
    assert torch.equal(hits(certain, 3), (mean > 0.65).double())
    assert float(hits(ft.stragglers(math.inf, mean).late, 100).max()) == 0


@every_fault
def test_draws_do_not_depend_on_the_cohort(fault: ft.Faults) -> None:
    ids, some = torch.arange(K), torch.tensor([1, 4])
    keys = random.fold_in(random.key(2), ids)
    for hit in (fault.before, fault.after, fault.late):
        if hit is not None:
            assert torch.equal(hit(keys, ids)[some], hit(keys[some], some))
            assert hit(keys[:0], ids[:0]).shape == (0,)


@every_fault
@pytest.mark.parametrize("cohort", [None, 4])
def test_fault_log_counts_all_clients(fault: ft.Faults, cohort: int | None) -> None:
    seen: dict[str, int] = {"lost_before": 0, "late": 0, "lost_after": 0}
    for round in rounds(cohort=cohort, faults=fault, count=30):
        silent = {name: getattr(round, name) for name in seen}
        assert sorted(torch.cat([round.ids, *silent.values()]).tolist()) == round.asked.tolist()
        assert len(round.asked) == (K if cohort is None else cohort)
        seen = {name: seen[name] + len(ids) for name, ids in silent.items()}
    expected = {
        "lost_before": fault.before is not None,
        "late": fault.late is not None,
        "lost_after": fault.after is not None,
    }
    assert {name: count > 0 for name, count in seen.items()} == expected


@every_fault
@pytest.mark.parametrize("repeated", [False, True])
def test_totals_keep_their_invariant_and_the_silent_their_state(fault: ft.Faults, repeated: bool) -> None:
    population = ft.InProcess(DATA)
    before = torch.zeros(K, 3, dtype=torch.float64)
    for round in rounds(population, faults=fault | ft.duplicated() if repeated else fault, count=12):
        sent = copy_of(round.clients.table.read(slice(0, K)).told)
        assert distance(round.server.total, sent.sum(0)) < ROUNDING
        moved = (sent != before).any(1).nonzero()[:, 0]
        assert torch.equal(moved, round.ids)
        before = sent


def test_half_of_the_clients_missing_converge_to_the_fixed_point() -> None:
    """The clients' least squares with a proximal term agree on a solution where their data do."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(3, generator=generator, dtype=torch.float64)
    xs = [torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in SIZES]
    consistent = ft.data.from_tensors([(x, x @ truth + 0.5) for x in xs])
    algorithm = ft.fedprox(ft.least_squares(linear()), 0.3)
    fault = ft.dropouts(0.3) | ft.stragglers(1.0, SECONDS) | ft.lost_messages(after=0.1)
    done = list(ft.Run(algorithm, ft.InProcess(consistent), faults=fault).rounds(150))
    answered = sum(len(round.ids) for round in done) / (150 * K)
    assert 0.3 < answered < 0.6
    solution = fedprox_fixed_point(consistent, 0.3, consistent.counts.double())
    assert distance(joined(done[-1].server), solution) < 1e-8
    assert float((solution[:3, 0] - truth).abs().max()) < 1e-8


def test_half_of_the_clients_missing_stay_near_the_fixed_point_of_different_clients() -> None:
    data = linear_clients([40] * 30)
    algorithm = ft.fedprox(ft.least_squares(linear()), 2.0, lr=0.2)
    solution = fedprox_fixed_point(data, 2.0, data.counts.double())
    done = [
        joined(round.server) for round in ft.Run(algorithm, ft.InProcess(data), faults=ft.dropouts(0.5)).rounds(200)
    ]
    late = torch.stack(done[100:])
    # The iterates fluctuate around it: the mean is closer than a tenth of the way from the start.
    assert float((late.mean(0) - solution).norm()) < 0.1 * float((done[0] - solution).norm())
    assert float((late - solution).norm(dim=(1, 2)).max()) < 0.5 * float((done[0] - solution).norm())


@pytest.mark.parametrize("cohort", [None, 4])
@pytest.mark.parametrize("fault", [None, FAULTS["all"]], ids=["no faults", "all faults"])
def test_repeated_messages_count_once(cohort: int | None, fault: ft.Faults | None) -> None:
    population = ft.InProcess(DATA)
    plain = list(rounds(population, cohort=cohort, faults=fault))
    run = ft.Run(telling(), population, {}, cohort=cohort, faults=(fault or ft.Faults()) | ft.duplicated(0.7))
    twice = list(run.rounds(8))
    for one, two in zip(plain, twice, strict=True):
        assert distance(one.server, two.server) < ROUNDING
        assert torch.equal(one.ids, two.ids)
        assert (one.bytes_up, one.bytes_down) == (two.bytes_up, two.bytes_down)
        assert len(one.repeated) == 0
        assert set(two.repeated.tolist()) <= set(two.ids.tolist())
    copies = sum(len(round.repeated) for round in twice)
    still_waiting = len(run.network._waiting)
    assert run.network.receiver.refused == copies - still_waiting > 5


def test_without_the_receiver_repetitions_do_change_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = last(rounds())
    monkeypatch.setattr(Receiver, "accepts", lambda self, payload: wire.metadata(payload)["client"])
    assert distance(plain.server, last(rounds(ft.InProcess(DATA), faults=ft.duplicated(0.7))).server) > 0.01


def test_messages_do_come_out_of_order() -> None:
    orders: list[Any] = []
    algorithm = telling()
    gather = algorithm.exchange.gather
    watched = algorithm.exchange._replace(gather=lambda messages, ids: orders.append(ids) or gather(messages, ids))
    algorithm = dataclasses.replace(algorithm, exchange=watched)
    list(ft.Run(algorithm, ft.InProcess(DATA), {}, faults=ft.duplicated(0.0)).rounds(60))
    orders = [tuple(ids.tolist()) for ids in orders[1:]]  # the first is the total before the first round
    assert all(sorted(order) == list(range(K)) for order in orders)
    assert len(set(orders)) > 45  # of 720 orders, 60 draws show 57.6 on average
    first = torch.tensor(orders)[:, 0].bincount(minlength=K)
    assert int(first.min()) > 0


def test_rows_and_averages_through_the_network() -> None:
    algorithm = ft.personal_layers(sgd(0.05, steps=2, batch_size=3), "bias")
    one, two = (ft.run(algorithm, ft.InProcess(DATA), faults=f, rounds=4).last for f in (None, ft.duplicated()))
    assert distance(one.server, two.server) < ROUNDING
    assert distance(one.clients.state_dict(), two.clients.state_dict()) < ROUNDING
    other = ft.run(algorithm, ft.Distributed(DATA), faults=ft.duplicated(), rounds=4).last
    assert distance(one.server, other.server) < ROUNDING


def test_the_receiver_refuses_the_stale_and_the_repeated() -> None:
    receiver = Receiver()
    letters = [wire.encode({"w": torch.ones(1)}, {"client": k, "round": t}) for t in (7, 8) for k in (0, 1)]
    receiver.open(7)
    assert [receiver.accepts(letter) for letter in letters] == [0, 1, None, None]
    assert receiver.accepts(letters[0]) is None
    receiver.open(8)
    assert [receiver.accepts(letter) for letter in letters] == [None, None, 0, 1]
    assert receiver.refused == 5


def test_resumption_with_all_faults_gives_the_same_bits() -> None:
    population = ft.InProcess(DATA, 2)
    settings: dict[str, Any] = {"faults": FAULTS["all"] | ft.duplicated(), "cohort": 5, "seed": 4}
    whole = list(rounds(population, count=8, **settings))
    half = ft.run(telling(), population, {}, rounds=4, **settings)
    resumed = ft.Run(telling(), population, {}, **settings)
    resumed.load_state_dict(half.state_dict())
    rest = list(resumed.rounds(8))
    assert same_bits(rest[-1].server, whole[-1].server)
    assert same_bits(rest[-1].clients.state_dict(), whole[-1].clients.state_dict())
    assert [r.repeated.tolist() for r in rest] == [r.repeated.tolist() for r in whole[4:]]


def test_refusals() -> None:
    for deadline in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="positive deadline"):
            ft.stragglers(deadline, SECONDS)
    for seconds in (torch.tensor([1.0, 0.0]), torch.tensor([1.0, math.inf]), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="positive finite seconds"):
            ft.stragglers(1.0, seconds)
    with pytest.raises(ValueError, match="sigma of at least 0"):
        lognormal_noise(-1.0)
    for probability in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="probability between 0 and 1"):
            ft.dropouts(probability)
        with pytest.raises(ValueError, match="probability between 0 and 1"):
            ft.partial_work(probability)
        with pytest.raises(ValueError, match="probability between 0 and 1"):
            ft.lost_messages(after=probability)
        with pytest.raises(ValueError, match="probability between 0 and 1"):
            ft.duplicated(probability)


def test_fates_are_disjoint_when_everything_hits() -> None:
    everybody = lambda keys, ids: torch.ones(len(ids), dtype=torch.bool)
    found = faults.fates(ft.Faults(after=everybody, late=everybody), random.key(0), None, torch.arange(3))
    assert (found.late.tolist(), found.after.tolist()) == ([0, 1, 2], [])
    found = faults.fates(ft.Faults(everybody, everybody, everybody), random.key(0), torch.tensor([1]), torch.arange(3))
    assert [ids.tolist() for ids in (found.before, found.late, found.after)] == [[1], [], []]
    assert tree.leaves(found.hear)[0].tolist() == []
