"""Whatever may take long says how far it is, in one way, and is quiet when told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, TQDMProgressBar
from support.oracles.closed_forms import linear_clients
from support.small_federations import trainer
from support.verticals import GUIDES, some_model

import fedtorch as ft
from fedtorch import progress, vfl
from fedtorch.data.download import download
from fedtorch.models import hierarchical
from fedtorch.models.gibbs import sparse
from fedtorch.networks import discrepancy, learning, solvers
from fedtorch.trust import privacy
from fedtorch.trust.attacks import _search
from fedtorch.vfl.fit.soul import soul
from fedtorch.vfl.rows import alignment

DATA = linear_clients([5, 9, 14])
KEY = ft.random.key(0)


def federation() -> ft.Federation:
    width = DATA.rows[0].shape[1]
    return ft.Federation(ft.fedavg(ft.least_squares(torch.nn.Linear(width, 1).double())), ft.InProcess(DATA))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all that takes any time took long."""
    monkeypatch.setattr(progress, "_SHORT", 0.0)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)


def averaged(**settings: Any) -> None:
    ft.run(ft.fedavg(ft.least_squares(ft.LinearHead(3))), ft.InProcess(DATA), rounds=2, **settings)


def propagated(**settings: Any) -> None:
    x = torch.ones(20, 1, dtype=torch.float64)
    data = ft.data.from_tensors([(x, x[:, 0] * level) for level in (1.0, 2.0, 3.0)])
    ft.run(ft.ep(hierarchical.linear(hierarchical.normal(1), noise=0.1)), ft.InProcess(data), rounds=2, **settings)


def sampled(**settings: Any) -> None:
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy())
    ft.run(algorithm, ft.InProcess(DATA), torch.zeros(3), rounds=2, **settings)


def searched(**settings: Any) -> None:
    build = lambda mu: ft.fedprox(ft.least_squares(ft.LinearHead(3).double()), mu)
    rest = {"validation": 0.5, "metric": torch.nn.functional.mse_loss, "largest_is_best": False, "rounds": 2}
    ft.grid(build, {"mu": [0.0, 1.0]}, ft.InProcess(DATA), **rest, **settings)


def varied(**settings: Any) -> None:
    model, data = some_model("augmented", "gaussian")
    vfl.sfvi(model, GUIDES["mean field"](), data, steps=2, size=2, **settings)


def chained(**settings: Any) -> None:
    model, data = some_model("augmented", "gaussian")
    soul(model, data, key=KEY, steps=2, step=1e-4, rate=lambda step: 1e-3, keep=2, **settings)


PLACES = {
    "fedavg": averaged,
    "ep": propagated,
    "gibbs": sampled,
    "2 settings": searched,
    "SFVI": varied,
    "Langevin chains": chained,
}


@pytest.mark.parametrize("title", PLACES)
def test_what_takes_an_argument(title: str, at_once: None, capsys: pytest.CaptureFixture[str]) -> None:
    PLACES[title]()
    said = capsys.readouterr()
    assert said.err.startswith(title)
    assert said.out == ""
    assert " of " in said.err
    PLACES[title](progress=False)
    assert capsys.readouterr().err == ""


def solved() -> None:
    problem = solvers.linear_problem(DATA, ft.Network.ring(3), 1.0)
    solvers.fedgd(problem, rounds=30)


def inverted() -> None:
    _search.descended(lambda x: x.square().sum(), torch.ones(2), 5)


PLACES_OF_NODES = torch.arange(8.0)[:, None]
OTHERS: dict[str, Callable[[], object]] = {
    "GTV minimisation": solved,
    "Learning the network": lambda: learning.regular(torch.cdist(PLACES_OF_NODES, PLACES_OF_NODES), 4, projected=True),
    "Representing the nodes": lambda: discrepancy.maximum_likelihood(DATA),
    "Blinding identifiers": lambda: alignment.intersect({"clinic": ["a", "b"], "lab": ["b", "c"]}, "clinic"),
    "Audit": lambda: privacy.audit(
        partial(privacy.example_level, clip=1.0, noise=3.0, sampling_rate=1.0, steps=1, delta=1e-5),
        runs=20,
        choosing=10,
        block=20,
    ),
    "Inversion": inverted,
}


@pytest.mark.parametrize("title", OTHERS)
def test_what_takes_none(title: str, at_once: None, capsys: pytest.CaptureFixture[str]) -> None:
    OTHERS[title]()
    assert {line.split(":")[0] for line in capsys.readouterr().err.splitlines()} == {title}
    with progress.quiet():
        OTHERS[title]()
    assert capsys.readouterr().err == ""


@pytest.fixture
def address() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "3000000")
            self.end_headers()
            self.wfile.write(bytes(3_000_000))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=partial(server.serve_forever, 0.01)).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def test_downloads(
    address: str,
    tmp_path: Path,
    at_once: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    with pytest.raises(ValueError, match="another sha256"):
        download(address, tmp_path / "rows.csv", ("0" * 64,))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("rows.csv: 0.")
    assert lines[-1].startswith("rows.csv: 3.0 of 3.0 MB in ")


@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_steps": 3, "max_epochs": -1}])
def test_a_trainer_counts_rounds(length: dict, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(callbacks=ft.RoundProgressBar("FedAvg"), enable_progress_bar=True, **length).fit(federation())
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("FedAvg")]
    assert "3 of 3 rounds" in line
    assert "train_loss" in line


def test_lightnings_own_bar_makes_place(capsys: pytest.CaptureFixture[str]) -> None:
    outer = trainer(max_epochs=30, enable_progress_bar=True, enable_model_summary=True)
    outer.fit(federation())
    said = capsys.readouterr()
    assert "\r" not in said.out + said.err
    assert sum("rounds in" in line for line in said.err.splitlines()) == 1
    assert isinstance(outer.progress_bar_callback, ft.RoundProgressBar)
    assert not any(isinstance(each, ModelSummary) for each in outer.callbacks)  # of a module without parameters

    class Own(TQDMProgressBar):
        pass

    own = trainer(max_epochs=1, callbacks=Own(), enable_progress_bar=True)
    own.fit(federation())
    assert isinstance(own.progress_bar_callback, Own)


def test_an_error_closes_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    class Stops(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 1:
                raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        trainer(max_epochs=3, callbacks=[ft.RoundProgressBar(), Stops()], enable_progress_bar=True).fit(federation())
    assert "2 of 3 rounds" in capsys.readouterr().err
    with progress.Progress("After", always=True) as after:
        after.update()
    assert "After: 1" in capsys.readouterr().err


def test_a_disabled_bar_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ft.RoundProgressBar()
    bar.disable()
    trainer(max_epochs=2, callbacks=bar, enable_progress_bar=True).fit(federation())
    assert "rounds in" not in capsys.readouterr().err
