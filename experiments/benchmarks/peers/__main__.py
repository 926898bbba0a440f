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

import torch

from experiments import common
from experiments.benchmarks.parts import measure as measuring
from experiments.benchmarks.peers import ours, work
from experiments.benchmarks.peers.tasks import TASKS, Size

ROOT = Path(__file__).parents[3]
LOOP, OURS = "plain PyTorch loop", "fedtorch"


class System(NamedTuple):
    """How a system is run."""

    module: str
    environment: str | None = None  # a folder of .venv-peers; None is this Python
    options: tuple[str, ...] = ()
    tasks: tuple[str, ...] = tuple(TASKS)
    once: bool = False  # run it in the first repetition only


SYSTEMS = {
    "Flower": System("flower", "flower", once=True),  # which takes half a minute each time
    "pfl-research": System("pfl_research", "pfl"),
    LOOP: System("plain"),
    OURS: System("ours"),
    "fedtorch, batched=False": System("ours", options=("--one-by-one",)),
    "fedtorch, compile=True": System("ours", options=("--compile",)),
    "fedtorch, closed form": System("ours", options=("--closed-form",), tasks=("linear",)),
}
SLOWER = {  # times slower than fedtorch that a simulator shall be
    ("linear", "Flower"): 300,
    ("linear", "pfl-research"): 30,
    ("perceptron", "Flower"): 50,
    ("perceptron", "pfl-research"): 5,
}
FASTER = {  # times faster than the plain loop that fedtorch shall be
    ("linear", "fedtorch, compile=True"): 40,
    ("perceptron", "fedtorch, compile=True"): 12,
    ("gru", "fedtorch, batched=False"): 1.3,
    ("gru", OURS): 6,
    ("lstm", OURS): 6,
    ("transformer", "fedtorch, batched=False"): 1.5,
    ("transformer", OURS): 6,
    ("convolutional", OURS): 2,
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


def measure(system: System, file: Path, task: str, threads: int, here: bool) -> dict:
    """One run in a process of its own, or in this one."""
    out = file.with_suffix(".json")
    module = f"experiments.benchmarks.peers.{system.module}"
    arguments = [str(file), "--task", task, "--out", str(out), "--threads", str(threads), *system.options]
    if here:
        importlib.import_module(module).main(arguments)
        return json.loads(out.read_text())
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    quiet["OMP_NUM_THREADS"] = str(threads)
    command = [python(system.environment), "-m", module, *arguments]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, **quiet}, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"Expected {module} to run, but it ended with {ran.returncode}:\n{ran.stderr[-3000:]}")
    return json.loads(out.read_text())


def compare(
    smoke: bool, repeat: int, tasks: Sequence[str], systems: Sequence[str], threads: int
) -> dict[str, dict[str, list[dict]]]:
    """The runs of every system by task; repetitions are interleaved."""
    chosen = {name: SYSTEMS[name] for name in systems if not (smoke and SYSTEMS[name].environment)}
    for system in chosen.values():
        python(system.environment)
    runs: dict[str, dict[str, list[dict]]] = {
        task: {name: [] for name in chosen if task in chosen[name].tasks} for task in tasks
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.npz"
        work.write(file, {name: size(name, smoke) for name in tasks}, ours.schedule)
        for task in tasks:
            for repetition in range(repeat):
                for name in [name for name in runs[task] if not (repetition and chosen[name].once)]:
                    runs[task][name].append(measure(chosen[name], file, task, threads, here=smoke))
                    sys.stderr.write(f"{task}, {name}: {runs[task][name][-1]['seconds']:.3g} s\n")
    return runs


def size(task: str, smoke: bool) -> Size:
    """How much of a task is run."""
    return TASKS[task].smoke if smoke else TASKS[task].full


def median(runs: Sequence[dict], part: str) -> float:
    """The median over repetitions."""
    return statistics.median(run[part] for run in runs)


def ratios(slow: Sequence[dict], fast: Sequence[dict]) -> list[float]:
    """How many times longer, in each repetition."""
    return [a["seconds"] / b["seconds"] for a, b in zip(slow, fast)]


def rows(runs: dict[str, dict[str, list[dict]]]) -> list[common.Row]:
    """All figures."""
    result = []
    for task, systems in runs.items():
        for name, repeated in systems.items():
            label = f"{task}: {name}"
            result += [common.Row(label, part, median(repeated, part)) for part in repeated[0] if part != "version"]
            if LOOP in systems:
                faster = statistics.median(ratios(systems[LOOP], repeated))
                result.append(common.Row(label, f"times faster than the {LOOP}", faster))
    return result


COLUMNS = [
    *("", "seconds", "processor, s", "start-up, s", "memory, MB", "× the loop's speed", "least to most"),
    *("target", "times slower than fedtorch", "target", "loss", "accuracy"),
]


def lines(task: str, systems: dict[str, list[dict]]) -> list[list[str]]:
    """The table of one task."""
    table = []
    for name, repeated in systems.items():
        faster = ratios(systems[LOOP], repeated) if LOOP in systems else []
        slower = ratios(repeated, systems[OURS]) if OURS in systems else []
        simulated = name == "Flower"  # by processes of its own, whose processors and memory are not ours to see
        table.append(
            [
                f"{name} {repeated[0]['version']}" if SYSTEMS[name].environment else name,
                f"{median(repeated, 'seconds'):.3g}",
                "" if simulated else f"{median(repeated, 'processor'):.3g}",
                f"{median(repeated, 'startup'):.3g}",
                "" if simulated else f"{median(repeated, 'megabytes'):.0f}",
                f"{statistics.median(faster):.3g}" if faster else "",
                f"{min(faster):.3g} to {max(faster):.3g}" if faster else "",
                at_least(FASTER.get((task, name))),
                f"{statistics.median(slower):.3g}" if slower else "",
                at_least(SLOWER.get((task, name))),
                f"{repeated[0]['loss']:.6f}",
                f"{repeated[0]['accuracy']:.4f}" if "accuracy" in repeated[0] else "",
            ]
        )
    return table


def at_least(target: float | None) -> str:
    """Return a target's cell."""
    return "" if target is None else f"≥ {target:g}"


def markdown(runs: dict[str, dict[str, list[dict]]], repeat: int, threads: int, load_before: float) -> str:
    """The tables for PEERS.md."""
    text = [
        "# Modules and ways, beside a plain loop and other simulators",
        "",
        "`make bench-peers` runs the same FedAvg in every system: the same data (float32), first parameters, cohorts",
        "and minibatches, read from one file, in a process of its own. Flower simulates on ray, one CPU per client;",
        f"the others use one process with {threads} thread{'s' * (threads > 1)}. Medians of {repeat} interleaved",
        "repetitions (of Flower one) on",
        *measuring.circumstances(load_before),
        "",
        "Seconds are those of all rounds after one round of warm-up; start-up is the system's start and that round,",
        "without imports (except in Flower's actors); memory is by how much both raised the peak of the process, 0",
        "where imports had taken more. `compile=True` captures in its second round, which is among the seconds.",
        "Loss and accuracy are the final model's on the same rows. Flower runs by `run_simulation`; its grid asks for",
        "replies every 0.1 s; `flwr run` has a grid that asks every 3 s and is not measured here. Nobody draws",
        "minibatches but fedtorch: the others find them in the file. Where a module draws random numbers every system",
        "draws its own. Closed form is `ft.least_squares(module, steps=20, lr=0.05)`: the same steps from Gram",
        "matrices, by `ft.run`.",
    ]
    for task, systems in runs.items():
        text += ["", f"## {describe(task, size(task, False))}", "", *measuring.table(COLUMNS, lines(task, systems))]
    return "\n".join([*text, ""])


def describe(task: str, size: Size) -> str:
    """A task in words."""
    return f"{task}: {size.clients} clients × {size.rounds} rounds, {TASKS[task].description}"


def main(argv: Sequence[str] | None = None) -> None:
    """Compare all systems; with --smoke only ours and the plain loop, on tiny work, in one process."""
    parser = common.arguments(__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="interleaved repetitions (default 5)")
    parser.add_argument("--task", nargs="+", choices=sorted(TASKS), default=list(TASKS), help="some tasks only")
    parser.add_argument("--system", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), help="some systems only")
    parser.add_argument("--threads", type=int, default=1, help="of each process (default 1)")
    parser.add_argument("--write", action="store_true", help="write the tables into experiments/benchmarks/PEERS.md")
    options = parser.parse_args(argv)
    repeat = 1 if options.smoke else options.repeat
    before = os.getloadavg()[0]
    if not options.smoke:
        torch.set_num_threads(options.threads)  # what the machine's line says: those of the processes
    runs = compare(options.smoke, repeat, options.task, options.system, options.threads)
    for task, systems in runs.items():
        title = f"{describe(task, size(task, options.smoke))} ({common.machine()})"
        common.show(title, COLUMNS, lines(task, systems))
    common.write("benchmarks.peers", rows(runs), options.json)
    if options.write:
        (Path(__file__).parents[1] / "PEERS.md").write_text(markdown(runs, repeat, options.threads, before))


if __name__ == "__main__":
    main()
