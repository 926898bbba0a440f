"""What sites tell of a fit, as their policy says: the results of one process, and nothing without leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas
import pytest
import torch
from support.loopback import Clock, Loopback

import fedtorch as ft
from fedtorch.models import hierarchical
from fedtorch.sites import Policy, Remote, SiteConfiguration, agree
from fedtorch.sites.rounds import frames, sites as meeting

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


def fitted(rounds: int = 1, /, **policy: Any) -> tuple[Loopback, ft.Run]:
    """A run of two sites with two wards each."""
    brought = {
        name: SiteConfiguration.of_frame(each, "ward", {"it": regression}, policy=Policy(**policy))
        for name, each in FRAMES.items()
    }
    host = Loopback(brought, None)
    design = agree(host, NAMES, FORMULA, client="ward")  # type: ignore[arg-type]
    population = Remote(host, NAMES, "it", quorum=1.0)  # type: ignore[arg-type]
    return host, ft.run(regression(design), population, rounds=rounds, progress=False)


@pytest.fixture(scope="module")
def pair() -> tuple[ft.Run, ft.Run]:
    """The run over sites, and that of one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "time", Clock)
        _, there = fitted(6, after_fit=EVERYTHING)
    data = ft.data.from_frame(FRAME, client="ward", design=there.algorithm.settings["model"].design)
    return there, ft.run(there.algorithm, ft.InProcess(data), rounds=6, progress=False)


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


def numbers(result: Any) -> np.ndarray:
    parts = result.to_numpy() if hasattr(result, "to_numpy") else [each for each in result if not isinstance(each, str)]
    return np.asarray(parts, dtype=np.float64)


@pytest.mark.parametrize("what", WHAT)
def test_results_are_those_of_one_process(what: str, pair: tuple[ft.Run, ft.Run]) -> None:
    there, here = (WHAT[what](run) for run in pair)
    np.testing.assert_allclose(numbers(there), numbers(here), rtol=1e-6, atol=1e-8)
    if isinstance(there, pandas.DataFrame):
        assert list(there.index) == list(here.index)


@pytest.mark.parametrize(("what", "word"), [("ranef", "effects"), ("loo", "densities"), ("margins", "margins")])
def test_a_site_without_leave_sends_nothing(what: str, word: str) -> None:
    """Whatever else it tells; and the server hears which line of the policy would allow it."""
    host, run = fitted(after_fit=tuple(each for each in EVERYTHING if each != word))
    sent = list[bytes]()
    host.after = lambda name, reply: sent.append(reply) or reply
    with pytest.raises(RuntimeError, match=rf"'north'.*Policy\(after_fit=\(.*'{word}'\)\)"):
        WHAT[what](run)
    assert [frames.read(reply, "north").kind for reply in sent] == ["refusal", "refusal"]
    assert all(frames.read(reply, "north").tree(None) is None for reply in sent)
    assert list(run.summary(tolerance=torch.inf).index)[:2] == ["Intercept", "age"], "what all share is the server's"


def test_clients_are_not_told_from_each_other_where_the_policy_joins_them() -> None:
    _, run = fitted(after_fit=EVERYTHING, smallest_cohort=2)
    assert ft.inference.loo(run, draws=20, tolerance=torch.inf).left_out == len(FRAME)
    with pytest.raises(RuntimeError, match=r"sums of at least 2 clients, and does not tell the posterior of each"):
        ft.inference.ranef(run, tolerance=torch.inf)


def test_nothing_is_told_of_few_rows() -> None:
    host, run = fitted(after_fit=EVERYTHING)
    for site in host.sites.values():
        site._watch.policy = site._watch.policy._replace(minimum=31)  # a ward has 30 rows, a site 60
    assert ft.inference.loo(run, draws=20, tolerance=torch.inf).left_out == len(FRAME)
    with pytest.raises(RuntimeError, match="of fewer than 31 rows"):
        ft.inference.ranef(run, tolerance=torch.inf)


def test_questions_count_as_rounds() -> None:
    _, run = fitted(after_fit=EVERYTHING, rounds=2)
    ft.inference.loo(run, draws=20, tolerance=torch.inf)
    with pytest.raises(RuntimeError, match="has answered 2 rounds, and does not answer more"):
        ft.inference.loo(run, draws=20, tolerance=torch.inf)


def test_a_server_that_asks_for_anything_else_is_refused() -> None:
    host, run = fitted(after_fit=EVERYTHING)
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
