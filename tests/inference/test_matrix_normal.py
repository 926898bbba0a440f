"""HM1: predictions with intervals, and those of sites: one dense inverse, and the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from support.forked import over_ranks
from support.loopback import Clock, Loopback
from support.sites import offers
from torch import Tensor

import fedtorch as ft
from fedtorch.federation.algorithms.matrix_normal import devices
from fedtorch.federation.algorithms.matrix_normal.noise import noise_variance
from fedtorch.models.linear import polynomial
from fedtorch.sites import Policy, Remote
from fedtorch.sites.rounds import sites as meeting

K, D, LEVEL, ROUNDS = 6, 3, 0.9, 5
WIDE = 1.6448536269514722  # of a normal interval of 90 %


def related(binary: bool = False) -> ft.data.FederatedData:
    """Devices of two kinds of coefficients, of different sizes; clients are called as letters."""
    draws = torch.Generator().manual_seed(2)
    new = lambda *shape: torch.randn(*shape, generator=draws, dtype=torch.float64)
    base, rows = new(2, D), []
    for k, size in enumerate((9, 12, 7, 20, 15, 8)):
        x = new(size, D - 1)
        eta = torch.cat([x, torch.ones(size, 1).double()], 1) @ (base[k % 2] + 0.2 * new(D))
        rows.append((x, (eta + new(size) > 0).double() if binary else eta + 0.5 * new(size)))
    return ft.data.from_tensors(rows, names=list("ABCDEF"))


DATA = related()
ROWS = torch.tensor([[0.5, -1.0], [2.0, 0.3]], dtype=torch.float64)


def make(**settings: Any) -> ft.Algorithm:
    return ft.matrix_normal(ft.least_squares(ft.LinearHead(D - 1, dtype=torch.float64), **settings))


@pytest.fixture(scope="module")
def here() -> ft.Run:
    return ft.run(make(), ft.InProcess(DATA), rounds=ROUNDS)


def dense(run: ft.Run) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and covariance of all devices' coefficients given Ω̂, by one inverse, and noise variances."""
    noise = noise_variance(run.server.summary, None)
    designs = [torch.cat([x, torch.ones(len(x), 1).double()], 1) for x, _ in DATA]
    gram = torch.block_diag(*(x.mT @ x / s for x, s in zip(designs, noise)))
    right = torch.cat([x.mT @ y / s for x, (_, y), s in zip(designs, DATA, noise)])
    prior = torch.kron(torch.linalg.inv(run.server.covariance.dense()).contiguous(), torch.eye(D).double())
    covariance = torch.linalg.inv(gram + prior)
    return covariance @ right, covariance, noise


def test_predictions_given_the_covariance_are_those_of_one_inverse(
    here: ft.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    mean, covariance, noise = dense(here)
    rows = torch.cat([ROWS, torch.ones(2, 1).double()], 1)
    known = devices(here, known=True)
    monkeypatch.setattr("fedtorch.federation.algorithms.matrix_normal.posterior.devices", lambda run: known)
    for k in (0, 3):
        found = ft.inference.predict(here, ROWS, LEVEL, site="ABCDEF"[k])
        part = slice(k * D, (k + 1) * D)
        sd = (rows @ covariance[part, part] * rows).sum(1).sqrt()
        assert found["estimate"].to_numpy() == pytest.approx((rows @ mean[part]).numpy(), abs=1e-8)
        assert found["sd"].to_numpy() == pytest.approx(sd.numpy(), rel=1e-7)
        assert (found["high"] - found["low"]).to_numpy() == pytest.approx(2 * WIDE * sd.numpy(), rel=1e-6)
        new = (sd.square() + noise[k]).sqrt()
        assert (found["new_high"] - found["new_low"]).to_numpy() == pytest.approx(2 * WIDE * new.numpy(), rel=1e-6)


def test_predictions_are_as_uncertain_as_the_devices_are(here: ft.Run) -> None:
    found = ft.inference.predict(here, DATA, LEVEL)
    assert found["known"].all()
    assert list(found["site"][:9]) == ["A"] * 9
    each, x = devices(here), torch.cat([DATA[4][0], torch.ones(15, 1).double()], 1)
    sd = (x @ each.covariances[4, 0] * x).sum(1).sqrt()
    assert found["sd"].to_numpy()[48:63] == pytest.approx(sd.numpy(), rel=1e-7)
    with pytest.raises(TypeError, match=r"got one of matrix_normal; it has .* predictions of its own sites"):
        ft.inference.predict(here, ROWS)
    with pytest.raises(ValueError, match=r"rows x with 2 columns '0', '1', but got shape \(1, 3\)"):
        ft.inference.predict(here, torch.ones(1, 3), site="A")


def test_rows_of_a_formula_and_of_a_feature_map() -> None:
    frame = pandas.DataFrame({
        "ward": [name for name, (x, _) in zip("ABCDEF", DATA) for _ in x],
        "age": torch.cat([x[:, 0] for x, _ in DATA]).numpy(),
        "y": torch.cat([y for _, y in DATA]).numpy(),
    })  # fmt: skip
    data = ft.data.from_frame(frame, formula="y ~ age", client="ward")
    head = ft.LinearHead(2, intercept=False, dtype=torch.float64)
    by_formula = ft.run(ft.matrix_normal(ft.least_squares(head)), ft.InProcess(data), rounds=3)
    found = ft.inference.predict(by_formula, frame.iloc[[3, 30]])
    assert list(found["site"]) == ["A", frame["ward"][30]]
    curved = ft.LinearHead(2 * (D - 1), polynomial(2), dtype=torch.float64)
    run = ft.run(ft.matrix_normal(ft.least_squares(curved)), ft.InProcess(DATA), rounds=2)
    mean = ft.inference.predict(run, ROWS, site="B")["estimate"].to_numpy()
    wanted = torch.cat([ROWS, ROWS**2, torch.ones(2, 1).double()], 1) @ devices(run).means[1, 0]
    assert mean == pytest.approx(wanted.numpy(), abs=1e-9)


def test_yes_or_no_responses_have_probabilities_and_overdispersed_ones_no_new_response() -> None:
    data = related(binary=True)
    run = ft.run(make(family="logistic"), ft.InProcess(data), rounds=3)
    found = ft.inference.predict(run, ROWS, site="D")
    assert found["estimate"].between(0, 1).all()
    assert set(found["new_high"]) <= {0.0, 1.0}
    local = ft.least_squares(ft.LinearHead(D - 1, dtype=torch.float64), family="logistic")
    dispersed = ft.run(ft.matrix_normal(local, noise=2.0), ft.InProcess(data), rounds=3)
    assert ft.inference.predict(dispersed, ROWS, site="D")["new_high"].isna().all()


# -- over ranks ----------------------------------------------------------------------------------------------------


def test_two_ranks_equal_one_process(here: ft.Run, tmp_path: Path) -> None:
    """Every rank, though each has the rows of half of the devices; means over devices and each one's own, too."""

    def told(run: ft.Run) -> list[float]:
        tables = ft.inference.predict(run, DATA, LEVEL), run.summary(LEVEL), ft.inference.ranef(run, total=True)
        return np.concatenate([numbers(table).flatten() for table in tables]).tolist()

    expected = told(here)
    for found in over_ranks(
        tmp_path / "ranks", 2, lambda rank: told(ft.run(make(), ft.Distributed(DATA), rounds=ROUNDS))
    ):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)


# -- between sites -------------------------------------------------------------------------------------------------


def on_sites(monkeypatch: pytest.MonkeyPatch, rounds: int, **policy: Any) -> tuple[ft.Run, Loopback]:
    monkeypatch.setattr(meeting, "time", Clock)
    host = Loopback(offers(DATA, make, policy=Policy(**{"minimum": 7, **policy})), None)
    return ft.run(make(), Remote(host, ["a", "b", "c"], "it"), rounds=rounds, progress=False), host  # type: ignore[arg-type]


def numbers(frame: Any) -> np.ndarray:
    return frame.select_dtypes("number").to_numpy(np.float64)


def test_sites_equal_one_process_and_receive_only_their_rows(here: ft.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    there, host = on_sites(monkeypatch, ROUNDS, after_fit=("effects",), minimum=1)
    frames: list[tuple[str, bytes]] = []
    host.before = lambda name, frame: frames.append((name, frame)) or True
    for what in (
        lambda run: run.summary(level=LEVEL),
        lambda run: ft.inference.ranef(run, total=True),
        lambda run: ft.inference.predict(run, ROWS, site=run.population.names[3]),
    ):
        np.testing.assert_allclose(numbers(what(there)), numbers(what(here)), rtol=1e-7, atol=1e-9)
    factor = there.server.covariance.trimmed()
    rows = factor.vectors * factor.values.sqrt()
    for k in range(K):  # a device's row of Ω goes to its own site
        heard = {name for name, frame in frames if rows[k].numpy().tobytes() in frame}
        assert heard == {"abc"[k // 2]}


def test_policy_refuses_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    there, _ = on_sites(monkeypatch, 3)
    with pytest.raises(RuntimeError, match=r"'a'.*Policy\(after_fit=\('effects',\)\)"):
        devices(there)
    table = there.summary()
    assert table["sd"].isna().all()
    assert "Policy(after_fit=('effects',))" in table.attrs.get("about", str(table.attrs))
