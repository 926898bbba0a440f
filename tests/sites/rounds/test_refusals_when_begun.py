"""A server that begins runs, of which a site refuses some by what its rows are: each counts as a failure.

A module of so many classes fails where a label is larger. Bisection reads the largest, a patient's number of falls.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from support.certified import certified
from support.loopback import Clock, Loopback
from support.sites import Carried, carry_of, offers

import fedtorch as ft
from fedtorch.sites import Policy, Remote, SiteConfiguration, agree, masked
from fedtorch.sites.rounds import frames, sites as meeting
from fedtorch.sites.rounds.policy import Watch


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def classes(count: int = 2) -> ft.Algorithm:
    solver = ft.gradient_descent(
        torch.nn.Linear(2, count), steps=1, loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    return ft.fedavg(solver)


class Attack:
    """Sites of thirty people each, at which runs of so many classes begin."""

    def __init__(self, folder: Path, make: Any = classes, refusals: int = 2) -> None:
        self.make = make
        draws = torch.Generator().manual_seed(0)
        rows = [
            (torch.randn(30, 2, generator=draws), torch.randint(0, 60 + 17 * k, (30,), generator=draws))
            for k in range(3)
        ]
        self.largest = int(rows[0][1].max())
        self.data = ft.data.from_tensors(rows)
        brought = offers(self.data, make, sites=3, policy=Policy(refusals=refusals))
        self.host = Loopback(brought, folder, certified().identities)
        self.why: dict[str, str] = {}
        self.host.after = self._after

    def _after(self, name: str, reply: bytes) -> bytes:
        frame = frames.read(reply, name)
        if frame.kind == "refusal":
            self.why[name] = frame.text("reason")
        return reply

    def begin(self, count: int) -> str:
        """Return why site a refuses, none where it does not."""
        self.why.clear()
        more = {"roster": certified().roster} if isinstance(self.make, Carried) else {}
        remote = Remote(
            self.host, list("abc"), "it", {"count": count}, rows=self.data.rows, quorum=1.0, seconds=0.05,
            carry=carry_of(self.make), **more,
        )  # fmt: skip
        with suppress(RuntimeError, ValueError):
            ft.Run(self.make(count), remote).step()
        return self.why.get("a", "")

    def bisected(self) -> int:
        """Return the largest label, as it follows from which runs site a refuses."""
        low, high = 1, 128
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if "could not begin" in self.begin(middle) else (low, middle)
        return low - 1


@pytest.mark.parametrize("carry", [{}, {"dropouts": 0}], ids=["plain", "masks"])
def test_what_a_site_refuses_when_a_run_begins_is_counted(
    carry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Carried(classes, masked(**carry)) if carry else classes
    attack = Attack(tmp_path / "counted", make)
    assert "ValueError; see what it says itself" in attack.begin(3)
    assert attack.bisected() != attack.largest
    assert "2 rounds or questions have failed at the site" in attack.begin(128)
    for name in "abc":
        (tmp_path / "counted" / name / "sums.jsonl").unlink(missing_ok=True)
    again = Attack(tmp_path / "counted", make)  # the sites, started anew
    assert "2 rounds or questions have failed at the site" in again.begin(128)
    monkeypatch.setattr(Watch, "failed", lambda watch, hidden=False: None)
    attack = Attack(tmp_path / "uncounted", make)
    assert attack.bisected() == attack.largest


def test_a_site_that_has_failed_too_often_tells_nothing_of_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor anything else: histograms of columns were answered still."""
    ages = 60 + 10 * torch.randn(200, generator=torch.Generator().manual_seed(0)).round().numpy()
    frame = pandas.DataFrame({"ward": ["a", "b"] * 100, "age": ages, "y": [0.0, 1.0, 1.0, 0.0] * 50})
    model = lambda design: ft.ep(ft.models.hierarchical.regression(design))
    brought = SiteConfiguration.of_frame(frame, "ward", {"it": model}, policy=Policy(refusals=2))
    host = Loopback({"a": brought}, None)
    for _ in range(2):
        host.sites["a"].watch.failed()
    ask = lambda: agree(host, ["a"], "y ~ age + (1 | ward)", client="ward", seconds=0.05)
    with pytest.raises(ValueError, match="2 rounds or questions have failed at the site"):
        ask()
    monkeypatch.setattr(Watch, "check_failed", lambda watch: None)
    assert ask() is not None
