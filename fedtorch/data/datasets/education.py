"""Pupils of schools: grades in Portugal, examination scores in London."""

from __future__ import annotations

import numpy
import torch

from fedtorch.data.cache import locate
from fedtorch.data.datasets._frames import by_client, choose, one_hot, read
from fedtorch.data.federated import FederatedData

ETHNICITIES = [
    "eswi",
    "african",
    "arab",
    "bangladeshi",
    "caribbean",
    "greek",
    "indian",
    "pakistani",
    "se_asian",
    "turkish",
    "other",
]
SCHOOL_FEATURES = (
    *("year=1985", "year=1986", "year=1987", "free_meals", "vr_band_1"),
    *("gender=female", "gender=male", "vr_band=3", "vr_band=1", "vr_band=2"),
    *(f"ethnicity={name}" for name in ETHNICITIES),
    *("school_gender=mixed", "school_gender=male", "school_gender=female"),
    *("denomination=maintained", "denomination=church_of_england", "denomination=roman_catholic"),
    "constant",
)


def student_performance(
    subject: str = "mat", grades: bool = False, dtype: torch.dtype = torch.float32
) -> FederatedData:
    """Load final grades in two Portuguese schools: GP and MS with 349 and 46 pupils, or 423 and 226 in "por".

    Rows (x `(38,)`, y, the final grade G3 in 0…20): 13 numbers (age in years, education of the parents,
    travel and study time, past failures, …, absences), then 25 dummies `name=level`, one for each level but
    the first of every nominal variable, such as `Mjob=teacher`.

    Source: Cortez and Silva (2008), "Using data mining to predict secondary school student performance", UCI
    "Student performance", doi:10.24432/C5TG7T, CC BY 4.0.

    Args:
        subject: "mat" for mathematics, "por" for Portuguese.
        grades: whether x also has the grades G1 and G2 of the two periods before, as columns 39 and 40.
        dtype: of x and y.
    """
    choose("subjects", [subject], ["mat", "por"])
    frame = read("student_performance", f"student-{subject}.csv", sep=";")
    x = one_hot(frame.drop(columns=["school", "G1", "G2", "G3"]), drop_first=True)
    if grades:
        x = x.assign(G1=frame["G1"], G2=frame["G2"])
    y = frame["G3"].to_numpy(dtype=numpy.float64)
    return by_client(frame["school"], (x.to_numpy(dtype=numpy.float64), y), dtype, list(x.columns))


def school(dtype: torch.dtype = torch.float32) -> FederatedData:
    """Load examination scores of 15362 pupils in 139 London schools, "1" … "139", with 22 to 251 pupils each.

    Rows (x `(28,)`, y, the score in 1…70): dummies of the year, of the pupil's gender, verbal reasoning band (in the
    file's order 3, 1, 2) and ethnicity, of the school's gender and denomination; the school's percentages of pupils
    with free meals and in band 1; and a constant 1 at the end. The file has no names: those of the features follow the
    codes of its source, and, where these are ambiguous (gender and band), the composition of the schools and the mean
    scores.

    Source: Inner London Education Authority, 1985–1987; Nuttall, Goldstein, Prosser, Rasbash (1989), as coded by
    Bakker and Heskes (2003), "Task clustering and gating for Bayesian multitask learning"; no licence stated.

    Args:
        dtype: of x and y.
    """
    from scipy.io import loadmat

    content = loadmat(locate("school", "school.mat"))
    xs, ys = content["X"][0], content["Y"][0]
    names = [str(number) for number in range(1, len(xs) + 1)]
    label = [name for name, x in zip(names, xs) for _ in range(len(x))]
    x, y = (numpy.concatenate(list(parts)).astype(numpy.float64) for parts in (xs, ys))
    return by_client(label, (x, y[:, 0]), dtype, SCHOOL_FEATURES)
