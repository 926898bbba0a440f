"""Processes killed at any moment: what their checkpoints hold, and whether resumed runs end with the same bits.

Three kinds of process: a run that saves itself after every round, a run of a Gibbs sampler whose draws go to files, and
a Trainer that keeps `last.ckpt`. Each is killed by SIGKILL at a random moment or at a set point of a random write: in
the middle of the temporary file, before it is forced to the disk, before it takes its name, and after. Then a copy of
the folder goes on to the end, and the folder itself to the next kill. A checkpoint has to load, be the last one that
was complete or the one that was being written, and lead to the bits of an uninterrupted run.

Folders for checkpoints and for temporary files are on different file systems where the machine has two, in turns.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import fedtorch as ft
from experiments import common
from experiments.benchmarks.parts.forked import fork, warm
from fedtorch.models.gibbs import sparse

POINTS = ("random", "write", "fsync", "replace", "after")
ROUNDS = 12
WRITES = 5  # a set point is in one of the first so many writes of a process
_LONGEST = 120.0  # seconds that a process may take

Flat = dict[str, Tensor]


class Work(NamedTuple):
    """Something that saves itself after every round and goes on from what is in its folder."""

    file: str  # the checkpoint's name
    do: Callable[[Path, Callable[[int], None]], Flat]  # (folder, told the round that it goes on from) -> all at the end


class Life(NamedTuple):
    """What a process left behind."""

    killed: bool
    began: int | None  # the round that it went on from; None if it did not get so far
    begun: int  # writes of the checkpoint that were begun
    done: int  # and that were done
    digest: str  # of everything at the end, if it came there
    seconds: float


def saved_run(folder: Path, resumed: Callable[[int], None]) -> Flat:
    """Personal layers with Adam, half of the clients a round."""
    x = ft.random.normal(ft.random.key(0), (60, 3))
    data = ft.data.FederatedData((x, x.sum(1, keepdim=True)), torch.tensor([10, 20, 5, 25]))
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for k, parameter in enumerate(layers.parameters()):
        parameter.data = ft.random.normal(ft.random.key(k), tuple(parameter.shape))
    local = ft.gradient_descent(
        layers, steps=3, batch_size=4, loss=nn.functional.mse_loss, optimizer=torch.optim.Adam, reset="never"
    )
    run = ft.Run(ft.personal_layers(local, "2.*"), ft.InProcess(data), cohort=2)
    return _to_the_end(run, folder, resumed)


def sampled(folder: Path, resumed: Callable[[int], None]) -> Flat:
    """Sparse regression of four chains, draws in files of two."""
    x = ft.random.normal(ft.random.key(0), (2, 30, 3))
    data = ft.data.from_tensors([(x[k], x[k, :, 0]) for k in range(2)])
    sampler = ft.Sampler(burn_in=2, folder=folder / "draws", block=2)
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=3, chains=4)
    run = ft.Run(algorithm, ft.InProcess(data), torch.zeros(3), record=sampler)
    flat = _to_the_end(run, folder, resumed)
    return {**flat, **{f"draws.{name}": leaf for name, leaf in sampler.draws().items()}}


def _to_the_end(run: ft.Run, folder: Path, resumed: Callable[[int], None]) -> Flat:
    file = folder / "run.safetensors"
    if file.exists():
        run.load(file)
    resumed(run.number)
    for _ in run.rounds(ROUNDS):
        run.save(file)
    return run.state_dict()


def trained(folder: Path, resumed: Callable[[int], None]) -> Flat:
    """FedAvg under a Trainer that keeps its last checkpoint."""
    x = ft.random.normal(ft.random.key(0), (60, 3), torch.float64)
    data = ft.data.FederatedData((x, x.sum(1)), torch.tensor([10, 20, 5, 25]))
    local = common.linear_descent(3, steps=3, lr=0.05, batch_size=4)
    federation = ft.Federation(ft.fedavg(local), ft.InProcess(data), cohort=2)
    silent: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    keep, file = ModelCheckpoint(folder, save_last=True), folder / "last.ckpt"
    with common.quiet():
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
        warnings.filterwarnings("ignore", "The dirpath has changed")  # that of a copy has
        trainer = L.Trainer(max_epochs=ROUNDS, callbacks=[keep, _Told(resumed)], accelerator="cpu", **silent)
        trainer.fit(federation, ckpt_path=file if file.exists() else None, weights_only=True)
    return federation.run.state_dict()


class _Told(L.Callback):
    """Says which round training goes on from, also when there is nothing left to do."""

    def __init__(self, resumed: Callable[[int], None]) -> None:
        self.resumed = resumed

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.resumed(pl_module.round)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.resumed(pl_module.round)
        self.resumed = lambda number: None


WORKS = {
    "ft.Run.save": Work("run.safetensors", saved_run),
    "ft.Sampler with files": Work("run.safetensors", sampled),
    "a Trainer's last.ckpt": Work("last.ckpt", trained),
}


# -- in the child --------------------------------------------------------------------------------------------------


class _Half:
    """A file of which half a payload is written before the process dies."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> _Half:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, payload: Any) -> None:
        self.file.write(payload[: len(payload) // 2])
        self.file.flush()
        _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _watch_writes(tell: Callable[[str], None], file: Path, point: str, which: int) -> None:
    """Tell of every write of the checkpoint, and die at a point of write number `which`."""
    fdopen, fsync, replace = os.fdopen, os.fsync, os.replace
    writes = 0

    def opened(*arguments: Any, **options: Any) -> Any:
        nonlocal writes
        writes += 1
        found = fdopen(*arguments, **options)
        return _Half(found) if (point, which) == ("write", writes) else found

    def forced(handle: int) -> None:
        if (point, which) == ("fsync", writes):
            _die()
        fsync(handle)

    def renamed(old: Any, new: Any) -> None:
        if Path(new) == file:
            tell("begun")
        if (point, which) == ("replace", writes):
            _die()
        replace(old, new)
        if (point, which) == ("after", writes):
            _die()
        if Path(new) == file:
            tell("done")

    os.fdopen, os.fsync, os.replace = opened, forced, renamed  # type: ignore[assignment]


def _live(work: Work, folder: Path, place: Path, pipe: int, point: str, which: int) -> None:
    """One process's life; what it tells goes through the pipe, a line each."""

    def tell(text: str) -> None:
        os.write(pipe, f"{text}\n".encode())

    tempfile.tempdir = str(place)
    _watch_writes(tell, folder / work.file, point, which)
    flat = work.do(folder, lambda number: tell(f"began {number}"))
    found = hashlib.sha256()
    for name, leaf in sorted(flat.items()):
        if not name.endswith("seconds"):  # which no two runs share
            found.update(name.encode() + leaf.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    tell(f"digest {found.hexdigest()}")


# -- in the parent -------------------------------------------------------------------------------------------------


def life(work: Work, folder: Path, place: Path, point: str = "", which: int = 0, after: float = _LONGEST) -> Life:
    """Fork a process, kill it after so many seconds unless it has ended, and say what it left behind."""
    began = time.monotonic()
    reading, writing = os.pipe()
    pid = fork(partial(_live, work, folder, place, writing, point, which))
    os.close(writing)
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < began + after:
        time.sleep(0.001)
    if ended == (0, 0):
        os.kill(pid, signal.SIGKILL)
        ended = os.waitpid(pid, 0)
    seconds = time.monotonic() - began
    with os.fdopen(reading) as told:
        lines = [line.split() for line in told.read().splitlines()]
    values = {words[0]: words[1] for words in lines if len(words) > 1}
    counts = Counter(words[0] for words in lines)
    killed = os.waitstatus_to_exitcode(ended[1]) == -signal.SIGKILL
    number = int(values["began"]) if "began" in values else None
    return Life(killed, number, counts["begun"], counts["done"], values.get("digest", ""), seconds)


def places() -> tuple[list[tuple[Path, Path]], bool]:
    """(folder for checkpoints, folder for temporary files) in turns, and whether they are on different file systems."""
    here = Path(tempfile.gettempdir())
    others = [Path(name) for name in ("/dev/shm", "/var/tmp", Path.home()) if os.access(name, os.W_OK)]
    other = next((path for path in others if path.stat().st_dev != here.stat().st_dev), None)
    return ([(here, here)], False) if other is None else ([(other, here), (here, other)], True)


def trials(name: str, kills: int, seed: int, where: Sequence[tuple[Path, Path]]) -> tuple[Counter[str], list[str]]:
    """(kills at each point, what went wrong) of one kind of process."""
    draw, sides = random.Random(seed), itertools.cycle(where)
    at = Counter(dict.fromkeys([*POINTS[2 * seed % len(POINTS) :], *POINTS], 0))  # the rarest is next, in this order
    wrong: list[str] = []
    while at.total() < kills:
        parent, place = next(sides)
        with tempfile.TemporaryDirectory(dir=parent) as base:
            wrong += [f"{name}, {text}" for text in _lives(WORKS[name], Path(base), place, at, draw, kills)]
    return at, wrong


def _lives(work: Work, base: Path, place: Path, at: Counter[str], draw: random.Random, kills: int) -> Iterator[str]:
    """Kill one run again and again until it has come to its end; say what went wrong."""
    folder, copy, whole = (base / name for name in ("run", "copy", "whole"))
    folder.mkdir()
    whole.mkdir()
    expected, committed = life(work, whole, place), 0
    if not expected.digest:
        raise RuntimeError("Expected a run that is left alone to come to its end, but it did not; see its error")
    while at.total() < kills:
        point = min(at, key=at.__getitem__)
        after = draw.uniform(0, expected.seconds) if point == "random" else _LONGEST
        found = life(work, folder, place, point, draw.randint(1, WRITES), after)
        if not found.killed:
            if found.digest != expected.digest:
                yield f"{point}: it ended with other bits, or with an error"
            if point != "random" and not committed:
                at[point] += 1
                yield f"{point}: no write came by"
            return
        at[point] += 1
        shutil.copytree(folder, copy)
        resumed = life(work, copy, place)
        shutil.rmtree(copy)
        first = committed if found.began is None else found.began
        if resumed.began is None:
            yield f"{point}: the checkpoint does not load"
        elif not max(committed, first + found.done) <= resumed.began <= max(committed, first + found.begun):
            yield f"{point}: of round {resumed.began}, not {first} + {found.done} to {found.begun}"
        if resumed.digest != expected.digest:
            yield f"{point}: a resumed run ends with other bits"
        committed = committed if resumed.began is None else resumed.began


def main(argv: Sequence[str] | None = None) -> None:
    """Kill, print and write; end with an error if anything was lost."""
    parser = common.arguments(__doc__)
    parser.add_argument("--kills", type=int, metavar="N", help="in all, in equal parts of the kinds (default 201)")
    options = parser.parse_args(argv)
    rows, wrong = measured(options)
    common.show_rows(f"kills ({common.machine()})", rows, ".4g")
    common.finish("benchmarks.kills", rows, options)
    if wrong:
        raise SystemExit("\n".join(wrong))


def measured(options: argparse.Namespace) -> tuple[list[common.Row], list[str]]:
    """The rows, and what went wrong."""
    warm()
    where, apart = places()
    each = (options.kills or (15 if options.smoke else 201)) // len(WORKS)
    rows, everything = [], []
    for seed, name in enumerate(WORKS):
        at, wrong = trials(name, each, seed, where)
        rows += [common.Row(name, f"kills, {point}", at[point]) for point in POINTS]
        rows.append(common.Row(name, "checkpoints or bits lost", len(wrong)))
        everything += wrong
    rows.append(common.Row("folders for checkpoints and for temporary files", "file systems", 1 + apart))
    return rows, everything


if __name__ == "__main__":
    main()
