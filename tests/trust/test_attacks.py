"""Attacks: what they say, whom they reach, and that they join any algorithm in any population."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, distance, linear, linear_clients, sgd
from torch import Tensor

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.solvers.unlabelled import unlabelled
from fedtorch.models.linear import LinearHead
from fedtorch.trust import attacks, robust
from fedtorch.trust.attacks.collusion import usual_z
from fedtorch.trust.attacks.lies import claimed_rows
from fedtorch.trust.attacks.poison import zero_loss

SIZES = [5, 2, 9, 4, 17, 6, 3]
K = len(SIZES)
WRONG = [1, 4]
LIES: dict[str, attacks.Attack] = {
    "sign_flip": attacks.sign_flip(WRONG, 2.0),
    "noise": attacks.noise(WRONG, 0.5),
    "free_rider": attacks.free_rider(WRONG),
    "denial_of_service": attacks.denial_of_service(WRONG, 7.0),
    "claimed_rows": claimed_rows(WRONG, 100.0),
}
COLLUSIONS: dict[str, attacks.Attack] = {
    "a_little_is_enough": attacks.a_little_is_enough(WRONG, 1.5),
    "inner_product_manipulation": attacks.inner_product_manipulation(WRONG, 4.0),
    "min_max": attacks.min_max(WRONG),
}
ALGORITHMS: dict[str, Callable[[], ft.Algorithm]] = {
    "fedavg": lambda: ft.fedavg(sgd(0.1, steps=2, batch_size=3)),
    "ditto": lambda: ft.ditto(sgd(0.1, steps=2), 0.5),
    "gtv": lambda: ft.gtv(sgd(0.05, steps=2), ft.Network.ring(K), 0.5),
    "matrix_normal": lambda: ft.matrix_normal(ft.least_squares(LinearHead(3, dtype=torch.float64), steps=4), noise=0.1),
    "scaffold": lambda: ft.scaffold(sgd(0.05, steps=2)),
}
AVERAGE = ft.fedavg(ft.least_squares(linear()))


def run(algorithm: ft.Algorithm, chunk: int | None = None, rounds: int = 3, **settings: object) -> ft.Run:
    start = torch.full((3,), 0.5).double() if algorithm.start is None else algorithm.start
    return ft.run(algorithm, ft.InProcess(linear_clients(SIZES), chunk), start, rounds=rounds, **settings)


def changes() -> Tensor:
    """What each client of `AVERAGE` would say in the first round, `(K, 4)`."""
    data, found = linear_clients(SIZES), []
    for k in range(K):
        last = ft.run(AVERAGE, ft.InProcess(data.select([k])), rounds=1)
        moved = tree.subtract(last.server, AVERAGE.start)
        found.append(torch.cat([moved["weight"].flatten(), moved["bias"]]))
    return torch.stack(found)


def step(attack: attacks.Attack) -> Tensor:
    """By how much the first attacked round of `AVERAGE` moves the server, `(4,)`."""
    moved = tree.subtract(run(AVERAGE | attack, rounds=1).server, AVERAGE.start)
    return torch.cat([moved["weight"].flatten(), moved["bias"]])


# -- what they say ---------------------------------------------------------------------------------------------------


def test_attacks_send_their_formulas() -> None:
    said, weight = changes(), torch.tensor(SIZES).double()
    wrong = torch.zeros(K, dtype=torch.bool).index_fill(0, torch.tensor(WRONG), True)
    expected = {
        "sign_flip": torch.where(wrong[:, None], -2 * said, said),
        "free_rider": torch.where(wrong[:, None], 0.0, said),
        "denial_of_service": torch.where(wrong[:, None], 7.0, said),
    }
    for name, lies in expected.items():
        assert distance(step(LIES[name]), weight @ lies / weight.sum()) < ROUNDING
    claims = torch.where(wrong, 100 * weight, weight)
    assert distance(step(LIES["claimed_rows"]), claims @ said / claims.sum()) < ROUNDING


def test_collusions_are_the_papers_formulas() -> None:
    said, weight = changes(), torch.tensor(SIZES).double()
    wrong = torch.zeros(K, dtype=torch.bool).index_fill(0, torch.tensor(WRONG), True)
    honest = said[~wrong]
    mean, sd = honest.mean(0), (honest - honest.mean(0)).square().mean(0).sqrt()
    reach = max(float((a - b).norm()) for a in honest for b in honest)
    low, high = 0.0, 1e3
    for _ in range(200):  # the paper's bisection
        middle = 0.5 * (low + high)
        inside = max(float((mean - middle * sd - x).norm()) for x in honest) <= reach
        low, high = (middle, high) if inside else (low, middle)
    agreed = {
        "a_little_is_enough": mean - 1.5 * sd,
        "inner_product_manipulation": -4 * mean,
        "min_max": mean - low * sd,
    }
    for name, lie in agreed.items():
        expected = weight @ torch.where(wrong[:, None], lie, said) / weight.sum()
        assert distance(step(COLLUSIONS[name]), expected) < 1e-9  # of the bisection; the others to rounding


def test_the_usual_z_is_that_of_the_paper() -> None:
    """Baruch et al. (2019): n = 50 with 24 attackers, of whom s = 2 honest supporters are needed: Φ(z) = 24/26."""
    assert abs(0.5 * (1 + math.erf(usual_z(50, 24) / 2**0.5)) - 24 / 26) < 1e-12


def test_noise_is_drawn_for_every_client_and_round() -> None:
    moved = torch.stack([step(attacks.noise([k], 1.0)) - step(attacks.noise([k], 0.0)) for k in range(K)])
    share = torch.tensor(SIZES).double() / sum(SIZES)
    normal = moved / share[:, None]
    assert len(normal.flatten().unique()) == normal.numel()
    assert 0.6 < float(normal.std()) < 1.4  # 28 numbers: the standard error is 0.13


# -- whom they reach -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("attack", ["sign_flip", "noise", "claimed_rows"])
def test_they_join_any_algorithm_in_any_chunks(name: str, attack: str) -> None:
    settings = {"cohort": 5, "faults": ft.lost_messages(after=0.2), "seed": 2}
    algorithm = ALGORITHMS[name]() | LIES[attack]
    whole, one = (run(algorithm, chunk, **settings) for chunk in (None, 1))
    assert distance(whole.server, one.server) < ROUNDING
    assert distance(whole.tensors(), one.tensors()) < ROUNDING
    if algorithm.told is not None:
        assert distance(whole.server.total, whole.clients.total()) < ROUNDING
    if attack == "sign_flip":
        assert distance(whole.server, run(ALGORITHMS[name](), **settings).server) > 1e-3


@pytest.mark.parametrize("name", COLLUSIONS)
def test_collusions_are_the_same_in_any_chunks(name: str) -> None:
    for algorithm, rule in (
        (AVERAGE, None),
        (AVERAGE, robust.median()),
        (ft.scaffold(sgd(0.05, steps=2)), robust.trimmed_mean(0.0)),
        (ALGORITHMS["matrix_normal"](), None),
    ):
        attacked = algorithm | COLLUSIONS[name]
        if rule is not None:
            attacked, algorithm = attacked | robust.rule(rule), algorithm | robust.rule(rule)
        whole, one = (run(attacked, chunk, cohort=5, seed=1) for chunk in (None, 1))
        assert distance(whole.server, one.server) < ROUNDING
        assert distance(whole.server, run(algorithm, cohort=5, seed=1).server) > 1e-6


def test_a_node_s_lie_reaches_its_neighbours_only() -> None:
    network = ft.Network.ring(K)
    algorithm = ft.gtv(ft.least_squares(linear()), network, 0.5)
    attacked = run(algorithm | attacks.denial_of_service([2], 1e3), rounds=1).server.total["bias"]
    honest = run(algorithm, rounds=1).server.total["bias"]
    assert (attacked - honest).abs().gt(1.0).flatten().nonzero().flatten().tolist() == [1, 3]


def test_several_attacks_join() -> None:
    both = run(AVERAGE | attacks.sign_flip([1]) | attacks.denial_of_service([4], 0.0), rounds=1).server
    said, weight = changes(), torch.tensor(SIZES).double()
    said[1], said[4] = -said[1], 0
    expected = weight @ said / weight.sum()
    assert distance(tree.subtract(both, AVERAGE.start)["bias"], expected[3:]) < ROUNDING


def test_absent_clients_do_not_attack() -> None:
    away = ft.Faults(before=lambda keys, ids: torch.isin(ids, torch.tensor(WRONG)))
    for attack in (LIES["sign_flip"], COLLUSIONS["min_max"]):
        assert distance(run(AVERAGE | attack, faults=away).server, run(AVERAGE, faults=away).server) < ROUNDING
    alone = ft.Faults(before=lambda keys, ids: ~torch.isin(ids, torch.tensor(WRONG)))  # nobody to copy from
    attacked = run(AVERAGE | COLLUSIONS["min_max"], faults=alone).server
    assert distance(attacked, run(AVERAGE, faults=alone).server) < ROUNDING


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_stop_a_run_or_are_left_out(value: float) -> None:
    attacked, data = AVERAGE | attacks.denial_of_service(WRONG, value), ft.InProcess(linear_clients(SIZES))
    with pytest.raises(ValueError, match="client 'client 1' sent NaN, Inf or a negative weight"):
        ft.Run(attacked, data).step()
    away = ft.Faults(before=lambda keys, ids: torch.isin(ids, torch.tensor(WRONG)))
    median = robust.rule(robust.median())
    for defended, algorithm in ((attacked, AVERAGE), (attacked | median, AVERAGE | median)):
        dropping = ft.Run(defended, data, on_bad_message="drop")
        dropping.step()
        assert dropping.last is not None
        assert dropping.last.refused.tolist() == WRONG
        expected = ft.run(algorithm, data, rounds=1, faults=away)
        assert distance(dropping.server, expected.server) < ROUNDING


def test_a_run_under_attack_resumes() -> None:
    make = lambda: ft.Run(ALGORITHMS["scaffold"]() | LIES["noise"], ft.InProcess(linear_clients(SIZES)))
    whole, first, second = make(), make(), make()
    for each, rounds in ((whole, 3), (first, 1)):
        for _ in each.rounds(rounds):
            pass
    second.load_state_dict(first.state_dict())
    for _ in second.rounds(3):
        pass
    assert distance(second.server, whole.server) == 0


def test_what_makes_no_sense_is_refused() -> None:
    alone = ALGORITHMS["gtv"]() | COLLUSIONS["min_max"]
    with pytest.raises(ValueError, match=r"write algorithm \| attacks\.min_max\(…\) \| robust\.rule\(…\)"):
        ft.Run(alone, ft.InProcess(linear_clients(SIZES)))
    replaced = dataclasses.replace(AVERAGE | LIES["sign_flip"], exchange=ft.star())
    with pytest.raises(TypeError, match=r"algorithm \| attack \| robust\.rule"):
        run(replaced, rounds=1)


def test_empty_block_sends_nothing() -> None:
    krum, median = robust.rule(robust.krum(1)), robust.rule(robust.median(), ft.Network.ring(K))
    gtv = ALGORITHMS["gtv"]()
    attacked = AVERAGE | LIES["noise"], AVERAGE | COLLUSIONS["min_max"] | krum, gtv | LIES["noise"] | median
    for algorithm in (*attacked, gtv | median):
        started = ft.Run(algorithm, ft.InProcess(linear_clients(SIZES)))
        outbox, clients = algorithm.outbox(started.server), started.clients
        turn = ft.Turn(ft.random.key(0), 0)
        nobody, block = clients.reply(clients.empty_block(), outbox, turn), next(iter(clients.blocks(None)))
        somebody = clients.reply(block, outbox, turn)
        exchange = algorithm.exchange
        partials = [exchange.gather(nobody.message, slice(0, 0)), exchange.gather(somebody.message, block[0])]
        alone = exchange.finish(exchange.merge(partials[1:]))
        assert distance(exchange.finish(exchange.merge(partials)), alone) == 0


# -- rows ------------------------------------------------------------------------------------------------------------


def images(seed: int = 0) -> ft.data.FederatedData:
    generator = torch.Generator().manual_seed(seed)
    rows = [(torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)) for n in (8, 5, 12)]
    return ft.data.from_tensors(rows)


def stamp(x: Tensor) -> Tensor:
    return torch.cat([x[:, :3], torch.full_like(x[:, :1], 9.0)], 1)


def test_labels_are_flipped_where_they_are_to_be() -> None:
    data = images()
    poisoned = data | attacks.flipped_labels([0, 2], classes=3)
    for k, ((x, y), (wrong_x, wrong_y)) in enumerate(zip(data, poisoned)):
        assert torch.equal(x, wrong_x)
        assert torch.equal(wrong_y, y if k == 1 else 2 - y)
    half = data | attacks.shifted_labels([2], by=100, fraction=0.5)
    assert int((half[2][1] >= 100).sum()) == 6
    assert torch.equal(half[2][1] % 100, data[2][1])
    other = data | attacks.shifted_labels([2], by=100, fraction=0.5, seed=1)
    assert not torch.equal(half[2][1], other[2][1])
    assert half.names == data.names


def test_a_backdoor_has_trigger_and_target_in_the_same_rows() -> None:
    x, y = (images() | attacks.backdoor([2], stamp, target=1, fraction=0.25))[2]
    stamped = x[:, 3] == 9.0
    assert int(stamped.sum()) == 3
    assert bool((y[stamped] == 1).all())
    assert torch.equal(x[~stamped], images()[2][0][~stamped])


def test_clean_labels_stay() -> None:
    x, y = (images() | attacks.clean_label([2], stamp, target=1))[2]
    assert torch.equal(y, images()[2][1])
    assert torch.equal(x[:, 3] == 9.0, y == 1)


def test_a_node_without_loss_copies_its_cluster() -> None:
    """10.2: it gets the mean of its neighbours' models, here that of a cluster which agrees."""
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0)).double()
    target = x @ torch.tensor([1.0, -2.0, 0.5]).double()
    data = ft.data.from_tensors([(x, target)] * 4 + [(x, -target)]) | zero_loss([4])
    assert data.counts.tolist() == [30] * 4 + [0]
    network = ft.Network.from_edges([(0, 1), (1, 2), (2, 3), (0, 3), (3, 4), (2, 4)])
    algorithm = ft.gtv(unlabelled(ft.least_squares(linear(bias=False))), network, 1.0)
    found = ft.run(algorithm, ft.InProcess(data), rounds=150).tensors()["weight"]
    assert distance(found[4], found[0]) < 1e-6  # what is left of the start after 150 rounds


def test_poisons_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"clients between 0 and 2, but got \[3\]"):
        images() | zero_loss([3])
    with pytest.raises(ValueError, match="fraction between 0 and 1, but got 2"):
        attacks.backdoor([0], stamp, 1, fraction=2)
    with pytest.raises(ValueError, match="at least two classes, but got 1"):
        attacks.flipped_labels([0], 1)
