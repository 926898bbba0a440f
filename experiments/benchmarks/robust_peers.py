"""Robust rules beside those of byzfl and Flower, on random tables of messages, in float64.

The peers run in a virtual environment of their own, `.venv-peers/robust` (where it is missing nothing is compared):
`pip install torch numpy scipy matplotlib flwr==1.41.0`, then `pip install --no-deps byzfl==0.0.11`, whose other needs
its rules do without (torchvision, seaborn). Messages are standard normal, and as many as may be wrong lie about a
common point far off. Flower has Krum, multi-Krum and Bulyan as their papers write them; byzfl's Krum is the paper's for
one faulty message fewer. Nobody has FLTrust: a direct formula stands for it in the tests, as one does for every rule.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import fedtorch as ft
from experiments import common
from fedtorch.federation.exchanges.robust import Rule
from fedtorch.trust import robust

ROOT = Path(__file__).parents[2]
INTERPRETER = ROOT / ".venv-peers" / "robust" / "bin" / "python"
RADIUS, STEPS = 2.0, 3  # of clipping, as in `peers.robust_rules`
SIZES = ((11, 2, 7), (23, 5, 40), (50, 10, 300), (100, 20, 1000))  # messages, faulty, numbers
LIMIT = 1e-6


def tables(repetitions: int) -> dict[str, Tensor]:
    """Messages `(M, D)`, by a number and how many are faulty."""
    found = {}
    for i, (messages, faulty, numbers) in enumerate(SIZES * repetitions):
        value = ft.random.normal(ft.random.key(i), (messages, numbers), torch.float64)
        value[:faulty] = 0.5 * value[:faulty] + 3.0
        found[f"{i} {faulty}"] = value
    return found


def ours(messages: int, faulty: int) -> dict[str, Rule]:
    """The rules by the peer's name and its rule's."""
    mixed, share = robust.nearest_neighbour_mixing, faulty / messages
    trimmed, geometric, most = robust.trimmed_mean(share), robust.geometric_median(), messages - faulty
    found = {
        "byzfl: median": robust.median(),
        "byzfl: trimmed mean": trimmed,
        "byzfl: geometric median": geometric,
        "byzfl: Krum for f − 1": robust.krum(faulty - 1),
        "byzfl: multi-Krum for f − 1": robust.krum(faulty - 1, chosen=most),
        "byzfl: centred clipping": robust.centred_clipping(RADIUS, steps=STEPS),
        "byzfl: norm bounding": robust.norm_bounding(RADIUS),
        "byzfl: mixed trimmed mean": mixed(faulty, trimmed),
        "byzfl: mixed geometric median": mixed(faulty, geometric),
        "Flower: median": robust.median(),
        "Flower: trimmed mean": trimmed,
        "Flower: Krum": robust.krum(faulty),
        "Flower: multi-Krum": robust.krum(faulty, chosen=most),
    }
    return {**found, "Flower: Bulyan": robust.bulyan(faulty)} if messages >= 4 * faulty + 3 else found


def differences(given: dict[str, Tensor], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """The largest difference of any number of any table, relative to the largest number of the peer's average."""
    found: dict[str, float] = {}
    for key, value in given.items():
        equal = torch.full((len(value),), 1 / len(value), dtype=torch.float64)
        for name, rule in ours(len(value), int(key.split()[1])).items():
            expected = torch.from_numpy(theirs[f"{key} {name}"])
            difference = (rule.average(value, equal) - expected).abs().max() / expected.abs().max()
            found[name] = max(found.get(name, 0.0), float(difference))
    return found


def compare(repetitions: int) -> list[common.Row]:
    """The rows: a difference for every rule of every peer."""
    given = tables(repetitions)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "tables.npz", Path(folder) / "averages.npz"
        np.savez(source, **{name: value.numpy() for name, value in given.items()})  # type: ignore[arg-type]
        command = [str(INTERPRETER), "-m", "experiments.benchmarks.peers.robust_rules", str(source), str(target)]
        subprocess.run(command, cwd=ROOT, check=True)
        theirs, versions = dict(np.load(target)), json.loads(target.with_suffix(".json").read_text())
    rows = []
    for name, value in differences(given, theirs).items():
        peer, rule = name.split(": ")
        setting = f"{peer} {versions[peer]}: {rule}"
        rows.append(common.Row(setting, f"largest relative difference over {len(given)} tables", value))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Compare all rules; raise an error where one differs from its oracle."""
    options = common.arguments(__doc__).parse_args(argv)
    rows = compare(1 if options.smoke else 5) if INTERPRETER.exists() else []
    common.show_rows("Robust rules beside byzfl's and Flower's", rows, ".2g")
    common.finish("benchmarks.robust_peers", rows, options)
    wrong = [row.setting for row in rows if not row.ours < LIMIT]
    if wrong:
        raise AssertionError(f"Expected differences below {LIMIT:g}, but got larger ones of {', '.join(wrong)}")


if __name__ == "__main__":
    main()
