"""byzfl's rules and attacks: the outputs that its documentation prints, and its own code on random messages.

Documented: three messages (1, 2, 3), (4, 5, 6), (7, 8, 9), for which each page prints the answer; the row is the mean
of its coordinates. Random: 200 times 13 messages of 50 normal numbers, every fifth set with two messages that are a
hundred times as large; the row is the largest difference from byzfl's answer relative to its largest number, and
"equal" counts the sets in which that is at most 1e-9 (`pip install byzfl`; without it these rows are left out).

What differs in definition is said by the arguments: byzfl's Krum with f faulty sums n − f − 1 nearest distances where
Blanchard et al. (2017) sum n − f − 2, so that it is `robust.krum(f − 1)`; its centred clipping starts at zero and takes
no other start (its constructor refuses every one), so that the start is set on the object here; its geometric median
takes three smoothed steps from zero unless it is told otherwise, and is compared after 3 and after 2 000; its "a little
is enough" goes up by standard deviations of a sample (n − 1), ours down by those of the messages (n).
Left out, as there is nothing of the kind in `fedtorch.trust.robust`: MDA, MoNNA, Meamed, CAF, SMEA, ARC and bucketing;
and of the attacks Mimic and the two that search for their factor.

Source: the package `byzfl` 0.0.11, docstrings of `byzfl/aggregators/aggregators.py`, `preaggregators.py` and
`byzfl/attacks/attacks.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments import common, result_pages
from fedtorch.trust import attacks, robust

FAULTY, MESSAGES, COORDINATES, EQUAL = 2, 13, 50, 1e-9
RADIUS = 3.0
EXAMPLE = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], dtype=torch.float64)
READING = result_pages.Reading(
    reasons=(
        result_pages.Reason(
            "^geometric median, 3 steps",
            "byzfl stops after three smoothed steps from zero; ours goes on to the geometric median, as byzfl does "
            "with more steps",
        ),
    )
)
Answer = Callable[[Tensor], Tensor]


class Compared(NamedTuple):
    """One rule or attack: ours, byzfl's, and what its documentation prints for three messages."""

    ours: Callable[[int], Answer]  # by the number of faulty messages
    theirs: Callable[[Any, int], Callable[[np.ndarray], np.ndarray]]
    printed: tuple[float, ...] | None = None  # for one faulty message


def average(rule: robust.Rule) -> Answer:
    """What a rule makes of messages of equal weights."""

    def answer(messages: Tensor) -> Tensor:
        return rule.average(messages, torch.full((len(messages),), 1 / len(messages), dtype=messages.dtype))

    return answer


def attacked(attack: attacks.Attack) -> Answer:
    """What an attacker says who hears all these messages, which are honest."""
    together = attack.together
    assert together is not None
    return lambda messages: together(messages, messages[:1])[0]


def of_sample(messages: Tensor) -> float:
    """The standard deviation of a sample, by n − 1, over that of these messages, by n."""
    return (len(messages) / (len(messages) - 1)) ** 0.5


def centred(byzfl: Any, steps: int) -> Callable[[np.ndarray], np.ndarray]:
    """byzfl's centred clipping from the median of every coordinate."""

    def clipped(messages: np.ndarray) -> np.ndarray:
        rule = byzfl.CenteredClipping(L=steps, tau=RADIUS)
        rule.m = np.median(messages, axis=0)
        return np.asarray(rule(messages))

    return clipped


def mixed(byzfl: Any, faulty: int, rule: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """byzfl's rule of mixed messages."""
    return lambda messages: rule(byzfl.NNM(faulty)(messages))


def share(faulty: int) -> float:
    """What a trimmed mean of so many messages cuts off at each end."""
    return faulty / (len(EXAMPLE) if faulty == 1 else MESSAGES)


COMPARED: dict[str, Compared] = {
    "average": Compared(lambda f: average(robust.trimmed_mean(0.0)), lambda byzfl, f: byzfl.Average(), (4.0, 5.0, 6.0)),
    "median": Compared(lambda f: average(robust.median()), lambda byzfl, f: byzfl.Median(), (4.0, 5.0, 6.0)),
    "trimmed mean": Compared(
        lambda f: average(robust.trimmed_mean(share(f))), lambda byzfl, f: byzfl.TrMean(f), (4.0, 5.0, 6.0)
    ),
    "geometric median, 3 steps": Compared(
        lambda f: average(robust.geometric_median()),
        lambda byzfl, f: byzfl.GeometricMedian(),
        (3.78788764, 4.78788764, 5.78788764),
    ),
    "geometric median, 2 000 steps": Compared(
        lambda f: average(robust.geometric_median()), lambda byzfl, f: byzfl.GeometricMedian(nu=1e-9, T=2_000)
    ),
    "Krum": Compared(lambda f: average(robust.krum(f - 1)), lambda byzfl, f: byzfl.Krum(f), (1.0, 2.0, 3.0)),
    "multi-Krum": Compared(
        lambda f: average(robust.krum(f - 1, chosen=(len(EXAMPLE) if f == 1 else MESSAGES) - f)),
        lambda byzfl, f: byzfl.MultiKrum(f),
        (2.5, 3.5, 4.5),
    ),
    "centred clipping, 1 step": Compared(
        lambda f: average(robust.centred_clipping(RADIUS, steps=1)), lambda byzfl, f: centred(byzfl, 1)
    ),
    "centred clipping, 5 steps": Compared(
        lambda f: average(robust.centred_clipping(RADIUS, steps=5)), lambda byzfl, f: centred(byzfl, 5)
    ),
    "centred clipping that clips nothing": Compared(
        lambda f: average(robust.centred_clipping(1e9, steps=1)),
        lambda byzfl, f: byzfl.CenteredClipping(tau=1e9),
        (4.0, 5.0, 6.0),
    ),
    "average of clipped messages": Compared(
        lambda f: average(robust.norm_bounding(2.0)),
        lambda byzfl, f: lambda messages: byzfl.Clipping(2.0)(messages.copy()).mean(0),
        tuple(
            float(np.mean(column))
            for column in (
                (0.53452248, 0.91168461, 1.00514142),
                (1.06904497, 1.13960576, 1.14873305),
                (1.60356745, 1.36752692, 1.29232469),
            )
        ),
    ),
    "average of mixed messages": Compared(
        lambda f: average(robust.nearest_neighbour_mixing(f, robust.trimmed_mean(0.0))),
        lambda byzfl, f: mixed(byzfl, f, byzfl.Average()),
        (3.5, 4.5, 5.5),
    ),
    "trimmed mean of mixed messages": Compared(
        lambda f: average(robust.nearest_neighbour_mixing(f, robust.trimmed_mean(share(f)))),
        lambda byzfl, f: mixed(byzfl, f, byzfl.TrMean(f)),
    ),
    "median of mixed messages": Compared(
        lambda f: average(robust.nearest_neighbour_mixing(f, robust.median())),
        lambda byzfl, f: mixed(byzfl, f, byzfl.Median()),
    ),
    "attack: sign flipping": Compared(
        lambda f: attacked(attacks.inner_product_manipulation([0], 1.0)),
        lambda byzfl, f: byzfl.SignFlipping(),
        (-4.0, -5.0, -6.0),
    ),
    "attack: inner products × 2": Compared(
        lambda f: attacked(attacks.inner_product_manipulation([0], 2.0)),
        lambda byzfl, f: byzfl.InnerProductManipulation(2.0),
        (-8.0, -10.0, -12.0),
    ),
    "attack: a little is enough, 1.5": Compared(
        lambda f: lambda messages: attacked(attacks.a_little_is_enough([0], -1.5 * of_sample(messages)))(messages),
        lambda byzfl, f: byzfl.ALittleIsEnough(1.5),
        (8.5, 9.5, 10.5),
    ),
}


def documented() -> list[common.Row]:
    """A row for each printed answer."""
    return [
        common.Row(
            f"{name}, documented",
            "mean of coordinates",
            float(each.ours(1)(EXAMPLE).mean()),
            published=float(np.mean(each.printed)),
            decimals=7,
        )
        for name, each in COMPARED.items()
        if each.printed is not None
    ]


def sets(count: int) -> list[Tensor]:
    """Random messages, of every fifth set two that are large."""
    draws = np.random.default_rng(0)
    made = [draws.normal(size=(MESSAGES, COORDINATES)) for _ in range(count)]
    for messages in made[::5]:
        messages[:FAULTY] *= 100
    return [torch.from_numpy(messages) for messages in made]


def beside(name: str, byzfl: Any, messages: Sequence[Tensor]) -> list[common.Row]:
    """Ours and byzfl's code on the same messages."""
    ours, theirs = COMPARED[name].ours(FAULTY), COMPARED[name].theirs(byzfl, FAULTY)
    gaps = []
    for each in messages:
        other = torch.as_tensor(np.asarray(theirs(each.numpy().copy())))
        gaps.append(float((ours(each) - other).abs().max() / other.abs().max()))
    equal = sum(gap <= EQUAL for gap in gaps)
    return [
        common.Row(f"{name}, random", "largest relative difference", max(gaps)),
        common.Row(f"{name}, random", f"equal to {EQUAL:g}, of {len(gaps)}", equal),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """The documented answers, and byzfl's code where it is installed; with --smoke on few sets."""
    options = common.arguments(__doc__).parse_args(argv)
    rows = documented()
    try:
        import byzfl
    except ImportError as error:
        sys.stderr.write(f"byzfl's own code is left out (pip install byzfl): {error}\n")
    else:
        messages = sets(10 if options.smoke else 200)
        for name in COMPARED:
            rows += beside(name, byzfl, messages)
    common.show_rows("Rules and attacks of byzfl", rows, ".10g")
    common.finish("trials.byzfl", rows, options)


if __name__ == "__main__":
    main()
