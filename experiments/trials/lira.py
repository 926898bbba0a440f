r"""Membership inference (LiRA) at low false-positive rates, where the best attack's power is known in closed form.

A linear softmax model of two classes takes one gradient step from zero on a random half of n rows, so that the log odds
φ of a row is :math:`\frac{\eta}{h} \sum_i s_i s_j \langle x_i, x_j \rangle` over the h = n/2 rows of the half, s = ±1.
Whether the row itself is among them or not, φ has the variance of a random sum without replacement, the same for both,
and means that differ by :math:`\frac{\eta}{h}` times :math:`\|x_j\|^2` less the mean of the other products. With normal
laws the likelihood ratio is the best test at every false-positive rate, and its power is that of the ratio's two normal
laws, mixed over the rows: what LiRA reaches with shadows without number. Rows are normal, of 512 dimensions, scaled to
one norm.

With noise, the step is DP-SGD's and releases one noised sum. A row that is in takes the place of another, so that
detections are at most :math:`e^\epsilon \alpha + \delta` at a false-positive rate α, with the ε of that change (half
the noise); the closed form has the noise's variance besides.

Halves come in pairs that share no row. With 16 models LiRA finds more than the best attack on the laws, presumably as a
model's partner, which is one of few others, tells what the model has not seen.

The published detections (Carlini et al., 2022; github.com/tensorflow/privacy, commit 03035d5,
`research/mi_lira_2021/README.md`: CIFAR-10, 16 models, 1.69 % at 0.1 % false positives) are of images that were not at
hand; neither are those of github.com/privacytrustlab/ml_privacy_meter, commit e384af8 (`documentation/mia.md`: pictures
of CIFAR-10 and AG News). So nothing published stands beside these figures, but what the attack should reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedtorch as ft
from experiments import common, result_pages
from fedtorch.trust import attacks, privacy

ROWS, COLUMNS, DELTA = 512, 512, 1e-5
SHADOWS, NOISES = (16, 64, 256), (1.0, 4.0)
RATES = (0.001, 0.01)
READING = result_pages.Reading()


def rows_of(seed: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Normal rows of norm one `(n, d)` float64, and labels."""
    keys = ft.random.fold_in(ft.random.key(seed), torch.arange(2))
    x = ft.random.normal(keys[0], (rows, columns), torch.float64)
    return x / x.norm(dim=1, keepdim=True), (ft.random.normal(keys[1], (rows,), torch.float64) > 0).long()


def gap(x: Tensor, y: Tensor, noise: float) -> Tensor:
    """The difference of the means of φ over its standard deviation, of every row `(n,)`."""
    half, signs = len(y) // 2, 2.0 * y - 1
    products = (x @ x.mT) * signs * signs[:, None]
    own = products.diagonal()
    others = products - torch.diag(own)
    mean = others.sum(1) / (len(y) - 1)
    square = ((others.square().sum(1) / (len(y) - 1)) - mean.square()) * (len(y) - 1) / (len(y) - 2)
    return (own - mean) / (square * half * (half - 1) / (len(y) - 1) + (noise * own).square()).sqrt()


def power(gaps: Tensor, rate: float) -> float:
    """Detections of the best test with one threshold for all rows, at a rate of false positives."""
    tail = lambda threshold, sign: float(torch.special.ndtr((sign * gaps.square() / 2 - threshold) / gaps).mean())
    low, high = -1e3, 1e3
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, -1) > rate else (low, middle)
    return tail(high, 1)


def area(gaps: Tensor) -> float:
    """The area under the best test's curve: the chance that a member's ratio exceeds another row's."""
    mean = (gaps.square() / 2)[:, None] + gaps.square() / 2
    return float(torch.special.ndtr(mean / (gaps.square()[:, None] + gaps.square()).sqrt()).mean())


def solver(columns: int, noise: float, seed: int) -> ft.LocalSolver:
    """One step from zero; rows of norm one have gradients of norm √½, the clip."""
    module = nn.Linear(columns, 2, bias=False, dtype=torch.float64)
    nn.init.zeros_(module.weight)
    loss, optimizer = nn.functional.cross_entropy, lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    if not noise:
        return ft.gradient_descent(module, steps=1, loss=loss, optimizer=optimizer)
    return privacy.example_level(
        module, clip=math.sqrt(0.5), noise=noise, delta=DELTA, sampling_rate=1.0, entropy=privacy.from_seed(seed),
        ghost=True, steps=1, loss=loss, optimizer=optimizer,
    )  # fmt: skip


def attacked(x: Tensor, y: Tensor, noise: float, shadows: int, seed: int) -> dict[str, float]:
    """Detections and area of LiRA with so many models."""
    found = attacks.membership(solver(x.shape[1], noise, seed), x, y, shadows=shadows, seed=seed)
    return {**{name(rate): found.detections(rate) for rate in RATES}, "area": found.area()}


def name(rate: float) -> str:
    """Of a row."""
    return f"detections at {100 * rate:g} % false positives"


def bound(noise: float, rate: float) -> float:
    """What differential privacy leaves: of a release in which a row takes the place of another."""
    epsilon = privacy.epsilon(noise=noise / 2, sampling_rate=1.0, rounds=1, delta=DELTA)
    return min(1.0, math.exp(epsilon) * rate + DELTA)


def best(x: Tensor, y: Tensor, noise: float) -> dict[str, float]:
    """What LiRA should reach."""
    gaps = gap(x, y, noise)
    return {**{name(rate): power(gaps, rate) for rate in RATES}, "area": area(gaps)}


def words(noise: float) -> str:
    """Of a setting."""
    return f"noise {noise:g}" if noise else "no noise"


def measured(seeds: int, shadows: Sequence[int], noises: Sequence[float], size: tuple[int, int]) -> list[common.Row]:
    """A row for each figure: LiRA by the number of models, the closed form, and the bound."""
    sets = [rows_of(seed, *size) for seed in range(seeds)]
    found = []
    for noise in (0.0, *noises):
        for count in shadows if not noise else shadows[-1:]:
            runs = [attacked(*rows, noise, count, seed) for seed, rows in enumerate(sets)]
            found += common.over_seeds(f"{words(noise)}, LiRA, {count} models", runs)
        found += common.over_seeds(f"{words(noise)}, closed form", [best(*rows, noise) for rows in sets])
        if noise:
            setting = f"{words(noise)}, bound of differential privacy"
            found += [common.Row(setting, name(rate), bound(noise, rate)) for rate in RATES]
    return found


def draw(size: tuple[int, int]) -> dict[str, Figure]:
    """Detections by false positives on logarithmic axes: LiRA, the closed form, and the bound with noise."""
    x, y = rows_of(0, *size)
    figure, axes = common.subplots(1, 2, figsize=(8, 3.6), sharex=True, sharey=True)
    rates = torch.logspace(-4, 0, 60, dtype=torch.float64)
    for axis, noise in zip(axes, (0.0, NOISES[-1])):
        for count in SHADOWS if not noise else SHADOWS[-1:]:
            alarms, found = attacks.membership(solver(x.shape[1], noise, 0), x, y, shadows=count, seed=0).roc()
            axis.plot(alarms, found, label=f"LiRA, {count} models")
        axis.plot(rates, [power(gap(x, y, noise), float(rate)) for rate in rates], "k:", label="closed form")
        if noise:
            axis.plot(rates, [bound(noise, float(rate)) for rate in rates], "k--", label="differential privacy")
        axis.set(
            xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1), xlabel="false positives", title=words(noise)
        )
        axis.legend(frameon=False, fontsize="small")
    axes[0].set_ylabel("detections")
    return {"lira": figure}


def main(argv: Sequence[str] | None = None) -> None:
    """Attack models of all sizes; with --smoke small ones."""
    options = common.arguments(__doc__).parse_args(argv)
    size, shadows = ((64, 64), (16,)) if options.smoke else ((ROWS, COLUMNS), SHADOWS)
    rows = measured(options.seeds, shadows, NOISES[:1] if options.smoke else NOISES, size)
    common.show_rows("Membership inference beside the best attack", rows, ".4f")
    common.finish("trials.lira", rows, options, lambda: draw(size))


if __name__ == "__main__":
    main()
