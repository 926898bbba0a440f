"""What two ranks compute beside what one process computes; written as JSON by each of two ranks.

`main(folder)` runs on a rank, with the environment of `torchrun`. Every finding is a distance, relative to the size of
the numbers, or a message.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.exchanges.unreliable_edges import unreliable_edges
from fedtorch.federation.runs import run as running
from fedtorch.federation.runs.evaluation import evaluate
from fedtorch.models.gaussian_process import ConvolvedGP
from fedtorch.models.gibbs import sparse
from fedtorch.trust import attacks, robust
from support.oracles.closed_forms import client_tensors, distance, linear, linear_clients, same_bits, sgd
from support.small_federations import classes, everything, solver, trainer

LINEAR = linear_clients([3, 12, 5, 9, 7, 4, 20])
CLASSES = classes((9, 14, 5, 11, 20), dtype=torch.float64)
NETWORK = ft.Network([(0, 1), (1, 2), (2, 5), (3, 4), (4, 5), (5, 6), (0, 6)], [1.0, 0.5, 2.0, 1.0, 1.5, 0.7, 1.0])
SIGNALS = ft.data.from_tensors([(x[:, :1], y) for x, y in LINEAR])
METRICS = {"accuracy": ft.metrics.accuracy(), "cross_entropy": ft.metrics.cross_entropy()}


class Told(NamedTuple):
    """What a client of `remembers` tells the server."""

    total: ft.Mean
    count: ft.Sum


def remembers() -> ft.Algorithm:
    """Every client hears its own row and tells a new one: rows need `private_rows`, which gathers and does not add."""

    def client(inbox: Tensor, state: Tensor, data: ft.data.ClientData, turn: ft.Turn) -> ft.Reply:
        total = torch.where(data.mask[..., None], data.batch[0], 0).sum(1)
        told = Told(ft.Mean(total + inbox, data.count.double()), ft.Sum({"seen": data.count}))
        return ft.Reply(told, state + 1, {"inbox": inbox.sum(1)} if len(state) else {})

    def server(rows: Tensor, aggregate: Any, key: Tensor) -> Tensor:
        new = rows.clone()
        new[aggregate.ids] = 0.5 * aggregate.message.total.value + aggregate.message.count.value["seen"][:, None]
        return new

    return ft.Algorithm(
        init=lambda parameters, clients: (torch.ones(clients, 3, dtype=torch.float64), torch.tensor(0)),
        outbox=lambda rows: rows,
        client=client,
        server=server,
        model=lambda inbox, state: {"row": inbox},
        exchange=ft.private_rows(),
    )


def processes() -> ft.Algorithm:
    """A Gaussian process of all clients, whose server keeps the sum of what each has told last."""
    inducing = torch.linspace(-2, 2, 3, dtype=torch.float64)[:, None]
    return ft.fedmgp(ConvolvedGP(inducing), steps=2, accept_disclosure=True)


def some_rounds(algorithm: ft.Algorithm, population: Any, **arguments: Any) -> list[Any]:
    """Everything that each round says, clients in ascending order."""
    told = []
    for done in ft.Run(algorithm, population, seed=3, **arguments).rounds(3):
        order = done.ids.argsort()
        info = {name: value[order] for name, value in sorted(done.info.items())}
        told.append((tree.map(torch.clone, done.server), info, done.ids[order], done.bytes_up, done.bytes_down))
    return told


def worst(first: list[Any], second: list[Any]) -> float:
    """The largest distance of servers and infos; ids and bytes have to be equal."""
    largest = 0.0
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one[2], two[2]), (one[2], two[2])
        assert one[3:] == two[3:], (one[3:], two[3:])
        largest = max(largest, distance(one[0], two[0]), distance(one[1], two[1]))
    return largest


def only(*clients: int) -> Callable[[Tensor], Tensor]:
    return lambda key, round: torch.tensor(clients)


def cases() -> dict[str, tuple[ft.Algorithm, ft.data.FederatedData, dict[str, Any]]]:
    """Algorithms with their clients and the arguments of their runs."""
    personal = ft.personal_layers(solver("adam", torch.float64, reset="never"), "head.*")
    fedavg = ft.fedavg(sgd(0.05, steps=3, batch_size=4), mu=0.1)
    robust_star = fedavg | robust.rule(robust.krum(1))
    robust_gtv = ft.gtv(sgd(0.05), NETWORK, 0.3) | robust.rule(robust.median(), NETWORK)
    half = ft.Faults(after=lambda keys, ids: ids % 2 == 0)
    faults = ft.dropouts(0.2) | ft.stragglers(1.0, 0.1 * LINEAR.counts) | ft.lost_messages(after=0.2)
    return {
        "everybody": (fedavg, LINEAR, {}),
        "a cohort": (fedavg, LINEAR, {"cohort": 3}),
        "nobody on rank 1": (fedavg, LINEAR, {"cohort": only(0, 4)}),
        "nobody on rank 0": (fedavg, LINEAR, {"cohort": only(3)}),
        "one client": (fedavg, LINEAR.select([2]), {}),
        "personal layers": (personal, CLASSES, {"cohort": 2}),
        "separate": (ft.separate(solver(dtype=torch.float64)), CLASSES, {"cohort": 2}),
        "rank 0 loses all": (fedavg, LINEAR, {"faults": half}),
        "some do not hear": (personal, CLASSES, {"faults": ft.Faults(before=lambda keys, ids: ids == 1)}),
        "nobody answers": (fedavg, LINEAR, {"faults": ft.Faults(after=lambda keys, ids: ids >= 0)}),
        "a cohort of coins": (fedavg, LINEAR, {"cohort": ft.poisson_cohort(0.3, len(LINEAR))}),
        "a cohort by weights": (fedavg, LINEAR, {"cohort": ft.weighted_cohort(LINEAR.counts, 3)}),
        "all faults": (fedavg, LINEAR, {"cohort": 5, "faults": faults}),
        "nobody hears": (fedavg, LINEAR, {"faults": ft.Faults(before=lambda keys, ids: ids >= 0)}),
        "SCAFFOLD": (ft.scaffold(sgd(0.05, steps=3, batch_size=4)), LINEAR, {"cohort": 3}),
        "SCAFFOLD on rank 0": (ft.scaffold(sgd(0.05, steps=3, batch_size=4)), LINEAR, {"cohort": only(0, 4)}),
        "FedDyn": (ft.feddyn(sgd(0.05, steps=3, batch_size=4), alpha=2.0), LINEAR, {"faults": faults}),
        "Ditto": (ft.ditto(sgd(0.05, steps=3, batch_size=4), 0.5), LINEAR, {"cohort": 3}),
        "GTV": (ft.gtv(sgd(0.05, steps=3, batch_size=4), NETWORK, 0.3), LINEAR, {}),
        "GTV, some active": (ft.gtv(sgd(0.05, steps=2), NETWORK, {"weight": 0.3}), LINEAR, {"cohort": 3}),
        "GTV with faults": (ft.gtv(ft.least_squares(linear()), NETWORK, 0.3), LINEAR, {"faults": faults}),
        "GTV on rank 1": (ft.gtv(sgd(0.05, steps=2), NETWORK, 0.3), LINEAR, {"cohort": only(1, 5)}),
        "GTV over lossy edges": (
            ft.gtv(sgd(0.05, steps=2), NETWORK, 0.3) | unreliable_edges(NETWORK, loss=0.3, delay=1),
            LINEAR,
            {"cohort": 4},
        ),
        "FedMGP": (processes(), SIGNALS, {"faults": faults}),
        "FedMGP of a cohort": (processes(), SIGNALS, {"cohort": 3}),
        "FedAdam": (ft.fedadam(sgd(0.05, steps=3, batch_size=4)), LINEAR, {"cohort": 3}),
        "Gibbs": (
            ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2, chains=2),
            LINEAR,
            {"parameters": torch.zeros(3), "cohort": 5},
        ),
        "Gibbs without a server": (
            ft.without_server(ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2, chains=2), NETWORK),
            LINEAR,
            {"parameters": torch.zeros(3), "cohort": 5},
        ),
        "robust star": (robust_star, LINEAR, {"cohort": 5}),
        "robust totals": (robust_gtv, LINEAR, {"cohort": 4}),
        "liars": (ft.scaffold(sgd(0.05)) | attacks.noise([0, 3], 1.0), LINEAR, {"cohort": 3}),
        "attackers on rank 1": (fedavg | attacks.min_max([1, 5]) | robust.rule(robust.krum(1)), LINEAR, {}),
        "rows": (remembers(), LINEAR, {"parameters": {}}),
        "rows of a cohort": (remembers(), LINEAR, {"parameters": {}, "cohort": 2}),
        "rows of rank 1": (remembers(), LINEAR, {"parameters": {}, "cohort": only(1, 5)}),
        "no rows": (remembers(), LINEAR, {"parameters": {}, "faults": ft.Faults(after=lambda keys, ids: ids >= 0)}),
    }


@functools.cache
def in_one_process() -> dict[str, list[Any]]:
    """Return the rounds of each case in one process; ranks that are forked later have them."""
    running.TOTAL_ANEW = 2
    return {
        name: some_rounds(algorithm, ft.InProcess(data), **arguments)
        for name, (algorithm, data, arguments) in cases().items()
    }


def rounds() -> dict[str, float]:
    """Rounds on two ranks, in chunks and with messages that come twice, beside rounds in one process."""
    found = {}
    for name, (algorithm, data, arguments) in cases().items():
        expected = in_one_process()[name]
        arguments["faults"] = arguments.get("faults", ft.Faults()) | ft.duplicated(0.6)
        found[name] = worst(expected, some_rounds(algorithm, ft.Distributed(data, chunk=2), **arguments))
    return found


def predictions() -> dict[str, float]:
    """Evaluation and the tensors of clients that are elsewhere."""
    algorithm = ft.personal_layers(solver("adam", torch.float64, reset="never"), "head.*")
    found = {}
    for name, data in (("five", CLASSES), ("one", CLASSES.select([1]))):
        one = ft.run(algorithm, ft.InProcess(data), rounds=2).last
        two = ft.run(algorithm, ft.Distributed(data), rounds=2).last
        predict = algorithm.predict
        here = evaluate(one.clients, one.server, predict, data, METRICS)
        there = evaluate(two.clients, two.server, predict, data, METRICS)
        for metric in METRICS:
            found[f"{metric} of {name}"] = max(
                abs(here[metric].overall - there[metric].overall),
                float((here[metric].clients - there[metric].clients).abs().max()),
            )
        for k in range(len(data)):
            found[f"client {k} of {name}"] = distance(
                client_tensors(one.clients, one.server, k), client_tensors(two.clients, two.server, k)
            )
    return found


def sharded(data: ft.data.FederatedData = CLASSES, **arguments: Any) -> ft.Federation:
    """The federation whose checkpoints go from two ranks to one."""
    algorithm = ft.personal_layers(solver("adam", torch.float64, reset="never"), "head.*")
    return ft.Federation(
        algorithm, ft.Distributed(data), cohort=3, seed=7, validation=data, metrics=METRICS, **arguments
    )


def sharding(folder: Path, rounds: int, **arguments: Any) -> L.Trainer:
    """Two ranks, or the devices given."""
    callbacks = [
        ModelCheckpoint(folder / "checkpoints", save_top_k=-1, filename="{epoch}", save_last=True),
        EarlyStopping("val_cross_entropy", patience=20),
    ]
    options = {"strategy": ft.ClientSharding(), "devices": 2, "enable_checkpointing": True, **arguments}
    return trainer(max_epochs=rounds, callbacks=callbacks, default_root_dir=folder, **options)


def lightning(folder: Path) -> dict[str, Any]:
    """A Trainer over two ranks, and resumed."""
    whole, outer = sharded(), sharding(folder, 4)
    outer.fit(whole)
    modules = [dict(whole.client_module(k).state_dict()) for k in range(5)]
    if dist.get_rank() == 0:
        torch.save({"server": whole.server, "modules": tuple(modules), "up": whole.run.bytes_up}, folder / "two.pt")
    dist.barrier()
    resumed = sharded()
    sharding(folder, 4).fit(resumed, ckpt_path=folder / "checkpoints" / "epoch=1.ckpt")
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    return {
        "clients": saved["state_dict"]["_extra_state"]["clients.ids"].tolist(),
        "left behind": [p.name for p in (folder / "checkpoints").iterdir() if p.suffix != ".ckpt"],
        "resumed is equal": same_bits(everything(whole), everything(resumed)),
        "rounds": [resumed.round, outer.global_step, outer.current_epoch],
        "logged": {name: float(value) for name, value in outer.callback_metrics.items()},
        "history": whole.history.drop(columns="seconds").to_dict("list"),
        "losses": whole.client_losses.to_dict("list"),
        "twice": distance(whole.server, twice(folder).server),
    }


def twice(folder: Path) -> ft.Federation:
    """The same federation behind a network that delivers messages again."""
    plain = sharded()
    model = ft.Federation(plain.run.algorithm, plain.run.population, cohort=3, seed=7, faults=ft.duplicated(0.6))
    trainer(max_epochs=4, strategy=ft.ClientSharding(), devices=2, default_root_dir=folder).fit(model)
    return model


def refusals(folder: Path) -> dict[str, str]:
    """What cannot work is refused on every rank."""
    personal = ft.personal_layers(solver(dtype=torch.float64), "head.*")
    options: dict[str, Any] = {"devices": 2, "max_epochs": 1, "default_root_dir": folder}
    attempts: dict[str, Callable[[], Any]] = {
        "in process": lambda: trainer(strategy=ft.ClientSharding(), **options).fit(
            ft.Federation(personal, ft.InProcess(CLASSES))
        ),
        "ddp": lambda: trainer(strategy="ddp", **options).fit(sharded()),
        "elsewhere": lambda: trainer(strategy=ft.ClientSharding(), **options).fit(elsewhere()),
        "other data": lambda: sharded().evaluate(CLASSES.select([0, 1])),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "not refused"
        except ValueError as error:
            found[name] = str(error)
    return found


def elsewhere() -> ft.Federation:
    """A population made when there was one process."""
    model = sharded()
    model.run.population.rank, model.run.population.world_size = 0, 1
    return model


def joining() -> dict[str, float]:
    """Clients that join a run of the first five, on two ranks beside one process."""
    edges = [(0, 1), (1, 2), (2, 3), (3, 4)]
    networks = {5: ft.Network(edges, torch.ones(4)), 7: ft.Network([*edges, (4, 5), (5, 6)], torch.ones(6))}
    kinds: dict[str, Callable[[int], ft.Algorithm]] = {
        "SCAFFOLD": lambda clients: ft.scaffold(sgd(0.05, steps=3, batch_size=4)),
        "GTV": lambda clients: ft.gtv(sgd(0.05, steps=2), networks[clients], 0.3),
    }
    found = {}
    for name, make in kinds.items():
        few = ft.Run(make(5), ft.InProcess(LINEAR.select(range(5))), seed=3)
        list(few.rounds(2))
        runs = [ft.Run(make(7), population, seed=3) for population in (ft.InProcess(LINEAR), ft.Distributed(LINEAR))]
        for run in runs:
            run.load_state_dict(few.state_dict(), joined="new", anyway=name == "GTV")
            list(run.rounds(4))
        found[name] = distance(runs[1].server, runs[0].server)
    return found


def main(folder: Path) -> None:
    """Writes this rank's findings."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".isinstance.treespec, LeafSpec", FutureWarning)
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    findings = {
        "rounds": rounds(),
        "predictions": predictions(),
        "joining": joining(),
        "lightning": lightning(folder),
        "refusals": refusals(folder),
    }
    (folder / f"findings-{dist.get_rank()}.json").write_text(json.dumps(findings))
    dist.barrier()
    dist.destroy_process_group()
