"""What sites tell of a fit, as their policy says: the results of one process, and nothing without leave."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas
import pytest
import torch
from support.loopback import Clock, Loopback

import fedtorch as ft
from fedtorch.inference.site_estimates import site_estimates
from fedtorch.models import hierarchical
from fedtorch.sites import Policy, Remote, SiteConfiguration, agree
from fedtorch.sites.rounds import frames, sites as meeting
from fedtorch.sites.rounds.policy import Watch

NAMES = ["north", "south"]
FORMULA = "died ~ age + sex + smoker + (1 | ward)"
EVERYTHING = ("effects", "densities", "margins")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def frame() -> pandas.DataFrame:
    draws = np.random.default_rng(0)
    made = pandas.DataFrame({"ward": np.repeat([f"ward {k}" for k in range(4)], 30), "age": draws.normal(60, 10, 120)})
    made["sex"], made["smoker"] = draws.choice(["f", "m"], 120), draws.integers(0, 2, 120)
    made["died"] = draws.uniform(size=120) < 1 / (1 + np.exp(2 - 0.04 * made["age"] + 0.3 * (made["sex"] == "m")))
    return made


FRAME = frame()
FRAMES = dict(zip(NAMES, (FRAME[:60], FRAME[60:])))


def regression(design: ft.data.Design) -> ft.Algorithm:
    return ft.ep(hierarchical.regression(design, "logistic"))


class Both(NamedTuple):
    """A run of two sites with two wards each, and that of one process."""

    host: Loopback
    there: ft.Run
    here: ft.Run

    def under(self, **policy: Any) -> ft.Run:
        """The run over sites, whose policies are others now."""
        for site in self.host.sites.values():
            site._watch = Watch(Policy(**policy), None)
            for session in (site._session, site._known):
                assert session is not None
                session.watch = site._watch
        return self.there


@pytest.fixture(scope="module")
def both() -> Both:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "time", Clock)
        algorithms = {"it": regression}
        host = Loopback(
            {name: SiteConfiguration.of_frame(each, "ward", algorithms) for name, each in FRAMES.items()}, None
        )
        design = agree(host, NAMES, FORMULA, client="ward")  # type: ignore[arg-type]
        there = ft.run(regression(design), Remote(host, NAMES, "it"), rounds=4, progress=False)  # type: ignore[arg-type]
    data = ft.data.from_frame(FRAME, client="ward", design=design)
    return Both(host, there, ft.run(regression(design), ft.InProcess(data), rounds=4, progress=False))


WHAT = {
    "ranef": lambda run: ft.inference.ranef(run, tolerance=torch.inf),
    "totals": lambda run: ft.inference.ranef(run, total=True, tolerance=torch.inf),
    "predict": lambda run: ft.inference.predict(run, FRAME.iloc[::20], tolerance=torch.inf).drop(columns="site"),
    "loo": lambda run: ft.inference.loo(run, draws=200, tolerance=torch.inf),
    "waic": lambda run: ft.inference.waic(run, draws=200, tolerance=torch.inf),
    "loo of sites": lambda run: ft.inference.loo(run, out="site", tolerance=torch.inf),
    "margins": lambda run: ft.inference.marginal_effects(
        run, None if hasattr(run.population, "counts") else FRAME, tolerance=torch.inf
    ),
}


FAST = {"ranef", "loo", "margins"}


def numbers(result: Any) -> np.ndarray:
    parts = result.to_numpy() if hasattr(result, "to_numpy") else [each for each in result if not isinstance(each, str)]
    return np.asarray(parts, dtype=np.float64)


@pytest.mark.parametrize("what", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in WHAT])
def test_results_are_those_of_one_process(what: str, both: Both) -> None:
    there, here = (WHAT[what](run) for run in (both.under(after_fit=EVERYTHING), both.here))
    np.testing.assert_allclose(numbers(there), numbers(here), rtol=1e-6, atol=1e-8)
    if isinstance(there, pandas.DataFrame):
        assert list(there.index) == list(here.index)


@pytest.mark.parametrize(("what", "word"), [("ranef", "effects"), ("loo", "densities"), ("margins", "margins")])
def test_a_site_without_leave_sends_nothing(what: str, word: str, both: Both) -> None:
    """Whatever else it tells; and the server hears which line of the policy would allow it."""
    run, sent = both.under(after_fit=tuple(each for each in EVERYTHING if each != word)), list[bytes]()
    both.host.after = lambda name, reply: sent.append(reply) or reply
    with pytest.raises(RuntimeError, match=rf"'north'.*Policy\(after_fit=\(.*'{word}'\)\)"):
        WHAT[what](run)
    assert [frames.read(reply, "north").kind for reply in sent] == ["refusal", "refusal"]
    assert all(frames.read(reply, "north").tree(None) is None for reply in sent)
    assert list(run.summary(tolerance=torch.inf).index)[:2] == ["Intercept", "age"], "what all share is the server's"


def test_clients_are_not_told_from_each_other_where_the_policy_joins_them(both: Both) -> None:
    run = both.under(after_fit=EVERYTHING, smallest_cohort=2)
    assert ft.inference.loo(run, draws=20, tolerance=torch.inf).left_out == len(FRAME)
    with pytest.raises(RuntimeError, match=r"sums of at least 2 clients, and does not tell the posterior of each"):
        ft.inference.ranef(run, tolerance=torch.inf)


def test_nothing_is_told_of_few_rows(both: Both) -> None:
    run = both.under(after_fit=EVERYTHING, minimum=31)  # a ward has 30 rows, a site 60
    assert ft.inference.loo(run, draws=20, tolerance=torch.inf).left_out == len(FRAME)
    with pytest.raises(RuntimeError, match="of fewer than 31 rows"):
        ft.inference.ranef(run, tolerance=torch.inf)


def test_questions_count_as_rounds(both: Both) -> None:
    run = both.under(after_fit=EVERYTHING, rounds=1)
    ft.inference.loo(run, draws=20, tolerance=torch.inf)
    with pytest.raises(RuntimeError, match="has answered 1 round, and does not answer more"):
        ft.inference.loo(run, draws=20, tolerance=torch.inf)


@pytest.mark.slow
def test_sites_plots_are_those_of_one_process(both: Both) -> None:
    there, here = (site_estimates(run, 0.9, torch.inf) for run in (both.under(after_fit=("effects",)), both.here))
    assert there.sites == here.sites
    for mine, other in zip(there[2:-1], here[2:-1]):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8, equal_nan=True)


def test_a_server_that_asks_for_anything_else_is_refused(both: Both) -> None:
    host, run = both.host, both.under(after_fit=EVERYTHING)
    session = run.clients.session
    outbox, site = run.outbox, host.sites["north"]

    def answer(ids: torch.Tensor, name: str, **about: Any) -> frames.Frame:
        more = {"phi": torch.zeros(1, 2).double()}
        given = {"question": name, "about": {}, "shapes": {"phi": [1, 2]}, **about}
        step = session.request(
            "ask", "north", session.plan.sites.next_sequence(), session.inboxes(outbox, ids), more, **given
        )
        return frames.read(site.answer(step.message), "north")

    both = torch.arange(2)
    for said, reason in (
        (answer(both, "rows"), "answers the questions"),
        (answer(both[:1], "coefficients"), "expected all clients of the site"),
        (answer(both, "coefficients", shapes={"phi": [2**24, 2]}), "expected shapes of tensors"),
        (answer(both, "densities", about={"method": "__class__"}), "the site failed with KeyError"),
    ):
        assert said.kind == "refusal"
        assert reason in said.text("reason")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"after_fit": "effects"}, "Expected after_fit= as a tuple"),
        ({"after_fit": ("rows",)}, "Expected after_fit= as a tuple"),
        ({"after_fit": ("effects",), "epsilon": 1.0}, "nothing that is told after a fit has noise"),
    ],
)
def test_policies_out_of_range(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**given).check()
