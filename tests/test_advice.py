"""What messages recommend works: each test is refused or warned, does as it is told, and goes on."""

from __future__ import annotations

import decimal
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import networkx
import numpy as np
import pandas as pd
import pytest
import torch
import torchmetrics
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.federation.algorithms.ep import settled
from fedtorch.federation.algorithms.maximum_likelihood import estimates, maximised
from fedtorch.models import hierarchical
from fedtorch.trust import attacks


def frame(rows: int = 120, sites: int = 6) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "site": [f"s{i % sites}" for i in range(rows)],
            "age": draw.normal(size=rows),
            "arm": draw.choice(["a", "b"], rows),
            "sex": draw.choice(["f", "m"], rows),
        }
    )
    table["y"] = table["age"] + (table["arm"] == "b") + draw.normal(size=rows) + table["site"].str[1:].astype(float) / 3
    table["ill"] = (table["y"] > 1).astype(int)
    return table


def fitted(table: pd.DataFrame, formula: str, restricted: bool | None = None, **options: Any) -> ft.Run:
    data = ft.data.from_frame(table, client="site", formula=formula, **options)
    model = hierarchical.regression(data.design)
    algorithm = ft.ep(model) if restricted is None else ft.maximum_likelihood(model, restricted=restricted)
    until = settled() if restricted is None else maximised()
    return ft.run(algorithm, ft.InProcess(data), rounds=40, until=until, progress=False)


@pytest.fixture(scope="module")
def run() -> ft.Run:
    return fitted(frame(), "y ~ age + arm + (1 | site)")


def refusal(call: Callable[[], Any], error: type[Exception], *words: str) -> str:
    """Return the message of a refusal that has these words."""
    with pytest.raises(error) as found:
        call()
    assert [word for word in words if word not in str(found.value)] == []
    return str(found.value)


def test_new_rows_with_gaps_are_left_out_or_filled(run: ft.Run) -> None:
    rows = frame()[:6].assign(age=[0.0, None, 1.0, 2.0, 0.5, 0.1])
    refusal(lambda: ft.inference.predict(run, rows), ValueError, "frame.dropna(subset=['age'])", "fill them")
    assert len(ft.inference.predict(run, rows.dropna(subset=["age"]))) == 5
    assert len(ft.inference.predict(run, rows.fillna({"age": 0.0}))) == 6


@pytest.mark.parametrize("missing", ["drop", "impute"])
def test_rows_with_gaps_are_dropped_or_kept(missing: str) -> None:
    rows = frame().assign(age=lambda f: f["age"].where(f.index % 9 > 0))
    read = lambda **options: ft.data.from_frame(rows, client="site", formula="y ~ age", **options)
    refusal(read, ValueError, f'missing="{missing}"')
    assert len(read(missing=missing)) == 6


def test_new_rows_of_a_level_without_a_coefficient(run: ft.Run) -> None:
    rows = frame()[:4].assign(arm=["a", "b", "c", "a"])
    refusal(
        lambda: ft.inference.predict(run, rows),
        ValueError,
        "levels 'a', 'b'",
        "leave them out",
        "from_frame(…, levels=",
    )
    assert len(ft.inference.predict(run, rows[rows["arm"] != "c"])) == 3
    again = fitted(frame(), "y ~ age + arm + (1 | site)", levels={"arm": ["a", "b", "c"]})
    with pytest.warns(RuntimeWarning, match="dependent"):
        again.summary()
    assert len(ft.inference.predict(again, rows)) == 4


def test_a_design_says_the_levels() -> None:
    data = ft.data.from_frame(frame(), client="site", formula="y ~ arm")
    read = lambda **options: ft.data.from_frame(frame(), client="site", design=data.design, **options)
    refusal(lambda: read(levels={"arm": ["a", "b", "c"]}), TypeError, "['levels']", "leave them out")
    assert read().design == data.design


def test_restricted_likelihood_of_an_empty_cell_names_the_column() -> None:
    table = frame().query("arm == 'a' or sex == 'f'")
    run = fitted(table, "y ~ arm * sex + (1 | site)", restricted=True)
    refusal(run.summary, RuntimeError, "['arm[T.b]:sex[T.m]'] are here", "one factor of its other cells")
    joined = table.assign(cell=table["arm"] + table["sex"])
    assert fitted(joined, "y ~ cell + (1 | site)", restricted=True).summary()["sd"].iloc[:3].notna().all()


def test_restricted_likelihood_of_dependent_columns_names_them() -> None:
    table = frame().assign(twice=lambda f: 2 * f["age"])
    run = fitted(table, "y ~ age + twice + arm + (1 | site)", restricted=True)
    refusal(run.summary, RuntimeError, "['age', 'twice'] are here")
    assert fitted(table, "y ~ age + arm + (1 | site)", restricted=True).summary()["sd"].iloc[:3].notna().all()


@pytest.mark.parametrize("sites", [1, 120])
def test_variances_that_rows_cannot_tell_apart(sites: int) -> None:
    table = frame(sites=sites)
    run = fitted(table, "y ~ age + (1 | site)", restricted=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        estimates(run)
    texts = [str(each.message) for each in found]
    assert any("sd(Intercept)" in text and "leave the random terms out" in text for text in texts)
    assert not any("allow more rounds" in text for text in texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimates(fitted(table, "y ~ age", restricted=False))


def test_objects_of_whole_numbers_are_asked_about() -> None:
    table = frame().assign(days=lambda f: [decimal.Decimal(i % 30) for i in f.index])
    read = lambda f, text: ft.data.from_frame(f, client="site", formula=text).design
    with pytest.warns(UserWarning, match=r"30 levels that are whole numbers.*C\(days\).*pandas.to_numeric"):
        read(table, "y ~ days")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read(table, "y ~ C(days)").columns) == 30
        assert len(read(table.assign(days=pd.to_numeric(table["days"])), "y ~ days").columns) == 2
        assert len(read(table.assign(days=[decimal.Decimal(i % 19) for i in table.index]), "y ~ days").columns) == 19


def test_the_level_of_others_comes_last() -> None:
    table = frame().assign(dose=lambda f: np.where(f.index % 3 == 0, "ctl", np.where(f.index % 3 == 1, "high", "low")))
    data = ft.data.from_frame(table, client="site", formula="y ~ dose", minimum=2, other={"dose": "ctl"})
    assert data.design.columns == ("Intercept", "dose[T.low]", "dose[T.ctl]")
    assert "reference" in ft.data.from_frame.__doc__


def test_weights_are_rows_of_counts_and_precisions_of_numbers() -> None:
    table = frame(60).assign(w=3.0)
    thrice = pd.concat([table] * 3, ignore_index=True)
    by = lambda family, f, **o: _likelihood(f, family, **o)
    counted, repeated = by("logistic", table, weights="w"), by("logistic", thrice)
    assert counted["sd"].tolist() == pytest.approx(repeated["sd"].tolist(), rel=1e-5)
    plain, precise = by("gaussian", table), by("gaussian", table, weights="w")
    assert precise["estimate"].tolist() == pytest.approx(
        [*plain["estimate"][:2], plain["estimate"].iloc[2] * 3**0.5], rel=1e-4
    )
    assert precise["sd"].tolist()[:2] == pytest.approx(plain["sd"].tolist()[:2], rel=1e-4)


def _likelihood(table: pd.DataFrame, family: str, **options: Any) -> pd.DataFrame:
    response = "ill" if family == "logistic" else "y"
    data = ft.data.from_frame(table, client="site", formula=f"{response} ~ age", **options)
    model = hierarchical.regression(data.design, family)
    run = ft.run(ft.maximum_likelihood(model), ft.InProcess(data), rounds=60, until=maximised(), progress=False)
    return run.summary()


def test_pooled_runs_are_taken_one_by_one(run: ft.Run) -> None:
    both = ft.inference.pooled([run, run])
    for function in (ft.inference.predict, ft.inference.ranef, ft.inference.marginal_effects, ft.inference.loo):
        arguments = (frame()[:3],) if function is ft.inference.predict else ()
        refusal(lambda f=function, a=arguments: f(both, *a), TypeError, "pooled ones", "of each run")
    refusal(lambda: ft.inference.contrasts(both, "age"), TypeError, "contrasts of each")
    each = [ft.inference.predict(one, frame()[:3])["estimate"] for one in (run, run)]
    assert (sum(each) / 2).tolist() == pytest.approx(each[0].tolist())
    table = ft.inference.contrasts(run, "age")
    pair = (torch.tensor(table["estimate"].tolist()), torch.tensor([table["sd"].tolist()]).square())
    assert float(ft.inference.pooled([pair, pair]).mean) == pytest.approx(float(table["estimate"].iloc[0]))


def test_nested_and_powered_formulas_are_written_out() -> None:
    read = lambda text: ft.data.from_frame(frame(), client="site", formula=text).design.columns
    refusal(lambda: read("y ~ arm/sex"), ValueError, "a + a:b for a/b", "backquotes")
    assert read("y ~ arm + arm:sex") == ("Intercept", "arm[T.b]", "arm[a]:sex[T.m]", "arm[b]:sex[T.m]")
    refusal(lambda: read("y ~ (arm + sex)^2"), ValueError, "a*b for (a + b)^2")
    assert len(read("y ~ arm * sex")) == 4


def test_coupled_regressors_start_from_nothing() -> None:
    from sklearn.linear_model import LinearRegression

    x = ft.random.normal(ft.random.key(0), (3, 5, 2))
    data = ft.data.from_tensors([(rows, rows.sum(1)) for rows in x])
    algorithm = ft.gtv_regressors(LinearRegression, ft.Network.ring(3), alpha=0.1, inputs=x[0])
    assert ft.run(algorithm, ft.InProcess(data), rounds=1, progress=False).number == 1


def test_a_vertical_fit_predicts_the_data_that_it_evaluates() -> None:
    from fedtorch.vfl.model import likelihoods

    x = ft.random.normal(ft.random.key(0), (20, 3))
    data = ft.vfl.VerticalData((x[:, :1], x[:, 1:]), (x.sum(1) > 0).float())
    model = ft.vfl.augmented(likelihoods.bernoulli(), [ft.vfl.linear(1), ft.vfl.linear(2)], 1.0)
    fit = ft.vfl.sfvi(model, ft.vfl.Guide(ft.vfl.mean_field()), data, steps=2)
    refusal(lambda: ft.inference.predict(fit, data), TypeError, "run.predict(data)")
    assert torch.equal(fit.predict(data), fit.predict(data.features))
    fit.evaluate(data, {"auroc": torchmetrics.classification.BinaryAUROC(thresholds=200)})
    message = refusal(
        lambda: fit.evaluate(data, {"auroc": torchmetrics.classification.BinaryAUROC()}), TypeError, "give thresholds=…"
    )
    assert "BinaryAUROC" in message


def test_a_vertical_fit_that_has_not_converged_goes_on() -> None:
    from fedtorch.vfl.model import likelihoods

    x = ft.random.normal(ft.random.key(0), (40, 2), torch.float64)
    data = ft.vfl.VerticalData((x[:, :1], x[:, 1:]), x.sum(1) + 3)
    model = ft.vfl.augmented(likelihoods.gaussian(1.0), [ft.vfl.linear(1), ft.vfl.linear(1)], 1.0)
    go = lambda steps, **more: ft.vfl.sfvi(model, ft.vfl.Guide(ft.vfl.mean_field()), data, steps=steps, lr=0.05, **more)
    fit = go(60)
    with pytest.warns(
        RuntimeWarning,
        match=r"too few to tell; continue from here with more steps=.*start=fit\.parameters\), or take a lar",
    ):
        assert not bool(fit.converged())
    further = go(200, start=fit.parameters)
    assert bool(further.converged())
    assert float(further.bounds[-1]) > float(fit.bounds[-1])


def test_gradients_of_steps_and_rows_get_an_output() -> None:
    gradients = torch.tensor([[0.5, -0.5], [0.2, -0.1]])
    refusal(lambda: attacks.guessed_labels(gradients), ValueError, "(T, ..., C, n)", "gradients[:, None]")
    assert attacks.guessed_labels(gradients[:, None]).tolist() == [1, 0]


def test_token_lists_come_from_loaders() -> None:
    table = pd.DataFrame({"site": ["a", "b"], "tokens": [[1, 2], [3]], "y": [0.0, 1.0]})
    read = lambda: ft.data.from_frame(table, client="site", features=["tokens"], target="y")
    refusal(read, TypeError, "from_loaders(loaders, pad=0)")
    loaders = {name: torch.utils.data.DataLoader([torch.tensor(row) for row in rows["tokens"]], 1)
               for name, rows in table.groupby("site")}  # fmt: skip
    assert len(ft.data.from_loaders(loaders, pad=0)) == 2


def test_personal_heads_are_loaded_by_client(tmp_path: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    local = ft.gradient_descent(
        module, steps=1, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, 0.1)
    )
    x = ft.random.normal(ft.random.key(0), (2, 4, 2))
    population = ft.InProcess(ft.data.from_tensors([(rows, rows[:, :1]) for rows in x]))
    algorithm = ft.personal_layers(local, ["1.*"])
    run = ft.run(algorithm, population, rounds=1, progress=False)
    run.save(tmp_path / "run")
    refusal(run.global_module, ValueError, "ft.Run(algorithm, population).load(path).client_module(client)")
    loaded = ft.Run(algorithm, population).load(tmp_path / "run").client_module(0)
    assert torch.equal(loaded[1].weight, run.client_module(0)[1].weight)


def test_optimisers_that_take_no_stack_run_alone() -> None:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    x = ft.random.normal(ft.random.key(0), (2, 4, 2))
    population = ft.InProcess(ft.data.from_tensors([(rows, rows[:, :1]) for rows in x]))
    message = refusal(
        lambda: ft.run(ft.fedavg(ft.gradient_descent(Net(), steps=1)), population, rounds=1, progress=False), TypeError
    )
    assert "closure" in message
    assert "independently" not in message
    assert "ft.lightning_fit" in message
    local = ft.lightning_fit(Net(), max_epochs=1, batch_size=4)
    assert ft.run(ft.fedavg(local), population, rounds=1, progress=False).number == 1


def test_networks_of_several_edges_become_simple() -> None:
    graph = networkx.MultiGraph([(0, 1), (0, 1), (1, 2)])
    refusal(lambda: ft.Network.from_networkx(graph), ValueError, "networkx.Graph(graph)")
    assert ft.Network.from_networkx(networkx.Graph(graph)).nodes == 3


def test_clients_without_rows_are_taken_where_they_mean_something() -> None:
    x = torch.ones(2, 1)
    read = lambda **options: ft.data.from_tensors([(x, x[:, 0]), (x[:0], x[:0, 0])], **options)
    refusal(read, ValueError, "allow_empty=True")
    assert len(read(allow_empty=True)) == 2
