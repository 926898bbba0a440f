"""The trial of accountants: the sensitivity of a tree, published ε, and that it runs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from experiments.trials import accountants


def brute(rounds: int, most: int, separation: int) -> int:
    """By all turns of a device: the squares of its turns in every complete node of the forest, added up."""
    nodes, start = [], 0
    for level in reversed(range(rounds.bit_length())):
        if rounds >> level & 1:
            for size in (2**power for power in range(level + 1)):
                nodes += [range(at, at + size) for at in range(start, start + 2**level, size)]
            start += 2**level
    best = 0
    for count in range(1, most + 1):
        for turns in itertools.combinations(range(rounds), count):
            if all(b - a > separation for a, b in itertools.pairwise(turns)):
                best = max(best, sum(sum(turn in node for turn in turns) ** 2 for node in nodes))
    return best


@pytest.mark.parametrize(("rounds", "most", "separation"), [(8, 3, 1), (11, 4, 0), (13, 3, 3), (6, 2, 4), (7, 1, 2)])
def test_the_sensitivity_of_a_tree(rounds: int, most: int, separation: int) -> None:
    assert accountants.squared_sensitivity(rounds, most, separation) == brute(rounds, most, separation)


def test_published_figures_come_out_by_their_conversion() -> None:
    released = accountants.TUTORIAL["tutorial, noise 1.12, 60 epochs"]
    assert accountants.former(released) == pytest.approx(released.published, abs=5e-3)
    gboard = accountants.Released(7.0 / 79**0.5, 1.0, 1, 1e-10, 8.90)
    assert accountants.renyi(gboard) == pytest.approx(gboard.published, abs=5e-3)


def test_rdp_epsilon_matches_tutorial() -> None:
    released = accountants.TUTORIAL["tutorial, noise 0.6, 30 epochs"]
    fine = [2.9 + step / 200 for step in range(20)]
    assert round(accountants.former(released), 3) == 9.747
    assert round(accountants.former(released, fine), 3) == 9.745
    assert round(accountants.former(released, fine), 2) == released.published


def test_figures_that_stand_alone_come_out() -> None:
    """One of each account; the results page has all of them."""
    accounts = {accountants.FORMER: accountants.former, accountants.LATER: accountants.renyi}
    for name, account in accounts.items():
        released = list(accountants.ALONE[name].values())[-1]
        assert account(released) == pytest.approx(released.published, abs=5e-3)
    released = accountants.ALONE[accountants.TIGHT]["Gboard es-ES, MF-DP-FTRL"]
    assert 1 / (2 * released.noise**2) == pytest.approx(0.1506840301548885)
    assert accountants.ours(released) == pytest.approx(released.published, abs=1e-6)


@pytest.mark.slow
def test_the_trial_runs(tmp_path: Path) -> None:
    accountants.main(["--smoke", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    figures = {(row["setting"], row["metric"]): row["ours"] for row in rows}
    for setting in accountants.TUTORIAL:
        loose, tight = (figures[setting, f"ε, fedtorch, {name}"] for name in ("Rényi", "privacy-loss distributions"))
        assert 0 < tight < loose
        assert loose == pytest.approx(figures[setting, "ε, dp-accounting, Rényi"], rel=2e-3)
