"""The real data sets: sizes, ranges and known facts about them."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import numpy
import pandas
import pytest
import torch

from fedtorch import data as ft_data
from fedtorch.data import FederatedData, breast_cancer, diabetes, digits, heart_disease, locate, mnist
from fedtorch.data.datasets import images as mnist_files


def need(folder: str) -> None:
    """Skips a test whose files are not at hand, so that tests never download."""
    given = os.environ.get("FEDTORCH_DATA_DIR")
    if not given or not (Path(given) / folder).is_dir():
        pytest.skip(f"needs the folder {folder} in FEDTORCH_DATA_DIR")


def test_digits() -> None:
    x, y = digits()
    assert x.shape == (1797, 64)
    assert x.dtype == torch.float32
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    assert y.dtype == torch.int64
    assert y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_breast_cancer() -> None:
    x, y = breast_cancer()
    assert x.shape == (569, 30)
    assert y.bincount().tolist() == [212, 357]
    # float32 rounding of 569 numbers of size one
    assert torch.allclose(x.mean(0), torch.zeros(30), atol=1e-5)
    assert torch.allclose(x.var(0, unbiased=False), torch.ones(30), atol=1e-5)
    raw, _ = breast_cancer(standardise=False)
    assert float(raw[0, 0]) == pytest.approx(17.99)


def test_diabetes() -> None:
    x, y = diabetes()
    assert x.shape == (442, 10)
    assert y.shape == (442,)
    assert x.dtype == y.dtype == torch.float32
    assert (float(y.min()), float(y.max())) == (25.0, 346.0)
    assert torch.allclose(x.var(0, unbiased=False), torch.ones(10), atol=1e-5)
    raw, _ = diabetes(standardise=False)
    assert float(raw[0, 0]) == 59.0  # years of age


def test_heart_disease() -> None:
    need("heart_disease_uci")
    data = heart_disease()
    assert data.names == ("cleveland", "hungarian", "switzerland", "va")
    assert data.counts.tolist() == [303, 261, 46, 130]
    assert data.features[-5:] == ("cp=2", "cp=3", "cp=4", "restecg=1", "restecg=2")
    x, y = data.rows
    assert x.shape == (740, 13)
    assert y.unique().tolist() == [0, 1]
    first = [63, 1, 145, 233, 1, 150, 0, 2.3, 0, 0, 0, 0, 1]
    assert torch.allclose(x[0], torch.tensor(first, dtype=torch.float32))
    assert bool((x[:, 8:11].sum(1) <= 1).all())


def test_heart_disease_standardised_per_hospital() -> None:
    need("heart_disease_uci")
    for x, _ in heart_disease(standardise=True):
        variance = x.var(0, unbiased=False)
        assert torch.allclose(x.mean(0), torch.zeros(13), atol=1e-5)
        assert bool((torch.isclose(variance, torch.ones(13), atol=1e-4) | (variance == 0)).all())


@pytest.mark.parametrize(("train", "size"), [(True, 60000), (False, 10000)])
def test_mnist(train: bool, size: int) -> None:
    need("mnist")
    x, y = mnist(train)
    assert x.shape == (size, 28, 28)
    assert x.dtype == torch.float32
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    assert y[:5].tolist() == ([5, 0, 4, 1, 9] if train else [7, 2, 1, 0, 4])
    assert len(y) == size
    assert float(x.mean()) == pytest.approx(0.1307 if train else 0.1325, abs=1e-4)  # as is widely quoted


def test_idx_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 2, 0, 51, 102, 255])
    labels = bytes([0, 0, 8, 1, 0, 0, 0, 1, 7])
    for kind, content in (("images-idx3", pixels), ("labels-idx1", labels)):
        (tmp_path / f"t10k-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(mnist_files, "locate", lambda name, filename: tmp_path / filename)
    x, y = mnist(train=False)
    assert torch.allclose(x, torch.tensor([[[0.0, 0.2], [0.4, 1.0]]]))
    assert y.tolist() == [7]


# --- with natural clients: (how to load, folder, clients, rows, columns of x, columns of y)

LOADERS = [
    (ft_data.student_performance, "student_performance", 2, 395, 38, ()),
    (ft_data.cmapss, "cmapss_fd001", 100, 20631, 1, (21,)),
    (heart_disease, "heart_disease_uci", 4, 740, 13, ()),
    (ft_data.fmi_weather, "fmi_weather", 207, 19768, 7, ()),
    (ft_data.fmi_forecast, "fmi_weather", 192, 1920, 12, (2,)),
    (ft_data.fmi_extremes, "fmi_weather", 199, 995, 3, (2,)),
    (ft_data.tcpa_brca_rppa, "tcpa_brca_rppa", 7, 559, 217, None),
    (ft_data.tcga_brca_expression, "tcga_brca_expression", 13, 476, 139, None),
    (ft_data.fed_tcga_brca, "fed_tcga_brca", 6, 866, 39, (2,)),
    (ft_data.battery, "battery", 4, 3786, 1, ()),
    (ft_data.school, "school", 139, 15362, 28, ()),
]


@pytest.mark.parametrize(("load", "folder", "clients", "size", "columns", "target"), LOADERS)
def test_shapes_names_and_dtypes(
    load: Callable[..., FederatedData],
    folder: str,
    clients: int,
    size: int,
    columns: int,
    target: tuple[int, ...] | None,
) -> None:
    need(folder)
    data, wide = load(), load(dtype=torch.float64)
    assert len(data) == len(set(data.names)) == clients
    assert len(data.features) == len(set(data.features)) == columns
    x, y = data.rows if target is not None else (data.rows, None)
    assert (x.shape, x.dtype) == ((size, columns), torch.float32)
    assert wide.features == data.features
    wide_x, wide_y = wide.rows if target is not None else (wide.rows, None)
    assert wide_x.dtype == torch.float64
    assert torch.equal(wide_x.float(), x)
    if y is not None:
        assert y.shape == (size, *target)
        assert torch.equal(wide_y.to(y.dtype), y)


@pytest.mark.parametrize(("subject", "counts"), [("mat", [349, 46]), ("por", [423, 226])])
def test_student_performance(subject: str, counts: list[int]) -> None:
    need("student_performance")
    data = ft_data.student_performance(subject)
    assert data.names == ("GP", "MS")
    assert data.counts.tolist() == counts
    assert [name for name in data.features if "=" not in name][-1] == data.features[12] == "absences"
    x, y = data.rows
    assert bool(((x[:, 13:] == 0) | (x[:, 13:] == 1)).all())
    assert x[0, :4].tolist() == [18, 4, 4, 2]
    assert x[0, data.features.index("Fjob=teacher")] == 1
    assert (float(y.min()), y[0]) == (0, 6 if subject == "mat" else 11)
    more = ft_data.student_performance(subject, grades=True)
    assert more.features == (*data.features, "G1", "G2")
    assert more.rows[0][0, 38:].tolist() == ([5, 6] if subject == "mat" else [0, 11])
    with pytest.raises(ValueError, match=r"Expected subjects in \['mat', 'por'\], but got \['math'\]"):
        ft_data.student_performance("math")


def test_cmapss() -> None:
    need("cmapss_fd001")
    data, test = ft_data.cmapss(sensors=[3, 2]), ft_data.cmapss(train=False)
    assert data.names == test.names == tuple(str(engine) for engine in range(1, 101))
    assert (int(data.counts.min()), int(data.counts.max())) == (128, 362)
    assert int(test.counts.sum()) == 13096
    for x, _ in data:
        assert torch.equal(x[:, 0], torch.arange(1.0, len(x) + 1))
    assert data.rows[1][0].tolist() == pytest.approx([1589.70, 641.82])
    lives = [y[:, -1] for _, y in ft_data.cmapss(train=False, remaining_life=True)]
    assert [life[-1] for life in lives[:3]] == [112, 98, 69]  # the file of the truth
    assert all(torch.equal(life, life[-1] + torch.arange(len(life)).flip(0)) for life in lives)
    for (_, y), (_, measured) in zip(ft_data.cmapss(remaining_life=True, sensors=[3, 2]), data):
        assert torch.equal(y[:, :2], measured)
        assert torch.equal(y[:, 2], torch.arange(len(y), dtype=y.dtype).flip(0))
    for sensors in ([0], [22], [2, 2], []):
        with pytest.raises(ValueError, match="sensors"):
            ft_data.cmapss(sensors=sensors)


def test_heart_failure() -> None:
    need("heart_failure")
    x, y, features, parties, continuous = ft_data.heart_failure(dtype=torch.float64)
    assert x.shape == (918, 20)
    assert y.bincount().tolist() == [410, 508]
    assert [party.shape[1] for party in ft_data.split_features(x, parties)] == [9, 11]
    assert [features[c] for c in continuous] == ["Age", "RestingBP", "Cholesterol", "MaxHR", "Oldpeak"]
    expected = [53.510893, 132.396514, 198.799564, 136.809368, 0.887364]
    assert x[:, continuous].mean(0).tolist() == pytest.approx(expected, abs=5e-7)  # six printed digits
    assert (x[:, features.index("Cholesterol")] == 0).sum() == 172
    for name, levels in (("Sex", 2), ("ChestPainType", 4), ("RestingECG", 3), ("ExerciseAngina", 2), ("ST_Slope", 3)):
        columns = [c for c, feature in enumerate(features) if feature.startswith(f"{name}=")]
        assert len(columns) == levels
        assert bool((x[:, columns].sum(1) == 1).all())
    assert pandas.read_csv(ft_data.locate("heart_failure", "heart.csv")).shape == (918, 12)


def test_fmi_weather() -> None:
    need("fmi_weather")
    data = ft_data.fmi_weather(dtype=torch.float64)
    assert data.names[0] == "Enontekiö Kilpisjärvi Saana"
    assert (int(data.counts.min()), int(data.counts.max())) == (39, 96)
    x, y = data[0]
    first = [0.6904277, 0.2085091, 2023 / 2025, 12 / 13, 31 / 32, 18 / 25, 0]
    assert x[0].tolist() == pytest.approx(first)
    assert y[0] == -16.5
    places = ft_data.fmi_coordinates()
    assert places.shape == (207, 2)
    for (x, _), place in zip(data, places):
        assert torch.allclose(100 * x[:, :2], place)  # a station does not move


def test_other_fmi_files() -> None:
    need("fmi_weather")
    forecast, extremes = ft_data.fmi_forecast(), ft_data.fmi_extremes()
    assert set(forecast.counts.tolist()) == {10}
    assert set(extremes.counts.tolist()) == {5}
    x, y = forecast[0]
    expected = [60.12735, 19.90038, 0.3, -1.9, -1.2, 5.4, 7.7, -2.6, -4.9, -5.1, -9.6, 4.4]
    assert x[0].tolist() == pytest.approx(expected)
    assert y[0].tolist() == pytest.approx([7.1, 5.7])
    assert extremes[0][0][:, 2].tolist() == [0, 1, 2, 3, 4]


def test_tcpa_brca_rppa() -> None:
    need("tcpa_brca_rppa")
    data = ft_data.tcpa_brca_rppa()
    assert dict(zip(data.names, data.counts.tolist())) == dict(BH=138, A2=91, D8=74, E2=71, AR=66, E9=66, A8=53)
    assert int(ft_data.tcpa_brca_rppa(minimum=0).counts.sum()) == 901
    names = ["LKB1", "p27_pT157", "p27_pT198", "E.Cadherin", "Rb", "PI3K.p110.alpha"]
    primary = ft_data.tcpa_brca_rppa(names, primary=True)
    assert dict(zip(primary.names, primary.counts.tolist())) == dict(BH=121, A2=91, D8=74, E2=69, AR=66, E9=61, A8=53)
    assert primary.features == tuple(names)
    with pytest.raises(ValueError, match=r"missing ones of \['ENY2'\]"):
        ft_data.tcpa_brca_rppa(["LKB1", "ENY2"])
    with pytest.raises(ValueError, match=r"but got \['STK11'\]"):
        ft_data.tcpa_brca_rppa(["STK11"])
    with pytest.raises(ValueError, match="Expected a minimum below 138"):
        ft_data.tcpa_brca_rppa(minimum=138)


def test_the_named_proteins_are_associated() -> None:
    """The partial correlation that the data set's description quotes has the sign of the marginal one."""
    need("tcpa_brca_rppa")
    data = ft_data.tcpa_brca_rppa(["LKB1", "p27_pT157", "p27_pT198"], dtype=torch.float64)
    centred = numpy.concatenate([x - x.mean(0) for x in data])
    correlation = numpy.corrcoef(centred.T)
    assert correlation[0, 1] > 0.2
    assert correlation[1, 2] > 0.2


def test_tcga_brca_expression() -> None:
    need("tcga_brca_expression")
    data = ft_data.tcga_brca_expression()
    assert data.names == tuple(["BH", "A8", "A2", "E2", "B6", "AN", "AO", "C8", "AR", "A7", "D8", "A1", "AQ"])
    assert data.counts.tolist() == [103, 69, 63, 46, 43, 36, 36, 27, 24, 11, 8, 7, 3]
    assert sum(name.startswith("WNT") for name in data.features) == 19
    assert float(data.rows.min()) == 0
    assert float(data.rows.max()) == pytest.approx(8.5, abs=0.1)
    some = ft_data.tcga_brca_expression(["MYC", "WNT1"], minimum=40)
    assert (len(some), some.features) == (5, ("MYC", "WNT1"))
    column = data.features.index("MYC")
    assert torch.equal(some[0][:, 0], data[0][:, column])
    with pytest.raises(ValueError, match="MMP7"):
        ft_data.tcga_brca_expression(["MMP7"])
    with pytest.raises(ValueError, match=r"Expected a list of genes, but got 'MYC'"):
        ft_data.tcga_brca_expression("MYC")


@pytest.mark.parametrize(
    ("train", "counts"), [(True, [248, 156, 164, 129, 129, 40]), (False, [63, 40, 42, 33, 33, 11])]
)
def test_fed_tcga_brca(train: bool, counts: list[int]) -> None:
    need("fed_tcga_brca")
    data = ft_data.fed_tcga_brca(train)
    assert data.names == ("Northeast", "South", "West", "Midwest", "Europe", "Canada")
    assert data.counts.tolist() == counts
    x, y = data.rows
    assert data.features[0] == "age_at_index"
    assert bool((x[:, 0] > 20).all())
    assert y[:, 0].unique().tolist() == [0, 1]
    assert float(y[:, 1].max()) > 1000  # days


@pytest.mark.parametrize(
    ("which", "cells", "sizes", "nominal"),
    [("calce", 4, (882, 996), 1.1), ("xjtu", 55, (121, 942), 2.0), ("mit", 125, None, 1.1)],
)
def test_battery(which: str, cells: int, sizes: tuple[int, int] | None, nominal: float) -> None:
    need("battery")
    data = ft_data.battery(which)
    assert len(data) == cells
    assert int(data.counts.sum()) == {"calce": 3786, "xjtu": 23297, "mit": 85577}[which]
    assert sizes is None or (int(data.counts.min()), int(data.counts.max())) == sizes
    assert (data.counts >= 250).sum() == {"calce": 4, "xjtu": 42, "mit": 115}[which]
    for x, _ in data:
        assert torch.equal(x[:, 0], torch.arange(1.0, len(x) + 1))
    assert float(data.rows[1].max()) == pytest.approx(nominal, rel=0.05)


def test_battery_batches() -> None:
    need("battery")
    assert len(ft_data.battery("xjtu", ["2C", "3C"])) == 23
    assert ft_data.battery("mit", ["2017-05-12"]).counts.min() >= 250
    with pytest.raises(ValueError, match="Expected batches in"):
        ft_data.battery("xjtu", ["4C"])
    with pytest.raises(ValueError, match="no batches for 'calce'"):
        ft_data.battery("calce", ["2C"])
    with pytest.raises(ValueError, match="Expected batteries in"):
        ft_data.battery("nasa")


def test_school() -> None:
    need("school")
    data = ft_data.school()
    assert (int(data.counts.min()), int(data.counts.max())) == (22, 251)
    x, y = data.rows
    assert (float(y.min()), float(y.max())) == (1, 70)
    assert bool((x[:, 27] == 1).all())
    column = {name: x[:, k] for k, name in enumerate(data.features)}
    for group, levels in (("year", 3), ("gender", 2), ("ethnicity", 11), ("school_gender", 3), ("denomination", 3)):
        members = [values for name, values in column.items() if name.startswith(f"{group}=")]
        assert len(members) == levels
        assert bool((torch.stack(members).sum(0) == 1).all())
    # what the names say: boys in boys' schools, and a band is a band of ability, the middle one the largest
    assert float(column["gender=male"][column["school_gender=male"] == 1].mean()) > 0.99  # but for a few slips
    means = [float(y[column[f"vr_band={band}"] == 1].mean()) for band in (1, 2, 3)]
    assert means == sorted(means, reverse=True)
    assert column["vr_band=2"].sum() > column["vr_band=1"].sum() + column["vr_band=3"].sum()


def test_a_truncated_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("heart_failure")
    whole = locate("heart_failure", "heart.csv").read_bytes()
    (tmp_path / "heart_failure").mkdir()
    (tmp_path / "heart_failure" / "heart.csv").write_bytes(whole[:-100])
    monkeypatch.setenv("FEDTORCH_DATA_DIR", str(tmp_path))
    with pytest.raises(ValueError, match=r"with 35921 bytes and sha256 .*, but got 35821 bytes"):
        ft_data.heart_failure()
