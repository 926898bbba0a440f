"""What Flower starts at its SuperLink: a run over the sites, and what it came to, as JSON."""

import json
import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedtorch as ft
from experiments.benchmarks.parts.remote_problem import ALGORITHMS
from fedtorch import tree
from fedtorch.sites import Remote
from fedtorch.sites.flower import transport as flower

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run as many rounds as the app is told to."""
    config = context.run_config
    began = time.perf_counter()
    host = flower.serve(grid)
    sites = Remote(host, config["sites"].split(","), config["algorithm"], timeout=300.0, seconds=300.0, quorum=1.0)
    run = ft.Run(ALGORITHMS[config["algorithm"]](), sites, seed=0)
    met, seconds = time.perf_counter() - began, []
    for _ in range(config["rounds"]):
        began = time.perf_counter()
        run.step()
        seconds.append(time.perf_counter() - began)
    sites.finish(run)
    host.close()
    server = {name: leaf.tolist() for name, leaf in tree.items(run.server)}
    assert run.last is not None
    about = {"met": met, "seconds": seconds, "server": server, "up": run.last.bytes_up, "down": run.last.bytes_down}
    Path(config["out"]).write_text(json.dumps(about))
