"""Secure sums are the plain sums on their grid, whoever drops out, or there is none; and the server sees noise."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from scipy import stats
from support.oracles.closed_forms import linear_clients, sgd

import fedtorch as ft
from fedtorch.federation.exchanges.exchange import Mean, Sum
from fedtorch.random.entropy import from_system
from fedtorch.sites.secure import Grid, shamir
from fedtorch.sites.secure.masked import masked as secure_masked
from fedtorch.sites.secure.messages import MASKED, PHASES, REVEAL, Aborted, Session
from fedtorch.sites.secure.neighbours import Neighbourhoods, circle, neighbourhoods
from fedtorch.sites.secure.parties import Client
from fedtorch.sites.secure.simulation import SecureSum, secure_sum
from fedtorch.trust import privacy

GRID = Grid(bits=20, bound=100.0)
VALUES = torch.randn(12, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
FEW = Neighbourhoods(6, 4)


def sums(values: torch.Tensor = VALUES, seed: int = 0, **settings) -> SecureSum:
    return secure_sum(values, GRID, entropy=privacy.from_seed(seed), **settings)


def plain(rows: list[int], values: torch.Tensor = VALUES) -> torch.Tensor:
    return GRID.decode(GRID.encode(values)[rows].sum(0))


# -- the sum -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [None, FEW])
def test_the_sum_is_the_plain_one_on_the_grid(graph: Neighbourhoods | None) -> None:
    found = sums(graph=graph)
    assert torch.equal(found.total, plain(list(range(12))))
    assert float((found.total - VALUES.sum(0)).abs().max()) <= 12 * 2.0**-21


@pytest.mark.parametrize("seed", range(12))
def test_whoever_drops_out_before_masking_is_left_out_and_who_later_stays_in(seed: int) -> None:
    generator = random.Random(seed)
    gone = {row: generator.choice([*PHASES]) for row in generator.sample(range(12), 3)}
    found = sums(gone=gone, graph=Neighbourhoods(11, 6), seed=seed)
    stay = [row for row in range(12) if gone.get(row, 9) > MASKED]
    assert found.survivors == stay
    assert torch.equal(found.total, plain(stay))


def test_the_server_sees_words_that_look_like_chance() -> None:
    """Of numbers that are all alike. Kolmogorov–Smirnov at a fixed seed."""
    values = torch.full((8, 2000), 3.0, dtype=torch.float64)
    one, two = (sums(values, attempt=attempt, graph=FEW) for attempt in (0, 1))
    for found in (one, two):
        words = found.masked.double().flatten() / 2.0**64 + 0.5
        assert stats.kstest(words.numpy(), "uniform").pvalue > 1e-3
        assert len(found.masked.unique()) == 8 * 2000
    assert not bool((one.masked == two.masked).any())
    assert not bool((sums(values, graph=FEW, round=1).masked == one.masked).any())
    assert torch.equal(one.total, two.total)


def test_a_random_part_of_a_hundred_clients_drops_out() -> None:
    """30 % in all, as the neighbourhoods are made for."""
    generator = random.Random(1)
    values = torch.randn(60, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gone = {row: generator.choice([*PHASES][1:]) for row in generator.sample(range(60), 18)}
    found = secure_sum(values, GRID, gone=gone, entropy=privacy.from_seed(0))
    assert torch.equal(found.total, plain(found.survivors, values))


# -- or none -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_too_few_that_stay_are_no_sum(phase: int) -> None:
    """Five of twelve, with a minimum of six; and after masking, too few who could recover the masks."""
    gone = dict.fromkeys(range(7), phase)
    settings = {"minimum": 6, "dropouts": 0.0} if phase <= MASKED else {"graph": Neighbourhoods(11, 6)}
    with pytest.raises(Aborted):
        sums(gone=gone, **settings)


@pytest.mark.parametrize("places", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_messages_that_are_changed_on_the_way_never_make_a_wrong_sum(places: int) -> None:
    """Every phase, many places: the client counts as gone, or there is no sum."""
    generator = random.Random(0)
    for phase, _ in itertools.product(PHASES, range(places)):
        place = generator.random()

        def tamper(at: int, client: int, message: bytes, phase: int = phase, place: float = place) -> bytes:
            if at != phase or client != 5:
                return message
            changed = bytearray(message)
            changed[int(place * len(changed))] ^= 1 << generator.randrange(8)
            return bytes(changed)

        found = sums(tamper=tamper, graph=Neighbourhoods(11, 6))
        assert found.survivors == [row for row in range(12) if row != 4 or phase > MASKED]
        assert torch.equal(found.total, plain(found.survivors))


def test_a_client_that_lies_in_what_it_signs_is_found_out() -> None:
    """Its shares belong to other secrets than it has advertised: where they are needed, there is no sum, but a name."""

    def lie(self, *arguments):
        self._own_mask = bytes(32) if self.number == 3 else self._own_mask
        return honest(self, *arguments)

    honest = Client.share
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "share", lie)
        with pytest.raises(Aborted, match="client 3 has sent shares that do not give its committed secret") as error:
            sums(graph=FEW)
    assert error.value.members == (3,)


def test_clients_that_were_told_different_survivors_reveal_nothing() -> None:
    """One of seven that signs other survivors is not heard; where those that sign the same are too few, nothing is."""
    honest = Client.confirm
    for liars in (1, 4):
        split = lambda self, survivors, heads, liars=liars: honest(
            self, survivors[:-1] if self.number <= liars else survivors, heads
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Client, "confirm", split)
            if liars == 1:
                assert sums(VALUES[:7], graph=FEW).survivors == list(range(7))
            else:
                with pytest.raises(Aborted, match="Too few neighbours of client 5 have confirmed"):
                    sums(VALUES[:7], graph=FEW)


def test_no_client_reveals_both_secrets_of_another() -> None:
    seen: list[tuple[int, int, bool]] = []

    def watch(phase: int, client: int, message: bytes) -> bytes:
        if phase == REVEAL:
            body = message[9:-64]
            records = [body[i : i + 75] for i in range(0, len(body), 75)]
            seen.extend((client, int.from_bytes(r[:8], "big"), bool(r[8])) for r in records)
        return message

    sums(tamper=watch, gone={2: MASKED, 6: REVEAL}, graph=FEW)
    assert len({(client, owner) for client, owner, _ in seen}) == len(seen)
    assert {own for _, owner, own in seen if owner == 3} == {False}
    assert {own for _, owner, own in seen if owner != 3} == {True}


def test_a_client_goes_through_each_phase_once() -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    keys = {k: Ed25519PrivateKey.generate() for k in (1, 2, 3, 4)}
    session = Session(
        b"run", 0, 0, {k: key.public_key().public_bytes_raw() for k, key in keys.items()}, 2, Neighbourhoods(3, 2), 3
    )
    client = Client(session, 1, keys[1], from_system())
    with pytest.raises(Aborted, match="Expected phase 1"):
        client.mask(torch.zeros(2, dtype=torch.int64), [])
    client.advertise()
    with pytest.raises(Aborted, match="Expected phase 2"):
        client.advertise()
    with pytest.raises(Aborted, match="at least 3 clients"):
        client.share([])


# -- its parts ---------------------------------------------------------------------------------------------------------


def test_any_threshold_of_shares_gives_the_secret_and_fewer_say_nothing() -> None:
    generator = random.Random(0)
    secret = generator.randbytes(32)
    shares = shamir.split(secret, 3, [2, 5, 7, 11], generator.randbytes(2 * 72))
    for some in itertools.combinations(shares, 3):
        assert shamir.combine({holder: shares[holder] for holder in some}) == secret
    assert shamir.combine(shares) == secret
    # Two shares fit every secret: for any other there is a third share that goes with them.
    other = generator.randbytes(32)
    known = {0: int.from_bytes(other, "big"), 2: shares[2], 5: shares[5]}
    third = sum(
        value * math.prod((7 - b) * pow(a - b, -1, shamir.PRIME) for b in known if b != a)
        for a, value in known.items()
    ) % shamir.PRIME  # fmt: skip
    assert shamir.combine({2: shares[2], 5: shares[5], 7: third}) == other
    with pytest.raises(ValueError, match="give none"):
        shamir.combine({2: shares[2], 5: shares[5] + 1, 7: shares[7]})
    with pytest.raises(ValueError, match="threshold"):
        shamir.split(secret, 5, [1, 2], b"")


def test_neighbourhoods_are_as_small_as_their_tails_allow() -> None:
    assert neighbourhoods(100, adversary="curious")[:2] == (36, 11)
    assert neighbourhoods(1000, adversary="curious").neighbours == 100
    assert neighbourhoods(12).neighbours <= 11
    few = neighbourhoods(100, dropouts=0.05)
    assert few.neighbours < 36
    with pytest.raises(ValueError, match="no threshold keeps them; so many bear dropouts of at most 48"):
        neighbourhoods(100, corrupt=0.5, dropouts=0.5, adversary="curious")
    with pytest.raises(ValueError, match="at least 3"):
        neighbourhoods(2)
    ring = circle(list(range(1, 21)), 4, b"seed")
    assert all(len(others) == 4 and client not in others for client, others in ring.items())
    assert all(client in ring[other] for client, others in ring.items() for other in others)
    assert circle(list(range(1, 21)), 4, b"another") != ring


def test_numbers_beyond_the_grid_name_client_and_field() -> None:
    rows = [(torch.ones(1, 1), torch.full((1,), y)) for y in (1.0, 1.0, 1.1e7, 1.0)]
    data = ft.data.from_tensors(rows, names=["north", "east", "south", "west"])
    algorithm = ft.fedavg(ft.least_squares(torch.nn.Linear(1, 1, bias=False)))
    said = r"Client 'south': expected numbers of at most 1048576\.0 .* but got 1\d*\.0 in 'change\.value\.weight'"
    with pytest.raises(ValueError, match=said):
        ft.run(algorithm, ft.InProcess(data, carry=secure_masked(dropouts=0.0)), rounds=1)


def test_numbers_off_the_grid_are_refused_with_the_reason() -> None:
    for wrong in (101.0, -101.0, math.nan, math.inf):
        values = VALUES.clone()
        values[3, 2] = wrong
        with pytest.raises(ValueError, match=r"at most 100\.0 in size"):
            sums(values)
    with pytest.raises(ValueError, match="below 2⁶³"):
        secure_sum(VALUES, Grid(52, 1000.0))
    with pytest.raises(ValueError, match="bits from 0 to 52"):
        secure_sum(VALUES, Grid(60, 1.0))
    exact = torch.tensor([0.5, -0.25, 99.75], dtype=torch.float64)
    assert torch.equal(GRID.decode(GRID.encode(exact)), exact)


# -- in a federation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [
    lambda: ft.fedavg(sgd(0.1, steps=2)), lambda: ft.scaffold(sgd(0.1)), lambda: ft.personal_layers(sgd(0.1), "bias"),
], ids=["fedavg", "scaffold", "personal_layers"])  # fmt: skip
def test_a_federation_on_secure_sums_is_the_plain_one_up_to_the_grid(make, monkeypatch) -> None:
    data = linear_clients([5, 3, 8, 4, 6])
    runs = []
    for chunk, small in ((None, 16_384), (1, 0), (2, 0)):
        monkeypatch.setattr("fedtorch.federation.populations.in_process.SMALL_BLOCK", small)
        masked = secure_masked(Grid(30, 2.0**20), dropouts=0)
        runs.append(ft.run(make(), ft.InProcess(data, chunk, carry=masked), rounds=3).tensors())
    usual = ft.run(make(), ft.InProcess(data), rounds=3).tensors()
    for name, leaf in usual.items():
        # Five roundings of 2⁻³¹ in a sum, over three rounds whose steps hardly enlarge them.
        assert all(float((run[name] - leaf).abs().max()) < 100 * 2.0**-31 for run in runs)


def test_messages_of_any_shape_travel_and_a_cohort_that_is_too_small_does_not() -> None:
    exchange = secure_masked(minimum=4, dropouts=0).carried(ft.fedavg(sgd(0.1))).exchange
    messages = (Mean({"a": torch.ones(5), "b": torch.ones(5, 2, 3)}, torch.arange(1.0, 6.0)), Sum(torch.arange(5.0)))
    mean, total = exchange.finish(exchange.merge([exchange.gather(messages, slice(0, 5))]))
    assert mean.value["a"].shape == ()
    assert mean.value["b"].shape == (2, 3)
    assert (float(mean.value["a"]), float(mean.weight), float(total.value)) == (1.0, 15.0, 10.0)
    few = (Mean({"a": torch.ones(3)}, torch.ones(3)),)
    with pytest.raises(Aborted, match="at least 4"):
        exchange.finish(exchange.gather(few, slice(0, 3)))


def test_rounds_whose_sums_could_be_subtracted_end_a_run_that_asks_for_it() -> None:
    """Four of five clients after all five: what differs is one client's message, for fresh messages and for totals."""
    data = linear_clients([5, 3, 8, 4, 6])
    for make in (ft.fedavg, ft.scaffold):
        masked = lambda apart: secure_masked(Grid(30, 2.0**20), apart=apart, dropouts=0.2)
        silent = ft.Faults(after=lambda keys, ids: ids == 2)
        for apart in (1, 3):
            run = ft.Run(make(sgd(0.1)), ft.InProcess(data, carry=masked(apart)))
            run.step()
            run.faults = silent
            if apart == 1:
                run.step()
            else:
                with pytest.raises(Aborted, match="of 1 clients, fewer than 3"):
                    run.step()
                with pytest.raises(Aborted, match="of 1 clients, fewer than 3"):
                    run.step()  # and another attempt has other masks
                run.faults = None
                run.step()
