"""The real data sets: sizes, ranges and known facts about them."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
import torch

from fedtorch.data import breast_cancer, cache, datasets, diabetes, digits, heart_disease, mnist


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
    images = bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 2, 0, 51, 102, 255])
    labels = bytes([0, 0, 8, 1, 0, 0, 0, 1, 7])
    for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
        (tmp_path / f"t10k-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(cache, "path", lambda folder, filename, sha256, url: tmp_path / filename)
    x, y = datasets.mnist(train=False)
    assert torch.allclose(x, torch.tensor([[[0.0, 0.2], [0.4, 1.0]]]))
    assert y.tolist() == [7]
