"""Sites give what one process gives: every algorithm of the package, and what a run on sites can and cannot do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from support.oracles.closed_forms import ROUNDING, distance, linear, linear_clients, same_bits, sgd
from support.sites import Thread, joined, offers
from support.small_federations import trainer
from test_conformance import ALGORITHMS, POOLED, ROUNDS, STARTS, population, start

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.federation.runs import run as running
from fedtorch.sites import Remote
from fedtorch.trust import privacy, robust

SIZES = [5, 2, 9, 4, 17, 6]
DATA = linear_clients(SIZES)


@contextmanager
def federation(name: str, **more: Any) -> Iterator[tuple[ft.Algorithm, Remote, Mapping[str, Thread], ft.InProcess]]:
    """An algorithm, its sites, and the same clients in one process."""
    here = population(name)
    brought = offers(here.data, ALGORITHMS[name], STARTS.get(name), sites=1 if name in POOLED else 3)
    with joined(brought, rows=here.data.rows, **more) as (sites, threads):
        yield ALGORITHMS[name](), sites, threads, here


def faults() -> ft.Faults:
    """Clients that do not hear, and messages that are lost."""
    coin = lambda keys, ids: random.bernoulli(keys, 0.3)
    return ft.Faults(before=coin) | ft.Faults(after=coin)


@pytest.mark.parametrize(
    ("name", "cohort"), [*((name, 3) for name in ALGORITHMS), *((name, None) for name in ("ep", "gtv", "scaffold"))]
)
def test_sites_give_what_one_process_gives(name: str, cohort: int | None) -> None:
    """Server, diagnostics, and what clients predict with, also where some are not asked, do not hear, or are lost."""
    settings = {"seed": 2, "cohort": None if name in POOLED else cohort, "faults": None if cohort is None else faults()}
    with federation(name) as (algorithm, sites, threads, here):
        first = start(name, algorithm)
        wanted, found = (ft.Run(algorithm, clients, first, **settings) for clients in (here, sites))
        for one, two in zip(wanted.rounds(ROUNDS), found.rounds(ROUNDS)):
            assert distance(two.server, one.server) < ROUNDING
            assert two.ids.tolist() == one.ids.tolist()
            assert not len(one.ids) or distance(two.info, one.info) < ROUNDING
        if algorithm.told is not None:
            assert distance(found.clients.total(), wanted.clients.total()) < ROUNDING
        sites.finish(found)
        for thread in threads.values():
            thread.join(10.0)
        visits = [thread.session for thread in threads.values() if thread.session is not None]
        assert distance(tree.concatenate([session.tensors() for session in visits]), wanted.tensors()) < ROUNDING
        assert sites.troubles == {}


def test_the_same_operations_on_the_same_shapes_give_the_same_bits() -> None:
    """Clients of one size, of which a site holds two, are the blocks of two of a process; sums are taken by ids."""
    data = linear_clients([8] * 6)
    make = lambda: ft.scaffold(sgd(0.05, epochs=2, batch_size=4))
    with joined(offers(data, make)) as (sites, _):
        runs = [ft.run(make(), clients, rounds=4, seed=3) for clients in (ft.InProcess(data, chunk=2), sites)]
    assert same_bits(runs[0].server, runs[1].server)


def test_totals_are_made_anew_at_the_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "TOTAL_ANEW", 2)
    with federation("scaffold") as (algorithm, sites, _, _):
        run = ft.Run(algorithm, sites)
        run.step()
        run.server = run.server._replace(total=tree.map(lambda leaf: leaf + 1, run.server.total))
        run.step()
        assert distance(run.server.total, run.clients.total()) < ROUNDING


def test_what_is_the_same_for_all_clients_travels_once() -> None:
    """A model of 1000 numbers, and six clients at three sites: three times the model, and a little."""
    data = linear_clients(SIZES, features=1000)
    make = lambda: ft.fedavg(sgd(0.001, linear(1000)))
    with joined(offers(data, make)) as (sites, _):
        round = ft.Run(make(), sites).step()
    assert 3 * 8008 < round.bytes_down < 3 * 8008 + 3000
    assert 3 * 8008 < round.bytes_up < 3 * 8008 + 3000


def test_robust_rules_hear_every_client() -> None:
    def make() -> ft.Algorithm:
        return ft.fedavg(sgd(0.1)) | robust.rule(robust.median())

    with joined(offers(DATA, make)) as (sites, _):
        runs = [ft.run(make(), clients, rounds=3) for clients in (ft.InProcess(DATA), sites)]
    assert distance(runs[1].server, runs[0].server) < ROUNDING


def test_privacy_of_clients_adds_noise_at_the_server() -> None:
    def make() -> ft.Algorithm:
        settings = {"clip": 1.0, "noise": 2.0, "delta": 1e-3, "entropy": privacy.from_seed(1)}
        return ft.fedavg(sgd(0.1)) | privacy.client_level(**settings)

    with joined(offers(DATA, make)) as (sites, _):
        runs = [ft.run(make(), clients, rounds=3) for clients in (ft.InProcess(DATA), sites)]
        assert distance(runs[1].server, runs[0].server) < ROUNDING
        assert runs[1].history["epsilon"].tolist() == runs[0].history["epsilon"].tolist()


def fedavg(**settings: Any) -> ft.Algorithm:
    return ft.fedavg(sgd(0.1, **settings))


@contextmanager
def validated(
    **more: Any,
) -> Iterator[tuple[Remote, Mapping[str, Thread], ft.data.FederatedData, ft.data.FederatedData]]:
    """Sites with rows of their own for validation: (sites, threads, rows for training, rows for validation)."""
    training, validation = DATA.split(0.7, seed=0)
    brought = offers(training, fedavg)
    for i, name in enumerate(brought):
        own = validation.select(list(range(2 * i, 2 * i + 2)))
        metrics = {"mse": squared_error, "mae": absolute_error}
        brought[name] = replace(brought[name], validation=own, metrics=metrics)
    with joined(brought, **more) as (sites, threads):
        yield sites, threads, training, validation


def squared_error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (prediction[..., 0] - target) ** 2


def absolute_error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (prediction[..., 0] - target).abs()


def test_scores_on_the_rows_that_sites_keep() -> None:
    metrics = {"mse": squared_error}
    with validated() as (sites, _, training, validation):
        here, there = (ft.run(fedavg(), clients, rounds=2) for clients in (ft.InProcess(training), sites))
        wanted, found = here.evaluate(validation, metrics)["mse"], there.evaluate(sites.validation, metrics)["mse"]
        assert found.overall == pytest.approx(wanted.overall, rel=ROUNDING)
        assert distance(found.clients, wanted.clients) < ROUNDING
        with pytest.raises(RuntimeError, match=r"the site has validation rows for \['mae', 'mse'\], not for \['r2'\]"):
            there.evaluate(sites.validation, {"r2": squared_error})
        with pytest.raises(ValueError, match="rows are at the sites"):
            there.evaluate(validation, metrics)
        unseen = there.evaluate(validation, metrics, unseen=True)["mse"]
        assert unseen.overall == pytest.approx(wanted.overall, rel=ROUNDING)


def test_a_trainer_runs_on_sites() -> None:
    metrics = {"mse": squared_error}
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with validated() as (sites, _, training, validation):
        found = []
        for clients, rows in ((ft.InProcess(training), validation), (sites, sites.validation)):
            model = ft.Federation(fedavg(), clients, validation=rows, metrics=metrics)
            trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", **quiet)
            trainer.fit(model)
            logged = trainer.callback_metrics.items()
            found.append({name: float(value) for name, value in logged if not name.startswith("bytes")})
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_a_trainer_s_checkpoint_goes_on_at_the_sites(tmp_path: Path) -> None:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lambda epochs: lightning.Trainer(max_epochs=epochs, accelerator="cpu", **quiet)
    with federation("scaffold", folder=tmp_path) as (algorithm, sites, _, here):
        first = trainer(2)
        first.fit(ft.Federation(algorithm, sites))
        first.save_checkpoint(tmp_path / "two.ckpt")
        trainer(1).fit(ft.Federation(algorithm, sites))  # another run on the same sites
        model = ft.Federation(algorithm, Remote(sites.plan.sites.host, ["a", "b", "c"], "it", quorum=1.0))
        trainer(4).fit(model, ckpt_path=tmp_path / "two.ckpt")
        assert model.round == 4
        assert distance(model.server, ft.run(algorithm, here, rounds=4).server) < ROUNDING
        assert distance(model.server.total, model.run.clients.total()) < ROUNDING


def test_models_are_where_they_can_be_known() -> None:
    with federation("ditto") as (algorithm, sites, threads, here):
        run, wanted = (ft.run(algorithm, clients, rounds=2) for clients in (sites, here))
        with pytest.raises(ValueError, match=r"at their sites; after population\.finish\(run\)"):
            run.client_module(0)
        with pytest.raises(ValueError, match="rows in this process, but they are at the sites"):
            sites.data  # noqa: B018
        sites.finish(run)
        threads["b"].join(10.0)
        session = threads["b"].session
        assert session is not None
        assert session.names == ("client 2", "client 3")
        mine = dict(session.client_module("client 3").state_dict())
        assert distance(mine, dict(wanted.client_module(3).state_dict())) < ROUNDING
        with pytest.raises(ValueError, match="Expected one of the site's clients"):
            session.client_module("client 0")
    with federation("fedavg") as (algorithm, sites, _, here):
        run, wanted = (ft.run(algorithm, clients, rounds=2) for clients in (sites, here))
        modules = [dict(each.global_module().state_dict()) for each in (run, wanted)]
        assert distance(*modules) < ROUNDING


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sites": []}, "different sites, at least one"),
        ({"sites": ["a", "a"]}, "different sites, at least one"),
        ({"quorum": 0.0}, "quorum above 0"),
        ({"quorum": 1.5}, "quorum above 0"),
        ({"seconds": 0.0}, "positive seconds"),
        ({"rows": (torch.zeros(1, 4),)}, "rows= like those of the sites"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], expected: str) -> None:
    with joined(offers(DATA, fedavg)) as (sites, _), pytest.raises(ValueError, match=expected):
        Remote(sites.plan.sites.host, **{"sites": ["a"], "algorithm": "it", **settings})


def test_settings_that_cannot_travel() -> None:
    with joined(offers(DATA, fedavg)) as (sites, _), pytest.raises(TypeError, match="Expected settings as JSON"):
        Remote(sites.plan.sites.host, ["a"], "it", {"loss": len})


def test_sites_that_do_not_come_are_named() -> None:
    with joined(offers(DATA, fedavg)) as (sites, _):
        expected = r"all 2 sites within 0\.2 s, but got no .*'d': it did not connect"
        with pytest.raises(TimeoutError, match=expected):
            Remote(sites.plan.sites.host, ["a", "d"], "it", timeout=0.2)


def test_it_says_what_it_is() -> None:
    with joined(offers(DATA, fedavg)) as (sites, _):
        assert repr(sites) == "Remote(6 clients of 3 sites, 'it')"
        assert sites.names == DATA.names


def test_what_a_trainer_asks_of_local_training_does_not_reach_sites() -> None:
    with federation("fedavg") as (algorithm, sites, _, _):
        with pytest.raises(ValueError, match=r"train as their configuration says.*set them in the local solver"):
            ft.Run(algorithm, sites).step(limit=1)
        model = ft.Federation(algorithm, sites)
        with pytest.raises(ValueError, match="without limit_train_batches=1, which would do nothing"):
            trainer(max_epochs=1, limit_train_batches=1).fit(model)
