"""Intervals of battery cells' futures from the errors at other cells (split conformal prediction, leave one cell out).

What FedMGP says of its own errors is far too narrow (`fedmgp.battery`). Here every cell finds out how wrong it would
have been: it takes its own site out of the sum that the server has, which gives q(g) without it exactly, joins again
with its first cycles alone (`join`), and predicts its others. A unit does that with what it hears anyway. The test
cell's interval is its prediction ± the 90 % quantile of the other cells' errors in units of a scale: none, the cycles
since the cut, or what FedMGP says its sd is. Of K cells each has the weight 1 / (K + 1), over its cycles, and the rest
lies at infinity, so that coverage is at least 90 % in the mean over cells and cycles, of cells that are exchangeable,
but for what the shared hyperparameters have seen. With 16 other cells no interval of 95 % is finite.

Cells and cuts are those of `fedmgp.battery`; other cells are those that are seen up to their 250th cycle, as test cells
are; one setting of the steps. Scored are five test cells at 30 %, and each of the whole cells in turn in their place.
The scales were looked at together on two cuts before this was written; none of them is chosen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.fedmgp import battery, models as fm
from fedtorch.models.gaussian_process import ConvolvedGP, join

CUT, LEVEL = 0.3, 0.9
NORMAL = 1.6448536269514722  # of 90 % intervals


class Errors(NamedTuple):
    """Of a cell that joined with its first cycles: where it is predicted, its outputs and the prediction."""

    at: Tensor  # (N,) cycles since the cut
    truth: Tensor  # (N,)
    found: fm.Prediction


SCALES: dict[str, Callable[[Errors], Tensor]] = {
    "conformal, one width": lambda e: torch.ones_like(e.at),
    "conformal, by cycles since the cut": lambda e: e.at,
    "conformal, by FedMGP's sd": lambda e: e.found.sd,  # type: ignore[dict-item,return-value]
}


def left_out(
    units: Sequence[ConvolvedGP], x: Sequence[Tensor], y: Sequence[Tensor], cut: Tensor, longest: int
) -> list[Errors]:
    """Errors of every unit of so many rows: q without it, joined with its cycles up to the cut."""
    with torch.no_grad():
        sites = [unit.site(a[:, None], b) for unit, a, b in zip(units, x, y)]
    errors = []
    for k, (a, b) in enumerate(zip(x, y)):
        if len(a) < longest:
            continue
        others = [site for j, site in enumerate(sites) if j != k]
        precision, shift, _ = (torch.stack(part).sum(0) for part in zip(*others))
        unit = copy.deepcopy(units[k])
        unit.posterior_mean, unit.posterior_root = posterior(unit, precision, shift)
        early = a <= cut
        new = join(unit, a[early][:, None], b[early])
        with torch.no_grad():
            found = new.predict(a[~early][:, None])
        errors.append(Errors(a[~early] - cut, b[~early], fm.Prediction(found.mean, found.stddev)))
    return errors


@torch.no_grad()
def posterior(unit: ConvolvedGP, precision: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and root of the covariance of q from a sum of sites, by coordinates that are white under the prior."""
    back = torch.linalg.inv(unit.change())
    white = torch.linalg.inv(back.mT @ precision @ back + torch.eye(len(back), dtype=back.dtype))
    return back @ white @ back.mT @ shift, back @ torch.linalg.cholesky((white + white.mT) / 2)


def half_width(errors: Errors, others: Sequence[Errors], scale: Callable[[Errors], Tensor]) -> Tensor:
    """Half the width of a cell's interval `(N,)`: the quantile of the others' errors, in units of the scale."""
    scores = torch.cat([(e.found.mean - e.truth).abs() / scale(e) for e in others])
    weight = torch.cat([torch.full_like(e.at, 1 / len(e.at) / (len(others) + 1)) for e in others])
    order = scores.argsort()
    place = int((weight[order].cumsum(0) < LEVEL).sum())
    return scale(errors) * (scores[order][place] if place < len(scores) else torch.inf)


def scores(errors: Errors, half: Tensor) -> dict[str, float]:
    """Coverage and width over a cell's cycles."""
    inside = ((errors.found.mean - errors.truth).abs() <= half).double().mean()
    return {"90 % intervals cover": float(inside), "mean width": 2 * float(half.mean())}


def draw(cells: Sequence[tuple[Errors, Tensor, Tensor]]) -> Figure:
    """Test cells with intervals by cycles since the cut, and FedMGP's own."""
    figure, axes = common.subplots(1, len(cells), figsize=(3.2 * len(cells), 3.2), squeeze=False, sharey=True)
    for axis, (errors, half, own) in zip(axes[0], cells):
        at, mean = battery.CYCLES * (CUT + errors.at), errors.found.mean
        axis.fill_between(at, mean - half, mean + half, color="C0", alpha=0.25, linewidth=0, label="conformal, 90 %")
        axis.fill_between(at, mean - own, mean + own, color="C3", alpha=0.5, linewidth=0, label="FedMGP's, 90 %")
        axis.plot(at, errors.truth, ".", color="black", markersize=3, label="to come")
        axis.set_xlabel("cycle")
    axes[0, 0].set_ylabel("lost capacity / nominal")
    axes[0, 0].legend(frameon=False, fontsize="small")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Train for each test cell, score its intervals and those of all whole cells, and draw the test cells."""
    parser = common.arguments(__doc__)
    parser.add_argument("--every", type=int, default=1, help="take only every so many cycles")
    options = parser.parse_args(argv)
    x, y = ([v[:: options.every] for v in part] for part in battery.cells())
    rounds, count = (8, 1) if options.smoke else (60, 5)
    if options.smoke:
        x, y = [a[::16] for a in x[:13]], [b[::16] for b in y[:13]]
    longest = max(map(len, x))
    whole = [k for k in range(len(x)) if len(x[k]) == longest and k not in battery.TUNED_ON]
    tests = [whole[i] for i in ft.random.choice(ft.random.key(0), len(whole), count)]
    runs: dict[str, list[dict[str, float]]] = {}
    shown = []
    for cell in tests:
        xs, ys, at, lost = battery.observed(x, y, cell, CUT)
        one = fm.model(torch.linspace(0, 1, 50, dtype=fm.DTYPE), 2, None, fm.pooled_scale(ys), battery.WEIGHT_SD)
        units, _ = fm.fedmgp(fm.federated(xs, ys), one, rounds)
        test, cut = fm.predict(units[0], at), xs[0][-1]
        every = [Errors(at - cut, lost, test), *left_out(units, xs, ys, cut, longest)]
        assert test.sd is not None
        runs.setdefault("FedMGP", []).append(scores(every[0], NORMAL * test.sd))
        for name, scale in SCALES.items():
            half = half_width(every[0], every[1:], scale)
            runs.setdefault(name, []).append(scores(every[0], half))
            turns = [scores(e, half_width(e, [o for o in every if o is not e], scale)) for e in every]
            mean = {metric: sum(values) / len(values) for metric, values in common.by_metric(turns).items()}
            runs.setdefault(f"{name}, all cells in turn", []).append(mean)
        shown.append((every[0], half_width(every[0], every[1:], [*SCALES.values()][1]), NORMAL * test.sd))
    rows = [row for name, of_cells in runs.items() for row in common.over_seeds(name, of_cells)]
    common.show_rows(f"{count} test cells at {CUT:.0%}, {rounds} rounds", rows, ".4f")
    common.finish("fedmgp.conformal", rows, options, lambda: {"fedmgp_conformal": draw(shown)})


if __name__ == "__main__":
    main()
