"""NVFlare: its recipe of FedAvg in its simulator, a process for each client."""

from __future__ import annotations

import argparse
import importlib.metadata
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from torch import nn

from experiments.benchmarks.peers import nvflare_client, work


def rounds(file: str, task: str, mine: work.Work, count: int) -> nn.Module:
    """Train a new model; all clients take part in every round."""
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "initial.pt"
        torch.save(mine.model().state_dict(), start)
        recipe = FedAvgRecipe(
            name="fedavg",
            model=mine.model(),
            initial_ckpt=str(start),
            min_clients=len(mine.clients),
            num_rounds=count,
            train_script=str(Path(nvflare_client.__file__)),
            train_args=f"{file} {task}",
        )
        sites = [f"site-{number}" for number in range(len(mine.clients))]
        # with fewer threads clients take turns in them, and start anew each time
        environment = SimEnv(clients=sites, num_threads=len(sites), workspace_root=folder)
        result = recipe.execute(environment).get_result(clean_up=False)
        stored = next(Path(result).rglob("FL_global_model.pt"))
        model = mine.model()
        model.load_state_dict(torch.load(stored, weights_only=False)["model"])
    return model


def train(file: str, task: str, options: argparse.Namespace) -> work.Trained:
    """All rounds at once: the simulator starts anew for each job, so that there is no warm-up."""
    mine = work.load(file, task)
    watch = work.Stopwatch()
    watch.warm()
    return watch.done(rounds(file, task, mine, mine.rounds))


def main(argv: Sequence[str] | None = None) -> None:
    """One run."""
    work.command("NVFlare", importlib.metadata.version("nvflare"), train, argv)


if __name__ == "__main__":
    main()
