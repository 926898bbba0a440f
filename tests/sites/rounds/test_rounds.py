"""`Policy(rounds=)` counts over all runs, and over all folders of states of one identity."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.certified import certified
from support.loopback import Loopback
from support.oracles.closed_forms import linear_clients, sgd
from support.sites import offers

import fedtorch as ft
from fedtorch.sites import Policy, Remote
from fedtorch.sites.identity import identity
from fedtorch.sites.identity.identity import Identity
from fedtorch.sites.rounds.policy import Refusal, Watch

DATA = linear_clients([5, 3])


def averaging() -> ft.Algorithm:
    return ft.fedavg(sgd(0.1))


@pytest.fixture
def kept(tmp_path: Path) -> dict[str, Identity]:
    """An identity that was read from a folder."""
    certified().identities["a"].save(tmp_path / "identity")
    return {"a": identity.read(tmp_path / "identity")}


def test_another_folder_of_states_does_not_begin_at_nought(tmp_path: Path, kept: dict[str, Identity]) -> None:
    brought = offers(DATA, averaging, sites=1, policy=Policy(rounds=3, minimum=1))
    ft.run(averaging(), Remote(Loopback(brought, tmp_path / "one", kept), ["a"], "it"), rounds=2)
    again = ft.Run(averaging(), Remote(Loopback(brought, tmp_path / "two", kept), ["a"], "it"))
    again.step()
    with pytest.raises(RuntimeError, match="the site has answered 3 rounds, and does not answer more"):
        again.step()
    for folder in (tmp_path / "three", None):
        late = ft.Run(averaging(), Remote(Loopback(brought, folder, kept), ["a"], "it"))
        with pytest.raises(RuntimeError, match="the site has answered 3 rounds"):
            late.step()


def count(watch: Watch, rounds: int) -> None:
    for _ in range(rounds):
        watch.count()


def test_the_larger_count_holds_where_one_was_lost(tmp_path: Path) -> None:
    states, beside = tmp_path / "states", tmp_path / "identity"
    count(Watch(Policy(rounds=9), states, None), 2)  # as it was counted before there was an identity
    count(Watch(Policy(rounds=9), states, beside), 1)
    (states / "rounds.json").unlink()
    with pytest.raises(Refusal, match="answered 3 rounds"):
        count(Watch(Policy(rounds=3), states, beside), 1)
    count(Watch(Policy(rounds=4), states, beside), 1)
    (beside / "rounds.json").unlink()
    with pytest.raises(Refusal, match="answered 4 rounds"):
        count(Watch(Policy(rounds=4), states, beside), 1)


def test_two_processes_of_one_site_count_together(tmp_path: Path) -> None:
    one, two = (Watch(Policy(rounds=3), tmp_path / name, tmp_path / "identity") for name in ("one", "two"))
    count(one, 1), count(two, 1), count(one, 1)
    for each in (one, two):
        with pytest.raises(Refusal, match="answered 3 rounds"):
            count(each, 1)


def test_scores_count_as_rounds() -> None:
    """A server that has many models scored learns of the validation rows by each."""
    metrics = {"mse": lambda prediction, target: (prediction[..., 0] - target) ** 2}
    brought = offers(DATA, averaging, sites=1, policy=Policy(rounds=2, minimum=1), validation=DATA, metrics=metrics)
    run = ft.run(averaging(), Remote(Loopback(brought, None), ["a"], "it", rows=DATA.rows), rounds=1)
    run.evaluate(run.population.validation, metrics)
    with pytest.raises(RuntimeError, match="the site has answered 2 rounds, and does not answer more"):
        run.evaluate(run.population.validation, metrics)
    with pytest.raises(RuntimeError, match="the site has answered 2 rounds"):
        run.step()
