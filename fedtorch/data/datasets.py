"""Real data sets, small enough to try things on.

`digits`, `breast_cancer` and `diabetes` ship inside scikit-learn. The others are files, which
`fedtorch.data.cache` finds in `FEDTORCH_DATA_DIR` or downloads from their publisher.

>>> from fedtorch.data import digits, dirichlet, partition
>>> partition(digits(), dirichlet(0.3), clients=100, seed=0)
FederatedData(100 clients, 1797 rows, ... per client, fields 0: float32 (64,), 1: int64 ())
"""

from __future__ import annotations

import gzip

import numpy
import torch
from torch import Tensor

from fedtorch.data import cache
from fedtorch.data.federated import FederatedData
from fedtorch.data.sources import from_tensors

__all__ = ["breast_cancer", "diabetes", "digits", "heart_disease", "mnist"]

HEART_DISEASE_URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
HEART_DISEASE_SHA256 = {
    "cleveland": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "hungarian": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "switzerland": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    "va": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
}

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_SHA256 = {
    "train-images-idx3-ubyte.gz": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "71524e2cd1ad2968737f7f2f2ff69cbfc32df8ccddff51593f7cb2d4e0eb5b64",  # the same, gzipped again
    ),
    "train-labels-idx1-ubyte.gz": ("3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",),
    "t10k-images-idx3-ubyte.gz": ("8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",),
    "t10k-labels-idx1-ubyte.gz": ("f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",),
}


def digits() -> tuple[Tensor, Tensor]:
    """8 × 8 images of handwritten digits: x `(1797, 64)` float32 in [0, 1], y `(1797,)` int64 in 0…9.

    Source: Alpaydin and Kaynak (1998), UCI "Optical recognition of handwritten digits", as in scikit-learn.
    """
    from sklearn.datasets import load_digits  # here and below: it takes long to import

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y, dtype=torch.int64)


def breast_cancer(standardise: bool = True) -> tuple[Tensor, Tensor]:
    """Cell nuclei of tumours: x `(569, 30)` float32, y `(569,)` int64, 1 for benign and 0 for malignant.

    Source: Wolberg, Mangasarian, Street (1993), UCI "Breast cancer Wisconsin (diagnostic)", as in
    scikit-learn.

    Args:
        standardise: whether each feature gets mean 0 and variance 1 over all rows.
    """
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    return _features(x, standardise), torch.tensor(y, dtype=torch.int64)


def diabetes(standardise: bool = True) -> tuple[Tensor, Tensor]:
    """Progression of diabetes after a year: x `(442, 10)` float32, y `(442,)` float32, a number in 25…346.

    Source: Efron, Hastie, Johnstone, Tibshirani (2004), "Least angle regression", as in scikit-learn; x is in
    the original units (age, sex, body mass index, blood pressure, six serum measurements) unless
    standardised.

    Args:
        standardise: whether each feature gets mean 0 and variance 1 over all rows.
    """
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=False)
    return _features(x, standardise), torch.tensor(y, dtype=torch.float32)


def heart_disease(standardise: bool = False) -> FederatedData:
    """Heart disease in four hospitals (cleveland, hungarian, switzerland, va): 303, 261, 46 and 130 patients.

    Rows (x `(13,)` float32, y int64, 1 for disease) as FLamby's Fed-Heart-Disease prepares them: the columns
    slope, ca and thal are dropped, then patients with a missing value; chest pain and resting ECG become
    dummies without their first level. The features are age, sex, trestbps, chol, fbs, thalach, exang,
    oldpeak, cp = 2, 3, 4, restecg = 1, 2.

    Source: Janosi, Steinbrunn, Pfisterer, Detrano (1988), UCI "Heart disease", doi:10.24432/C52P4X, CC BY
    4.0; Ogier du Terrail et al. (2022), "FLamby".

    Args:
        standardise: whether each feature gets mean 0 and variance 1 over the rows of each hospital; a feature
            that is constant in a hospital becomes 0 there.
    """
    hospitals = []
    for name, sha256 in HEART_DISEASE_SHA256.items():
        filename = f"processed.{name}.data"
        file = cache.path("heart_disease_uci", filename, sha256, HEART_DISEASE_URL + filename)
        table = numpy.genfromtxt(file, delimiter=",", missing_values="?", filling_values=numpy.nan)
        table = numpy.delete(table, [10, 11, 12], axis=1)
        table = table[~numpy.isnan(table).any(axis=1)]
        pain, ecg = table[:, 2:3], table[:, 6:7]
        numbers = table[:, [0, 1, 3, 4, 5, 7, 8, 9]]
        x = numpy.hstack([numbers, pain == [2, 3, 4], ecg == [1, 2]])
        hospitals.append((_features(x, standardise), torch.tensor(table[:, -1] > 0, dtype=torch.int64)))
    return from_tensors(hospitals, tuple(HEART_DISEASE_SHA256))


def mnist(train: bool = True) -> tuple[Tensor, Tensor]:
    """Handwritten digits: x `(60000, 28, 28)` float32 in [0, 1], y `(60000,)` int64 in 0…9.

    Source: LeCun, Cortes, Burges, "The MNIST database of handwritten digits".

    Args:
        train: whether to take the 60000 training or the 10000 test images.
    """
    part = "train" if train else "t10k"
    images, labels = _idx(f"{part}-images-idx3-ubyte.gz"), _idx(f"{part}-labels-idx1-ubyte.gz")
    return images.float().div_(255), labels.long()


def _idx(filename: str) -> Tensor:
    """Bytes in a gzipped idx file: two zeros, the type 8, how many dimensions, big-endian sizes, data."""
    content = gzip.decompress(cache.path("mnist", filename, MNIST_SHA256[filename], MNIST_URL + filename).read_bytes())
    dimensions = content[3]
    shape = numpy.frombuffer(content, dtype=">i4", count=dimensions, offset=4)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * dimensions).reshape(shape.tolist())


def _features(x: numpy.ndarray, standardise: bool) -> Tensor:
    """`x` `(n, d)` as float32, standardised in float64 if so wished; constant columns become 0."""
    if standardise:
        spread = x.std(axis=0)
        x = (x - x.mean(axis=0)) / numpy.where(spread > 0, spread, 1.0)
    return torch.tensor(x, dtype=torch.float32)
