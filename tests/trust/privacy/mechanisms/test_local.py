"""What clients that trust nobody send, against plain sums, and the size of the noise of each and of a quorum."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.oracles.closed_forms import distance, linear, linear_clients, sgd

import fedtorch as ft
from fedtorch.federation.exchanges.carry import Carry
from fedtorch.sites import plain, sealed
from fedtorch.sites.secure.masked import Masked, masked as secure_masked
from fedtorch.trust import privacy, secure

N, D, DELTA = 5, 400, 1e-3
DATA = linear_clients([8, 3, 12, 5, 9], features=D)


def local(rate: float = 0.0) -> ft.Algorithm:
    """Steps of size zero leave messages of zeros, so that all that is sent is noise."""
    return ft.fedavg(sgd(rate, linear(D)))


def private(
    noise: float = 2.0, seed: int | None = 0, algorithm: ft.Algorithm | None = None, **settings
) -> ft.Algorithm:
    entropy = None if seed is None else privacy.from_seed(seed)
    settings = {"clip": 0.5, "delta": DELTA, "entropy": entropy, **settings}
    return (local() if algorithm is None else algorithm) | privacy.local_level(noise=noise, **settings)


def masked(minimum: int = 3, bits: int = 30) -> Masked:
    return secure_masked(secure.Grid(bits, 2.0**20), minimum, dropouts=0)


def released(algorithm: ft.Algorithm, carry: Carry = plain(), data: ft.data.FederatedData = DATA) -> torch.Tensor:  # noqa: B008
    """The mean of what clients send in a round, as numbers."""
    run = ft.run(algorithm, ft.InProcess(data, carry=carry), rounds=1)
    return torch.cat([(leaf - local().start[name]).flatten() for name, leaf in run.server.items()])


@pytest.mark.parametrize("quorum", [1, 3])
def test_noise_has_the_size_that_is_accounted(quorum: int) -> None:
    """Of each client's own, or of a quorum's together: what N of them add up has √(N / quorum) times that."""
    sums = N * released(private(quorum=quorum), masked(quorum) if quorum > 1 else plain())
    unit = sums / (2.0 * 0.5 * math.sqrt(N / quorum))
    assert float(unit.std()) == pytest.approx(1.0, abs=4 / math.sqrt(2 * len(unit)))
    assert float(unit.mean()) == pytest.approx(0.0, abs=4 / math.sqrt(len(unit)))


def test_without_noise_it_is_the_plain_mean_of_clipped_messages() -> None:
    change = released(private(1e-9, algorithm=local(1e-4), clip=0.01))
    each = []
    for k in range(N):
        one = ft.run(local(1e-4), ft.InProcess(DATA.select([k])), rounds=1).server
        flat = torch.cat([(leaf - local().start[name]).flatten() for name, leaf in one.items()])
        each.append(flat * min(1.0, 0.01 / float(flat.norm())))
    assert sum(float(flat.norm()) >= 0.0099 for flat in each) > 1
    assert float((change - torch.stack(each).mean(0)).abs().max()) < 1e-7  # clips are cut by 2⁻²⁰ of themselves


def test_noise_is_fresh_for_every_client_and_every_run() -> None:
    one, other = (private(seed=None), private(seed=None))
    assert float((released(one) - released(other)).abs().max()) > 0.1
    runs = [ft.run(private(), ft.InProcess(DATA, chunk), rounds=1) for chunk in (1, None)]
    assert distance(runs[0].server, runs[1].server) < 1e-12  # of a seed it is each client's own, whatever its block
    first, second = (released(private(), data=DATA.select([k])) for k in (0, 1))
    assert float((first - second).abs().max()) > 0.1


def test_all_rounds_count_for_all_clients(tmp_path: Path) -> None:
    run = ft.run(private(3.0, None, ledger=tmp_path / "ledger", budget=3.0), ft.InProcess(DATA), rounds=50, cohort=2)
    expected = [privacy.epsilon(noise=3.0, rounds=t, delta=DELTA) for t in range(1, run.number + 1)]
    assert run.history["epsilon"].tolist() == pytest.approx(expected)
    assert run.number == privacy.rounds_for(epsilon=3.0, noise=3.0, delta=DELTA)
    assert "loss" not in run.history.columns or run.history["loss"].isna().all()
    budget = run.algorithm.budget
    assert (budget.claim.unit, budget.quorum, budget.lasting) == ("client", 1, True)
    assert "the server included" in budget.claim.adversary
    several = private(quorum=3).budget
    assert "sums of at least 3 clients" in several.claim.adversary
    assert (several.quorum, several.lasting) == (3, False)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"algorithm": ft.scaffold(sgd(0.1))}, "with persistent contributions"),
        ({"algorithm": private()}, "local_level twice"),
        ({"algorithm": local() | privacy.client_level(1.0, 1.0, delta=DELTA)}, "choose one level of privacy"),
        ({"quorum": 0}, "a quorum of at least 1, but got 0"),
        ({"clip": 0.0}, "clip"),
        ({"noise": 0.0}, "noise"),
    ],
)
def test_what_cannot_be_private_here(settings: dict, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        private(**settings)
    with pytest.raises(ValueError, match="below one over the 5 clients"):
        ft.Run(private(delta=0.3), ft.InProcess(DATA))


@pytest.mark.parametrize(
    ("quorum", "carry", "expected"),
    [
        (3, plain(), r"at least 3 clients, which privacy.local_level\(quorum=3\) relies on, but got .*plain\(\)"),
        (3, sealed(ft.Network.ring(N)), "sums under masks of at least 3 clients"),
        (4, masked(), "sums under masks of at least 4 clients"),
        (3, masked(bits=1), "shares of noise of at least 2"),
        (1, masked(bits=1), "shares of noise of at least 2"),
    ],
)
def test_noise_that_rests_on_masks_runs_nowhere_without_them(quorum: int, carry: Carry, expected: str) -> None:
    """Every population is named that does not provide them."""
    algorithm = private(quorum=quorum, noise=1.0)
    growing = ft.Growing(DATA, lambda rounds: torch.full((N,), 3), carry=carry)
    inside = ft.InProcess(DATA, carry=carry)
    for population in (inside, ft.Distributed(DATA, carry=carry), growing):
        with pytest.raises(ValueError, match=expected) as error:
            ft.Run(algorithm, population)
        assert "shares" in expected or f"{type(population).__name__}(…, carry=" in str(error.value)
