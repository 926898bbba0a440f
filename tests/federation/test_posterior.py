"""What fits can answer does not depend on what an algorithm's settings say, and who cannot answer says who can."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.algorithms import ep, maximum_likelihood as likelihood, multi_output_gp as gp
from fedtorch.federation.algorithms.ep.hierarchical import NOISE
from fedtorch.federation.algorithms.matrix_normal import devices as of_devices
from fedtorch.federation.algorithms.regressors import fitted
from fedtorch.federation.posterior import Posterior, posterior_of
from fedtorch.inference import checks, questions
from fedtorch.inference.questions import QUESTIONS, answered
from fedtorch.inference.ranef import site_estimates
from fedtorch.models import hierarchical
from fedtorch.models.gaussian_process import ConvolvedGP
from fedtorch.models.gibbs import imputation, sparse
from fedtorch.report import _posteriors as posteriors

FLOAT = torch.float64
MINE = {"algorithm": "mine"}  # of a variation, whose author wrote no other setting down


def rows() -> ft.data.FederatedData:
    parts = []
    for k in range(5):
        x, z = random.normal(random.fold_in(random.key(0), k), (2, 12), FLOAT)
        parts.append((torch.stack([torch.ones(12).double(), x], 1), 1.0 + k / 4 - 0.5 * x + 0.3 * z))
    return ft.data.from_tensors(parts, names=list("ABCDE"))


DATA = rows()
NEW = (torch.ones(3, 2).double(), torch.tensor([2.0, 2.5, 2.1]).double())
MODEL = hierarchical.linear(hierarchical.normal(2, random=[0], names=["level", "dose"]), noise=0.09)


def with_body(heads: Callable[[ft.LocalSolver], ft.Algorithm]) -> ft.Algorithm:
    torch.manual_seed(0)
    body = ft.LinearHead(2, nn.Linear(2, 2, dtype=FLOAT), given=True, intercept=False, dtype=FLOAT)
    local = ft.gradient_descent(body, steps=1, loss=nn.functional.mse_loss, buffers="local", optimizer=descent)
    return ft.shared_body(local, heads(ft.least_squares(ft.LinearHead(2, intercept=False, dtype=FLOAT))))


def descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def propagation(_: Any = None) -> ft.Algorithm:
    return ft.ep(MODEL)


def units() -> ft.Algorithm:
    model = ConvolvedGP(torch.linspace(0, 1, 4, dtype=FLOAT)[:, None].expand(4, 2).contiguous())
    return gp.fedmgp(model, accept_disclosure=True, steps=1, exact_units=True)


def own_factors() -> ft.Algorithm:
    return ft.ep(ep.algorithm.Factors(MODEL.project, MODEL.prior, MODEL.start, MODEL.prepare, MODEL.log_factor))


FITS: dict[str, Callable[[], ft.Algorithm]] = {
    "ep": propagation,
    "maximum_likelihood": lambda: ft.maximum_likelihood(MODEL),
    "gibbs": lambda: ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=1, chains=2),
    "matrix_normal": lambda: ft.matrix_normal(ft.least_squares(ft.LinearHead(2, intercept=False, dtype=FLOAT))),
    "normal_em": lambda: ft.normal_em(columns=2),
    "fedmgp": units,
    "own factors": own_factors,
    "gtv_regressors": lambda: ft.gtv_regressors(
        lambda: Constant(), ft.Network.ring(5), 0.5, torch.zeros(2, 2).double()
    ),
    "shared_body of ep": lambda: with_body(propagation),
    "shared_body of matrix_normal": lambda: with_body(ft.matrix_normal),
    "shared_body of separate": lambda: with_body(ft.separate),
    "fedavg": lambda: ft.fedavg(ft.least_squares(nn.Linear(2, 1, bias=False, dtype=FLOAT))),
}


class Constant:
    """A regressor that predicts the mean."""

    def fit(self, x: Any, y: Any, sample_weight: Any = None) -> Constant:
        self.level = float(np.average(y, weights=sample_weight))
        return self

    def predict(self, x: Any) -> Any:
        return np.full(len(x), self.level)


@cache
def run_of(fit: str, renamed: bool) -> ft.Run:
    """A short run of an algorithm, under its own settings or those of a variation; of a shared body its heads', too."""
    algorithm = FITS[fit]()
    if renamed:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("ep", "matrix_normal", "separate"):
                made = getattr(ft, name)
                patch.setattr(ft, name, lambda *a, made=made: dataclasses.replace(made(*a), settings=MINE))
            algorithm = dataclasses.replace(FITS[fit](), settings=MINE)
    start, data, record = None, DATA, ()
    if fit == "gibbs":
        start, record = torch.zeros(2).double(), ft.Sampler(burn_in=2, sites=True)
    if fit == "gtv_regressors":
        start = {}
    if fit == "normal_em":
        data = imputation.incomplete([(x[:, 1:], y) for x, y in DATA])
    rounds = {"gibbs": 12, "ep": 8, "maximum_likelihood": 25, "shared_body of ep": 1}.get(fit, 3)
    return ft.run(algorithm, ft.InProcess(data), start, rounds=rounds, record=record, progress=False)


QUESTIONS_OF_A_RUN: dict[str, Callable[[ft.Run], Any]] = {
    "summary(": lambda run: run.summary(),
    "contrasts(": lambda run: ft.inference.contrasts(run, {"first": {run.summary().index[0]: 2.0}}),
    "pooled(": lambda run: ft.inference.pooled([run, run]),
    "ranef(run)": ft.inference.ranef,
    "ranef(run, total=True)": lambda run: ft.inference.ranef(run, total=True),
    "predict(run, rows)": lambda run: ft.inference.predict(run, NEW[0]),
    "predict(run, rows, site=": lambda run: ft.inference.predict(run, NEW[0], site="B"),
    "adapted(": lambda run: ft.inference.ranef(ft.inference.adapted(run, NEW, site="F"), total=True),
    "loo(run)": lambda run: ft.inference.loo(run, draws=20),
    'loo(run, out="site")': lambda run: ft.inference.loo(run, out="site"),
    "waic(": lambda run: ft.inference.waic(run, draws=20),
    "compare(": lambda run: ft.inference.compare({"a": run, "b": run}, draws=20),
    'compare(runs, out="site")': lambda run: ft.inference.compare({"a": run, "b": run}, out="site"),
    "marginal_effects(": ft.inference.marginal_effects,
    "to_inferencedata(": lambda run: ft.inference.to_inferencedata(run, draws=5).posterior.to_dataframe(),
    "histograms(": lambda run: checks.histograms(run, draws=10),
    "site_means(": lambda run: checks.site_means(run, draws=10),
    "site_estimates(": lambda run: site_estimates(run, 0.9),
    "client_module(": lambda run: dict(run.client_module(1).state_dict()),
    "posterior(": lambda run: ep.posterior(run).mean,
    "corrected(": lambda run: ep.corrected(run, points=64).nodes,
    "ep.devices(": lambda run: ep.devices(run),
    "maximum_likelihood.estimates(": lambda run: likelihood.estimates(run),
    "maximum_likelihood.devices(": lambda run: likelihood.devices(run),
    "matrix_normal.devices(": lambda run: of_devices(run),
    "fitted(": lambda run: [each.level for each in fitted(run)],
    "report": lambda run: [*posteriors.found(run), *posteriors.by_client(run)],
    "design": lambda run: run.design,
    "server": lambda run: ft.tree.leaves(run.server),
}


@cache
def answer(question: str, fit: str, renamed: bool = False) -> Any:
    """What is answered, or the error that is raised, in which the algorithm has no name."""
    run = run_of(fit, renamed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # runs of few rounds
        try:
            return QUESTIONS_OF_A_RUN[question](run)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            return type(error)(str(error).replace(f"got one of {run.algorithm.settings['algorithm']}", "got one of it"))


def check_same(one: Any, other: Any) -> None:
    assert type(one) is type(other), (one, other)
    if isinstance(one, Exception):
        assert str(one) == str(other)
    elif isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    elif isinstance(one, pd.DataFrame):
        pd.testing.assert_frame_equal(one, other, check_exact=True)
    elif isinstance(one, dict):
        check_same(list(one), list(other))
        check_same(list(one.values()), list(other.values()))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, its in zip(one, other):
            check_same(mine, its)
    else:
        assert one == other or (one != one and other != other), (one, other)  # NaN is NaN


CHECKED = [pytest.param(fit, marks=pytest.mark.slow) if fit.startswith("shared_body") else fit for fit in FITS]


@pytest.mark.parametrize("fit", CHECKED)
def test_answers_do_not_depend_on_settings(fit: str) -> None:
    for question in QUESTIONS_OF_A_RUN:
        check_same(answer(question, fit), answer(question, fit, True))


ANSWERED = {
    "ep": {"summary(", "ranef(run)", "predict(run, rows)", "adapted(", 'loo(run, out="site")', "to_inferencedata("},
    "maximum_likelihood": {"summary(", "contrasts(", "ranef(run)", "predict(run, rows)", "maximum_likelihood.devices("},
    "gibbs": {"summary(", "ranef(run)", "predict(run, rows, site=", "loo(run)", "site_estimates(", "marginal_effects("},
    "matrix_normal": {"summary(", "ranef(run, total=True)", "predict(run, rows, site=", "matrix_normal.devices("},
    "normal_em": {"summary("},
    "fedmgp": {"client_module("},
    "own factors": {"summary(", "posterior(", "corrected("},
    "gtv_regressors": {"fitted("},
    "fedavg": {"client_module("},
}


@pytest.mark.parametrize("fit", ANSWERED)
def test_what_fits_can_answer(fit: str) -> None:
    """So that equal answers of two runs are not two equal errors."""
    for question in ANSWERED[fit]:
        found = answer(question, fit, True)
        assert not isinstance(found, Exception), (question, found)


@pytest.mark.parametrize("question", QUESTIONS_OF_A_RUN)
def test_alternatives_named_in_errors_can_answer(question: str) -> None:
    refused = {fit: answer(question, fit) for fit in ("fedavg", "matrix_normal", "maximum_likelihood")}
    for error in refused.values():
        who = re.match(r"Expected a run of (.*), which .* but got one of .*; it has (.*)", str(error))
        if who is None:
            continue
        assert type(error) is TypeError
        for name in re.findall(r"(?<!its own sites, )ft\.(\w+)", who[1]):
            found = answer(question, name)
            point = question == "pooled(" and "point estimate" in str(found)
            assert point or not isinstance(found, Exception), (name, found)
        assert question not in who[2], "it recommends the call that has raised it"


def test_questions_to_sites_are_known_and_each_is_answered_by_somebody() -> None:
    every = {name: set(answered(posterior_of(make()))) for name, make in FITS.items()}
    assert set().union(*every.values()) == set(QUESTIONS) - {NOISE.name}
    assert every["maximum_likelihood"] == {"coefficients", "variables", "effects"}
    assert every["matrix_normal"] == {"factors", "devices", "average"}
    assert every["gibbs"] == every["own factors"] == every["fedavg"] == set()


def test_no_two_questions_have_one_name() -> None:
    assert all(QUESTIONS[kind.name] is kind for kind in questions._EVERY)


def test_every_question_of_a_posterior_is_refused_in_the_same_words() -> None:
    run = run_of("fedavg", False)
    given = {"tolerance": 0.01, "given": None}
    asked: dict[str, Any] = {
        "estimates": {},
        "coefficients": {},
        "deviations": {},
        "newcomers": {},
        "adapted": {"data": DATA},
        "pooling": {"level": 0.9},
        "draws": {"draws": 1, "seed": 0, **given},
        "evidence": {},
        "columns": {},
        "inferencedata": {"draws": 1, "chains": 1, **given},
    }
    for name, arguments in asked.items():
        with pytest.raises(
            TypeError, match=r"Expected a run of ft\.ep.*, which .*, but got one of fedavg; it has models"
        ):
            getattr(Posterior(), name)(run, **arguments)
