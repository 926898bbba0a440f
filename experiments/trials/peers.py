"""Flower, pfl-research, NVFlare and FedLab: FedAvg of a softmax regression of digits, weight by weight.

Ten seeds, each with digits of scikit-learn in an order of its own and first weights of its own; they are ten softmax
regressions beside each other in one model, whose losses add up, so that one run of a simulator is all ten. The 1500
rows of training are split over 10 clients in parts of 1 to 10 shares, the other 297 rows test. 20 rounds of 20 steps of
SGD (rate 0.1, batches of 10, float32), all clients in each round, rows as weights. All systems read rows, first weights
and minibatches from one file, as `experiments.benchmarks.peers` does, each in a process and a virtual environment
(`.venv-peers/`) of its own. What is compared are the last weights: where the arithmetic is the same they differ by
rounding. Besides, the test losses of the seeds are compared as distributions (Kolmogorov-Smirnov, two samples).

FedLab's handler averages without weights and its aggregator takes them: both are run. NVFlare adds clients' results up
in the order in which they come, so that its last bits differ from run to run.

NVFlare's simulator takes minutes, most of them to start a process for each client, and is run when it is asked for:
`--systems NVFlare`. A system whose environment cannot be made is left out with a message.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import ks_2samp

from experiments import common
from experiments.benchmarks.peers import __main__ as peers, ours, work
from experiments.benchmarks.peers.tasks import SEEDS, TRIALS

TASK = "softmax"
EQUAL = 1e-5  # of weights of which the largest is about 1
SYSTEMS = {
    "Flower": peers.System("flower", "flower"),
    "pfl-research": peers.System("pfl_research", "pfl"),
    "NVFlare": peers.System("nvflare", "nvflare"),
    "FedLab, rows as weights": peers.System("fedlab", "fedlab"),
    "FedLab, its handler": peers.System("fedlab", "fedlab", ("--unweighted",)),
    "plain PyTorch loop": peers.System("plain"),
}
QUICK = [name for name in SYSTEMS if name != "NVFlare"]


class Model(NamedTuple):
    """The last weights of the seeds, and what they do on the test rows."""

    weight: np.ndarray  # (seeds, 10, 65), the intercepts last
    loss: np.ndarray  # (seeds,)
    accuracy: np.ndarray


def scored(parameters: Mapping[str, np.ndarray], mine: work.Work) -> Model:
    """Losses and accuracies by seed, in float64."""
    weight, bias = (parameters[name].astype(np.float64) for name in ("weight", "bias"))
    x, y = (leaf.numpy() for leaf in mine.evaluation)
    logits = np.einsum("nsf,scf->nsc", x, weight) + bias
    logits -= np.logaddexp.reduce(logits, -1, keepdims=True)
    loss = -np.take_along_axis(logits, y[..., None], -1)[..., 0].mean(0)
    return Model(np.concatenate([weight, bias[..., None]], -1), loss, (logits.argmax(-1) == y).mean(0))


def model(system: peers.System, file: Path, threads: int = 1) -> Model:
    """What a system ends at."""
    stored = file.with_suffix(".parameters.npz")
    told = system._replace(options=(*system.options, "--parameters", str(stored)))
    peers.measure(told, file, TASK, threads, here=system.environment is None)
    with np.load(stored) as parameters:
        return scored(parameters, work.load(str(file), TASK))


def beside(name: str, other: Model, mine: Model) -> list[common.Row]:
    """A system beside fedtorch."""
    gap = np.abs(other.weight - mine.weight).max((1, 2))
    return [
        common.row(name, "test loss", other.loss.tolist()),
        common.row(name, "test accuracy", other.accuracy.tolist()),
        common.Row(name, "largest difference of a weight", float(gap.max())),
        common.Row(name, f"seeds of {SEEDS} equal to {EQUAL:g}", int((gap <= EQUAL).sum())),
        common.Row(name, "p of Kolmogorov-Smirnov, test loss", float(ks_2samp(other.loss, mine.loss).pvalue)),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Train in all systems; with --smoke in ours and a plain loop only."""
    parser = common.arguments(__doc__)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=QUICK, help="some only")
    options = parser.parse_args(argv)
    options.seeds = SEEDS
    size = TRIALS[TASK].smoke if options.smoke else TRIALS[TASK].full
    rows: list[common.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.npz"
        work.write(file, {TASK: size}, ours.schedule)
        mine = model(peers.System("ours"), file)
        rows += beside("fedtorch", mine, mine)[:2]
        for name in options.systems:
            system = SYSTEMS[name]
            if options.smoke and system.environment is not None:
                continue
            try:
                peers.python(system.environment)
            except subprocess.CalledProcessError as error:
                sys.stderr.write(f"{name} is left out: {error}\n")
                continue
            rows += beside(name, model(system, file), mine)
    common.show_rows("FedAvg of a softmax regression in other simulators", rows, ".3g")
    common.finish("trials.peers", rows, options)


if __name__ == "__main__":
    main()
