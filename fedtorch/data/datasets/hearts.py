"""Heart disease: patients of four hospitals, and patients whose covariates two parties hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import numpy
import torch
from torch import Tensor

from fedtorch._representation import without_rows
from fedtorch.data.cache import locate
from fedtorch.data.datasets._frames import by_client, one_hot, read, scaled
from fedtorch.data.federated import FederatedData

if TYPE_CHECKING:
    import pandas

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
MEASURED = (
    "age",
    "sex",
    "cp",
    "trestbps",
    "chol",
    "fbs",
    "restecg",
    "thalach",
    "exang",
    "oldpeak",
    "slope",
    "ca",
    "thal",
)


@overload
def heart_disease(
    standardise: bool = ..., dtype: torch.dtype = ..., *, as_frame: Literal[False] = ...
) -> FederatedData: ...
@overload
def heart_disease(
    standardise: bool = ..., dtype: torch.dtype = ..., *, as_frame: Literal[True]
) -> pandas.DataFrame: ...
def heart_disease(
    standardise: bool = False, dtype: torch.dtype = torch.float32, *, as_frame: bool = False
) -> FederatedData | pandas.DataFrame:
    """Load heart disease in four hospitals (cleveland, hungarian, switzerland, va): 303, 261, 46 and 130 patients.

    Rows (x `(13,)`, y int64, 1 for disease) as FLamby's Fed-Heart-Disease prepares them: the columns slope, ca
    and thal are dropped, then patients with a missing value; chest pain and resting ECG become dummies without
    their first level. The features are age (years), sex, trestbps (mm Hg), chol (mg/dl), fbs, thalach (1/min),
    exang, oldpeak (mm), cp = 2, 3, 4, restecg = 1, 2.

    Source: Janosi, Steinbrunn, Pfisterer, Detrano (1988), UCI "Heart disease", doi:10.24432/C52P4X, CC BY
    4.0; Ogier du Terrail et al. (2022), "FLamby".

    Args:
        standardise: whether each feature gets mean 0 and variance 1 over the rows of each hospital; a feature
            that is constant in a hospital becomes 0 there.
        dtype: of x.
        as_frame: whether to return all 920 patients as published, in a pandas frame with the column `hospital` and 14
            numeric ones, with NaN for missing values, including a cholesterol or a blood pressure of 0; `disease` is 0
            or 1. Other arguments are not used.
    """
    if as_frame:
        return _frame()
    names = [
        "age",
        "sex",
        "trestbps",
        "chol",
        "fbs",
        "thalach",
        "exang",
        "oldpeak",
        "cp=2",
        "cp=3",
        "cp=4",
        "restecg=1",
        "restecg=2",
    ]
    hospital, xs, ys = [], [], []
    for name in HOSPITALS:
        table = _table(name)
        table = numpy.delete(table, [10, 11, 12], axis=1)
        table = table[~numpy.isnan(table).any(axis=1)]
        pain, ecg = table[:, 2:3], table[:, 6:7]
        numbers = table[:, [0, 1, 3, 4, 5, 7, 8, 9]]
        xs.append(scaled(numpy.hstack([numbers, pain == [2, 3, 4], ecg == [1, 2]]), standardise))
        ys.append(table[:, -1] > 0)
        hospital += [name] * len(table)
    return by_client(hospital, (numpy.concatenate(xs), numpy.concatenate(ys)), dtype, names)


def _table(hospital: str) -> numpy.ndarray:
    """Return the numbers of a hospital's patients `(n, 14)`, NaN where they are missing."""
    file = locate("heart_disease", f"processed.{hospital}.data")
    return numpy.genfromtxt(file, delimiter=",", missing_values="?", filling_values=numpy.nan)


def _frame() -> pandas.DataFrame:
    """Return all hospitals' patients, with missing values as NaN."""
    import pandas  # slow to import

    tables = [_table(name) for name in HOSPITALS]
    frame = pandas.DataFrame(numpy.concatenate(tables), columns=[*MEASURED, "disease"])
    for column in ("trestbps", "chol"):
        frame[column] = frame[column].where(frame[column] != 0)
    frame["disease"] = (frame["disease"] > 0).astype(float)
    frame.insert(0, "hospital", numpy.repeat(HOSPITALS, [len(table) for table in tables]))
    return frame


@without_rows
class VerticalTable(NamedTuple):
    """A table whose columns several parties hold; `fedtorch.vfl.Party.from_table` makes the parties.

    >>> from fedtorch.data import split_features
    >>> parties = (0,), (1, 2)
    >>> table = VerticalTable(torch.ones(5, 3), torch.ones(5), ("age", "smokes", "sbp"), parties, continuous=(0, 2))
    >>> [list(x.shape) for x in split_features(table.x, table.parties)]
    [[5, 1], [5, 2]]
    """

    x: Tensor  # (n, d)
    y: Tensor  # (n,)
    features: tuple[str, ...]  # the names of the columns, d
    parties: tuple[tuple[int, ...], ...]  # the columns of each party, as `split_features` takes them
    continuous: tuple[int, ...]  # the columns that are measurements rather than dummies


def heart_failure(dtype: torch.dtype = torch.float32) -> VerticalTable:
    """Load heart disease of 918 patients: x `(918, 20)`, y `(918,)` int64, 1 for disease (508), at two parties.

    The first party holds the first five covariates in 9 columns, the second the other six in 11. The features
    are, in the original units, Age (years), RestingBP (mm Hg; 0 once, for missing), Cholesterol (mg/dl; 0 in
    172 rows, for missing), FastingBS (1 above 120 mg/dl), MaxHR (1/min) and Oldpeak (mm); and a dummy
    `name=level` for every level of Sex, ChestPainType, RestingECG, ExerciseAngina and ST_Slope. Standardise the
    `continuous` ones within the training part of every fold.

    Source: fedesoriano (2021), "Heart Failure Prediction Dataset", Kaggle, ODbL 1.0; the split over parties is
    that of Hassan, Sutton, Mira, Mengersen, "Scalable vertical federated learning via data augmentation and
    amortized inference", section 5.3.

    Args:
        dtype: of x.
    """
    frame = read("heart_failure", "heart.csv")
    covariates = list(frame.columns[:-1])
    parties = [one_hot(frame[part], drop_first=False) for part in (covariates[:5], covariates[5:])]
    names = [name for party in parties for name in party.columns]
    first = len(parties[0].columns)
    return VerticalTable(
        torch.tensor(numpy.hstack([party.to_numpy(dtype=numpy.float64) for party in parties]), dtype=dtype),
        torch.tensor(frame["HeartDisease"].to_numpy(), dtype=torch.int64),
        tuple(names),
        (tuple(range(first)), tuple(range(first, len(names)))),
        tuple(c for c, name in enumerate(names) if "=" not in name and name != "FastingBS"),
    )
