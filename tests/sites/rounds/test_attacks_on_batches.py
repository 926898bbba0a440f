"""A server that chooses starts, cohorts, keys and settings reads single rows out of batches; a site holds them back.

Wards of a hundred people have three numbers below a hundred each, and a bit. At weights of 2, 2 · 128 and 2 · 128² the
predictor of a row is all three at once, so that what is of one row tells the row.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from support.loopback import Clock, Loopback
from support.sites import offers
from torch import Tensor

import fedtorch as ft
from fedtorch.sites import Policy, Remote
from fedtorch.sites.rounds import sites as meeting
from fedtorch.sites.rounds._behind import Behind
from fedtorch.sites.rounds.policy import Watch
from fedtorch.sites.rounds.session import SiteSession
from fedtorch.trust import privacy
from fedtorch.trust.privacy.accounting.spending import Spending
from fedtorch.trust.privacy.mechanisms import clients

WARDS, ROWS = 11, 97
DRAWS = torch.Generator().manual_seed(1)
PEOPLE = [
    (
        torch.randint(0, 100, (ROWS, 3), generator=DRAWS).double(),
        torch.randint(0, 2, (ROWS, 1), generator=DRAWS).double(),
    )
    for _ in range(WARDS)
]
WEIGHT = 2 * torch.tensor([[1.0, 128.0, 128.0**2]], dtype=torch.float64)
ZERO = torch.zeros(1, dtype=torch.float64)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, same_secret: None) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(3, 1, dtype=torch.float64)


def averaging(batch_size: int = 1, steps: int = 1) -> ft.Algorithm:
    solver = ft.gradient_descent(
        linear(), steps=steps, batch_size=batch_size, loss=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    )  # fmt: skip
    return ft.fedavg(solver, weight=lambda data: torch.ones_like(data.count))


class Asked:
    """A site of some wards, which a server asks."""

    def __init__(self, make: Callable[..., ft.Algorithm] = averaging, wards: int = WARDS) -> None:
        self.make = make
        self.data = ft.data.from_tensors(PEOPLE[:wards], names=[f"ward {k:02}" for k in range(wards)])
        self.host = Loopback(offers(self.data, make, sites=1, policy=Policy()), None)

    def step(self, start: Any = None, cohort: list[int] | None = None, seed: int = 0, **settings: Any) -> Any:
        """Return a run after one round, from a start."""
        remote = Remote(self.host, ["a"], "it", settings, rows=self.data.rows, quorum=1.0, seconds=0.05)
        run = ft.Run(self.make(**settings), remote, start, cohort=cohort, seed=seed)
        run.step()
        return run


def is_of(ward: int, row: Tensor, bit: float) -> bool:
    """Whether a ward has such a person."""
    x, y = PEOPLE[ward]
    return bool(((x == row).all(1) & (y[:, 0] == bit)).any())


# -- losses of few rows ------------------------------------------------------------------------------------------------


def read_from_losses() -> int:
    """How many of ten losses are those of a person, whose three numbers and bit they tell."""
    losses = Asked().step({"weight": WEIGHT, "bias": ZERO}, list(range(10))).last.info["loss"].nan_to_num()
    found = 0
    for ward, loss in enumerate(losses.tolist()):
        value = round(loss**0.5)
        bit = value % 2
        number = (value + bit) // 2
        found += is_of(ward, torch.tensor([number % 128, number // 128 % 128, number // 128**2]).double(), bit)
    return found


def test_losses_of_batches_of_one_row_are_told_as_one_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_from_losses() == 0
    few = Behind.few
    monkeypatch.setattr(Behind, "few", lambda rows, ids, taken=None: few(rows, ids))
    assert read_from_losses() == 10


def test_losses_of_enough_rows_are_told_as_they_are() -> None:
    told = Asked().step(batch_size=10).last.info["loss"]
    assert len(told.unique()) == WARDS
    assert len(Asked().step(batch_size=9).last.info["loss"].unique()) == 1


def read_from_two_means(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of ten times two means, of all wards but one and of all, differ by the loss of a person of that ward.

    Batches are the same in both, as those of a loader in a fixed order are.
    """
    forget(monkeypatch, "clients", "names", "states")
    asked, found = Asked(), 0
    for seed in range(10):
        means = []
        for cohort in (list(range(10)), list(range(11))):
            info = asked.step({"weight": WEIGHT, "bias": ZERO}, cohort, seed).last.info["loss"]
            means.append(len(cohort) * float(info.nan_to_num(0.0)[0]))
        value = round(max(means[1] - means[0], 0.0) ** 0.5)
        bit = value % 2
        number = (value + bit) // 2
        found += is_of(10, torch.tensor([number % 128, number // 128 % 128, number // 128**2]).double(), bit)
    return found


def test_means_of_batches_of_one_row_are_told_of_all_clients_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them differed by one row, whose loss tells three numbers and a bit; past sums count all rows of a ward."""
    assert read_from_two_means(monkeypatch) == 0
    assert Asked().step(cohort=list(range(10))).last.info["loss"].isnan().all()
    assert not Asked().step(cohort=list(range(11))).last.info["loss"].isnan().any()
    monkeypatch.setattr(SiteSession, "_is_remembered", lambda site, ids, taken: True)
    assert read_from_two_means(monkeypatch) == 10


# -- noise that is not the site's --------------------------------------------------------------------------------------


def noised_by_the_server(batch_size: int = 1) -> ft.Algorithm:
    return averaging(batch_size) | privacy.client_level(clip=1e3, noise=4.0, delta=1e-3)


def read_from_a_step() -> int:
    """How many of five steps of one ward are those of a person; the server does not add the noise that it says."""
    asked, found = Asked(noised_by_the_server, wards=1), 0
    for seed in range(5):
        server = asked.step({"weight": torch.zeros(1, 3).double(), "bias": ZERO - 1}, seed=seed).server
        slope = server["bias"] + 1  # 1 + y
        found += is_of(0, (server["weight"] / slope)[0].round(), float(slope.round()) - 1)
    return found


def test_noise_of_the_server_lets_no_batches_of_one_row_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spending, "noise", lambda budget, phase, scales: torch.zeros_like(scales))
    monkeypatch.setattr(clients, "on_grid", lambda noised, scales: noised)
    with pytest.raises(RuntimeError, match="a round's batches have as few as 1 of a client"):
        read_from_a_step()
    Asked(noised_by_the_server, wards=1).step(batch_size=10)
    monkeypatch.setattr(Watch, "counts", lambda watch, budget: budget is not None)
    assert read_from_a_step() == 5


def test_noise_of_the_site_does_and_not_such_as_the_server_can_compute(tmp_path: Path) -> None:
    def noised(entropy: bool) -> ft.Algorithm:
        more = {} if entropy else {"entropy": privacy.from_seed(1)}
        ledger = tmp_path / f"{secrets.token_hex(4)}.jsonl"
        return averaging() | privacy.local_level(clip=1.0, noise=4.0, delta=1e-3, ledger=ledger, **more)

    assert Asked(lambda: noised(True), wards=1).step().number == 1
    with pytest.raises(RuntimeError, match="a round's batches have as few as 1 of a client"):
        Asked(lambda: noised(False), wards=1).step()


# -- what draws follow from --------------------------------------------------------------------------------------------


def read_from_two_cohorts() -> int:
    """How many of five times two sums, of all wards but one and of all, differ by a step on a person of that ward."""
    asked, found = Asked(), 0
    start = {"weight": torch.zeros(1, 3).double(), "bias": ZERO - 1}
    for seed in range(5):
        sums = []
        for cohort in (list(range(10)), list(range(11))):
            server = asked.step(start, cohort, seed).server
            sums.append([len(cohort) * (server[name] - start[name]) for name in ("weight", "bias")])
        weight, slope = (all_of_them - others for others, all_of_them in zip(*sums))
        found += is_of(10, (weight / slope)[0].round(), float(slope.round()) - 1)
    return found


def forget(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have the keys of a site follow from less than all that is asked."""
    key = SiteSession._key

    def without(site: SiteSession, purpose: str, of_server: Tensor, sent: Any, about: Any) -> Tensor:
        left = [{name: value for name, value in part.items() if name not in names} for part in (sent, about)]
        return key(site, purpose, of_server, *left)

    monkeypatch.setattr(SiteSession, "_key", without)


def test_two_cohorts_do_not_differ_by_a_batch_of_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_from_two_cohorts() == 0
    forget(monkeypatch, "clients", "names", "states")
    assert read_from_two_cohorts() == 5


def test_clients_whose_messages_are_lost_are_not_in_the_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a server would ask all, and say of one that its message is lost."""
    keys, key = set[int](), SiteSession._key

    def noted(*arguments: Any) -> Tensor:
        keys.add(int(made := key(*arguments)))
        return made

    monkeypatch.setattr(SiteSession, "_key", noted)
    asked = Asked()
    for lost in ([], [10], [9]):
        remote = Remote(asked.host, ["a"], "it", rows=asked.data.rows, quorum=1.0, seconds=0.05)
        run = ft.Run(averaging(), remote, {"weight": WEIGHT, "bias": ZERO})
        run.clients.step(run.outbox, None, ft.Turn(ft.random.key(0), 0), torch.tensor(lost) if lost else None)
    assert len(keys) == 3


def personal() -> ft.Algorithm:
    """The bias is each ward's own, from a start that the server sends when a run begins."""
    solver = ft.gradient_descent(
        linear(), steps=1, batch_size=10, loss=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    )  # fmt: skip
    return ft.personal_layers(solver, ["bias"])


def bend_over_states() -> float:
    """How far the steps of the shared weight from one start are from a line over three personal starts."""
    asked, told = Asked(personal, wards=1), []
    for bias in (0.0, 1.0, 2.0):
        told.append(asked.step({"weight": torch.zeros(1, 3).double(), "bias": ZERO + bias}).server["weight"])
    return float((told[0] - 2 * told[1] + told[2]).abs().max())


def test_other_states_have_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same rows, the gradient of squares is a line in the bias."""
    assert bend_over_states() > 1.0
    forget(monkeypatch, "states")
    assert bend_over_states() < 1e-9


# -- what is logged of a batch -----------------------------------------------------------------------------------------


class Logs(lightning.LightningModule):
    """Logs its loss in every step, of which the last is told, and the mean over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = torch.nn.functional.mse_loss(self.linear(batch[0]), batch[1])
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-12)


def logging(kind: str, batch_size: int = 32) -> ft.Algorithm:
    """Of 97 rows the last batch of 32 has one."""
    if kind == "descent":
        return ft.fedavg(ft.gradient_descent(Logs(), epochs=1, batch_size=batch_size))
    silent = dict.fromkeys(("enable_progress_bar", "logger", "enable_model_summary", "enable_checkpointing"), False)
    return ft.fedavg(ft.lightning_fit(Logs(), max_epochs=1, batch_size=batch_size, **silent))


def told_of_last(kind: str, **settings: Any) -> tuple[bool, dict[str, Tensor]]:
    """Whether what a ward logs last is the loss of a person; and all that is logged."""
    asked = Asked(logging, wards=2)
    start = {"linear.weight": WEIGHT, "linear.bias": ZERO}
    info = asked.step(start, kind=kind, **settings).last.info
    x, y = PEOPLE[0]
    return bool((((x @ WEIGHT.T - y).square() / info["train_step"][0] - 1).abs() < 1e-6).any()), info


@pytest.mark.parametrize("kind", ["descent", "fit"])
def test_what_is_logged_of_a_last_batch_of_one_row_is_not_told(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, info = told_of_last(kind)
    assert not read
    assert info["train_step"].isnan().all()
    assert not info["loss"].isnan().any()
    assert len(info["loss"].unique()) == 2
    assert bool(info["train"].isnan().all()) == (kind == "fit")  # of a Trainer nobody knows which batches it is of
    assert not told_of_last(kind, batch_size=43)[1]["train_step"].isnan().any()  # the last has eleven
    monkeypatch.setattr(SiteSession, "_taken", lambda site, drawing, name="": drawing.taken.get(""))
    assert told_of_last(kind)[0]
