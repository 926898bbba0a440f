"""Which wrappers join which algorithms and each other, in which order, and what they leave in the settings."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, distance, linear, linear_clients, sgd

import fedtorch as ft
from fedtorch.models.linear import LinearHead
from fedtorch.trust import attacks, privacy, robust
from fedtorch.trust.privacy import AdaptiveClip

SIZES = [5, 2, 9, 4, 7, 6]
K = len(SIZES)
NETWORK = ft.Network.from_matrix(1 - torch.eye(K))
DATA = linear_clients(SIZES)
AVERAGE = ft.fedavg(ft.least_squares(linear()))
NOISE = {"clip": 1.0, "noise": 1.0, "delta": 1e-3, "entropy": privacy.from_seed(0)}


def ones(data: ft.data.ClientData) -> torch.Tensor:
    return torch.ones_like(data.count, dtype=torch.float64)


ALGORITHMS: dict[str, Callable[[], ft.Algorithm]] = {
    "fedavg": lambda: ft.fedavg(sgd(0.1)),
    "scaffold": lambda: ft.scaffold(sgd(0.1), weight=ones),
    "gtv": lambda: ft.gtv(sgd(0.1), NETWORK, 0.1),
    "matrix_normal": lambda: ft.matrix_normal(ft.least_squares(LinearHead(3, dtype=torch.float64))),
}
WRAPPERS: dict[str, Callable[[str], ft.Wrapper | attacks.Attack]] = {
    "lie": lambda name: attacks.sign_flip([1]),
    "collusion": lambda name: attacks.min_max([1]),
    "client": lambda name: privacy.client_level(**NOISE, clip_told=1.0 if name == "scaffold" else None),
    "local": lambda name: privacy.local_level(**NOISE),
    "node": lambda name: privacy.node_level(**NOISE),
    "rule": lambda name: robust.rule(robust.median(), NETWORK if name == "gtv" else None),
    "edges": lambda name: ft.unreliable_edges(NETWORK, loss=0.2),
}
ACCEPTED = {  # all others are refused
    "fedavg": "lie, collusion, client, local, rule, lie collusion, lie client, lie local, lie rule, collusion local, "
    "collusion rule, local rule",
    "scaffold": "lie, client, rule, lie rule, collusion rule",
    "gtv": "lie, node, rule, edges, lie node, lie rule, lie edges, collusion rule, collusion edges, node rule, "
    "node edges",
    "matrix_normal": "lie, collusion, local, lie collusion, lie local, collusion local",
}


def joined(name: str, wrappers: tuple[str, ...]) -> ft.Algorithm:
    algorithm = ALGORITHMS[name]()
    for each in wrappers:
        algorithm = algorithm | WRAPPERS[each](name)
    return algorithm


def begun(algorithm: ft.Algorithm) -> ft.Run:
    start = torch.full((3,), 0.5).double() if algorithm.start is None else algorithm.start
    run = ft.Run(algorithm, ft.InProcess(DATA), start)
    run.step()
    return run


@pytest.mark.parametrize("name", ALGORITHMS)
def test_pairs_are_accepted_or_refused(name: str) -> None:
    accepted = set()
    for wrappers in [(each,) for each in WRAPPERS] + list(itertools.combinations(WRAPPERS, 2)):
        refused = ""
        try:
            begun(joined(name, wrappers))
        except (ValueError, TypeError) as error:
            refused = str(error)
        assert not refused or refused.startswith("Expected "), wrappers
        accepted |= set() if refused else {" ".join(wrappers)}
    assert accepted == set(ACCEPTED[name].split(", "))


def test_each_wrong_order_prints_the_right_line() -> None:
    for one, other in itertools.combinations(WRAPPERS, 2):
        inner, outer = WRAPPERS[one]("gtv"), WRAPPERS[other]("gtv")
        if inner.stage == outer.stage:
            continue
        marked = dataclasses.replace(AVERAGE, wrapped={"robust.rule": int(outer.stage)})
        with pytest.raises(ValueError, match=r"write algorithm \| [\w.]+\(…\) \| robust\.rule\(…\)$"):
            marked | dataclasses.replace(
                ft.Wrapper(inner.stage, f"mine.{one}", lambda algorithm: algorithm), settings={"size": 1}
            )
    with pytest.raises(ValueError, match=r"attacks\.sign_flip after robust\.rule; write algorithm \| attacks"):
        AVERAGE | WRAPPERS["rule"]("fedavg") | WRAPPERS["lie"]("fedavg")
    with pytest.raises(ValueError, match=r"each wrapper once, but got robust\.rule twice; write algorithm \| robust"):
        AVERAGE | WRAPPERS["rule"]("fedavg") | robust.rule(robust.krum(1))


def test_wrapper_order_is_independent_of_settings() -> None:
    """Settings are words for people: replaced ones switch no check off."""
    plain = dataclasses.replace(AVERAGE | WRAPPERS["rule"]("fedavg"), settings={})
    with pytest.raises(ValueError, match=r"attacks\.sign_flip after robust\.rule"):
        plain | WRAPPERS["lie"]("fedavg")


def test_what_is_no_wrapper_is_refused() -> None:
    for wrong in (attacks.sign_flip, robust.median(), lambda algorithm: algorithm, 3, privacy.client_level):
        with pytest.raises(TypeError, match=r"Expected a wrapper such as attacks\.sign_flip"):
            AVERAGE | wrong


def test_noise_of_a_server_is_not_lost_to_a_rule() -> None:
    """A rule sees single messages, so that it would put means without noise in the place of noised sums."""
    private = AVERAGE | WRAPPERS["client"]("fedavg")
    with pytest.raises(ValueError, match="or noise that the server adds to sums"):
        private | robust.rule(robust.trimmed_mean(0.0))


def test_all_algorithms_of_a_wrapper_spend_from_one_ledger() -> None:
    private = WRAPPERS["client"]("fedavg")
    one, two = (ft.run(ft.fedavg(sgd(rate)) | private, ft.InProcess(DATA), rounds=1) for rate in (0.1, 0.2))
    expected = [privacy.epsilon(noise=1.0, rounds=rounds, delta=1e-3) for rounds in (1, 2)]
    assert [float(run.history["epsilon"].iloc[-1]) for run in (one, two)] == pytest.approx(expected)


def test_attackers_are_marked_under_an_adaptive_clip() -> None:
    private = privacy.client_level(AdaptiveClip(start=1e6), 1e-12, delta=1e-3, entropy=privacy.from_seed(0))
    data = linear_clients([4] * K)  # client level takes all weights as one
    wrong = attacks.denial_of_service([2], 3.0)
    runs = [
        ft.run(algorithm, ft.InProcess(data), rounds=1) for algorithm in (AVERAGE | wrong, AVERAGE | wrong | private)
    ]
    assert distance(runs[0].tensors(), runs[1].tensors()) < 1e-5
    assert float(runs[1].history["clip"].iloc[-1]) < 1e6


def test_wrappers_are_in_the_settings_and_the_fingerprint() -> None:
    one, two = (AVERAGE | robust.rule(rule) for rule in (robust.median(), robust.trimmed_mean(0.1)))
    assert one.settings["wrap"] == {"robust.rule": 4}
    assert one.settings["robust.rule.average"] == "median"
    fingerprints = [ft.Run(algorithm, ft.InProcess(DATA)).fingerprint() for algorithm in (AVERAGE, one, two)]
    assert fingerprints[0] != fingerprints[1] != fingerprints[2]


def test_three_in_a_line_are_the_parts_in_any_chunks() -> None:
    algorithm = ALGORITHMS["gtv"]() | attacks.sign_flip([1]) | attacks.noise([2], 0.1) | ft.unreliable_edges(NETWORK)
    whole, parts = (ft.run(algorithm, ft.InProcess(DATA, chunk), rounds=3) for chunk in (None, 1))
    assert distance(whole.tensors(), parts.tensors()) < ROUNDING
    assert list(algorithm.settings["wrap"]) == ["attacks.sign_flip", "attacks.noise", "unreliable_edges"]
