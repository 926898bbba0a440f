r"""FedBench: federated averaging and its kin on MNIST split by a Dirichlet distribution, and on the cube FCUBE.

As its scripts have it: rounds in which all clients take 10 epochs of minibatches of 64 by SGD (rate 0.01, momentum 0.9,
weight decay 1e-5, a fresh momentum in each round), a tenth of each client's rows set aside, accuracy of the server's
model on the test rows. MNIST: 10 clients by Dirichlet(0.5), the very rows of its seed (NumPy's and PyTorch's generators
at 42), two convolutions and three linear layers. FCUBE (NIID-Bench's, as documented there): 4 clients, each with 1 000
points of two octants opposite each other, labelled by the sign of the first coordinate; hidden layers of 32, 16, 8.
Published are mean and sd of three runs after each of 50 rounds; `--last` says how far MNIST is run. MNIST differs
between our seeds in first weights and order of rows, FCUBE in the points, too.

What the package's code does, and so do we: clients weigh by their minibatches (FedNova: rows). FedProx's clients never
read μ, so it is FedAvg; both published curves are beside one of ours. Server steps are Flower's (FedAdam at 0.1 with
τ = 1e-9, its correction of bias one round ahead; FedYogi at 0.01 with τ = 1e-3; FedAdagrad at 0.1 with τ = 0.2; moments
from 0). Its SCAFFOLD forgets clients' control variates, for clients are made anew in each round, and adds up the
server's with the sign turned: ours is the algorithm of the paper, with plain steps of rate 0.1 in place of momentum.

Sources: `fedbench` 0.1.3 on PyPI, `benchmark_runner.py` and `main.py` of github.com/NechbaMohammed/FLBenchmark (for
figures see `fedbench_published`), github.com/Xtra-Computing/NIID-Bench, `utils.py`, commit 61b901a (FCUBE); Flower
1.16.0, `server/strategy/`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedtorch as ft
from experiments import common, result_pages
from experiments.side_by_side import Joined, server, side_by_side
from experiments.trials import fedbench_published
from experiments.trials.pfedme import of_solver
from fedtorch import tree
from fedtorch.data import ClientData
from fedtorch.tree import Tree

EPOCHS, BATCH, LR, MOMENTUM, DECAY, SEED = 10, 64, 0.01, 0.9, 1e-5, 42
Rows = tuple[Tensor, Tensor]
Kept = dict[tuple[int, ...], Any]  # what a first round's work came to, by the keys of a block's clients
Curves = list[dict[int, float]]  # accuracy by round, of each seed
ONE_DRAW = (
    "their 1 000 test points are one draw, on which an accuracy of 0.995 has a standard deviation of 0.002, which the "
    "published sd does not contain"
)
THREE_RUNS = (
    "the same code as FedAvg's for clients of equal size, whose three runs were up to seven times as far apart: three "
    "runs hardly know their sd"
)
ONE_CURVE = "the stored rounds of FedAdagrad are FedAdam's, too, digit by digit; ours of FedAdam are near them"
NO_DIFFERENCE = (
    "ours, over five seeds, are four times as far apart as their three runs; by Welch's test the means do not differ "
    "(t = −1.1 in both)"
)
TWO_MEANS = "FedAvg and FedProx are the same code, and their published means lie 0.054 apart; ours is between them"
OWN_SCAFFOLD = "its SCAFFOLD is not the paper's: clients' control variates are lost between rounds"
READING = result_pages.Reading(
    larger="accuracy",
    reasons=(
        result_pages.Reason(r"^MNIST, Fed(Avg|Prox).*: accuracy after 1 rounds", TWO_MEANS, True),
        result_pages.Reason(r"^FCUBE, SCAFFOLD", OWN_SCAFFOLD, True),
        result_pages.Reason(r"^FCUBE, FedAdagrad: accuracy after (1|2|5|20) rounds", ONE_CURVE, True),
        result_pages.Reason(r"^FCUBE, FedAdam: accuracy after (2|50) rounds", NO_DIFFERENCE),
        result_pages.Reason(r"^FCUBE, Fed(Prox|Nova).*: accuracy after [12] rounds", THREE_RUNS, True),
        result_pages.Reason(r"^FCUBE, Fed(Avg|Prox|Nova).*: accuracy after (5|20|50) rounds", ONE_DRAW, True),
    ),
)


class Problem(NamedTuple):
    """What a seed begins with."""

    clients: list[Rows]
    test: Rows
    start: Tree


class Adam(torch.optim.Optimizer):
    """Flower's FedAdam: PyTorch's Adam whose correction of bias is that of the step to come, τ beside √v."""

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(1.0)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["step"] += 1
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - second)
                rate = group["lr"] * (1 - second ** state["step"]).sqrt() / (1 - first ** state["step"])
                parameter.sub_(rate * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]))


def made(module: Callable[[], nn.Sequential], seed: int) -> nn.Sequential:
    """A module with PyTorch's first weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return module()


def perceptron() -> nn.Sequential:
    """FCUBE's."""
    hidden = [layer for sizes in ((3, 32), (32, 16), (16, 8)) for layer in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(8, 2))


def convolutions() -> nn.Sequential:
    """MNIST's."""
    seen = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    answered = [nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*seen, nn.Flatten(), *answered)


def trained(rows: Rows) -> Rows:
    """A client's rows but the tenth that is set aside."""
    count = len(rows[1])
    kept = torch.randperm(count, generator=torch.Generator().manual_seed(SEED))[: count - int(count / 10)]
    return rows[0][kept], rows[1][kept]


def cube(seed: int) -> Problem:
    """FCUBE."""
    draws = random.Random(seed)
    clients: list[Rows] = []
    for place in range(4):
        octant = torch.tensor([1.0, -1.0 if place > 1 else 1.0, -1.0 if place % 2 else 1.0])
        labels = torch.arange(1000) % 2
        points = torch.tensor([[draws.random() for _ in range(3)] for _ in range(1000)]) * octant
        clients.append(trained((points * (1 - 2 * labels)[:, None], labels)))
    points = 2 * torch.tensor([[draws.random() for _ in range(3)] for _ in range(1000)]) - 1
    start = dict(made(perceptron, seed).named_parameters())
    return Problem(clients, (points, (points[:, 0] <= 0).long()), start)


def by_dirichlet(labels: np.ndarray, clients: int, alpha: float = 0.5) -> list[np.ndarray]:
    """The rows of each client: every label's are divided by a draw, those left out who have their share by then."""
    draws = np.random.default_rng(SEED)
    rows: list[list[int]] = [[] for _ in range(clients)]
    while min(map(len, rows)) < 10:
        for label in range(int(labels.max()) + 1):
            of_label = np.flatnonzero(labels == label)
            draws.shuffle(of_label)
            shares = draws.dirichlet(np.repeat(alpha, clients))
            shares *= [len(mine) < len(labels) / clients for mine in rows]
            ends = (np.cumsum(shares / shares.sum()) * len(of_label)).astype(int)[:-1]
            rows = [mine + more.tolist() for mine, more in zip(rows, np.split(of_label, ends))]
    return [np.array(mine) for mine in rows]


def digits(seed: int, smoke: bool = False) -> Problem:
    """MNIST; some of it with `smoke`."""
    (x, y), (tested, said) = ((_scaled(images), labels) for images, labels in map(ft.data.mnist, (True, False)))
    if smoke:
        x, y, tested, said = x[:600], y[:600], tested[:500], said[:500]
    clients = [trained((x[mine], y[mine])) for mine in by_dirichlet(y.numpy(), 10)]
    return Problem(clients, (tested, said), dict(made(convolutions, seed).named_parameters()))


def _scaled(images: Tensor) -> Tensor:
    return images.sub(0.1307).div_(0.3081)[:, None]


def minibatches(data: ClientData) -> Tensor:
    """How many each client has in an epoch."""
    return (data.count + BATCH - 1) // BATCH


def fednova(local: ft.LocalSolver) -> ft.Algorithm:
    """FedNova with momentum: changes divided by what momentum makes of a client's steps, times the mean of that."""

    def client(inbox: Tree, state: Tree, data: ClientData, turn: ft.Turn) -> ft.Reply:
        solved = local.solve(inbox, state, data, None, turn)
        steps = EPOCHS * minibatches(data).double()
        length = ((steps - MOMENTUM * (1 - MOMENTUM**steps) / (1 - MOMENTUM)) / (1 - MOMENTUM)).float()
        change = tree.subtract(solved.parameters, inbox)
        per_step = tree.map(lambda leaf: leaf / length.view(-1, *[1] * (leaf.ndim - 1)), change)
        return ft.Reply(ft.Mean({"change": per_step, "length": length}, data.count), solved.state, solved.info)

    return ft.Algorithm(
        init=lambda parameters, clients: (parameters, local.init(parameters)),
        outbox=lambda parameters: parameters,
        client=client,
        server=_moved,
        model=lambda inbox, state: inbox,
        prepare=local.prepare,
        **of_solver(local, algorithm="fednova"),
    )


def _moved(parameters: Tree, heard: ft.Mean, key: Tensor) -> Tree:
    """The server's parameters after a round of FedNova."""
    length = heard.value["length"]
    return tree.map(lambda a, b: (a + length * b).to(a.dtype), parameters, heard.value["change"])


WEIGHED: dict[str, Any] = {"weight": minibatches}
METHODS: dict[str, Callable[[ft.LocalSolver], ft.Algorithm]] = {
    "FedAvg": lambda local: ft.fedavg(local, **WEIGHED),
    "FedNova": fednova,
    "FedAdagrad": lambda local: ft.fedadagrad(local, lr=0.1, eps=0.2, initial=0.0, **WEIGHED),
    "FedAdam": lambda local: ft.fedopt(local, partial(Adam, lr=0.1, betas=(0.9, 0.99), eps=1e-9), **WEIGHED),
    "FedYogi": lambda local: ft.fedyogi(local, lr=0.01, initial=0.0, **WEIGHED),
    "SCAFFOLD": ft.scaffold,
}
SAME = {"FedAvg": ("FedAvg", "FedProx")}  # the published curves that one of ours is beside


def descent(module: nn.Sequential, momentum: float = MOMENTUM) -> ft.LocalSolver:
    """The clients' epochs; without momentum its steps are as long as those with it become."""
    optimizer = partial(
        torch.optim.SGD, lr=LR if momentum else LR / (1 - MOMENTUM), momentum=momentum, weight_decay=DECAY
    )
    settings: dict[str, Any] = {"epochs": EPOCHS, "batch_size": BATCH, "loss": F.cross_entropy, "optimizer": optimizer}
    return ft.gradient_descent(module, batched=not isinstance(module[0], nn.Conv2d), **settings)


def remembered(local: ft.LocalSolver, kept: Kept) -> ft.LocalSolver:
    """A solver whose first round is kept by the clients' keys: all methods begin at the same weights and keys."""

    def solve(start: Tree, state: Tree, data: Any, quadratic: Any, turn: ft.Turn) -> Any:
        if turn.round:
            return local.solve(start, state, data, quadratic, turn)
        place = tuple(turn.key.flatten().tolist())
        if place not in kept:
            kept[place] = local.solve(start, state, data, quadratic, turn)
        return kept[place]

    return dataclasses.replace(local, solve=solve)


def courses(
    name: str,
    module: nn.Sequential,
    problems: Sequence[Problem],
    at: Sequence[int],
    kept: Kept,
    seed: int = 0,
) -> Curves:
    """Test accuracy after some rounds, of problems beside each other; `kept` is theirs."""
    scaffold = name == "SCAFFOLD"
    algorithm = METHODS[name](descent(module, 0.0) if scaffold else remembered(descent(module), kept))
    clients = len(problems[0].clients)
    together = side_by_side(algorithm, [problem.start for problem in problems], clients)
    run = ft.Run(together, Joined([ft.data.from_tensors(problem.clients) for problem in problems]), seed=seed)
    curves: Curves = [{} for _ in problems]
    for number in range(1, max(at) + 1):
        run.step()
        if number not in at:
            continue
        for place, (problem, curve) in enumerate(zip(problems, curves)):
            sent = algorithm.outbox(server(run, place))
            curve[number] = accuracy(module, getattr(sent, "parameters", sent), problem.test)  # SCAFFOLD sends two
    return curves


@torch.no_grad()
def accuracy(module: nn.Module, parameters: Tree, test: Rows) -> float:
    """The share of the test rows that is right."""
    x, y = test
    logits = torch.cat([torch.func.functional_call(module, parameters, (part,)) for part in x.split(1000)])
    return float((logits.argmax(1) == y).double().mean())


def rows_of(data: str, name: str, curves: Curves) -> list[common.Row]:
    """Ours beside what is stored."""
    stored = fedbench_published.FCUBE if data == "FCUBE" else fedbench_published.MNIST
    rows = []
    for other in SAME.get(name, (name,)):
        for number, values in common.by_metric([{str(n): v for n, v in curve.items()} for curve in curves]).items():
            known = stored.get(other, {}).get(int(number), (None, None))
            setting = f"{data}, {other}" + (" (μ is not read)" if other == "FedProx" else "")
            rows.append(common.row(setting, f"accuracy after {number} rounds", values, *known))
    return rows


def draw(rows: Sequence[common.Row]) -> dict[str, Figure]:
    """Accuracy by round, ours and what is stored."""
    names = list(dict.fromkeys(row.setting.split(",")[0] for row in rows))
    figure, axes = common.subplots(1, len(names), figsize=(4.6 * len(names), 3.4), squeeze=False)
    for data, axis in zip(names, axes[0]):
        for setting in dict.fromkeys(row.setting for row in rows if row.setting.startswith(data)):
            points = [(int(row.metric.split()[2]), row) for row in rows if row.setting == setting]
            known = [(n, row) for n, row in points if row.published is not None]
            (line,) = axis.plot(
                [n for n, _ in points], [row.ours for _, row in points], marker=".", label=setting.split(", ")[1]
            )
            errors = [row.published_sd for _, row in known]
            places, values = [n for n, _ in known], [row.published for _, row in known]
            axis.errorbar(places, values, errors, fmt="o", color=line.get_color(), mfc="none", capsize=2)
        axis.set(xscale="log", xlabel="round", title=data)
        axis.legend(frameon=False, fontsize=7)
    axes[0, 0].set_ylabel("test accuracy (circles: FedBench's)")
    return {"fedbench": figure}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the methods on both data sets; print accuracy by round beside what is stored."""
    parser = common.arguments(__doc__)
    parser.add_argument("--data", nargs="*", default=["FCUBE", "MNIST"], choices=["FCUBE", "MNIST"])
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--last", type=int, default=50, help="the last round of MNIST that is run (default 50)")
    options = parser.parse_args(argv)
    rows: list[common.Row] = []
    for data in options.data:
        stored = fedbench_published.FCUBE if data == "FCUBE" else fedbench_published.MNIST
        last = 1 if options.smoke else 50 if data == "FCUBE" else options.last
        at = [number for number in stored["FedAvg"] if number <= last]
        found: dict[str, Curves] = {name: [] for name in options.methods if name in stored}
        seeds = [[*range(options.seeds)]] if data == "FCUBE" else [[seed] for seed in range(options.seeds)]
        for group in seeds:
            module = perceptron() if data == "FCUBE" else convolutions()
            problems = [cube(seed) if data == "FCUBE" else digits(seed, options.smoke) for seed in group]
            kept: Kept = {}
            for name, curves in found.items():
                curves += courses(name, module, problems, at, kept, group[0])
        rows += [row for name, curves in found.items() for row in rows_of(data, name, curves)]
    common.show_rows("FedBench", rows, ".4f")
    common.finish("trials.fedbench", rows, options, lambda: draw(rows))


if __name__ == "__main__":
    main()
