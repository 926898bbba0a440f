r"""pFedMe on MNIST: what its authors' repository has stored of its rounds.

20 users of two digits each, rows as the authors' script gave them (`pfedme_data`), softmax regression, 5 users a round.
In a round a user goes on through its rows in R minibatches of 20; on each it takes K = 5 steps of rate η' on

.. math:: \ell(\theta) + \frac{\lambda}{2} \|\theta - w\|^2 + \frac{0.001}{2} \|\theta\|^2

from where θ was, and then :math:`w \leftarrow w - \eta \lambda (w - \theta)`; the server takes the mean of w by rows.
Stored are three results, each the mean of ten runs: "server's model" (η = 0.005, λ = 15, R = 10, η' = 0.09) and
"server's model, R = 20" (η' = 0.1, the README's command) on all users' rows before a round, and of that command also
"own models" of all users in a round. Runs begin at the same weights (`torch.manual_seed(0)`) and differ in who is
asked, so that round 0 has one value.

What the authors stored of users is w_k, not the personal θ_k of the paper: `test_persionalized_model` loads what
`update_parameters` has just set to w_k. Nothing is stored of θ_k. The tables of README and paper were not at hand (the
README's are pictures elsewhere).

With R = 10 the losses of the server's model come out 3 to 7 % above the stored ones from round 50 on, while accuracies
agree but for the last. It is not how they are computed: with R = 20 the same metrics of the same code agree. Nor is it
the mean of w without weights, which the code took from 15 May to 3 June 2020 (989bebd, 5809039): by that, three seeds
had 0.398 to 0.402 after 100 rounds, beside 0.401 by rows and 0.377 stored. No command is printed for that file but that
figures of the supplement have η' = 0.09; we have found no reason.

Sources: github.com/CharlieDinh/pFedMe, `results/Mnist_pFedMe_0.005_1.0_15_5u_20b_10_5_0.09_avg.h5` (commit 5a74360),
`results/Mnist_pFedMe_0.005_1_15_5u_20b_20_5_0.1_avg.h5` and `…_p_0.005_1_15_5u_20b_20_5_0.1_avg.h5` (378a4d4),
`fedl/users/userpsnl.py`, `fedl/optimizers/fedoptimizer.py`; Dinh, Tran and Nguyen (2020), "Personalized federated
learning with Moreau envelopes", Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedtorch as ft
from experiments import common, result_pages
from experiments.side_by_side import side_by_side
from experiments.trials import pfedme_data
from experiments.trials.pfedme_data import METRICS, USERS
from fedtorch import tree
from fedtorch.data import ClientData
from fedtorch.tree import Tree

ASKED, BATCH, INNER, RIDGE = 5, 20, 5, 0.001
READING = result_pages.Reading(smaller="loss", larger="accuracy")
Curve = dict[str, dict[str, float]]  # the metrics by model and round


class Setting(NamedTuple):
    """How users work in a round."""

    batches: int  # R
    lr: float  # of θ, η'
    strength: float = 15.0  # λ
    outer: float = 0.005  # η
    size: int = BATCH  # rows of a minibatch


class State(NamedTuple):
    """What a user has after its round; `(K, ...)`."""

    solver: Any
    personal: Tree  # θ
    shared: Tree  # w


SETTINGS = {
    "server's model": Setting(10, 0.09),
    "server's model, R = 20": Setting(20, 0.1),
    "own models": Setting(20, 0.1),
}
STORED = {
    "server's model": ("server", pfedme_data.SERVER),
    "server's model, R = 20": ("server", pfedme_data.SERVER_20),
    "own models": ("users, w", pfedme_data.OWN),
}


class OneBlock(ft.InProcess):
    """All clients in one block, though their numbers of rows differ: a round asks five of them."""

    def blocks(self) -> list[tuple[Tensor, ClientData]]:
        """The block."""
        return self.data.buckets(max_ratio=float("inf"))


def copies(values: Tree, count: int) -> Tree:
    """The same tensors for so many clients."""
    return tree.map(lambda leaf: leaf.expand(count, *leaf.shape), values)


def of_solver(local: ft.LocalSolver, **settings: Any) -> dict[str, Any]:
    """What an algorithm takes from its local solver."""
    settings |= {f"local.{name}": value for name, value in local.settings.items()}
    return {"start": local.parameters, "predict": local.predict, "module": local.module, "settings": settings}


def linear() -> nn.Linear:
    """The authors' first weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(784, 10)


def minibatch(rows: Tree, data: ClientData, number: int, size: int) -> ClientData:
    """Minibatch `number` of every client, which goes through its places in `rows` in order again and again."""
    first = number % ((data.count + size - 1) // size) * size
    count = (data.count - first).clamp(max=size)
    within = torch.arange(size).expand(len(count), size)
    within = torch.where(within < count[:, None], first[:, None] + within, first[:, None])  # the first again is masked
    places = data.batch.gather(1, within)
    return ClientData(tree.map(lambda leaf: leaf[places], rows), count)


def pfedme(setting: Setting, rows: Tree, module: nn.Module | None = None) -> ft.Algorithm:
    """pFedMe with β = 1, of minibatches in order; clients' data are places in `rows`."""
    optimizer = partial(torch.optim.SGD, lr=setting.lr, weight_decay=RIDGE)
    module = linear() if module is None else module
    local = ft.gradient_descent(module, steps=INNER, loss=F.cross_entropy, optimizer=optimizer)

    def client(inbox: Tree, state: State, data: ClientData, turn: ft.Turn) -> ft.Reply:
        shared = personal = inbox
        for number in range(setting.batches):
            batch = minibatch(rows, data, turn.round * setting.batches + number, setting.size)
            strength = torch.full(data.count.shape, setting.strength)
            pull = ft.Quadratic(strength, tree.scale(shared, setting.strength))
            solved = local.solve(personal, state.solver, batch, pull, turn)
            personal = solved.parameters
            shared = tree.add(shared, tree.scale(tree.subtract(personal, shared), setting.strength * setting.outer))
        return ft.Reply(ft.Mean(shared, data.count), State(solved.state, personal, shared), solved.info)

    def init(parameters: Tree, clients: int) -> tuple[Tree, State]:
        return parameters, State(local.init(parameters), parameters, parameters)

    return ft.Algorithm(
        init=init,
        outbox=lambda server: server,
        client=client,
        server=lambda server, aggregate, key: aggregate.value,
        model=lambda inbox, state: state.personal,
        **of_solver(local, algorithm="pfedme", **setting._asdict()),
    )


def scores(parameters: Tree, of: pfedme_data.Users) -> dict[str, float]:
    """The metrics over all users' rows, of one model `(…)` or of a model for each user `(20, …)`."""
    models = copies(parameters, len(of.train)) if parameters["bias"].ndim == 1 else parameters
    right, loss = [0, 0], 0.0
    for number, part in enumerate((of.test, of.train)):
        for (x, y), weight, bias in zip(part, models["weight"], models["bias"]):
            logits = x @ weight.mT + bias
            right[number] += int((logits.argmax(1) == y).sum())
            loss += number * len(y) * float(F.cross_entropy(logits, y))
    tested, trained = (int(part.counts.sum()) for part in (of.test, of.train))
    return dict(zip(METRICS, (right[0] / tested, right[1] / trained, loss / trained)))


def everybody(run: ft.Run, block: ClientData) -> State:
    """What all users of all seeds have after the round that comes next; the run stays where it is."""
    start = tree.map(lambda leaf: leaf[0], run.server)
    state = copies(run.algorithm.init(copies(start, 1), USERS)[1], len(block.count))
    inbox = tree.map(lambda leaf: leaf.repeat_interleave(USERS, 0), run.server)
    return run.algorithm.client(inbox, state, block, ft.Turn(ft.random.key(run.number)[None], run.number)).state


def of_seed(stacked: Tree, seed: int) -> Tree:
    """What one of the seeds has, of all."""
    return tree.map(lambda leaf: leaf[seed], stacked)


def asked(seeds: int) -> Callable[[Tensor, int], Tensor]:
    """Five users of each seed."""

    def cohort(key: Tensor, round: int) -> Tensor:
        each = [ft.random.choice(ft.random.fold_in(key, seed), USERS, ASKED).sort().values for seed in range(seeds)]
        return torch.cat([USERS * seed + ids for seed, ids in enumerate(each)])

    return cohort


def places(of: ft.data.FederatedData) -> list[Tensor]:
    """Each client's rows by their places in those of all."""
    return list(torch.arange(int(of.counts.sum())).split(of.counts.tolist()))


def courses(name: str, of: pfedme_data.Users, seeds: int, at: Sequence[int]) -> list[Curve]:
    """The metrics of the server's model before some rounds, or of users' w and θ in them, by name; of each seed.

    Seeds differ in who is asked only, and are run beside each other.
    """
    rows = tree.concatenate(list(of.train))
    population = OneBlock(ft.data.from_tensors(places(of.train) * seeds))
    algorithm = side_by_side(pfedme(SETTINGS[name], rows), [dict(linear().named_parameters())] * seeds, clients=USERS)
    run = ft.Run(algorithm, population, cohort=asked(seeds))
    ((_, block),) = population.blocks()
    curves: list[Curve] = [{} for _ in range(seeds)]
    for number in range(max(at) + 1):
        if number in at:
            models = {"server": run.server}
            if STORED[name][0] != "server":
                users = tree.map(lambda leaf: leaf.unflatten(0, (seeds, USERS)), everybody(run, block))
                models = {"users, w": users.shared, "users, θ": users.personal}
            for seed, curve in enumerate(curves):
                for which, stacked in models.items():
                    curve[f"{which}, round {number}"] = scores(of_seed(stacked, seed), of)
        run.step()
    return curves


def rows_of(name: str, curves: Sequence[Curve]) -> list[common.Row]:
    """Ours beside what is stored; before users differ in nothing but who is asked, one figure is all."""
    model, stored = STORED[name]
    made = []
    for place in curves[0]:
        of, _, number = place.partition(", round ")
        known = pfedme_data.published(stored, int(number)) if of == model else {}
        for metric, values in common.by_metric([curve[place] for curve in curves]).items():
            row = common.row(f"{name}: {place}", metric, values, known.get(metric))
            made.append(replace(row, sd=None, repeats=None, decimals=6) if number == "0" else row)
    return made


def draw(rows: Sequence[common.Row]) -> dict[str, Figure]:
    """Test accuracy and training loss by round, ours and what is stored."""
    shown = METRICS[0], METRICS[2]
    figure, axes = common.subplots(1, 2, figsize=(9, 3.4))
    for axis, metric in zip(axes, shown):
        lines: dict[str, list[tuple[int, common.Row]]] = {}
        for row in rows:
            place, _, number = row.setting.partition(", round ")
            if row.metric == metric and (row.published is not None or place == "own models: users, θ"):
                lines.setdefault(place, []).append((int(number), row))
        for place, points in lines.items():
            (line,) = axis.plot([n + 1 for n, _ in points], [row.ours for _, row in points], label=f"ours, {place}")
            known = [(n + 1, row.published) for n, row in points if row.published is not None]
            axis.plot(*zip(*known), "o", color=line.get_color(), mfc="none") if known else None
        axis.plot([], [], "o", color="black", mfc="none", label="stored by the authors")
        axis.set(xscale="log", xlabel="round", ylabel=metric)
    axes[0].legend(frameon=False)
    return {"pfedme": figure}


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is stored; with --smoke, the first round of it."""
    parser = common.arguments(__doc__)
    parser.add_argument("--last", type=int, default=799, help="the last of the stored rounds that is run (default 799)")
    parser.add_argument("--of", nargs="+", default=list(SETTINGS), choices=SETTINGS, help="which (default all)")
    options = parser.parse_args(argv)
    of, at = pfedme_data.users(), [number for number in pfedme_data.OWN if number <= options.last * (not options.smoke)]
    curves = {name: courses(name, of, options.seeds, at) for name in options.of}
    rows = [row for name, runs in curves.items() for row in rows_of(name, runs)]
    common.show_rows("pFedMe on MNIST", rows, ".4f")
    common.finish("trials.pfedme", rows, options, lambda: draw(rows))


if __name__ == "__main__":
    main()
