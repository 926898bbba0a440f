"""Privacy of the weather stations: chapter 9 of the book, its problems and its coding assignment.

- *Problem 9.1*, "Where is Alice?": Bob, the only neighbour of a station that takes the steps of Algorithm 8.1, tells it
  random models, works out its sums Q and q from what it answers, and looks for the station that has them; also where
  the station adds noise to what it tells.
- *Problem 9.2*: telling mild hours from cold ones by one number aᵀx that leaks little of the latitude.
- *9.6.1 to 9.6.3*: latitude and longitude of a snapshot of clock and thermometer, by hypotheses learnt from the
  recordings, from a subset with noise (pre-processing), and by predictions with noise (post-processing); besides, by
  inverting a model of the temperature (`attacks.model_inversion`).
- *9.6.4*: private features (9.10) for the latitude, and how well latitude and temperature are predicted before and
  after, linearly and by a forest; the privacy funnel (9.8) beside them.

Four fifths of the recordings, drawn at random, are for learning, the others for counting errors. Source: Jung,
"Federated learning: from theory to practice", sections 9.4 to 9.6; it publishes no figures. Reads the folder
`fmi_weather` of FEDTORCH_DATA_DIR, or downloads the course's file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy
import torch
from matplotlib.figure import Figure
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import LinearRegression
from torch import Tensor

import fedtorch as ft
from experiments import common
from fedtorch.trust import attacks, privacy

LATITUDE, LONGITUDE = 0, 1
USEFUL = [0, 1, 3, 4, 5]  # the minute is always the same, and the year changes with the month
LR, COUPLING = 0.1, 0.5
NOISES = (0.0, 1e-4, 1e-2, 1.0, 10.0, 100.0)  # on what Alice tells
LEAKS = (0.0, 0.01, 0.03, 0.1, 0.3, math.inf)
EPSILONS = (1.0, 10.0, 100.0, math.inf)
BLURS = (0.0, 0.5, 1.0, 2.0, 4.0)  # degrees


class Recordings(NamedTuple):
    """Rows to learn from and rows to count errors on."""

    x: Tensor  # (n, 7)
    y: Tensor  # (n,) °C
    other_x: Tensor
    other_y: Tensor


def load(seed: int, stations: int | None) -> tuple[ft.data.FederatedData, Recordings]:
    """The stations, and their recordings in two parts."""
    data = ft.data.fmi_weather(torch.float64)
    if stations is not None:
        data = ft.data.from_tensors(list(data)[:stations])
    x, y = data.rows
    order = ft.random.permutation(ft.random.key(seed), len(y))
    first, second = order[: len(y) * 4 // 5], order[len(y) * 4 // 5 :]
    return data, Recordings(x[first], y[first], x[second], y[second])


def alice(data: ft.data.FederatedData, noise: float, rounds: int, seed: int) -> float:
    """9.1: the part of the stations that Bob finds by what they tell with noise of this standard deviation."""
    q = torch.stack([x.T @ x / len(x) for x, _ in data])
    linear = torch.stack([x.T @ y / len(x) for x, y in data])
    key = ft.random.key(seed)
    bob = ft.random.normal(key, (rounds, len(data), q.shape[1]), torch.float64) * 10
    w, told = torch.zeros_like(linear), []
    for step in range(rounds + 1):
        own = ft.random.normal(ft.random.fold_in(key, step), tuple(w.shape), torch.float64)
        told.append(w + noise * own)
        if step < rounds:
            gradient = 2 * ((q @ w[..., None])[..., 0] - linear) + 2 * COUPLING * (w - bob[step])
            w = w - LR * gradient
    answers = torch.stack(told, 1)
    found = 0
    for i in range(len(data)):
        guess = attacks.local_problem(answers[i], bob[:, i], LR, COUPLING)
        found += int(guess.nearest(attacks.Quadratics(q, linear))[0]) == i
    return found / len(data)


def problem_one(data: ft.data.FederatedData, rounds: int, seed: int) -> list[common.Row]:
    """9.1 for several strengths of noise."""
    return [
        common.Row(
            f"9.1 noise {noise:g} on models, {rounds} rounds", "stations found", alice(data, noise, rounds, seed)
        )
        for noise in NOISES
    ]


def problem_two(given: Recordings) -> list[common.Row]:
    """9.2: accuracy on the other rows, and R² of the latitude by aᵀx within the classes, beside the closed form's."""
    mild, other = given.y > given.y.median(), given.other_y > given.y.median()
    x, other_x = (part[:, USEFUL] / given.x[:, USEFUL].std(0) for part in (given.x, given.other_x))
    means = torch.stack([x[~mild].mean(0), x[mild].mean(0)])
    covariances = torch.stack([torch.cov(x[~mild].T, correction=0), torch.cov(x[mild].T, correction=0)])
    private = torch.zeros(1, x.shape[1], dtype=torch.float64)
    private[0, LATITUDE] = 1
    rows = []
    for leak in LEAKS:
        found = privacy.private_discriminant(means, covariances, private, leak)
        z, threshold = other_x @ found.direction, float((means @ found.direction).mean())
        right = float(((z > threshold) == other).double().mean())
        within = [numpy.corrcoef(z[side], given.other_x[side, LATITUDE])[0, 1] ** 2 for side in (other, ~other)]
        setting = f"9.2 I(s; z | y) ≤ {leak:g} nats"
        rows += [
            common.Row(setting, "accuracy", right),
            common.Row(setting, "accuracy, normal classes", found.accuracy),
            common.Row(setting, "R² of the latitude", float(numpy.mean(within))),
            common.Row(setting, "R², normal classes", -math.expm1(-2 * found.leak)),
        ]
    return rows


def snapshot(x: Tensor, y: Tensor) -> Tensor:
    """What a picture of clock and thermometer shows: everything but the place, and the temperature."""
    return torch.cat([x[:, 2:], y[:, None]], 1)


Hypothesis = Callable[[Tensor], Tensor]


def learnt(kind: str, x: Tensor, y: Tensor, seed: int) -> Hypothesis:
    """A hypothesis of scikit-learn's, linear or a forest."""
    model = LinearRegression()
    if kind == "forest":
        model = RandomForestRegressor(20, min_samples_leaf=5, random_state=seed)
    fitted = model.fit(x.numpy(), y.numpy())
    return lambda rows: torch.from_numpy(fitted.predict(rows.numpy()))


def degrees(hypothesis: Hypothesis, given: Recordings) -> float:
    """The root mean squared distance in degrees between true and guessed places of the other rows."""
    guess = hypothesis(snapshot(given.other_x, given.other_y))
    return 100 * float((guess - given.other_x[:, :2]).square().sum(1).mean().sqrt())


def inversion(given: Recordings, seed: int) -> list[common.Row]:
    """9.6.1, with two hypotheses and with a temperature model that is inverted over all places that there are."""
    mean = given.x[:, :2].mean(0)
    rows = [common.Row("9.6.1 the mean place", "degrees off", degrees(lambda x: mean.expand(len(x), 2), given))]
    for kind in ("linear", "forest"):
        hypothesis = learnt(kind, snapshot(given.x, given.y), given.x[:, :2], seed)
        rows.append(common.Row(f"9.6.1 {kind} hypothesis", "degrees off", degrees(hypothesis, given)))
    predict = learnt("forest", given.x, given.y, seed)
    places, counts = given.x[:, :2].unique(dim=0, return_counts=True)
    variance = float((predict(given.other_x) - given.other_y).square().mean())
    some = slice(0, min(300, len(given.other_y)))
    posterior = attacks.model_inversion(
        predict, given.other_x[some], given.other_y[some], places, [LATITUDE, LONGITUDE],
        lambda said, seen: -0.5 * (said - seen) ** 2 / variance, counts / counts.sum(),
    )  # fmt: skip
    guess = posterior @ places
    off = 100 * float((guess - given.other_x[some, :2]).square().sum(1).mean().sqrt())
    return [*rows, common.Row("9.6.1 temperature model inverted", "degrees off", off)]


def before(given: Recordings, seed: int) -> list[common.Row]:
    """9.6.2: a part of the rows, with noise on features and labels, all columns in units of their spread."""
    columns = torch.cat([given.x, given.y[:, None]], 1)
    centre, scale = columns.mean(0), columns.std(0)
    scale = torch.where(scale > 1e-9, scale, 1.0)
    rows = []
    for share in (1.0, 0.1):
        part = (columns[: int(share * len(columns))] - centre) / scale  # the rows are in random order
        for epsilon in EPSILONS:
            if math.isfinite(epsilon):
                noise = privacy.noise_for(epsilon=epsilon, delta=1e-5)
                part_noised = privacy.noised_features(part, 4.0, noise, entropy=privacy.from_seed(seed))
            else:
                part_noised = part
            told = part_noised * scale + centre
            hypothesis = learnt("forest", snapshot(told[:, :-1], told[:, -1]), told[:, :2], seed)
            setting = f"9.6.2 {share:.0%} of the rows, ε = {epsilon:g} a row"
            rows.append(common.Row(setting, "degrees off", degrees(hypothesis, given)))
    return rows


def blurred(hypothesis: Hypothesis, noise: Tensor) -> Hypothesis:
    """Add noise to what the hypothesis predicts."""
    return lambda x: hypothesis(x) + noise


def after(given: Recordings, seed: int) -> list[common.Row]:
    """9.6.3: predictions with normal noise, fresh for every row."""
    hypothesis = learnt("forest", snapshot(given.x, given.y), given.x[:, :2], seed)
    noise = ft.random.normal(ft.random.key(seed), (len(given.other_y), 2), torch.float64)
    return [
        common.Row(
            f"9.6.3 noise of {blur:g} degrees", "degrees off",
            degrees(blurred(hypothesis, blur / 100 * noise), given),
        )
        for blur in BLURS
    ]  # fmt: skip


def private_features(given: Recordings, seed: int, steps: int) -> list[common.Row]:
    """9.6.4: R² of latitude and temperature on the other rows, from features as they are, projected, and funnelled."""
    centre, scale = given.x.mean(0), given.x.std(0)
    x, other_x = ((part - centre) / torch.where(scale > 1e-9, scale, 1.0) for part in (given.x, given.other_x))
    projection = privacy.private_projection(x, given.x[:, LATITUDE])
    some = slice(0, min(2000, len(x)))
    funnel = privacy.variational_funnel(
        x[some], given.x[some, LATITUDE], given.y[some], 0.3, hidden=(16,), steps=steps, seed=seed
    )
    key = ft.random.key(seed)
    maps: dict[str, Callable[[Tensor, int], Tensor]] = {
        "as they are": lambda rows, part: rows,
        "private (9.10)": lambda rows, part: rows @ projection,
        "funnel (9.8), learnt": lambda rows, part: funnel.encoder(rows, ft.random.fold_in(key, part)).detach(),
    }
    rows = []
    for name, mapped in maps.items():
        z, other = mapped(x, 0), mapped(other_x, 1)
        for kind in ("linear", "forest"):
            for target, own, counted in (
                ("latitude", given.x[:, LATITUDE], given.other_x[:, LATITUDE]),
                ("temperature", given.y, given.other_y),
            ):
                error = (learnt(kind, z, own, seed)(other) - counted).square().mean() / counted.var(correction=0)
                rows.append(common.Row(f"9.6.4 features {name}, {kind}", f"R² of the {target}", 1 - float(error)))
    return rows


def funnel_curve(given: Recordings) -> list[common.Row]:
    """(9.8) in closed form, as if latitude, temperature and the other features were jointly normal."""
    useful = USEFUL[1:]
    columns = torch.cat([given.x[:, useful], given.x[:, :1], given.y[:, None]], 1)
    joint = torch.cov((columns / columns.std(0)).T)
    size = len(useful)
    inner = joint[:size, :size]
    private, label = (torch.cat([joint[:size, i], joint[i, i : i + 1]]) for i in (size, size + 1))
    most = -0.5 * math.log1p(-float(label[:size] @ torch.linalg.solve(inner, label[:size]) / label[size]))
    return [
        common.Row(f"9.8 I(y; z) = {share * most:.4f} nats", "I(s; z) in nats",
                   privacy.privacy_funnel(inner, private, label, share * most).leak)
        for share in (0.25, 0.5, 0.75, 0.9, 1.0)
    ]  # fmt: skip


def draw(rows: Sequence[common.Row]) -> Figure:
    """A panel for each part."""
    figure, axes = common.subplots(2, 3, figsize=(14, 7.5))
    of = lambda start, metric: [row.ours for row in rows if row.setting.startswith(start) and row.metric == metric]
    one, two, three, four, five, six = axes.flat
    one.plot([f"{noise:g}" for noise in NOISES], of("9.1", "stations found"), marker="o")
    one.set(
        title="9.1: Where is Alice?", xlabel="sd of the noise on her models", ylabel="stations found", ylim=(0, 1.05)
    )
    for metrics, style in ((("R² of the latitude", "accuracy"), "-"), (("R², normal classes",
                            "accuracy, normal classes"), "--")):  # fmt: skip
        label = "measured" if style == "-" else "closed form"
        two.plot(of("9.2", metrics[0]), of("9.2", metrics[1]), style, marker="o", label=label)
    two.set(title="9.2: private discriminant", xlabel="R² of the latitude by aᵀx", ylabel="accuracy, mild or cold")
    two.legend(frameon=False)
    places = [row for row in rows if row.setting.startswith("9.6.1")]
    three.barh([row.setting[6:] for row in places], [row.ours for row in places])
    three.set(title="9.6.1: where are you?", xlabel="degrees off")
    names = ["∞" if math.isinf(epsilon) else f"{epsilon:g}" for epsilon in EPSILONS]
    for share in ("100%", "10%"):
        four.plot(names, of(f"9.6.2 {share}", "degrees off"), marker="o", label=f"{share} of the rows")
    four.axhline(of("9.6.1 the mean place", "degrees off")[0], color="0.7")
    four.set(title="9.6.2: noise on the rows", xlabel="ε of a row", ylabel="degrees off", yscale="log")
    four.legend(frameon=False)
    five.plot(BLURS, of("9.6.3", "degrees off"), marker="o")
    five.set(title="9.6.3: noise on the predictions", xlabel="sd in degrees", ylabel="degrees off", ylim=(0, None))
    settings = list(dict.fromkeys(row.setting for row in rows if row.setting.startswith("9.6.4")))
    for offset, target in ((-0.2, "latitude"), (0.2, "temperature")):
        heights = [max(0.0, of(setting, f"R² of the {target}")[0]) for setting in settings]
        six.barh([i + offset for i in range(len(settings))], heights, height=0.4, label=target)
    six.set_yticks(range(len(settings)), [setting[15:] for setting in settings])
    six.set(title="9.6.4: features", xlabel="R² on other rows (0 if below)")
    six.legend(frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run all parts, print their tables and draw them."""
    options = common.arguments(__doc__).parse_args(argv)
    runs = []
    for seed in range(1, options.seeds + 1):
        data, given = load(seed, 12 if options.smoke else None)
        runs.append([
            *problem_one(data, 20 if options.smoke else 100, seed), *problem_two(given), *inversion(given, seed),
            *before(given, seed), *after(given, seed), *private_features(given, seed, 20 if options.smoke else 400),
            *funnel_curve(given),
        ])  # fmt: skip
    rows = [common.row(each[0].setting, each[0].metric, [row.ours for row in each]) for each in zip(*runs)]
    for part in ("9.1", "9.2", "9.6.1", "9.6.2", "9.6.3", "9.6.4", "9.8"):
        common.show_rows(part, [row for row in rows if row.setting.startswith(part + " ")], ".4g")
    common.finish("gtv.privacy", rows, options, lambda: {"gtv_privacy": draw(rows)})


if __name__ == "__main__":
    main()
