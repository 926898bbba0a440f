"""Figures show the numbers of the history and of the data, and can be drawn."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from support.oracles.closed_forms import linear_clients, sgd
from support.small_federations import classes, solver, trainer

import fedtorch as ft
from fedtorch.federation.runs.search.tuning import GridSearch
from fedtorch.history import History
from fedtorch.models import low_rank
from fedtorch.plots import history_charts
from fedtorch.plots.grids import heat_map
from fedtorch.plots.runs import groups
from fedtorch.report._pictures import picture
from fedtorch.trust import fairness

DATA = classes()
LOCAL = solver()


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    """A federation, and the history of another one."""
    made = {}
    for name, algorithm in {"FedAvg": ft.fedavg(LOCAL), "personal": ft.personal_layers(LOCAL, "head.*")}.items():
        metrics = {"accuracy": ft.metrics.accuracy(), "cross_entropy": ft.metrics.cross_entropy()}
        made[name] = ft.Federation(algorithm, ft.InProcess(DATA), cohort=4, validation=DATA, metrics=metrics)
        trainer(max_epochs=5, check_val_every_n_epoch=2 if name == "FedAvg" else 1).fit(made[name])
    return {"FedAvg": made["FedAvg"], "personal": made["personal"].history}


def table(run: Any) -> pd.DataFrame:
    return run if isinstance(run, pd.DataFrame) else run.history


def drawn(figure: Figure) -> bytes:
    """The picture, made without warnings."""
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=40)
    return target.getvalue()


def lines(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    return {str(x.get_label()): (list(x.get_xdata()), list(x.get_ydata())) for x in axes.get_lines()}


def known(run: Any, column: str) -> tuple[list[float], list[float]]:
    rows = table(run).dropna(subset=[column])
    return rows["round"].tolist(), rows[column].tolist()


@pytest.mark.parametrize("name", ["FedAvg", "personal"])
def test_curves(runs: dict[str, Any], name: str) -> None:
    figure = ft.plots.curves(runs[name])
    assert drawn(figure)
    loss, accuracy, entropy = figure.axes
    assert lines(loss)["mean over clients"] == known(runs[name], "train_loss")
    assert lines(loss)["median client"] == known(runs[name], "train_loss_median")
    assert lines(loss)["mean over the worst tenth"] == known(runs[name], "train_loss_worst_decile")
    for axes, metric in ((accuracy, "accuracy"), (entropy, "cross_entropy")):
        assert lines(axes)["all rows"] == known(runs[name], f"val_{metric}")
        assert lines(axes)["mean over clients"] == known(runs[name], f"val_{metric}_mean")
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "training loss",
        "validation accuracy",
        "validation cross entropy",
    ]
    assert {axes.get_xlabel() for axes in figure.axes} == {"communication round"}
    wide, middle = loss.collections
    for band, low, high in ((wide, "min", "max"), (middle, "q25", "q75")):
        heights = band.get_paths()[0].vertices[:, 1]
        assert heights.min() == table(runs[name])[f"train_loss_{low}"].min()
        assert heights.max() == table(runs[name])[f"train_loss_{high}"].max()
    assert len(figure.legends[0].get_texts()) == 6


@pytest.mark.parametrize("rounds", [4, 20])  # few are marked one by one
def test_curves_of_a_history_without_validation(rounds: int) -> None:
    history = History()
    for round in ft.Run(ft.fedavg(sgd(0.05)), ft.InProcess(linear_clients([4, 5, 6]))).rounds(rounds):
        history.record(round)
    figure = ft.plots.curves(history, ["train_loss"])
    assert drawn(figure)
    assert {line.get_marker() for line in figure.axes[0].lines} == ({"."} if rounds == 4 else {"None"})
    assert lines(figure.axes[0])["mean over clients"] == known(history.frame(), "train_loss")


def test_groups() -> None:
    data = linear_clients([4] * 12)
    run = ft.Run(ft.fedavg(sgd(0.05)), ft.InProcess(data))
    error, member = {"error": ft.metrics.mean_squared_error()}, lambda rows: (rows[0][:, 0] > 0).long()
    for _ in run.rounds(4):
        fairness.watch_groups(run, data, error, member, [0, 1], largest_is_best=False)
    figure = groups(run, "error")
    assert drawn(figure)
    shown = lines(figure.axes[0])
    assert shown["group 0"] == known(run, "val_error_group_0")
    assert shown["mean over the worst tenth"] == known(run, "val_error_worst_decile")
    heights = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    both = run.history[["val_error_group_0", "val_error_group_1"]]
    assert (heights.min(), heights.max()) == (both.min(axis=None), both.max(axis=None))
    assert "mean over the worst tenth" in lines(ft.plots.curves(run, ["val_error"]).axes[0])
    with pytest.raises(ValueError, match="Expected groups of 'loss' in the history"):
        groups(run, "loss")


@pytest.mark.parametrize(("metric", "column"), [("accuracy", "val_accuracy"), ("train_loss", "train_loss")])
def test_several_runs_against_bytes(runs: dict[str, Any], metric: str, column: str) -> None:
    figure = ft.plots.curves(runs, [metric], against="bytes")
    assert drawn(figure)
    for name, run in runs.items():
        rows = table(run).dropna(subset=[column])
        sent, values = lines(figure.axes[0])[name]
        assert values == rows[column].tolist()
        assert sent == pytest.approx(((rows["bytes_up"] + rows["bytes_down"]) / 1e6).tolist())
    assert "MB" in figure.axes[0].get_xlabel()
    worst = ft.plots.curves(runs, ["accuracy_min"])
    assert lines(worst.axes[0])["personal"] == known(runs["personal"], "val_accuracy_min")
    with pytest.raises(ValueError, match="Expected runs by name to draw against bytes"):
        ft.plots.curves(runs["FedAvg"], against="bytes")


def test_repetitions_are_a_mean_and_a_band() -> None:
    rounds = np.arange(1.0, 4.0)
    repeated = [pd.DataFrame({"round": rounds, "train_loss": rounds + shift}) for shift in (0.0, 1.0, 5.0)]
    repeated[2] = pd.concat([repeated[2], pd.DataFrame({"round": [4.0], "train_loss": [9.0]})])  # one round more
    figure = ft.plots.curves({"ours": repeated, "other": pd.DataFrame({"round": rounds, "train_loss": [1, np.nan, 2]})})
    assert drawn(figure)
    shown = lines(figure.axes[0])
    assert shown["ours"] == ([1.0, 2.0, 3.0], [3.0, 4.0, 5.0])
    assert shown["other"] == ([1.0, 3.0], [1.0, 2.0])
    heights = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (1.0, 8.0)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ours", "other"]


def test_figures_and_reports_have_the_same_scale_and_ticks(runs: dict[str, Any]) -> None:
    rounds = np.arange(1.0, 7.0)
    falling = pd.DataFrame({"round": rounds, "train_loss": 10.0**-rounds})
    axes = ft.plots.curves(falling).axes[0]
    described = history_charts.spread(falling, "train_loss")
    assert described is not None
    assert axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.get_yticklabels()] == [tick.text for tick in described.y_ticks]
    texts = re.findall(r"<text[^>]*>([^<]*)<", picture(described, "loss").svg)
    assert set(texts) >= {tick.text for tick in described.y_ticks}
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "3", "4", "5", "6"]
    assert ft.plots.curves(runs["FedAvg"]).axes[1].get_yscale() == "linear"  # an accuracy


def test_few_clients_are_bars() -> None:
    figure = ft.plots.client_distribution(DATA)
    assert drawn(figure)
    [axes] = figure.axes
    bars = {container.get_label(): [bar.get_height() for bar in container] for container in axes.containers}
    assert bars == {str(c): [int((y == c).sum()) for _, y in DATA] for c in range(3)}
    tops = [bar.get_y() + bar.get_height() for bar in axes.containers[-1]]
    assert tops == DATA.counts.tolist()
    assert [text.get_text() for text in axes.get_xticklabels()] == list(DATA.names)


def test_names_are_letters_and_not_mathematics() -> None:
    names = ["$\\bad$", "<script>", "a&b"]
    rows = ft.data.from_tensors([(torch.ones(2, 1), torch.tensor([0, 1]))] * 3, names=names)
    bars = ft.plots.client_distribution(rows)
    nodes = ft.plots.network(ft.Network(ft.Network.ring(3).edges, names=names))
    arrows = ft.plots.directed_network(torch.eye(3), names)
    assert [text.get_text() for text in bars.axes[0].get_xticklabels()] == names
    for figure in (bars, nodes, arrows):
        assert drawn(figure)


def test_many_clients_are_a_map() -> None:
    data = ft.data.partition(ft.data.digits(), ft.data.dirichlet(0.3), clients=100, seed=0)
    figure = ft.plots.client_distribution(data)
    assert drawn(figure)
    above, below = figure.axes[:2]
    share = torch.tensor(above.images[0].get_array())
    expected = torch.stack([torch.bincount(y, minlength=10) / len(y) for _, y in data], 1)
    assert torch.allclose(share, expected.double())
    assert [bar.get_height() for bar in below.containers[0]] == data.counts.tolist()
    assert len(below.get_xticklabels()) <= 30


def test_real_labels_are_quantiles() -> None:
    data = linear_clients([5, 8, 13])
    figure = ft.plots.client_distribution(data)
    assert drawn(figure)
    medians = lines(figure.axes[0])["median"][1]
    assert medians == pytest.approx([float(y.quantile(0.5)) for _, y in data])
    named = ft.data.from_tensors([{"x": x, "group": (y > 0).long()} for x, y in data])
    assert len(ft.plots.client_distribution(named, "group").axes[0].containers) == 2
    empty = linear_clients([1, 8]).split(0.7, seed=0)[1]
    assert drawn(ft.plots.client_distribution(empty))


def test_refusals(runs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Expected one of \[.*'val_accuracy'.*\], but got 'f1'"):
        ft.plots.curves(runs, ["f1"])
    with pytest.raises(ValueError, match=r"fields \['0', '1'\], but got 2"):
        ft.plots.client_distribution(DATA, 2)
    with pytest.raises(ValueError, match="one label per row"):
        ft.plots.client_distribution(DATA, 0)
    with pytest.raises(ValueError, match="train first"):
        ft.plots.curves(History())
    with pytest.raises(TypeError, match="but got int"):
        ft.plots.curves({"FedAvg": 3})


def test_a_network_is_drawn_where_its_nodes_are_and_in_their_colours() -> None:
    places = ft.random.uniform(ft.random.key(0), (40, 2), torch.float64)
    network = ft.Network.k_nearest(places, 3)
    figure = ft.plots.network(network, places[:, 0], label="first coordinate")
    axes, bar = figure.axes
    edges, nodes = axes.collections
    assert torch.equal(torch.from_numpy(nodes.get_offsets().data), places)
    assert nodes.get_array().tolist() == places[:, 0].tolist()
    [path] = edges.get_paths()  # edges that all weigh the same
    assert np.array_equal(path.vertices.reshape(-1, 3, 2)[:, :2], places[network.edges])
    assert bar.get_ylabel() == "first coordinate"
    assert not axes.texts  # more nodes than have room for their names
    assert drawn(figure)


def test_clusters_of_a_network_are_counted_in_the_legend() -> None:
    network = ft.Network.ring(14)
    figure = ft.plots.network(network, clusters=torch.arange(14).clamp(max=12))
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert len(names) == 11
    assert names[-1] == "others (3)"
    assert "12 (2)" in names
    assert [text.get_text() for text in figure.axes[0].texts] == list(network.names)
    assert drawn(figure)
    assert drawn(ft.plots.network(ft.Network([], nodes=2)))
    with pytest.raises(ValueError, match="but got both"):
        ft.plots.network(network, torch.zeros(14), clusters=torch.zeros(14))
    with pytest.raises(ValueError, match=r"one value per node, \(14,\)"):
        ft.plots.network(network, torch.zeros(13))


def tuned(**settings: list[Any]) -> GridSearch:
    data = linear_clients([5, 6, 7])
    build = lambda lr=0.05, mu=0.0, size=None: ft.fedprox(sgd(lr, batch_size=size), mu)
    metric = ft.metrics.mean_squared_error()
    return ft.grid(
        build,
        settings,
        ft.InProcess(data),
        validation=data,
        metric=metric,
        largest_is_best=False,
        rounds=2,
        progress=False,
    )


def test_heat_map_shows_every_mean_and_frames_the_best() -> None:
    grid = tuned(mu=[0.0, 1.0], lr=[0.01, 0.1, 1e200])
    figure = heat_map(grid, "squared error")
    assert drawn(figure)
    axes, bar = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()) == ("lr", "mu", "squared error, mean over clients")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.01", "0.1", "1e+200"]
    cells = {text.get_position(): text.get_text() for text in axes.texts}
    for i, setting in enumerate(grid.settings):
        place = [0.01, 0.1, 1e200].index(setting["lr"]), [0.0, 1.0].index(setting["mu"])
        assert cells[place] == ("diverged" if grid.diverged[i] else f"{grid.scores[i].mean():#.3g}")
    (frame,) = axes.patches
    assert frame.get_xy() == ([0.01, 0.1].index(grid.best["lr"]) - 0.5, [0.0, 1.0].index(grid.best["mu"]) - 0.5)


def test_heat_map_of_one_hyperparameter_is_a_line() -> None:
    grid = tuned(lr=[0.1, 0.001, 0.01], mu=[0.5])
    figure = heat_map(grid)
    assert drawn(figure)
    assert figure.axes[0].get_xscale() == "log"
    means = [grid.scores[i].mean() for i in (1, 2, 0)]
    assert lines(figure.axes[0])["mean over clients"] == ([0.001, 0.01, 0.1], means)


def test_heat_map_of_three_hyperparameters_has_the_best_over_the_third() -> None:
    grid = tuned(lr=[0.01, 0.1], mu=[0.0, 1.0], size=[2, 4])
    axes = heat_map(grid).axes[0]
    assert axes.get_title() == "best over size"
    cells = {text.get_position(): float(text.get_text()) for text in axes.texts}
    scores = [score.mean() for score in grid.scores]
    assert cells[0, 0] == pytest.approx(min(scores[:2]), rel=5e-3)  # three digits
    assert len(cells) == 4


def test_heat_map_where_everything_diverges() -> None:
    assert drawn(heat_map(tuned(mu=[0.0, 1.0], lr=[1e200, 1e250])))
    assert drawn(heat_map(tuned(lr=[1e200, 1e250])))


def test_device_correlation_shows_the_learnt_matrix_with_related_devices_together() -> None:
    signs = torch.tensor([1.0, -1, 1, -1, -1, 1], dtype=torch.float64)
    covariance = low_rank.LowRank.from_factor(torch.tensor(0.5, dtype=torch.float64), 2 * signs[:, None], 6)
    names = [f"device {k}" for k in range(6)]
    figure = ft.plots.device_correlation(covariance, names)
    assert drawn(figure)
    axes = figure.axes[0]
    order = [names.index(label.get_text()) for label in axes.get_yticklabels()]
    assert sorted(order) == list(range(6))
    expected = torch.outer(signs, signs)[order][:, order] * 4 / 4.5
    expected.fill_diagonal_(1)
    assert torch.allclose(torch.as_tensor(axes.images[0].get_array().data), expected)
    assert abs(int(signs[order[:3]].sum())) == 3  # the related ones side by side
    with pytest.raises(ValueError, match="Expected 6 names, one per device, but got 2"):
        ft.plots.device_correlation(covariance, names[:2])


def test_device_correlation_of_many_devices_draws_some() -> None:
    figure = ft.plots.device_correlation(low_rank.identity(2000, 1))
    assert drawn(figure)
    assert figure.axes[0].images[0].get_array().shape == (500, 500)


def test_an_inclusion_map_shows_the_pairs_but_not_the_diagonal() -> None:
    inclusion = torch.tensor([[0.0, 0.9, 0.1], [0.7, 0.0, 0.2], [0.3, 0.4, 0.0]])
    figure = ft.plots.inclusion_map(inclusion, ["a", "b", "c"])
    shown = np.ma.filled(figure.axes[0].images[0].get_array(), np.nan)
    off = ~np.eye(3, dtype=bool)
    assert np.allclose(shown[off], inclusion.numpy()[off])
    assert np.isnan(shown[~off]).all()
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["a", "b", "c"]
    assert drawn(figure)
    with pytest.raises(ValueError, match=r"Expected a matrix \(2, 2\)"):
        ft.plots.inclusion_map(inclusion, ["a", "b"])


def test_a_directed_network_has_an_arrow_for_each_effect() -> None:
    inclusion = torch.tensor([[0.0, 0.9, 0.0], [0.7, 0.0, 0.0], [0.0, 0.4, 0.0]])
    figure = ft.plots.directed_network(inclusion, ["a", "b", "c"], -inclusion)
    arrows = figure.axes[0].patches
    assert len(arrows) == 3
    widths = [arrow.get_linewidth() for arrow in arrows]
    assert widths == pytest.approx([0.6 + 1.8 * 0.9, 0.6 + 1.8 * 0.7, 0.6 + 1.8 * 0.4], rel=1e-6)
    assert drawn(figure)
    assert drawn(ft.plots.directed_network(inclusion, ["a", "b", "c"]))


def test_notebooks_show_figures() -> None:
    data = ft.data.from_tensors([(torch.ones(3, 2), torch.ones(3))])
    assert ft.plots.client_distribution(data)._repr_png_().startswith(b"\x89PNG")
