"""Robust averages by byzfl and by Flower, for `experiments.benchmarks.robust_peers`.

byzfl's data sets need torchvision, and its figures seaborn; its rules need neither, so both are stubs here. Its Krum
adds up the M − f − 1 smallest distances to others, the paper M − f − 2: Krum for f of byzfl is the paper's for f − 1.
Its centred clipping cannot be given a centre when it is made, so it is given one afterwards.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np

for stub in ("torchvision", "torchvision.datasets", "torchvision.models", "torchvision.transforms", "seaborn"):
    sys.modules[stub] = MagicMock()
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # before the import

import byzfl  # noqa: E402
from flwr.server.strategy import aggregate as flower  # noqa: E402

RADIUS, STEPS = 2.0, 3  # of clipping


def by_byzfl(table: np.ndarray, faulty: int) -> dict[str, np.ndarray]:
    """The averages of messages `(M, D)` by byzfl."""
    clipping = byzfl.CenteredClipping(L=STEPS, tau=RADIUS)
    clipping.m = np.median(table, 0)
    return {
        "median": byzfl.Median()(table),
        "trimmed mean": byzfl.TrMean(faulty)(table),
        "geometric median": byzfl.GeometricMedian(nu=1e-12, T=5_000)(table),
        "Krum for f − 1": byzfl.Krum(faulty)(table),
        "multi-Krum for f − 1": byzfl.MultiKrum(faulty)(table),
        "centred clipping": clipping(table),
        "norm bounding": byzfl.Average()(byzfl.Clipping(RADIUS)(table.copy())),
        "mixed trimmed mean": byzfl.TrMean(faulty)(byzfl.NNM(faulty)(table)),
        "mixed geometric median": byzfl.GeometricMedian(nu=1e-12, T=5_000)(byzfl.NNM(faulty)(table)),
    }


def by_flower(table: np.ndarray, faulty: int) -> dict[str, np.ndarray]:
    """The averages of messages `(M, D)` by Flower's strategies."""
    results = [([row], 1) for row in table]
    rules = {
        "median": flower.aggregate_median(results),
        "trimmed mean": flower.aggregate_trimmed_avg(results, (faulty + 0.5) / len(table)),
        "Krum": flower.aggregate_krum(results, faulty, 0),
        "multi-Krum": flower.aggregate_krum(results, faulty, len(table) - faulty),
    }
    if len(table) >= 4 * faulty + 3:
        rules["Bulyan"] = flower.aggregate_bulyan(list(results), faulty, flower.aggregate_krum, to_keep=0)
    return {name: found[0] for name, found in rules.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Read tables `{"<number> <faulty>": (M, D)}` from a file and write the averages into another."""
    source, target = sys.argv[1:] if argv is None else argv
    found = {}
    with np.load(source) as tables:
        for name, table in tables.items():
            for peer, by in (("byzfl", by_byzfl), ("Flower", by_flower)):
                for rule, value in by(table, int(name.split()[1])).items():
                    found[f"{name} {peer}: {rule}"] = value
    np.savez(target, **found)  # type: ignore[arg-type]
    versions = {"byzfl": importlib.metadata.version("byzfl"), "Flower": importlib.metadata.version("flwr")}
    Path(target).with_suffix(".json").write_text(json.dumps(versions))


if __name__ == "__main__":
    main()
