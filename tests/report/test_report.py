"""The report of a run: what it says, that nothing in it can do harm, and that it stays small."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import lightning as L
import matplotlib
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from support.small_federations import trainer

import fedtorch as ft
from fedtorch import checkpoint
from fedtorch.cli import main
from fedtorch.federation.algorithms import ep
from fedtorch.models import hierarchical
from fedtorch.models.gibbs import sparse
from fedtorch.plots.charts import Numbers, Series, chart
from fedtorch.plots.forests import Line, forest
from fedtorch.report import _pictures as pictures
from fedtorch.report._about import about, reduced
from fedtorch.report._page import visible
from fedtorch.report._pictures import picture
from fedtorch.report._posteriors import described
from fedtorch.report.folder import render
from fedtorch.trust import privacy, record

HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(2)'>",
    "' onload='alert(3)",
    "{{ 7 * 7 }}{% raw %}",
    "left\u202eright\u2066\x00\ud7ff",
    "</svg></style></title><iframe src=//example.org>",
    "javascript:alert(4)",
    "long" * 10_000,
)
OUTSIDE = "html head meta link title style body header nav a main section footer h1 h2 h3 p br b span bdi"
INSIDE = "dl dt dd div ul li table caption thead tbody tr th td details summary figure"
PICTURES = "svg desc defs g path text use clippath rect"
VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """A page's elements, and what each is named by."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def harmless(html: str) -> Page:
    """Parses a page that may hold nothing but its own elements, and fetch nothing."""
    page = Page(html)
    assert {tag for tag, _ in page.elements} <= {*OUTSIDE.split(), *INSIDE.split(), *PICTURES.split()}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))
    assert not [c for c in html if not c.isprintable() and c not in "\n\u200c\u200d"]
    assert "default-src 'none'" in html
    return page


def fitted(names: tuple[str, ...] = (), **settings: Any) -> ft.Run:
    data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=8, seed=0)
    data = dataclasses.replace(data, names=names) if names else data
    return ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1))), ft.InProcess(data), **{"rounds": 4, **settings})


def test_it_says_what_happened(tmp_path: Path) -> None:
    run = fitted(faults=ft.dropouts(0.5), cohort=6)
    page = harmless(ft.report.write(run, tmp_path / "new", title="Eight clinics").read_text())
    words = " ".join(page.texts)
    assert "Eight clinics" in words
    assert f"{run.history['train_loss'].iloc[-1]:,.0f}" in words
    missing = 24 - int(run.history["answered"].sum())
    assert missing > 0
    assert f"{missing} of 24" in words
    assert "the server's message lost" in words
    worst = run.client_losses.groupby("client")["train_loss"].last().nlargest(3)
    rows = [page.texts.index(name, page.texts.index("Largest last training loss")) for name in worst.index]
    assert rows == sorted(rows)


def test_pictures_have_words_and_numbers(tmp_path: Path) -> None:
    page = harmless(ft.report.write(fitted(), tmp_path).read_text())
    pictures = [a for tag, a in page.elements if tag == "svg"]
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(pictures) >= 4
    assert len(ids) == len(set(ids))
    for each in pictures:
        named = (each.get("aria-labelledby") or "").split() + (each.get("aria-describedby") or "").split()
        assert each["role"] == "img"
        assert len(named) == 2
        assert set(named) <= set(ids)
    assert [tag for tag, _ in page.elements].count("details") >= len(pictures)
    links = {a["href"] for tag, a in page.elements if tag == "a"}
    assert links <= {f"#{name}" for name in ids}
    parts = (
        {a[name] or "" for _, a in page.elements for name in ("href", "clip-path") if name in a} - links - {"data:,"}
    )
    assert parts
    assert {part.removeprefix("url(").strip("#)") for part in parts} <= set(ids)


def test_hostile_names_do_nothing(tmp_path: Path) -> None:
    run = fitted(HOSTILE)
    ring = ft.Network(ft.Network.ring(8).edges, names=HOSTILE)
    clients = torch.arange(8.0)
    clients[3] = torch.nan
    scores = {HOSTILE[0]: ft.Score(math.nan, clients, failed=clients.isnan())}
    path = ft.report.write(run, tmp_path, title=HOSTILE[5], ended=HOSTILE[1], scores=scores, network=ring)
    page = harmless(path.read_text())
    assert HOSTILE[0] in page.texts
    assert "clients 0 to 7, NaN of 1" in page.texts
    assert "left\\u202eright\\u2066\\u0000" in " ".join(page.texts)
    assert path.stat().st_size < 100_000
    known = json.loads((tmp_path / "about.json").read_text())
    known["settings"] = {HOSTILE[0]: HOSTILE[1]}
    row = {"name": HOSTILE[0], "mean": 0.5, "sd": 1.0, "low": 0.0, "high": 1.0, "rhat": 1.1, "ess": 10.0}
    trace = {"name": HOSTILE[1], "draw": [0, 1], "chains": [[0.0, 1.0]]}
    known["posteriors"] = [
        {"title": HOSTILE[2], "warnings": [HOSTILE[5]], "rows": [row], "components": 1, "traces": [trace]}
    ]
    known["privacy"] = {"epsilon": 1.0, "delta": 0.1, "budget": None, "claim": {HOSTILE[0]: HOSTILE[1]}}
    (tmp_path / "about.json").write_text(json.dumps(known))
    (tmp_path / f"{HOSTILE[2]}.safetensors.json").write_text(json.dumps(HOSTILE))
    assert "✗ failed:" in harmless(render(tmp_path).read_text()).texts


def test_names_are_shown_as_they_read() -> None:
    assert visible("Zürich – Spital 3") == "Zürich – Spital 3"
    assert visible("می\u200cخواهم") == "می\u200cخواهم"
    assert visible("a\u202eb\nc") == "a\\u202eb\\u000ac"
    assert len(visible("x" * 1000)) == 60


def test_ten_thousand_rounds_and_clients_fit_in_a_megabyte(tmp_path: Path) -> None:
    rounds = clients = 10_000
    draw = np.random.Generator(np.random.PCG64(0))
    columns = dict.fromkeys(("round", "asked", "answered"), np.arange(1.0, rounds + 1))
    columns |= dict.fromkeys(("lost_before", "late", "lost_after", "repeated", "refused"), draw.random(rounds).round())
    columns |= dict.fromkeys(("round_bytes_up", "round_bytes_down"), np.full(rounds, 1e5))
    for name in ("train_loss", "val_accuracy", "val_error"):
        for end in ("", "_min", "_q25", "_median", "_q75", "_max", "_mean", "_worst_decile"):
            columns[name + end] = draw.random(rounds)
    columns |= {f"logged {i}": draw.random(rounds) for i in range(40)}
    history = {
        "names": torch.tensor(list(json.dumps(list(columns)).encode()), dtype=torch.uint8),
        "values": torch.from_numpy(np.stack(list(columns.values()))),
        "seconds": torch.rand(rounds, dtype=torch.float64),
        "losses.rounds": torch.tensor([[rounds, clients]]),
        "losses.ids": torch.arange(clients, dtype=torch.int32),
        "losses.values": torch.rand(clients),
    }
    checkpoint.write(tmp_path / "history.safetensors", history)
    run = fitted()
    known = about(run) | {"clients": [f"client number {i} of a long name" for i in range(clients)]}
    known["scores"] = {"accuracy": {"overall": 0.5, "largest_is_best": True, "clients": draw.random(clients).tolist()}}
    places = draw.random((clients, 2))
    known["network"] = reduced(ft.Network.k_nearest(places, 6))
    row = {"mean": 0.5, "sd": 1.0, "low": 0.0, "high": 1.0, "rhat": 1.1, "ess": 10.0}
    rows = [{**row, "name": f"a variable of its own {i}"} for i in range(200)]
    traces = [{"name": "a", "draw": list(range(200)), "chains": draw.random((6, 200)).tolist()}] * 4
    found = {"title": "many", "warnings": [], "rows": rows, "components": 10**6, "traces": traces}
    known["posteriors"] = [found, found]
    (tmp_path / "about.json").write_text(json.dumps(known))
    path = render(tmp_path)
    assert 100_000 < path.stat().st_size < 1_000_000
    harmless(path.read_text())


def test_a_checkpoint_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = fitted()
    run.save(tmp_path / "run.safetensors")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    page = harmless((tmp_path / "page.html").read_text())
    assert "fedavg" in page.texts
    pictures = lambda folder: [mark for tag, mark in Page((folder).read_text()).elements if tag == "path"]
    assert pictures(tmp_path / "page.html") == pictures(ft.report.write(run, tmp_path / "whole"))


def test_a_trainers_checkpoint_is_enough(tmp_path: Path) -> None:
    data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=3, seed=0)
    federation = ft.Federation(ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1))), ft.InProcess(data))
    outer = trainer(max_epochs=2)
    outer.fit(federation)
    outer.save_checkpoint(tmp_path / "deep.ckpt")
    assert "Training loss" in harmless(render(tmp_path).read_text()).texts


def test_folders_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert f"Expected a run in {tmp_path}" in capsys.readouterr().err
    (tmp_path / "x.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="Expected a safetensors file"):
        render(tmp_path)
    ft.report.write(fitted(), tmp_path)
    for odd in ({"scores": 3}, {"format": 2}, {"clients": 5}, {"network": {"places": "x"}}):
        text = (tmp_path / "about.json").read_text()
        (tmp_path / "about.json").write_text(json.dumps(json.loads(text) | odd))
        with pytest.raises(ValueError, match="Expected files of ft"):
            render(tmp_path)
        (tmp_path / "about.json").write_text(text)


def test_a_run_without_rounds(tmp_path: Path) -> None:
    run = ft.Run(
        ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1))),
        ft.InProcess(ft.data.from_tensors([(torch.ones(1, 2), torch.ones(1))])),
    )
    harmless(ft.report.write(run, tmp_path).read_text())


def test_the_record_is_verified(tmp_path: Path) -> None:
    ledger = record.RunRecord()
    run = fitted(record=ledger)
    written = ledger.save(run, tmp_path / "run.safetensors")
    assert "the record is as it was written" in harmless(ft.report.write(run, tmp_path).read_text()).texts
    written.write_text(written.read_text().replace('"up": ', '"up": 1'))
    assert "✗ failed:" in harmless(render(tmp_path).read_text()).texts


def test_a_trainer_writes_it(tmp_path: Path) -> None:
    data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=3, seed=0)
    training, validation = data.split(0.5, seed=0)
    error = {"error": torch.nn.functional.mse_loss}
    local = ft.least_squares(ft.LinearHead(10))
    federation = ft.Federation(ft.fedavg(local), ft.InProcess(training), validation=validation, metrics=error)
    callback = ft.Report(tmp_path)
    trainer(max_epochs=2, callbacks=callback).fit(federation)
    assert callback.page == tmp_path / "report.html"
    words = " ".join(harmless(callback.page.read_text()).texts)
    scores = sorted(federation.scores["val_error"].clients.tolist(), reverse=True)
    where = [words.index(f"{score:,.0f}", words.index("Worst validation error")) for score in scores]
    assert where == sorted(where)
    score = federation.scores["val_error"]._replace(largest_is_best=None)
    ft.report.write(federation.run, tmp_path, scores={"val_error": score})
    assert "Highest validation error" in Page(callback.page.read_text()).texts


def refreshes(html: str) -> bool:
    """Whether a browser that shows a page reads it again and again."""
    return ("meta", {"http-equiv": "refresh", "content": "10"}) in harmless(html).elements


def test_a_page_refreshes_while_its_run_goes_on(tmp_path: Path) -> None:
    data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=3, seed=0)
    run, pages = ft.Run(ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1))), ft.InProcess(data)), list[str]()
    for _ in run.rounds(3):
        pages.append(ft.report.write(run, tmp_path).read_text())
    assert [refreshes(page) for page in pages] == [True, True, False]
    assert "of 3, still running" in harmless(pages[0]).texts
    assert "of 3, still running" not in harmless(pages[2]).texts
    next(run.rounds(9))
    assert not refreshes(ft.report.write(run, tmp_path, ended="somebody pulled the plug").read_text())


def test_a_trainer_writes_it_while_training_goes_on(tmp_path: Path) -> None:
    data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=3, seed=0)
    pages = list[str]()

    class Reads(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            pages.append((tmp_path / "report.html").read_text())

    for every, seen in ((1e-9, 3), (1e9, 1)):
        pages.clear()
        federation = ft.Federation(ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1))), ft.InProcess(data))
        trainer(max_epochs=3, callbacks=[ft.Report(tmp_path, every=every), Reads()]).fit(federation)
        assert len(set(pages)) == seen
        assert refreshes(pages[0])
        assert not refreshes((tmp_path / "report.html").read_text())
    with pytest.raises(ValueError, match="positive every, but got 0"):
        ft.Report(tmp_path, every=0.0)


def test_it_is_written_where_training_fails(tmp_path: Path) -> None:
    data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=3, seed=0)
    federation = ft.Federation(ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1))), ft.InProcess(data))

    class Fails(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            raise RuntimeError("no more paper")

    callback = ft.Report()
    with pytest.raises(RuntimeError):
        trainer(max_epochs=2, callbacks=[callback, Fails()], default_root_dir=tmp_path).fit(federation)
    assert "ended by RuntimeError: no more paper" in harmless((tmp_path / "report.html").read_text()).texts
    with pytest.raises(TypeError, match="Expected a Federation or a SplitNetwork to report on"):
        trainer(max_epochs=1, callbacks=ft.Report()).fit(BoringModel())


def test_diagnostics_are_arviz_s(tmp_path: Path) -> None:
    x = ft.random.normal(ft.random.key(0), (2, 30, 2))
    data = ft.data.from_tensors([(x[k], x[k, :, 0]) for k in range(2)])
    stored, moments = ft.Sampler(burn_in=5), ft.Sampler(burn_in=5, keep=False)
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2, chains=3)
    run = ft.run(algorithm, ft.InProcess(data), torch.zeros(2), rounds=25, record=[stored, moments])
    full, brief = described(run)
    table = stored.summary()
    assert full["components"] == len(full["rows"]) == brief["components"] == len(table)
    draws = torch.cat([leaf.reshape(60, -1) for leaf in stored.draws().values()], -1)
    for i, (row, short) in enumerate(zip(full["rows"], brief["rows"])):
        theirs = table.loc[row["name"]]
        assert row["mean"] == pytest.approx(theirs["mean"], rel=1e-12, abs=1e-14)
        assert short["sd"] == pytest.approx(float(draws[:, i].std()), rel=1e-9, abs=1e-12)
        for ours, name in (("rhat", "r_hat"), ("ess", "ess_bulk")):
            assert row[ours] == pytest.approx(theirs[name], rel=1e-12, nan_ok=True)
    words = " ".join(harmless(ft.report.write(run, tmp_path).read_text()).texts)
    assert "20 draws of each of 3 chains" in words
    assert f"R-hat at most {max(r['rhat'] for r in full['rows'] if not math.isnan(r['rhat'])):.4g}" in words


def test_report_has_disclosed_sentences_in_full(tmp_path: Path) -> None:
    data = ft.data.from_tensors([(torch.eye(2), torch.ones(2))] * 3)
    run = ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1))), ft.InProcess(data), rounds=1)
    words = " ".join(harmless(ft.report.write(run, tmp_path).read_text()).texts)
    for sentence in run.disclosure()["learns"]:
        assert sentence in words


def test_report_of_expectation_propagation(tmp_path: Path) -> None:
    x = torch.ones(20, 1, dtype=torch.float64)
    data = ft.data.from_tensors([(x, x[:, 0] * level) for level in (1.0, 2.0, 3.0, 2.0) * 4])
    run = ft.run(ft.ep(hierarchical.linear(hierarchical.normal(1), noise=0.1)), ft.InProcess(data), rounds=2)
    (shared,) = described(run)
    assert "Not converged after 2 rounds" in shared["warnings"][0]
    list(run.rounds(50, until=ep.settled()))
    (shared,) = described(run)
    q = ep.posterior(run)
    assert shared["warnings"] == []
    level, spread = shared["rows"]
    assert (level["name"], level["mean"]) == ("0", float(q.mean[0]))
    assert level["high"] == pytest.approx(float(q.mean[0] + 1.96 * q.variance[0].sqrt()), abs=1e-4)
    assert spread["name"] == "sd(0)"
    assert spread["low"] < float((q.mean[1] / 2).exp()) < spread["high"]
    words = " ".join(harmless(ft.report.write(run, tmp_path).read_text()).texts)
    assert "What all clients share, by expectation propagation." in words
    assert f"Settled after {run.number} rounds" in words
    assert "Mean change" not in words  # no raw curve


def test_privacy_is_shown_with_its_claim(tmp_path: Path) -> None:
    data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=8, seed=0)
    local = ft.least_squares(torch.nn.Linear(10, 1))
    private = ft.fedavg(local) | privacy.client_level(clip=1.0, noise=2.0, delta=1e-3, budget=50.0)
    run = ft.run(private, ft.InProcess(data), rounds=3)
    words = " ".join(harmless(ft.report.write(run, tmp_path).read_text()).texts)
    assert "Privacy spent, ε" in words
    assert f"{run.history['epsilon'].iloc[-1]:.4g}" in words
    assert private.budget.ledger.claim.adversary[:50] in words


def lines(drawn: str) -> list[Numbers]:
    """The points of the thick lines of a picture, each `(n, 2)`."""
    marks = [part for part in ElementTree.fromstring(drawn).iter("path") if "var(--c1)" in part.get("style", "")]
    paths = [part.attrib["d"].strip()[1:].split("L") for part in marks if "none" in part.attrib["style"]]
    return [np.array([point.split() for point in path], dtype=float) for path in paths]


def test_a_chart_keeps_its_extremes_and_few_points() -> None:
    y = np.sin(np.arange(100_000) / 5000)
    y[77_123], y[12_345] = 9.0, -8.0
    y[5000:6000] = np.nan
    described = chart("a wave", "t", np.arange(100_000.0), [Series("wave", y)])
    assert described is not None
    made = picture(described, "wave")
    [points] = lines(made.svg)
    assert len(points) <= 4 * 180
    assert points[0, 0] < points[-1, 0] <= pictures.WIDTH
    spread = points[:, 1].max() - points[:, 1].min()
    high = (pictures.HEIGHT - 50) * 17 / (described.y_range[1] - described.y_range[0])  # of 50 pixels of margins
    assert spread == pytest.approx(high, abs=0.2)  # places are rounded to 0.1
    assert 0 < points[:, 1].min() < points[:, 1].max() < pictures.HEIGHT
    assert "highest 9 at 77,123" in made.svg
    assert chart("nothing", "t", np.arange(2.0), [Series("none", np.full(2, np.nan))]) is None


def test_positive_numbers_over_decades_are_logarithmic() -> None:
    x = np.arange(1.0, 7.0)
    described = chart("falls", "t", x, [Series("change", 10.0**-x)])
    assert described is not None
    made = picture(described, "falls")
    assert made.remark == "(logarithmic)"
    [points] = lines(made.svg)
    assert np.diff(points[:, 1]) == pytest.approx(np.full(5, np.diff(points[:, 1]).mean()), abs=0.21)
    one = chart("a point", "t", np.ones(1), [Series("change", np.ones(1))])
    assert one is not None
    assert "<use" in picture(one, "one").svg


def test_names_of_sites_are_letters_in_pictures() -> None:
    names = ["$\\bad$", "<script>", "a&b", "中文"]
    made = forest("Level", "", [Line(name, -1.0, float(k), 5.0) for k, name in enumerate(names)], zero=0.0)
    assert made is not None
    drawn = picture(made, "level").svg
    assert drawn == picture(made, "level").svg
    texts = [part.text for part in ElementTree.fromstring(drawn).iter("text")]
    assert [text for text in texts if text in names] == names
    ids = re.findall(r'id="([^"]*)"', drawn)
    assert len(ids) == len(set(ids))
    assert all(id.startswith("level-") for id in ids)
    assert "metadata" not in drawn


def test_pictures_neither_heed_nor_change_the_settings_of_figures() -> None:
    described = chart("a point", "t", np.ones(1), [Series("change", np.ones(1))])
    assert described is not None
    before = picture(described, "a").svg
    with matplotlib.rc_context({"lines.linewidth": 9.0, "font.size": 30.0, "svg.fonttype": "path", "axes.grid": True}):
        inside = dict(matplotlib.rcParams)
        assert picture(described, "a").svg == before
        assert dict(matplotlib.rcParams) == inside


def test_thirty_charts_are_small() -> None:
    draw = np.random.Generator(np.random.PCG64(0))
    x, low, high = np.arange(10_000.0), draw.random(10_000) - 1, draw.random(10_000)
    series = [Series("band", high, low=low), *(Series(f"line {i}", draw.random(10_000), i) for i in range(3))]
    described = chart("much", "t", x, series)
    assert described is not None
    assert len(picture(described, "much").svg.encode()) < 50_000  # 1.5 MB of thirty


@pytest.mark.parametrize("nodes", [1, 50, 3000])
def test_a_drawing_of_a_network(nodes: int) -> None:
    network = ft.Network.ring(nodes) if nodes > 1 else ft.Network(torch.empty(0, 2, dtype=torch.int64), nodes=1)
    plain = reduced(network)
    assert json.loads(json.dumps(plain)) == plain
    shown = pictures.network(plain, network.names, [math.nan, *range(nodes - 1)], "graph")
    drawn = ElementTree.fromstring(shown.svg)
    circles = list(drawn.iter("use"))
    assert len(circles) == min(nodes, 1200)
    assert all(0 <= float(node.attrib[side]) <= 440 for node in circles for side in "xy")
    shades = [re.findall(r"fill: var\(--(\w+)\)", node.attrib["style"])[0] for node in circles]
    assert shades[0] == ("soft" if nodes > 1 else "s2")
    assert bool(shown.note) == (nodes == 3000)
    assert dict(shown.rows)["nodes"] == f"{nodes:,}"
    if nodes == 50:
        assert [node.findtext("title") for node in circles] == list(network.names)
        [edges] = [part for part in drawn.iter("path") if "stroke-opacity" in part.get("style", "")]
        assert edges.attrib["d"].count("M") == 50
        assert shades[1:] == sorted(shades[1:])
        assert len(shown.legend) == 1 + len(set(shades[1:])) == 6


def test_given_places_are_kept() -> None:
    places = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
    plain = reduced(ft.Network([[0, 1], [1, 2]], positions=places))
    assert plain is not None
    assert plain["places"] == [[0.0, 0.0], [1.0, 0.0], [0.0, 0.5]]
