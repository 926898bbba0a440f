"""byzfl's heatmaps of MNIST: ten honest clients of a convolutional network, the worst of three attacks of one to four.

A cell is a number of attackers f and a similarity γ of the honest clients' rows (0: sorted by digit). Its accuracy is
that on the test at the best of 17 times (every 50th of 800 rounds, and after them), the mean of three seeds, under the
worst attack; its loss the least mean loss of a round's minibatches, under the worst attack. Seeds differ in the order
of minibatches alone, as in byzfl; our spread is over them, at the attack and time that the cell shows. The rule is
clipping, nearest-neighbour mixing and byzfl's three smoothed steps towards the geometric median (`byzfl_training`).

`--cells 0:1 0.33:4` chooses cells; every training that is done is kept as a file in `--kept`, from where the next call
goes on. The whole heatmap is 16 cells of 9 trainings. That of the trimmed mean was not run: its two attacks that search
try 20 factors a round, and where those of the geometric median cost nothing, as that sees inner products of 12 vectors
only, each of these sorts 431 080 coordinates.

Sources: github.com/LPD-EPFL/byzfl, commit 69bd1ac, `byzfl/benchmark/README.md` (the configuration) and the pictures
beside it, whose cells are annotated: `docs/_build/html/_images/GM_test_heatmap.png` and `GM_heatmap_loss.png`;
`byzfl/benchmark/evaluate_results.py` (what a cell is).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from experiments import common, result_pages
from experiments.trials import byzfl_training as training

ROUNDS, EVERY = 800, 50
ATTACKS = ("sign flipping", "inner products", "a little is enough")
ACCURACY, LOSS = "test accuracy, worst attack", "training loss, worst attack"
READING = result_pages.Reading(smaller="loss", larger="accuracy")


class Cell(NamedTuple):
    """A cell of both pictures."""

    similar: float
    faulty: int

    @property
    def name(self) -> str:
        """For rows."""
        return f"γ = {self.similar:g}, f = {self.faulty}"


def cells(table: Mapping[float, Sequence[str]]) -> dict[Cell, str]:
    """A picture's cells as they are printed."""
    return {Cell(similar, f): text for similar, line in table.items() for f, text in enumerate(line, 1)}


PUBLISHED = {
    ACCURACY: cells(
        {
            0.0: ("0.87", "0.56", "0.26", "0.27"),
            0.33: ("0.98", "0.96", "0.94", "0.94"),
            0.66: ("0.98", "0.97", "0.97", "0.96"),
            1.0: ("0.98", "0.98", "0.98", "0.97"),
        }
    ),
    LOSS: cells(
        {
            0.0: ("0.35", "2.3", "2.3", "2.3"),
            0.33: ("0.057", "0.089", "0.17", "0.18"),
            0.66: ("0.039", "0.056", "0.067", "0.099"),
            1.0: ("0.028", "0.039", "0.045", "0.055"),
        }
    ),
}


def trained(cell: Cell, attack: str, seed: int, rounds: int, every: int, kept: Path | None) -> training.Course:
    """One training, from its file where it has been done."""
    name = f"{cell.similar:g}_{cell.faulty}_{attack.replace(' ', '_')}_{seed}_of_{rounds}_rounds.json"
    file = None if kept is None else kept / name
    if file is not None and file.exists():
        return training.Course(**json.loads(file.read_text()))
    began, rule = time.process_time(), training.rule(cell.faulty)
    tested = None if rounds == ROUNDS else 500  # of --smoke
    course = training.train(
        rule, training.attack(attack, rule, cell.faulty), cell.similar, seed, rounds=rounds, every=every,
        training=training.pictures(True), test=training.Pictures(*(leaf[:tested] for leaf in training.pictures(False))),
    )  # fmt: skip
    took = time.process_time() - began
    sys.stderr.write(f"{cell.name}, {attack}, seed {seed}: {max(course.accuracy):.4f}, {took:.0f} s\n")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(course._asdict()))
    return course


def best(of: Sequence[Sequence[float]], sign: int) -> np.ndarray:
    """Each seed's value `(seeds,)` where their mean is largest, or with sign −1 smallest."""
    values = np.asarray(of)
    return values[:, int((sign * values.mean(0)).argmax())]


def rows_of(cell: Cell, courses: Mapping[str, Sequence[training.Course]]) -> list[common.Row]:
    """What the pictures have of a cell, and the best accuracy under each attack."""
    scores = {attack: best([each.accuracy for each in runs], 1) for attack, runs in courses.items()}
    losses = [best([each.loss for each in runs], -1) for runs in courses.values()]
    shown = {ACCURACY: min(scores.values(), key=np.mean), LOSS: max(losses, key=np.mean)}
    made = []
    for metric, values in shown.items():
        text = PUBLISHED[metric][cell]
        row = common.row(cell.name, metric, values.tolist(), float(text))
        digits = len(text.partition(".")[2])
        fine = row.sd is None or 2 * row.sd < 0.5 * 10.0**-digits  # than what is printed
        made.append(replace(row, sd=None, decimals=digits) if fine else row)
    return made + [
        common.row(cell.name, f"test accuracy, {attack}", values.tolist()) for attack, values in scores.items()
    ]


def draw(courses: Mapping[Cell, Mapping[str, Sequence[training.Course]]], every: int) -> dict[str, Figure]:
    """Test accuracy by round under each attack, and the published accuracy of the worst."""
    figure, axes = common.subplots(1, len(courses), figsize=(4 * len(courses), 3.4), squeeze=False, sharey=True)
    for axis, (cell, of) in zip(axes[0], courses.items()):
        for attack, runs in of.items():
            values = np.asarray([each.accuracy for each in runs])
            at = every * np.arange(values.shape[1])
            (line,) = axis.plot(at, values.mean(0), label=attack)
            axis.fill_between(at, values.min(0), values.max(0), alpha=0.2, color=line.get_color(), linewidth=0)
        axis.axhline(float(PUBLISHED[ACCURACY][cell]), color="black", linestyle=":", label="byzfl's heatmap")
        axis.set(title=cell.name, xlabel="round")
    axes[0, 0].set(ylabel="test accuracy")
    axes[0, 0].legend(frameon=False)
    return {"byzfl_heatmaps": figure}


def main(argv: Sequence[str] | None = None) -> None:
    """Train for the chosen cells; with --smoke for two rounds of one seed."""
    parser = common.arguments(__doc__)
    parser.add_argument("--cells", nargs="+", default=["0:1"], metavar="γ:f", help="which (default 0:1)")
    parser.add_argument("--kept", type=Path, help="folder of the trainings that are done, where the next call goes on")
    options = parser.parse_args(argv)
    rounds, every = (2, 1) if options.smoke else (ROUNDS, EVERY)
    chosen = [Cell(float(similar), int(f)) for similar, _, f in (each.partition(":") for each in options.cells)]
    if missing := [cell.name for cell in chosen if cell not in PUBLISHED[ACCURACY]]:
        raise SystemExit(f"Expected cells of γ 0, 0.33, 0.66 or 1 and f 1 to 4, such as 0.33:2, but got {missing}")
    courses: dict[Cell, dict[str, list[training.Course]]] = {}
    for cell in chosen:
        courses[cell] = {
            attack: [trained(cell, attack, seed, rounds, every, options.kept) for seed in range(options.seeds)]
            for attack in ATTACKS
        }
    rows = [row for cell, of in courses.items() for row in rows_of(cell, of)]
    common.show_rows("byzfl's heatmap of the geometric median", rows, ".4f")
    common.finish("trials.byzfl_heatmaps", rows, options, lambda: draw(courses, every))


if __name__ == "__main__":
    main()
