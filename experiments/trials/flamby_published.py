"""FLamby's results of Fed-Heart-Disease: how many patients each model got right, by hospital and seed.

Source: github.com/owkin/FLamby, `flamby/results/results_benchmark_fed_heart_disease/heart_seed42.csv` to
`heart_seed46.csv`, commit edacf54d; its accuracies times the numbers of patients are these whole numbers.
"""

from __future__ import annotations

import numpy as np

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
TESTS = (*HOSPITALS, "all rows")
TESTED = (104, 89, 16, 45, 254)  # patients
AVERAGE = "mean of hospitals"
EACH = "each hospital its own"
Hits = tuple[int, int, int, int, int]
PUBLISHED: dict[str, tuple[Hits, ...]] = {
    "pooled": (
        (83, 68, 12, 29, 201),
        (81, 68, 12, 29, 202),
        (82, 68, 12, 29, 202),
        (81, 68, 12, 29, 203),
        (80, 68, 12, 29, 202),
    ),
    "cleveland alone": (
        (76, 67, 11, 30, 198),
        (78, 68, 12, 30, 197),
        (76, 67, 10, 30, 201),
        (78, 68, 13, 30, 199),
        (80, 68, 12, 28, 201),
    ),
    "hungarian alone": (
        (78, 67, 8, 23, 182),
        (76, 66, 9, 22, 185),
        (80, 67, 8, 23, 190),
        (77, 66, 10, 22, 182),
        (77, 66, 7, 22, 184),
    ),
    "switzerland alone": (
        (59, 41, 13, 30, 133),
        (51, 34, 13, 34, 130),
        (44, 32, 10, 26, 114),
        (49, 35, 13, 30, 107),
        (47, 32, 9, 31, 129),
    ),
    "va alone": (
        (62, 42, 14, 34, 148),
        (56, 40, 12, 31, 149),
        (62, 43, 14, 30, 168),
        (57, 41, 11, 29, 147),
        (63, 42, 13, 34, 164),
    ),
    "Cyclic": (
        (79, 68, 12, 28, 197),
        (79, 66, 12, 30, 204),
        (77, 69, 9, 28, 200),
        (81, 69, 13, 29, 200),
        (78, 67, 11, 29, 196),
    ),
    "FedAdagrad": (
        (79, 68, 12, 28, 199),
        (76, 65, 12, 30, 195),
        (80, 67, 12, 33, 199),
        (79, 66, 12, 31, 203),
        (81, 69, 11, 30, 193),
    ),
    "FedAdam": (
        (79, 67, 12, 28, 197),
        (75, 65, 12, 29, 195),
        (79, 66, 12, 33, 198),
        (79, 65, 12, 31, 204),
        (79, 69, 11, 29, 195),
    ),
    "FedAvg": (
        (79, 62, 11, 28, 191),
        (75, 66, 12, 30, 194),
        (77, 67, 8, 26, 194),
        (76, 60, 12, 28, 178),
        (73, 65, 9, 32, 193),
    ),
    "FedProx": (
        (79, 62, 11, 28, 191),
        (75, 66, 12, 30, 194),
        (77, 67, 8, 26, 194),
        (76, 60, 12, 28, 178),
        (73, 65, 9, 32, 193),
    ),
    "FedYogi": (
        (79, 68, 12, 28, 199),
        (76, 65, 12, 30, 195),
        (80, 67, 12, 33, 199),
        (79, 66, 12, 31, 203),
        (81, 69, 11, 30, 193),
    ),
    "SCAFFOLD": (
        (78, 62, 11, 28, 191),
        (75, 66, 12, 30, 194),
        (77, 67, 8, 26, 194),
        (75, 60, 12, 28, 178),
        (73, 65, 9, 32, 193),
    ),
}


def published(name: str) -> dict[str, list[float]]:
    """FLamby's accuracies by test, over its seeds."""
    if name == EACH:
        own = [published(f"{hospital} alone")[hospital] for hospital in HOSPITALS]
        return {**dict(zip(HOSPITALS, own)), AVERAGE: [float(np.mean(each)) for each in zip(*own)]}
    if name not in PUBLISHED:
        return {}
    shares = [[hits / count for hits, count in zip(seed, TESTED)] for seed in PUBLISHED[name]]
    return {**dict(zip(TESTS, map(list, zip(*shares)))), AVERAGE: [float(np.mean(each[:4])) for each in shares]}
