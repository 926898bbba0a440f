"""Vertical fits answer to the verbs of `ft.Run`: rounds, history, save, load, evaluate, report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import splits
from support.verticals import (
    GUIDES,
    ROWS,
    SD,
    gaussian_data,
    logistic_data,
    nodes,
    noises,
    predictors,
    some_model,
    some_parameters,
)
from torch import Tensor

import fedtorch as ft
from fedtorch import tree, vfl
from fedtorch.learns import UNDECLARED
from fedtorch.report.folder import read
from fedtorch.sites.vertical import FederatedParty
from fedtorch.vfl.fit.part import parts
from fedtorch.vfl.fit.run import VerticalRun
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.nodes.node import Iteration
from fedtorch.vfl.rows.data import VerticalData

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def variational(guide: str = "sums, joint", **settings: Any) -> vfl.VariationalFit:
    model = vfl.augmented(likelihoods.gaussian(SD), predictors(), torch.tensor([0.5, 1.0]))
    settings = {"steps": 12, "draws": 2, "size": 2, "every": 5, "batch_size": 7} | settings
    return vfl.VariationalFit(model, GUIDES[guide](), gaussian_data(rows=12), **settings)


def among_nodes() -> vfl.NodesRun:
    active = lambda number: Iteration(step=number, active=[True, number % 2 == 0, True] if number else None)
    network = splits.CASES["dropout"]()
    return vfl.NodesRun(*network.nodes(splits.data(), splits.SGD), iteration=active)


def networks() -> vfl.VariationalFit:
    network, rows = splits.CASES["sums"](), splits.data()._replace(weight=None)
    return vfl.VariationalFit(network.model, network.server.guide, rows, steps=12, size=splits.B)


FITS: dict[str, Callable[[], VerticalRun]] = {
    "one graph": variational,
    "one graph, captured": lambda: variational("mean field", compile=True),
    "one graph, networks": networks,
    "nodes": among_nodes,
}


def state(fit: VerticalRun) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in fit.state_dict().items() if name != "history.seconds"}


@pytest.mark.parametrize("name", FITS)
def test_a_fit_that_is_loaded_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = FITS[name]()
    assert [round.number for round in whole.rounds(12)] == list(range(1, 13))
    begun = FITS[name]()
    for _ in begun.rounds(4):
        pass
    begun.save(tmp_path / "fit.safetensors")
    later = FITS[name]()
    for _ in later.rounds(2):  # of which nothing remains
        pass
    later.load(tmp_path / "fit.safetensors")
    assert later.number == 4
    for _ in later.rounds(12):
        pass
    wanted, found = state(whole), state(later)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key].nan_to_num(), found[key].nan_to_num()) for key in wanted)
    assert later.history.drop(columns="seconds").equals(whole.history.drop(columns="seconds"))


def test_sfvi_is_the_fit_with_all_its_rounds() -> None:
    fit = variational()
    for _ in fit.rounds(12):
        pass
    settings = {"steps": 12, "draws": 2, "size": 2, "every": 5, "batch_size": 7}
    done = vfl.sfvi(fit.model, GUIDES["sums, joint"](), gaussian_data(rows=12), **settings)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(done.parameters), tree.leaves(fit.parameters)))
    assert torch.equal(done.bounds, fit.bounds)
    assert done.bounds.shape == (3, 2)
    losses = torch.tensor(done.history["train_loss"].to_numpy())
    torch.testing.assert_close(losses[:5].mean(), -fit.bounds[0].mean(), rtol=1e-12, atol=0)


def test_a_history_ends_a_fit() -> None:
    fit = variational()
    assert [round.number for round in fit.rounds(until=lambda history: len(history) == 3)] == [1, 2, 3]


def test_a_history_counts_parties_and_bytes() -> None:
    fit = among_nodes()
    rounds = list(fit.rounds(3))
    assert [round.ids.tolist() for round in rounds] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    table = fit.history
    assert table["answered"].tolist() == [3, 2, 3]
    assert 1.5 * table["round_bytes_up"][1] == table["round_bytes_up"][0] == table["round_bytes_up"][2]
    assert int(table["bytes_up"].iloc[-1]) == fit.bytes_up
    assert torch.isfinite(torch.tensor(table["train_loss"].to_numpy())).all()


def test_evaluation_is_that_of_the_predictive_mean() -> None:
    data = logistic_data([2, 1], 30)
    model = vfl.augmented(likelihoods.bernoulli(), predictors([2, 1]), torch.tensor([0.5, 1.0]))
    fit = vfl.sfvi(model, vfl.Guide(vfl.sums()), data, steps=30, lr=0.1, size=2)
    metrics = {"accuracy": ft.metrics.accuracy(), "cross entropy": ft.metrics.cross_entropy()}
    held = data._replace(weight=torch.arange(30.0).remainder(2))
    for rows, counts in ((data, torch.ones(30).bool()), (held, held.weight > 0)):
        found = fit.evaluate(rows, metrics)
        mean = fit.predict(data.features).double()[:, counts]
        right = (mean > 0.5) == (data.response[counts] > 0.5)
        torch.testing.assert_close(found["accuracy"].clients, right.double().mean(1))
        bits = torch.nn.functional.binary_cross_entropy(mean, data.response[counts].double().expand(2, -1))
        assert found["cross entropy"].overall == pytest.approx(float(bits), rel=1e-9)


def test_predictions_in_one_graph_are_the_models() -> None:
    """By simulation from q(θ) and the model's noise; of classes, a network's scores are those of its own prediction."""
    fit = variational(steps=2)
    list(fit.rounds(2))
    data = gaussian_data(rows=12)
    exact = torch.stack([x @ t.mean(1).mT for x, t in zip(data.features, fit.sample(20_000)[1:])]).sum(0)[..., 0]
    exact = exact + fit.sample(20_000)[0][..., :1].mean(1)
    found = fit.predict(data.features, draws=20_000)
    assert (found - exact).abs().max() < 5 * (2 * 3) ** 0.5 / 20_000**0.5
    network = splits.CASES["amortised"]()
    rows = splits.data()
    fit = vfl.NodesRun(*network.nodes(rows))
    scores = fit.evaluate(rows, {"accuracy": ft.metrics.accuracy()}, draws=10)
    assert torch.equal(fit.predict(rows, draws=10), fit.predict(rows.features, draws=10))
    chosen = network.predict(rows.features, draws=10).argmax(1)
    counts = rows.weight > 0
    right = ((chosen == rows.response) & counts).double().sum(1) / counts.double().sum(1)
    torch.testing.assert_close(scores["accuracy"].clients, right)


def test_a_trainer_writes_the_report_of_a_split_network(tmp_path: Path) -> None:
    network, rows = splits.CASES["amortised"](), splits.data()
    callback = ft.Report(tmp_path, title="Two clinics")
    trainer = L.Trainer(max_epochs=3, callbacks=callback, accelerator="cpu", **QUIET)
    loader = vfl.VerticalLoader(rows, row_dims=network.model.row_dims)
    trainer.fit(network, loader, loader)
    assert network.run.number == 3
    assert {"train_loss", "val_loss"} <= set(network.run.history)
    assert callback.page is not None
    assert "Two clinics" in callback.page.read_text()
    assert read(tmp_path).table["train_loss"].notna().all()
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = splits.CASES["amortised"]()
    L.Trainer(max_epochs=4, accelerator="cpu", **QUIET).fit(again, loader, loader, ckpt_path=tmp_path / "last.ckpt")
    assert again.run.history["round"].tolist() == [1, 2, 3, 4]
    network.run.save(tmp_path / "run.safetensors")
    fresh = splits.CASES["amortised"]()
    fresh.run.load(tmp_path / "run.safetensors")
    assert splits.distance(fresh, network) == 0


def test_report_of_a_variational_fit_has_its_posterior(tmp_path: Path) -> None:
    fit = variational()
    list(fit.rounds(12))
    page = ft.report.write(fit, tmp_path).read_text()
    assert "q(γ, θ) of variational inference, element 1" in page
    assert "θ_2[0]" in page
    assert read(tmp_path).about["clients"] == ["party 0", "party 1", "party 2"]


def by_the_clock() -> vfl.NodesRun:
    return vfl.NodesRun(*splits.CASES["plain"]().nodes(splits.data()), delays=lambda party, number: 2 * (party == 1))


def of_sites() -> vfl.NodesRun:
    """A party whose rows are at two sites."""
    data = VerticalData((torch.ones(4, 1), torch.ones(4, 2)), torch.tensor([0.0, 1.0, 1.0, 1.0]))
    bottoms = [torch.nn.Linear(1, 1), torch.nn.Linear(2, 1)]
    server, (one, other) = vfl.SplitNetwork(bottoms, likelihoods.bernoulli()).nodes(data)
    rows = [(torch.ones(3, 2), torch.tensor([2, 0, 3])), (torch.ones(1, 2), torch.tensor([1]))]
    sites = ft.InProcess(ft.data.from_tensors(rows, ["north", "south"]))
    known = other.data._replace(features=())
    return vfl.NodesRun(server, [one, FederatedParty(other.part, known, sites, per_row=other.per_row)])


def variational_nodes(name: str, guide: str, shared: bool) -> vfl.NodesRun:
    model, data = some_model(name, "bernoulli")
    family = GUIDES[guide]()
    server, parties = nodes(model, family, some_parameters(model, family, data), data, shared)
    given = noises(model, family, ROWS, 4)
    return vfl.NodesRun(server, parties, iteration=lambda number: Iteration(given[number], 0.05))


UP, DOWN = "a party", "the server"
DISCLOSED: dict[str, tuple[Callable[[], vfl.NodesRun], set[tuple[str, str, str]]]] = {
    "idle parties": (among_nodes, {("Summand", "value", UP), ("Gradient", "gradient", DOWN)}),
    "by the clock": (
        by_the_clock,
        {("Summand", "value", UP), ("Gradient", "gradient", DOWN), ("More", "more", DOWN)},
    ),
    "a party of sites": (of_sites, {("Summand", "value", UP), ("Gradient", "gradient", DOWN)}),
    "response shared": (
        lambda: variational_nodes("augmented", "amortised", True),
        {("Summand", "value", UP), ("Share", "predictor", DOWN), ("Share", "shared", DOWN)},
    ),
    "sums": (
        lambda: variational_nodes("augmented", "sums", False),
        {("Summand", "value", UP), ("Gradient", "gradient", DOWN)},
    ),
    "power": (
        lambda: variational_nodes("power", "mean field", True),
        {
            *(("Value", "value", UP), ("Share", "predictor", DOWN), ("Share", "shared", DOWN)),
            *(("Share", "predictor", UP), ("Share", "shared", UP), ("Gradient", "gradient", DOWN)),
        },
    ),
}


@pytest.mark.parametrize("name", DISCLOSED)
def test_disclosure_leaves_the_fit_unchanged(name: str) -> None:
    """Before the first iteration and between two, also while parties wait."""
    make, leaves = DISCLOSED[name]
    told, plain = make(), make()
    for _ in range(3):
        table = told.disclosure()
        assert set(zip(table["message"], table["field"], table["of"])) == leaves
        assert set(table["learns"]).isdisjoint({UNDECLARED.worst})
        told.step()
        plain.step()
    ours, theirs = state(told), state(plain)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key].nan_to_num(), theirs[key].nan_to_num()) for key in ours)
    assert set(told.disclosure(brief=True)["message"]) == set(table["message"])


def test_report_of_nodes_has_the_disclosure(tmp_path: Path) -> None:
    fit = among_nodes()
    list(fit.rounds(2))
    ft.report.write(fit, tmp_path)
    header, *rows = read(tmp_path).about["disclosure"]
    assert [row[header.index("message")] for row in rows] == ["Summand", "Gradient"]


def test_refusals(tmp_path: Path) -> None:
    fit = variational()
    with pytest.raises(ValueError, match="rounds= or until="):
        fit.rounds()
    list(fit.rounds(12))
    with pytest.raises(ValueError, match="at most 12 steps"):
        fit.step()
    fit.save(tmp_path / "fit")
    with pytest.raises(ValueError, match=r"with lr 0\.5, but got one with 0\.01; pass anyway=True"):
        variational(lr=0.5).load(tmp_path / "fit")
    assert variational(lr=0.5).load(tmp_path / "fit", anyway=True).number == 12
    ft.checkpoint.write(tmp_path / "other", {"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="Expected a checkpoint of a vertical fit"):
        fit.load(tmp_path / "other")
    with pytest.raises(TypeError, match="Expected a Trainer to do the iterations"):
        splits.CASES["plain"]().run.step()
    model, data = fit.model, gaussian_data(rows=12)
    holders = parts(model, vfl.Guide(vfl.sums()), variational("sums").parameters)
    parties = [vfl.nodes.node.PartyNode(part, own) for part, own in zip(holders[1:], data.known_to_parties(False))]
    unkeyed = vfl.NodesRun(vfl.nodes.node.ServerNode(holders[0], data.known_to_server()), parties)
    with pytest.raises(ValueError, match=r"give vfl\.parts\(\.\.\., key=\)"):
        unkeyed.predict(data.features)
