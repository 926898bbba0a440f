"""FLamby's results of Fed-TCGA-BRCA: concordant pairs of each model, by region and seed, over a number of pairs.

Source: github.com/owkin/FLamby, `flamby/results/results_benchmark_fed_tcga_brca/tcga_seed42.csv` to `tcga_seed46.csv`,
commit edacf54d; its indices times `PAIRS` are these whole numbers.
"""

from __future__ import annotations

import numpy as np

REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")
TESTS = (*REGIONS, "all rows")
PAIRS = (358, 44, 108, 48, 47, 3, 2730)  # pairs that can be compared, twice as many where halves occur
AVERAGE = "mean of regions"
EACH = "each region its own"
Hits = tuple[int, int, int, int, int, int, int]
PUBLISHED: dict[str, tuple[Hits, ...]] = {
    "pooled": (
        (287, 23, 90, 25, 47, 3, 2174),
        (251, 36, 91, 21, 46, 2, 2129),
        (284, 17, 53, 36, 29, 2, 1664),
        (307, 31, 83, 31, 41, 1, 2136),
        (255, 21, 64, 38, 17, 1, 1508),
    ),
    "Northeast alone": (
        (231, 36, 88, 20, 45, 3, 2048),
        (236, 17, 78, 28, 34, 3, 1773),
        (241, 22, 81, 22, 40, 3, 1863),
        (207, 35, 82, 23, 36, 3, 1814),
        (238, 32, 85, 22, 41, 3, 1986),
    ),
    "South alone": (
        (284, 21, 84, 40, 32, 3, 2064),
        (275, 19, 75, 44, 16, 3, 1760),
        (289, 22, 85, 37, 29, 3, 2046),
        (284, 24, 82, 38, 30, 3, 1981),
        (278, 30, 90, 38, 32, 3, 2080),
    ),
    "West alone": (
        (226, 29, 95, 10, 36, 0, 1794),
        (191, 22, 90, 15, 29, 0, 1603),
        (189, 26, 95, 12, 30, 0, 1582),
        (208, 25, 86, 12, 29, 1, 1608),
        (214, 25, 93, 15, 29, 0, 1662),
    ),
    "Midwest alone": (
        (176, 33, 90, 27, 20, 2, 1473),
        (188, 35, 95, 30, 19, 2, 1541),
        (226, 37, 91, 27, 35, 3, 1862),
        (174, 33, 91, 31, 18, 2, 1487),
        (137, 38, 87, 28, 17, 2, 1349),
    ),
    "Europe alone": (
        (309, 27, 56, 24, 43, 3, 2090),
        (277, 37, 60, 23, 42, 3, 2044),
        (302, 26, 46, 21, 39, 3, 1955),
        (322, 21, 34, 29, 40, 3, 1964),
        (297, 25, 42, 28, 36, 3, 1844),
    ),
    "Canada alone": (
        (208, 35, 80, 19, 44, 2, 1934),
        (211, 35, 79, 20, 45, 2, 1929),
        (216, 34, 79, 22, 44, 2, 1948),
        (206, 35, 82, 23, 44, 2, 1956),
        (208, 35, 79, 18, 44, 2, 1928),
    ),
    "Cyclic": (
        (203, 36, 78, 20, 47, 2, 1890),
        (199, 36, 79, 16, 44, 2, 1871),
        (220, 34, 78, 14, 46, 2, 1963),
        (127, 40, 71, 37, 23, 1, 1446),
        (200, 34, 74, 15, 45, 2, 1849),
    ),
    "FedAdagrad": (
        (293, 32, 92, 28, 44, 3, 2269),
        (303, 26, 95, 34, 41, 3, 2285),
        (307, 25, 96, 34, 39, 3, 2250),
        (303, 27, 97, 34, 37, 3, 2272),
        (312, 27, 91, 33, 40, 3, 2305),
    ),
    "FedAdam": (
        (305, 27, 95, 27, 44, 3, 2288),
        (306, 30, 88, 21, 41, 3, 2241),
        (300, 28, 100, 34, 44, 3, 2337),
        (316, 27, 97, 35, 42, 3, 2353),
        (292, 32, 96, 28, 41, 3, 2276),
    ),
    "FedAvg": (
        (271, 33, 82, 30, 46, 3, 2191),
        (206, 10, 38, 40, 6, 1, 1154),
        (277, 34, 82, 28, 47, 3, 2206),
        (299, 29, 87, 37, 40, 3, 2263),
        (280, 32, 84, 27, 46, 3, 2223),
    ),
    "FedProx": (
        (252, 35, 79, 29, 45, 3, 2118),
        (205, 11, 36, 41, 11, 1, 1168),
        (272, 34, 81, 27, 47, 3, 2174),
        (296, 35, 83, 38, 37, 3, 2207),
        (254, 32, 81, 25, 46, 3, 2116),
    ),
    "FedYogi": (
        (305, 27, 95, 27, 44, 3, 2289),
        (306, 30, 88, 21, 41, 3, 2241),
        (300, 28, 100, 34, 44, 3, 2337),
        (316, 27, 97, 35, 42, 3, 2352),
        (292, 32, 96, 28, 41, 3, 2276),
    ),
    "SCAFFOLD": (
        (209, 34, 69, 27, 43, 2, 1903),
        (202, 32, 67, 26, 38, 3, 1796),
        (237, 27, 77, 15, 46, 2, 2051),
        (201, 41, 79, 27, 44, 2, 1936),
        (212, 32, 73, 14, 43, 2, 1862),
    ),
}


def published(name: str) -> dict[str, list[float]]:
    """FLamby's concordance indices by test, over its seeds."""
    if name == EACH:
        own = [published(f"{region} alone")[region] for region in REGIONS]
        return {**dict(zip(REGIONS, own)), AVERAGE: [float(np.mean(each)) for each in zip(*own)]}
    if name not in PUBLISHED:
        return {}
    indices = [[hits / pairs for hits, pairs in zip(seed, PAIRS)] for seed in PUBLISHED[name]]
    return {**dict(zip(TESTS, map(list, zip(*indices)))), AVERAGE: [float(np.mean(each[:6])) for each in indices]}
