"""What sites tell of a fit, as their policy says: the results of one process, and nothing without leave."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load
from support.loopback import Clock, Loopback
from support.sites import servers_keys

import fedtorch as ft
from fedtorch.federation.posterior import posterior_of
from fedtorch.inference import checks
from fedtorch.inference.ranef import site_estimates
from fedtorch.models import hierarchical
from fedtorch.sites import Policy, Remote, SiteConfiguration, agree
from fedtorch.sites.rounds import frames, sites as meeting
from fedtorch.sites.rounds.policy import Watch

NAMES = ["north", "south"]
FORMULA = "died ~ age + sex + smoker + (1 | ward)"
EVERYTHING = ("effects", "densities", "margins", "checks")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


@pytest.fixture(autouse=True)
def keys() -> Iterator[None]:
    """Numbers are compared with those of one process, by whose keys sites that count rows do not draw."""
    with servers_keys():
        yield


def frame() -> pandas.DataFrame:
    draws = np.random.default_rng(0)
    made = pandas.DataFrame({"ward": np.repeat([f"ward {k}" for k in range(4)], 30), "age": draws.normal(60, 10, 120)})
    made["sex"], made["smoker"] = draws.choice(["f", "m"], 120), draws.integers(0, 2, 120)
    made["died"] = draws.uniform(size=120) < 1 / (1 + np.exp(2 - 0.04 * made["age"] + 0.3 * (made["sex"] == "m")))
    return made


FRAME = frame()
FRAMES = dict(zip(NAMES, (FRAME[:60], FRAME[60:])))


def regression(design: ft.data.Design, family: str = "logistic") -> ft.Algorithm:
    return ft.ep(hierarchical.regression(design, family))


class Both(NamedTuple):
    """A run of sites, of two with two wards each or of one with four, and that of one process."""

    host: Loopback
    there: ft.Run
    here: ft.Run

    def under(self, **policy: Any) -> ft.Run:
        """The run over sites, whose policies are others now."""
        allow(self.host, **policy)
        return self.there


def allow(host: Loopback, **policy: Any) -> None:
    """The sites' policies are others now."""
    for site in host.sites.values():
        site._watch = Watch(Policy(**policy), None)
        for session in (site._session, site._known):
            assert session is not None
            session.watch = site._watch


def renamed(design: ft.data.Design, family: str = "logistic") -> ft.Algorithm:
    return dataclasses.replace(regression(design, family), settings={"algorithm": "mine"})


ALGORITHMS = {"it": regression, "mine": renamed}


def hosted(name: str = "it", brought: dict[str, pandas.DataFrame] = FRAMES) -> Loopback:
    algorithms = {name: ALGORITHMS[name]}
    return Loopback(
        {name: SiteConfiguration.of_frame(each, "ward", algorithms) for name, each in brought.items()}, None
    )


def over_sites(
    host: Loopback, design: ft.data.Design, family: str = "logistic", rounds: int = 4, name: str = "it"
) -> ft.Run:
    remote = Remote(host, list(host.sites), name, {"family": family})  # type: ignore[arg-type]
    return ft.run(ALGORITHMS[name](design, family), remote, rounds=rounds, progress=False)


def in_one_process(design: ft.data.Design, family: str = "logistic", rounds: int = 4) -> ft.Run:
    data = ft.data.from_frame(FRAME, client="ward", design=design)
    return ft.run(regression(design, family), ft.InProcess(data), rounds=rounds, progress=False)


def fitted(brought: dict[str, pandas.DataFrame]) -> Both:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "time", Clock)
        host = hosted(brought=brought)
        design = agree(host, list(brought), FORMULA, client="ward")  # type: ignore[arg-type]
        return Both(host, over_sites(host, design), in_one_process(design))


@pytest.fixture(scope="module")
def both() -> Both:
    return fitted(FRAMES)


@pytest.fixture(scope="module")
def alone() -> Both:
    """All wards at one site, which computes with the shapes of one process."""
    return fitted({"north": FRAME})


class Models(NamedTuple):
    """Runs of two formulas one after the other, over sites and in one process."""

    host: Loopback
    there: dict[str, ft.Run]
    here: dict[str, ft.Run]


@pytest.fixture(scope="module")
def models() -> Models:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "time", Clock)
        host, there, here = hosted(), {}, {}
        for formula in ("age ~ died + (1 | ward)", "age ~ died + sex + smoker + (1 | ward)"):
            design = agree(host, NAMES, formula, client="ward")  # type: ignore[arg-type]
            there[formula] = over_sites(host, design, "gaussian", rounds=2)
            here[formula] = in_one_process(design, "gaussian", rounds=2)
        return Models(host, there, here)


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
    "calibration": lambda run: flat(checks.calibration(run, bins=4, draws=50, tolerance=torch.inf)),
    "means": lambda run: flat(checks.site_means(run, draws=50, tolerance=torch.inf)[1:]),
}


FAST = {"ranef", "loo", "margins"}
ROUNDING: Any = {"rtol": 1e-10, "atol": 1e-11}  # of sums in another order; derivatives divide some by 1e-4


def flat(found: Any) -> np.ndarray:
    return np.concatenate([each.flatten() for each in found])


def numbers(result: Any) -> np.ndarray:
    if isinstance(result, np.ndarray):
        return result
    parts = result.to_numpy() if hasattr(result, "to_numpy") else [each for each in result if not isinstance(each, str)]
    return np.asarray(parts, dtype=np.float64)


@pytest.mark.parametrize("what", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in WHAT])
def test_results_are_those_of_one_process(what: str, both: Both) -> None:
    there, here = (WHAT[what](run) for run in (both.under(after_fit=EVERYTHING, minimum=1), both.here))
    np.testing.assert_allclose(numbers(there), numbers(here), **ROUNDING)
    if isinstance(there, pandas.DataFrame):
        assert list(there.index) == list(here.index)


@pytest.mark.parametrize("what", [n for n in WHAT if n != "calibration"])
def test_a_site_that_counts_rows_tells_what_one_process_finds_to_the_bit(what: str, alone: Both) -> None:
    """But for calibration, of which cells are joined."""
    there, here = (WHAT[what](run) for run in (alone.under(after_fit=EVERYTHING), alone.here))
    np.testing.assert_array_equal(numbers(there), numbers(here))


@pytest.mark.parametrize(("what", "word"), [("ranef", "effects"), ("loo", "densities"), ("calibration", "checks")])
def test_a_site_without_leave_sends_nothing(what: str, word: str, both: Both) -> None:
    """Whatever else it tells; and the server hears which line of the policy would allow it."""
    run, sent = both.under(after_fit=tuple(each for each in EVERYTHING if each != word)), list[bytes]()
    both.host.after = lambda name, reply: sent.append(reply) or reply
    with pytest.raises(RuntimeError, match=rf"'north'.*Policy\(after_fit=\(.*'{word}'\)\)"):
        WHAT[what](run)
    assert [frames.read(reply, "north").kind for reply in sent] == ["refusal", "refusal"]
    assert all(frames.read(reply, "north").tree(None) is None for reply in sent)
    assert list(run.summary(tolerance=torch.inf).index)[:2] == ["Intercept", "age"], "what all share is the server's"


def told(host: Loopback, ask: Any) -> list[Any]:
    """What each site tells in its last answer to a question."""
    said: dict[str, bytes] = {}
    host.after = lambda name, reply: said.update({name: reply}) or reply
    ask()
    host.after = lambda name, reply: reply
    return [load(said[name]) for name in NAMES]


def test_calibration_is_told_of_enough_rows_only(both: Both) -> None:
    run = both.under(after_fit=("checks",), minimum=10)
    calibration = lambda run: checks.calibration(run, bins=3, draws=50, tolerance=torch.inf)
    for name, each in zip(NAMES, told(both.host, lambda: calibration(run))):
        rows = each["told.rows"]
        assert float(rows.sum()) == 60
        assert rows[rows > 0].min() >= 10
        assert (rows > 0).sum() > 2
        assert float(each["told.yes"].sum()) == FRAMES[name]["died"].sum()
        assert bool((each["told.yes"][rows == 0] == 0).all() and (each["told.predicted"][rows == 0] == 0).all())
    there, here = calibration(run), calibration(both.here)
    for column in ("observed", "predicted"):
        sums = [float((each.rows * getattr(each, column)).sum()) for each in (there, here)]
        assert sums[0] == pytest.approx(sums[1], rel=1e-12)


def test_bins_are_of_enough_persons(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person may have five rows, so that fifteen are of three persons at least."""
    run = both.under(after_fit=("checks",), minimum=3)
    calibration = lambda: checks.calibration(run, bins=3, draws=50, tolerance=torch.inf)
    assert min(int(each["told.rows"][each["told.rows"] > 0].min()) for each in told(both.host, calibration)) < 15
    for site in both.host.sites.values():
        session = site._session
        assert session is not None
        frame = session.configuration.frame.assign(patient=[k // 5 for k in range(60)])
        persons = dataclasses.replace(session.configuration, frame=frame, policy=Policy(person="patient"))
        monkeypatch.setattr(session, "configuration", persons)
    for each in told(both.host, calibration):
        assert each["told.rows"][each["told.rows"] > 0].min() >= 15


@pytest.mark.slow
def test_histograms_are_told_of_enough_rows_only(models: Models) -> None:
    run, here = list(models.there.values())[-1], list(models.here.values())[-1]
    histograms = lambda run: checks.histograms(run, bins=12, draws=20, tolerance=torch.inf)
    allow(models.host, after_fit=("checks",), minimum=1)
    exact = flat(histograms(here)[2:4])
    np.testing.assert_array_equal(flat(histograms(run)[2:4]), exact)
    allow(models.host, after_fit=("checks",), minimum=10)
    for each in told(models.host, lambda: histograms(run)):
        rows = torch.as_tensor(each["told"])
        values, sizes = torch.unique_consecutive(rows[:, 0], return_counts=True)
        assert len(values) > 2
        for group in rows.split(sizes.tolist()):
            assert float(group[:, 0].sum()) >= 10 - 1e-12
            assert float(group[:, 1:].mean(1).sum()) >= 10 - 1e-12
        torch.testing.assert_close(rows.sum(0), torch.full_like(rows[0], 60.0))


def test_models_are_compared_row_by_row_where_the_rows_are(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the formulas that sites have agreed on, also the one before the last; and by no other."""
    compare = lambda runs: ft.inference.compare(runs, draws=20, tolerance=torch.inf)
    here = compare(models.here)
    allow(models.host, after_fit=("densities",))
    there = compare(models.there)
    assert list(there.index) == list(here.index)
    np.testing.assert_allclose(there.to_numpy(), here.to_numpy(), **ROUNDING)
    for answer in told(models.host, lambda: compare(models.there)):
        assert {name: tuple(leaf.shape) for name, leaf in answer.items() if leaf.ndim == 2} == {"told.squares": (3, 3)}
        assert max(leaf.numel() for leaf in answer.values()) == 9, "sums over rows, of no row"
    first, second = models.there
    swapped = {second: models.there[second], first: models.there[first]}
    with pytest.raises(RuntimeError, match="the site has begun another run"):
        compare(swapped)
    with pytest.raises(ValueError, match="Expected runs that are all on sites or all on rows in this process"):
        compare({"a": models.there[first], "b": models.here[second]})
    answers = models.host.sites["north"]._frame._answers
    assert answers is not None
    monkeypatch.setattr(answers._log, "_designs", set())
    monkeypatch.setattr(answers._log._facts, "alone", contextlib.nullcontext)  # which would read them again
    with pytest.raises(RuntimeError, match="'north': the site has not made rows by the design of another model"):
        compare(models.there)


def test_nothing_is_told_of_few_rows(both: Both) -> None:
    run = both.under(after_fit=EVERYTHING, minimum=31)  # a ward has 30 rows, a site 60
    assert ft.inference.loo(run, draws=20, tolerance=torch.inf).left_out == len(FRAME)
    for ask in (ft.inference.ranef, lambda run, tolerance: ft.inference.loo(run, out="site", tolerance=tolerance)):
        with pytest.raises(RuntimeError, match="of fewer than 31 rows"):
            ask(run, tolerance=torch.inf)


def test_a_site_with_rows_and_no_frame_says_that_it_has_none(both: Both) -> None:
    """The rows have a formula, whose variables only a frame has."""
    design = both.here.algorithm.settings["model"].design
    policy, algorithms = Policy(after_fit=("margins",)), {"it": lambda family: regression(design, family)}
    brought = {
        name: SiteConfiguration(ft.data.from_frame(each, client="ward", design=design), algorithms, policy)
        for name, each in FRAMES.items()
    }
    run = over_sites(Loopback(brought, None), design, rounds=1)
    with pytest.raises(RuntimeError, match=r"'north': the site has rows but no frame.*SiteConfiguration\.of_frame"):
        ft.inference.marginal_effects(run, tolerance=torch.inf)


def test_questions_count_as_rounds(both: Both) -> None:
    run = both.under(after_fit=EVERYTHING, rounds=1)
    ft.inference.loo(run, draws=20, tolerance=torch.inf)
    with pytest.raises(RuntimeError, match="has answered 1 round, and does not answer more"):
        ft.inference.loo(run, draws=20, tolerance=torch.inf)


@pytest.mark.slow
def test_sites_plots_are_those_of_one_process(both: Both) -> None:
    there, here = (
        site_estimates(run, 0.9, torch.inf) for run in (both.under(after_fit=("effects",), minimum=1), both.here)
    )
    assert there.sites == here.sites
    for mine, other in zip(there[2:-1], here[2:-1]):
        torch.testing.assert_close(mine, other, **ROUNDING, equal_nan=True)


def test_sites_answer_whatever_the_algorithms_settings_say(both: Both) -> None:
    host, design = hosted("mine"), both.here.design
    assert design is not None
    agree(host, NAMES, FORMULA, client="ward")  # type: ignore[arg-type]
    run = over_sites(host, design, name="mine")
    allow(host, after_fit=EVERYTHING, minimum=1)
    for name in sorted(FAST):
        np.testing.assert_allclose(numbers(WHAT[name](run)), numbers(WHAT[name](both.here)), **ROUNDING)


def test_sites_answer_after_maximum_likelihood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)
    likelihood = lambda design: ft.maximum_likelihood(hierarchical.regression(design), restricted=True)
    host = Loopback({n: SiteConfiguration.of_frame(f, "ward", {"it": likelihood}) for n, f in FRAMES.items()}, None)
    design = agree(host, NAMES, "age ~ died + sex + (1 | ward)", client="ward")  # type: ignore[arg-type]
    there = ft.run(likelihood(design), Remote(host, NAMES, "it"), rounds=6, progress=False)  # type: ignore[arg-type]
    data = ft.data.from_frame(FRAME, client="ward", design=design)
    here = ft.run(likelihood(design), ft.InProcess(data), rounds=6, progress=False)
    with pytest.raises(RuntimeError, match=r"Policy\(after_fit=\('effects',\)\)"):
        ft.inference.ranef(there, tolerance=torch.inf)
    allow(host, after_fit=("effects", "margins"), minimum=1)
    for name in ("ranef", "totals", "predict", "margins"):
        np.testing.assert_allclose(numbers(WHAT[name](there)), numbers(WHAT[name](here)), **ROUNDING)


def test_a_server_that_asks_for_anything_else_is_refused(both: Both) -> None:
    host, run = both.host, both.under(after_fit=EVERYTHING)
    session = run.clients.session
    outbox, site = run.outbox, host.sites["north"]
    more = dict(posterior_of(run.algorithm).draws(run, 1, None, torch.inf, 0).sent)

    def answer(ids: torch.Tensor, name: str, **about: Any) -> frames.Frame:
        given = {"question": name, "about": {}, "shapes": {n: list(leaf.shape) for n, leaf in more.items()}, **about}
        step = session.request(
            "ask", "north", session.plan.sites.next_sequence(), session.inboxes(outbox, ids), more, **given
        )
        return frames.read(site.answer(step.message), "north")

    both = torch.arange(2)
    for said, reason in (
        (answer(both, "rows"), "answers the questions"),
        (answer(both[:1], "means"), "expected all clients of the site"),
        (answer(both, "means", shapes={"phi": [2**24, 2]}), "expected shapes of tensors"),
        (answer(both, "densities", about={"method": "__class__"}), "the site failed with KeyError"),
        (answer(both, "effects", about={"kinds": {"01": "number"}}), "the site failed with ValueError"),
        (answer(both, "means", about={"seed": 1}), "expected of a question 'means' ['phi', 'key'] and no more"),
        (answer(both, "means", shapes={"phi": [1, 2], "phi 0": [1, 2]}), "and no more, but got \"['phi 0']\""),
        (answer(both, "densities", about={"beside": 1}), "expected at most 100 other runs"),
        (answer(both, "densities", about={"beside": [{"seed": 1}]}), "expected at most 100 other runs"),
    ):
        assert said.kind == "refusal"
        assert reason in said.text("reason")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"after_fit": "effects"}, "Expected after_fit= as a tuple"),
        ({"after_fit": ("rows",)}, "Expected after_fit= as a tuple"),
        ({"after_fit": ("effects",), "epsilon": 1.0}, "answers after a fit have no noise"),
    ],
)
def test_policies_out_of_range(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**given).check()
