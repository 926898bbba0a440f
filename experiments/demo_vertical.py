"""Two companies and a registry, three processes: train on columns of both, keep the halves, predict new patients, leak.

A clinic and a laboratory have measurements of the same tumours, three columns and four, and a registry knows which
are benign (breast cancer, from scikit-learn). Each process takes its own columns of the table and never sends them.
They find the patients whom all have by private set intersection, agree on steps and a seed, and train a split network
three times: as it is, and with noise on the gradients by which labels are private, of ε = 10 and of ε = 1 for all steps
together. The clinic meanwhile guesses the labels from the gradients that it is sent. Each process keeps its own half of
each network in a file and ends. New processes read these halves, and predict patients of whom the registry knows
nothing yet. Streams are gRPC with TLS on both sides.

Beside it stand a network of each company's columns alone, which needs the labels at the company, and the same split
network in one process.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from experiments import common, local_sites
from experiments.demo_company import COLUMNS, WAYS, Table, adam, file_of, iterations, network, table
from experiments.local_sites import TIMEOUT, say
from fedtorch import vfl
from fedtorch.protocol import Half
from fedtorch.sites.vertical import over_hub
from fedtorch.trust import privacy
from fedtorch.vfl import Holder, ServerNode, VerticalData, server_half


def registers(data: Table, steps: int, seed: int, folder: Path) -> Half:
    """The registry's side, which returns the seconds of each training."""
    mine, seconds = data.at_registry(new=False), {}
    rows = yield from Holder(data.identifiers(mine), "registry").leading(list(COLUMNS))
    say("registry", f"knows {len(mine)} patients; {len(rows)} of them all three have")
    labels = VerticalData((), data.y[mine[rows]])
    for way, epsilon in WAYS.items():
        part, begun = network(seed).server, time.perf_counter()
        server = ServerNode(part, labels, optimizer=adam, per_row=True)
        half = server_half(server, iterations(steps))
        if math.isfinite(epsilon):
            noise = privacy.noise_for(epsilon=epsilon, rounds=steps, delta=DELTA)
            private = privacy.noised_gradients(clip=1.0, noise=noise, delta=DELTA)
            half = private(server, half)
        yield from half
        part.save(file_of(folder, way))
        seconds[way] = time.perf_counter() - begun
        spent = f"; ε spent {private.ledger.epsilon:.2f}" if math.isfinite(epsilon) else ""
        say("registry", f"{way}: {steps} steps in {seconds[way]:.1f} s{spent}")
    return seconds


def asks(data: Table, seed: int, folder: Path) -> Half:
    """The registry's side of predictions: returns the rows, and how probable it holds that they are benign."""
    mine, found = data.at_registry(new=True), {}
    rows = yield from Holder(data.identifiers(mine), "registry").leading(list(COLUMNS))
    say("registry", f"asks for {len(mine)} new patients, of whom both companies have {len(rows)}")
    for way in WAYS:
        model = network(seed)
        model.server.load(file_of(folder, way))
        found[way] = (yield from model.server_prediction(len(rows)))[0]
    return mine[rows], found


DELTA = 1e-3
Acts = Callable[[str, Callable[[Path], Half]], Any]  # a name of what companies do, and the registry's side of it


def by_processes(steps: int, seed: int, server: local_sites.Server, act: str, half: Callable[[Path], Half]) -> Any:
    """Two companies' processes do something, beside this one, which is the registry's."""
    own = server.folder / "registry"
    own.mkdir(exist_ok=True)
    with local_sites.processes(server, "experiments.demo_company", list(COLUMNS), act, str(steps), str(seed)):
        return over_hub(half(own), server.hub, list(COLUMNS), seconds=TIMEOUT, timeout=TIMEOUT)[0]


def results(data: Table, steps: int, seed: int, folder: Path, do: Acts) -> dict[str, dict[str, float]]:
    """Train, leak and predict; by setting and metric, as the demo counts it, which knows everything."""
    do("train", lambda own: registers(data, steps, seed, own))
    guesses = json.loads((folder / "clinic" / "guesses.json").read_text())
    label = dict(zip(data.identifiers(torch.arange(len(data.y))), data.y.tolist()))
    found: dict[str, dict[str, float]] = {}
    for way, guess in guesses.items():
        right = sum(label[name] == each for name, each in guess.items()) / len(guess)
        common_one = sum(label[name] for name in guess) / len(guess)
        found[way] = {"labels found by the clinic": right}
        say("demo", f"{way}: the clinic's guesses from the gradients are right for {right:.1%} of {len(guess)} labels")
    say("demo", f"{max(common_one, 1 - common_one):.1%} have the same label, which needs no gradient to guess")
    say("demo", "these processes have ended; new ones read the halves that were kept")
    rows, predicted = do("predict", lambda own: asks(data, seed, own))
    for way, probability in predicted.items():
        found[way] |= scores(probability, data.y[rows])
    for names in (["clinic"], ["laboratory"], list(COLUMNS)):
        own = in_one_process(data, names, rows, steps, seed)
        found[f"{names[0]} alone" if len(names) == 1 else "one process"] = scores(own, data.y[rows])
    found["plain"]["largest difference from one process"] = float((predicted["plain"] - own).abs().max())
    return found


def scores(probability: Tensor, y: Tensor) -> dict[str, float]:
    """How good predictions are."""
    return {
        "AUROC": float(binary_auroc(probability, y.long())),
        "accuracy": float(((probability > 0.5) == (y > 0.5)).double().mean()),
    }


def in_one_process(data: Table, names: Sequence[str], new: Tensor, steps: int, seed: int) -> Tensor:
    """What a network of these companies' columns predicts, trained here on the rows that all three have."""
    here = [vfl.Party(name, data.identifiers(data.has[name]), data.features(name)) for name in COLUMNS]
    known = data.at_registry(new=False)
    labels = vfl.Party("registry", data.identifiers(known), response=data.y[known])
    aligned = vfl.align([*here, labels]).rows
    of = lambda name, rows: data.features(name)[rows]
    training = VerticalData(tuple(of(name, aligned[name]) for name in names), data.y[known[aligned["registry"]]])
    model = network(seed, names)
    run = vfl.NodesRun(*model.nodes(training, adam))
    for _ in run.rounds(steps):
        pass
    where = {name: torch.tensor([data.has[name].tolist().index(row) for row in new.tolist()]) for name in names}
    return model.predict([of(name, where[name]) for name in names])[0]


def draw(found: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """How well new patients are told apart, and how many labels the gradients told: a dot a seed, a line the mean."""
    figure, (told, leaked) = common.subplots(1, 2, figsize=(9.5, 2.8))
    both = {f"both, {way.removeprefix('private labels, ')}": way for way in WAYS}
    alone = {name: name for name in found if name.endswith("alone")}
    for axis, names, metric in ((told, alone | both, "AUROC"), (leaked, both, "labels found by the clinic")):
        for place, name in enumerate(names.values()):
            values, colour = found[name][metric], "0.4" if name in alone else "C0"
            axis.plot(values, [place] * len(values), "o", color=colour, alpha=0.5, markeredgewidth=0)
            axis.plot(sum(values) / len(values), place, "|", color=colour, markersize=20, markeredgewidth=2)
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.axvline(0.5, color="k", linewidth=0.8, linestyle=":")
    told.set(title="New patients told apart", xlabel="AUROC; 0.5 is chance")
    leaked.set(title="Labels that gradients tell the clinic", xlabel="share found from signs; 0.5 is chance")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything, and print a table."""
    options = common.arguments(__doc__).parse_args(argv)
    steps, begun, runs = 5 if options.smoke else 200, time.perf_counter(), []
    for seed in range(options.seeds):
        with local_sites.serving() as server:
            say(
                "registry", f"an authority of its own; enrols at port {server.enrols}, serves at port {server.hub.port}"
            )
            do = partial(by_processes, steps, seed, server)
            runs.append(results(table(seed), steps, seed, server.folder, do))
    rows = [row for name in runs[0] for row in common.over_seeds(name, [run[name] for run in runs])]
    title = f"Two companies and a registry, {steps} steps, {time.perf_counter() - begun:.0f} s ({common.machine()})"
    common.show_rows(title, rows)
    together = {name: common.by_metric([run[name] for run in runs]) for name in runs[0]}
    common.finish("demo_vertical", rows, options, lambda: {"demo_vertical": draw(together)})


if __name__ == "__main__":
    main()
