"""fedtorch beside Flower's simulation, pfl-research and a plain PyTorch loop: seconds and scores of the same work.

Every system runs in a process, and each peer in a virtual environment, of its own (`.venv-peers/`, made when missing).
All read the same data, first parameters, cohorts and minibatches from one file. A run starts the system and trains one
round of warm-up ("start-up"), then all rounds from the beginning ("seconds"). Repetitions are interleaved; figures are
medians. `--write` puts the table into `experiments/benchmarks/PEERS.md`.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments import common
from experiments.benchmarks.parts import measure as measuring
from experiments.benchmarks.peers import ours, work

ROOT = Path(__file__).parents[3]
OURS = ("fedtorch", "fedtorch, compile=True", "fedtorch, closed form")


class System(NamedTuple):
    """How a system is run."""

    module: str
    environment: str | None = None  # a folder of .venv-peers; None is this Python
    options: tuple[str, ...] = ()
    tasks: tuple[str, ...] = tuple(work.TASKS)


SYSTEMS = {
    "Flower": System("flower", "flower"),
    "pfl-research": System("pfl_research", "pfl"),
    "plain PyTorch loop": System("plain"),
    OURS[0]: System("ours"),
    OURS[1]: System("ours", options=("--compile",)),
    OURS[2]: System("ours", options=("--closed-form",), tasks=("linear",)),
}
TARGETS = {
    ("linear", "Flower"): 300,
    ("linear", "pfl-research"): 30,
    ("perceptron", "Flower"): 50,
    ("perceptron", "pfl-research"): 5,
}
DESCRIPTIONS = {
    "linear": "{clients} clients of 40 rows × {rounds} rounds × 20 full-batch SGD steps, linear model of 8 features",
    "perceptron": "digits over {clients} clients × {rounds} rounds × 5 Adam steps of batch 10, 64-128-10",
    "convolutional": "{clients} users of 50 images (digits enlarged to 28 × 28), cohort 50 × {rounds} rounds × one "
    "epoch of batch 10, SGD 0.1, two convolutions",
}


def python(environment: str | None) -> str:
    """The interpreter of an environment, which is made when missing."""
    if environment is None:
        return sys.executable
    folder = ROOT / ".venv-peers" / environment
    interpreter, ready = folder / "bin" / "python", folder / ".installed"
    requirements = Path(__file__).parent / f"requirements-{environment}.txt"
    if not ready.exists() or ready.read_text() != requirements.read_text():
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        torch = next(line for line in lines if line.startswith("torch=="))  # the peers' other pins differ from ours
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [str(interpreter), "-m", "pip", "install", "--quiet", "--quiet"]  # errors only
        subprocess.run([*install, torch, "-r", str(requirements)], check=True)
        ready.write_text(requirements.read_text())
    return str(interpreter)


def measure(system: System, file: Path, task: str, here: bool) -> dict:
    """One run in a process of its own, or in this one."""
    out = file.with_suffix(".json")
    module = f"experiments.benchmarks.peers.{system.module}"
    arguments = [str(file), "--task", task, "--out", str(out), *system.options]
    if here:
        importlib.import_module(module).main(arguments)
        return json.loads(out.read_text())
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    command = [python(system.environment), "-m", module, *arguments]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, **quiet}, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"Expected {module} to run, but it ended with {ran.returncode}:\n{ran.stderr[-3000:]}")
    return json.loads(out.read_text())


def compare(smoke: bool, repeat: int, tasks: Sequence[str]) -> dict[str, dict[str, list[dict]]]:
    """The runs of every system by task; repetitions are interleaved."""
    systems = {name: system for name, system in SYSTEMS.items() if not (smoke and system.environment)}
    for system in systems.values():
        python(system.environment)
    runs: dict[str, dict[str, list[dict]]] = {
        task: {name: [] for name in systems if task in systems[name].tasks} for task in tasks
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.npz"
        work.write(file, work.SMOKE if smoke else work.FULL, ours.schedule)
        for task in tasks:
            for _ in range(repeat):
                for name in runs[task]:
                    runs[task][name].append(measure(systems[name], file, task, here=smoke))
                    sys.stderr.write(f"{task}, {name}: {runs[task][name][-1]['seconds']:.3g} s\n")
    return runs


def median(runs: Sequence[dict], part: str) -> float:
    """Over repetitions."""
    return statistics.median(run[part] for run in runs)


def ratio(found: dict[str, list[dict]], name: str, ours: str) -> float:
    """How many times slower than one of ours."""
    return measuring.ratio(*([run["seconds"] for run in found[which]] for which in (name, ours)))


def rows(runs: dict[str, dict[str, list[dict]]]) -> list[common.Row]:
    """All figures."""
    result = []
    for task, found in runs.items():
        for name, repeated in found.items():
            label = f"{task}: {name}"
            result += [common.Row(label, part, median(repeated, part)) for part in repeated[0] if part != "version"]
            result += [common.Row(label, f"times slower than {x}", ratio(found, name, x)) for x in OURS if x in found]
    return result


COLUMNS = ["", "seconds", "start-up, s", *(f"× {mine}" for mine in OURS), "target", "loss", "accuracy"]


def lines(task: str, found: dict[str, list[dict]]) -> list[list[str]]:
    """The table of one task."""
    table = []
    for name, repeated in found.items():
        target = TARGETS.get((task, name))
        table.append(
            [
                f"{name} {repeated[0]['version']}" if SYSTEMS[name].environment else name,
                f"{median(repeated, 'seconds'):.3g}",
                f"{median(repeated, 'startup'):.3g}",
                *(f"{ratio(found, name, mine):.3g}" if mine in found else "" for mine in OURS),
                "" if target is None else f"≥ {target}",
                f"{repeated[0]['loss']:.6f}",
                f"{repeated[0]['accuracy']:.4f}" if "accuracy" in repeated[0] else "",
            ]
        )
    return table


def markdown(runs: dict[str, dict[str, list[dict]]], repeat: int, load_before: float) -> str:
    """The tables for PEERS.md."""
    text = [
        "# Beside other simulators",
        "",
        "`make bench-peers` runs the same FedAvg in every system: the same data, first parameters, cohorts and",
        "minibatches, read from one file, in a process of its own. Flower simulates on ray with one CPU per client;",
        f"the others use one process. Medians of {repeat} interleaved repetitions on",
        *measuring.circumstances(load_before),
        "× is how many times longer a system takes than ours, beside the target.",
        "",
        "Seconds are those of all rounds after one round of warm-up; start-up is the system's start and that round,",
        "without imports (except in Flower's actors). Loss and accuracy are the final model's on the same rows.",
        "Flower runs by `run_simulation`, whose grid asks for replies every 0.1 s; `flwr run` has a grid that asks",
        "every 3 s and is not measured here. Nobody draws minibatches but fedtorch: the others find them in the file.",
        "Closed form is `ft.least_squares(module, steps=20, lr=0.05)`: the same steps from Gram matrices, by `ft.run`.",
    ]
    for task, found in runs.items():
        text += ["", f"## {describe(task, work.FULL[task])}", "", *measuring.table(COLUMNS, lines(task, found))]
    return "\n".join([*text, ""])


def describe(task: str, size: work.Size) -> str:
    """A task in words."""
    return DESCRIPTIONS[task].format(clients=size.clients, rounds=size.rounds)


def main(argv: Sequence[str] | None = None) -> None:
    """Compares all systems; with --smoke only ours and the plain loop, on tiny work, in one process."""
    parser = common.arguments(__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="interleaved repetitions (default 3)")
    parser.add_argument("--task", choices=sorted(work.TASKS), help="one task only")
    parser.add_argument("--write", action="store_true", help="write the tables into experiments/benchmarks/PEERS.md")
    options = parser.parse_args(argv)
    repeat = 1 if options.smoke else options.repeat
    sizes = work.SMOKE if options.smoke else work.FULL
    before = os.getloadavg()[0]
    runs = compare(options.smoke, repeat, [options.task] if options.task else list(sizes))
    for task, found in runs.items():
        common.show(f"{describe(task, sizes[task])} ({common.machine()})", COLUMNS, lines(task, found))
    common.write("benchmarks.peers", rows(runs), options.json)
    if options.write:
        (Path(__file__).parents[1] / "PEERS.md").write_text(markdown(runs, repeat, before))


if __name__ == "__main__":
    main()
