"""A start at which some rows overflow and others do not: whether a site refuses its sum would tell of the rows."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import sgd
from support.sites import offers

import fedtorch as ft
from fedtorch import tree
from fedtorch.sites import Policy, Remote
from fedtorch.sites.rounds import frames, session, sites as meeting
from fedtorch.sites.rounds.policy import Refusal, check_sizes


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def said(age: float, weights: list[float], folder: Path) -> list[str]:
    """What a site of three wards and a patient of this age says to each weight of a start."""
    draws, parts = torch.Generator().manual_seed(5), []
    for rows in (20, 20, 20, 1):
        ages = (
            20 + 20 * torch.rand(rows, 1, generator=draws, dtype=torch.float64) if rows > 1 else torch.full((1, 1), age)
        )
        x = torch.cat([torch.ones_like(ages), ages, ages], 1).double()
        parts.append((x, torch.randn(rows, generator=draws, dtype=torch.float64)))
    data, make, heard = ft.data.from_tensors(parts), lambda: ft.fedavg(sgd(1e-4, steps=1)), list[Any]()
    host = Loopback(offers(data, make, sites=1, policy=Policy()), folder)
    host.after = lambda name, reply: heard.append(frames.read(reply, name)) or reply  # type: ignore[func-returns-value]
    run, reasons = ft.Run(make(), Remote(host, ["a"], "it", rows=data.rows, quorum=1.0, seconds=0.05)), list[str]()  # type: ignore[arg-type]
    before = tree.to(run.server, copy=True)
    for weight in weights:
        run.server = tree.map(torch.zeros_like, before)
        run.server["weight"][0, 1] = weight
        heard.clear()
        with contextlib.suppress(RuntimeError):
            run.step()
        reasons.append(heard[-1].about.get("reason", "a sum"))
    return reasons


WEIGHTS = [float(f"1e{power}") for power in (99, 101, 200, 303, 304, 305, 306, 307)]
NOT_FINITE = "not every message is finite"


def test_starts_at_which_a_patient_overflows_would_tell_the_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "check_sizes", lambda sent: None)
    told = [[NOT_FINITE in each for each in said(age, WEIGHTS, tmp_path / str(age))] for age in (40.0, 4000.0)]
    assert told[0] != told[1]


def test_starts_of_such_numbers_are_refused_before_a_row_is_looked_at(tmp_path: Path) -> None:
    first = said(40.0, WEIGHTS, tmp_path / "young")
    second = said(4000.0, WEIGHTS, tmp_path / "old")
    assert first == second
    assert "number in 'inbox.weight' that is larger than 1e+100" in first[1]
    assert len(set(first[1:])) == 1
    assert first[0] == "a sum"


@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.float64, 1.1e100), (torch.float32, 1.1e30), (torch.bfloat16, 1.1e30)]
)
def test_the_largest_number_of_each_kind(dtype: torch.dtype, least: float) -> None:
    check_sizes(
        {
            "w": torch.tensor([-least / 1.2, least / 1.2], dtype=torch.float64).to(dtype).expand(3, 2),
            "n": torch.tensor(2**62),
        }
    )
    for value in (least, -least, torch.inf):
        with pytest.raises(Refusal, match="a number in 'w' that is larger"):
            check_sizes({"w": torch.tensor([torch.nan, value], dtype=torch.float64).to(dtype).expand(3, 2)})
