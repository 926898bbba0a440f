"""Sites on a network, all on this machine: a server and three sites as processes, enrolled on the spot, three models.

Over four clients' rows at three sites: federated averaging of a logistic regression, and expectation propagation of one
whose intercept differs among clients. Then a vertical split network, of patients of whom each site has other columns
and the server the labels, whose rows are aligned privately before. Certificates are made in a temporary folder, streams
are gRPC with TLS on both sides. Each result stands beside that of the same computation in one process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedtorch as ft
from experiments import common, demo_site, local_sites
from experiments.demo_site import ALGORITHMS, SITES, Table
from experiments.local_sites import TIMEOUT
from fedtorch import tree, vfl
from fedtorch.federation.algorithms.ep import posterior
from fedtorch.sites import Hub
from fedtorch.sites.vertical import over_hub
from fedtorch.vfl import ServerNode


class Found(NamedTuple):
    """One task over the sites, beside one process."""

    name: str
    rounds: int
    seconds: float  # over the sites
    accuracy: float  # on the rows trained on
    alone: float  # the same in one process
    difference: float  # the largest of any number at the server
    megabytes: float  # both ways

    def figures(self) -> dict[str, float]:
        """What the table has of it."""
        return {
            "accuracy over sites": self.accuracy,
            "accuracy in one process": self.alone,
            "largest difference": self.difference,
            "ms a round": 1000 * self.seconds / self.rounds,
            "megabytes": self.megabytes,
        }


say = partial(local_sites.say, "server")


def accuracy(logits: Tensor, y: Tensor) -> float:
    """The share of rows on the right side of zero."""
    return float(((logits > 0) == (y > 0.5)).double().mean())


def difference(first: Any, second: Any) -> float:
    """The largest between any two numbers."""
    pairs = zip(tree.leaves(first), tree.leaves(second), strict=True)
    return max(float((one.double() - two.double()).abs().max()) for one, two in pairs if one.numel())


def horizontal(hub: Hub, data: Table, name: str, rounds: int) -> Found:
    """Rounds over the sites, and in this process."""
    settings = {"features": data.features + 1}
    begun = time.perf_counter()
    sites = ft.Remote(hub, list(SITES), name, settings, quorum=1.0, timeout=TIMEOUT, seconds=TIMEOUT)
    say(f"{name}: {len(sites.names)} clients of {len(SITES)} sites are here after {time.perf_counter() - begun:.0f} s")
    run, begun = ft.Run(ALGORITHMS[name](**settings), sites, seed=0), time.perf_counter()
    for _ in run.rounds(rounds):
        pass
    seconds = time.perf_counter() - begun
    sites.finish(run)
    say(f"{name}: {rounds} rounds in {seconds:.1f} s; the same in one process")
    alone = ft.run(ALGORITHMS[name](**settings), ft.InProcess(data.clients), rounds=rounds, seed=0)
    x, y = data.clients.rows
    ours, central = (accuracy(x @ coefficients(each, name, x.shape[1]), y) for each in (run, alone))
    moved = (run.bytes_up + run.bytes_down) / 1e6
    return Found(name, rounds, seconds, ours, central, difference(run.server, alone.server), moved)


def coefficients(run: ft.Run, name: str, features: int) -> Tensor:
    """Those of the logistic regression of all clients together, `(features,)`."""
    if name == "ep":
        return posterior(run, tolerance=math.inf).mean[:features]
    return run.global_module().get_parameter("weight").detach()[0]


def vertical(hub: Hub, data: Table, iterations: int) -> Found:
    """Alignment and training among the parties, and in this process."""
    say(f"split network: aligning the patients of {len(SITES)} parties, then {iterations} iterations")
    half = demo_site.registry(data, iterations)
    (network, node, seconds), traffic = over_hub(half, hub, list(SITES), seconds=TIMEOUT, timeout=TIMEOUT)
    say(f"split network: trained in {seconds:.1f} s; the same in one process")
    aligned, alone = vfl.align(list(demo_site.parties(data).values())), demo_site.network(data.features)
    fit = vfl.NodesRun(*alone.nodes(aligned.data, demo_site.adam))
    for _ in fit.rounds(iterations):
        pass
    server = fit.server
    ours, central = accuracy(logits(node, network), node.data.y), accuracy(logits(server, alone), server.data.y)
    found = [(dict(each.part.state_dict()), *each.values) for each in (node, server)]
    moved = (traffic.up + traffic.down) / 1e6
    return Found("split network", iterations, seconds, ours, central, difference(*found), moved)


@torch.no_grad()
def logits(node: ServerNode, network: vfl.SplitNetwork) -> Tensor:
    """Of the rows trained on, from what the server last heard of the parties, `(n,)`."""
    model = network.model
    gamma = node.q["theta"]["mean"].unsqueeze(1)
    return model.centre(gamma, model.cut(node.last_values()), None)[0].flatten()


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything, and print a table."""
    options = common.arguments(__doc__).parse_args(argv)
    averaging, propagation, iterations = (2, 2, 3) if options.smoke else (50, 8, 300)
    begun, data = time.perf_counter(), demo_site.table()
    with local_sites.serving() as server:
        say(f"an authority of its own; enrols at port {server.enrols}, serves at port {server.hub.port}")
        say(f"{data.name}: {len(data.clients)} clients; three processes are starting")
        with local_sites.processes(server, "experiments.demo_site", list(SITES), str(iterations)):
            found = [
                horizontal(server.hub, data, "fedavg", averaging),
                horizontal(server.hub, data, "ep", propagation),
                vertical(server.hub, data, iterations),
            ]
    lines = [
        [f"{each.name}, {each.rounds} rounds", f"{each.accuracy:.4f}", f"{each.alone:.4f}", f"{each.difference:.1e}",
         f"{1000 * each.seconds / each.rounds:.1f}", f"{each.megabytes:.2f}"] for each in found
    ]  # fmt: skip
    title = f"{data.name}, three sites, {time.perf_counter() - begun:.0f} s in all ({common.machine()})"
    common.show(title, ["", *found[0].figures()], lines)
    common.finish(
        "demo_sites", [row for each in found for row in common.over_seeds(each.name, [each.figures()])], options
    )


if __name__ == "__main__":
    main()
