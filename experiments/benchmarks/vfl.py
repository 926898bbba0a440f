"""Vertical inference: folds × models as one batch, memory over the rows, and bytes per iteration.

- `batch`: 10 folds × 4 models (ρ of 0.5, 1, 5, 10) of the size of the heart disease data (826 rows, 5 + 6 features), as
  one batch and one after another, interleaved in one run; minutes for 50 000 iterations from the same slice.
- `memory`: what training adds to the memory of a process, and variational parameters, from 10³ to 10⁶ rows at a fixed
  minibatch. `--out` draws it.
- `bytes`: of one iteration in every setting, by `fedtorch.wire`.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from experiments import common
from experiments.benchmarks.parts.memory import peak
from fedtorch import random, vfl
from fedtorch.vfl.fit.guide import count_parameters, draw_noise, initial
from fedtorch.vfl.fit.part import parts
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.nodes.iteration import exchange
from fedtorch.vfl.nodes.node import Iteration, PartyNode, ServerNode

WIDTHS, FOLDS, RHOS = (5, 6), 10, (0.5, 1.0, 5.0, 10.0)
GUIDES: dict[str, Callable[[], vfl.Guide]] = {
    "mean field": lambda: vfl.Guide(vfl.mean_field(), vfl.diagonal()),
    "amortised": lambda: vfl.Guide(vfl.amortised()),
    "sums": lambda: vfl.Guide(vfl.sums()),
    "sums, joint": lambda: vfl.Guide(vfl.sums(), joint=True),
}


def problem(rows: int, folds: int | None = None) -> vfl.VerticalData:
    """Labels of a logistic model, for one problem or standing in for several folds."""
    lead = () if folds is None else (folds,)
    x = random.normal(random.key(0), (*lead, rows, sum(WIDTHS)))
    chance = (x.sum(-1) * 0.5).sigmoid()
    y = (random.uniform(random.key(1), (*lead, rows)) < chance).float()
    return vfl.VerticalData(x.split(WIDTHS, -1), y)


def model(rho: float | torch.Tensor, power: bool = False) -> vfl.VerticalModel:
    make = vfl.power if power else vfl.augmented
    return make(likelihoods.bernoulli(), [vfl.linear(width) for width in WIDTHS], rho)


def seconds(function: Callable[[], object]) -> float:
    """Processor time over all threads: on an idle machine no less than what a clock shows."""
    start = time.process_time()
    function()
    return time.process_time() - start


def batched(smoke: bool) -> list[common.Row]:
    """Processor time per iteration of all problems, as one batch and one after another, and their ratio."""
    rows, steps, repetitions = (100, 5, 1) if smoke else (826, 100, 3)
    folds = 2 if smoke else FOLDS
    one, many = problem(rows), problem(rows, folds * len(RHOS))
    rho = torch.tensor(RHOS).repeat_interleave(folds)
    found = []
    for name, guide in GUIDES.items():
        together, apart = [], []
        fit = partial(vfl.sfvi, guide=guide(), key=random.key(0), steps=steps)
        for _ in range(repetitions):
            together.append(seconds(partial(fit, model(rho), data=many, size=len(rho))) / steps)
            apart.append(len(rho) * seconds(partial(fit, model(1.0), data=one)) / steps)
        ratio = statistics.median(b / a for a, b in zip(together, apart))
        batch = statistics.median(together)
        setting = f"{len(rho)} problems, {name}"
        found += [
            common.Row(setting, "processor ms per iteration, one batch", 1e3 * batch),
            common.Row(setting, "processor minutes for 50 000 iterations", 50_000 * batch / 60),
            common.Row(setting, "one after another / one batch", ratio),
        ]
    return found


def memory(smoke: bool) -> list[common.Row]:
    """Peak memory that training adds, and parameters, by rows; a process each."""
    found = []
    for rows in (1000, 2000) if smoke else (1000, 10_000, 100_000, 1_000_000):
        for name in ("mean field", "amortised", "sums"):
            command = [sys.executable, "-m", "experiments.benchmarks.vfl", "--measure", f"{rows},{name}"]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            result = json.loads(told)
            setting = f"{rows} rows, minibatch 256, {name}"
            found.append(common.Row(setting, "MiB added by training", result["added"]))
            found.append(common.Row(setting, "variational parameters", result["parameters"]))
    return found


def measure(what: str) -> None:
    """In a process of its own: what training adds to the peak of the resident memory, as JSON."""
    rows, name = what.split(",", 1)
    data = problem(int(rows))
    guide = GUIDES[name]()
    warm = vfl.VerticalData(tuple(x[:256] for x in data.features), data.response[:256])
    vfl.sfvi(model(1.0), guide, warm, steps=20)  # libraries' own buffers
    before = peak(reset=True)
    fit = vfl.sfvi(model(1.0), guide, data, steps=20, batch_size=256)
    result = {"added": (peak() - before) / 2**20, "parameters": count_parameters(fit.parameters)}
    sys.stdout.write(json.dumps(result))


def traffic(smoke: bool) -> list[common.Row]:
    """Bytes of one iteration of one problem, float32."""
    rows = 826
    data = problem(rows)
    found = []
    for power in (False, True):
        for name in ("mean field", "amortised", "sums"):
            for shared in (False, True):
                guide = GUIDES[name]()
                at_party = guide.auxiliary.party is not None
                if (power and at_party and not shared) or (shared and not at_party):
                    continue
                if power and name == "amortised":
                    guide = dataclasses.replace(guide, auxiliary=vfl.amortised(sees_response=True))
                m = model(1.0, power)
                top, *holders = parts(m, guide, initial(m, guide, rows, 1, random.key(0)))
                known = zip(holders, data.known_to_parties(response=shared))
                parties = [PartyNode(part, own, response_shared=shared) for part, own in known]
                server = ServerNode(top, data.known_to_server(), response_shared=shared)
                noise = draw_noise(m, guide, random.key(0).reshape(1), rows, 1)
                sent = exchange(server, parties, Iteration(noise, 0.01))
                where = "response with the parties" if shared else "response at the server"
                setting = f"{'power' if power else 'augmented'}, {name}, {where}"
                found.append(common.Row(setting, f"bytes up, {rows} rows and 2 parties", sent.up))
                found.append(common.Row(setting, f"bytes down, {rows} rows and 2 parties", sent.down))
    return found


PARTS = {"batch": batched, "memory": memory, "bytes": traffic}


def draw(found: Sequence[common.Row]) -> Figure:
    """Added memory and parameters over the rows."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, metric in zip(axes, ("MiB added by training", "variational parameters")):
        for name in ("mean field", "amortised", "sums"):
            rows = [row for row in found if row.metric == metric and row.setting.endswith(f"256, {name}")]
            axis.plot(
                [int(row.setting.split()[0]) for row in rows], [max(row.ours, 0.1) for row in rows], "o-", label=name
            )
        axis.set(xscale="log", yscale="log", xlabel="rows", title=metric)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the parts, print and write them."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--part", choices=sorted(PARTS), action="append", help="only this part")
    parser.add_argument("--measure", metavar="ROWS,GUIDE", help="used by the part memory")
    options = parser.parse_args(argv)
    if options.measure:
        measure(options.measure)
        return
    found = [row for part in options.part or PARTS for row in common.of_part(part, PARTS[part](options.smoke))]
    common.show(
        common.machine(), ["setting", "metric", "ours"], [[r.setting, r.metric, f"{r.ours:.4g}"] for r in found]
    )
    figures = {"vfl_memory": draw} if "memory" in (options.part or PARTS) else {}
    common.finish("benchmarks.vfl", found, options, lambda: {name: made(found) for name, made in figures.items()})


if __name__ == "__main__":
    main()
