"""A trial of a search: a setting and its run, which goes on from where it stands, in memory or in a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedtorch import _files as files, checkpoint
from fedtorch.checkpoint import describe
from fedtorch.federation.runs.run import Run
from fedtorch.federation.runs.search.tuning import Setting, trained
from fedtorch.metrics.scores import Score
from fedtorch.progress import Progress

_FLOATS = {"overall": torch.float64}  # of a Score, which is a Python float


@dataclasses.dataclass(eq=False)
class Trial:
    """A setting with its run.

    Attributes:
        setting: what is tried.
        begin: setting -> a run that has not been stepped.
        judge: run -> its score, None of one that diverged.
        place: the path of its files without what they end in; None keeps the run in memory.
        score: when it was last compared; None before, and of a trial that diverged.
        rounds: that it has done.
    """

    setting: Setting
    begin: Callable[[Setting], Run]
    judge: Callable[[Run], Score | None]
    place: Path | None = None
    score: Score | None = None
    rounds: int = 0
    _run: Run | None = None

    def run(self) -> Run:
        """Return its run where it stands."""
        if self._run is not None:
            return self._run
        run = self.begin(self.setting)
        return run.load(self._file("run")) if self.place is not None and self._file("run").exists() else run

    def go_on(self, rounds: int, shown: Progress) -> None:
        """Do rounds until there are `rounds` in all, and score it; what a file says already is not done again."""
        if self.place is not None and self._file(f"{rounds}").exists():
            shown.update(rounds - self.rounds)
            self.score, self.rounds = _read(self._file(f"{rounds}"))
            return
        try:
            run = self.run()
            self.score = self.judge(run) if trained(run, rounds, shown) else None
        except Exception as error:
            error.add_note(f"in a trial of the setting {self.setting}")
            raise
        self.rounds, self._run = run.number, run
        if self.place is not None:
            self._keep(run, rounds)

    def end(self) -> None:
        """Free its run, in memory and on the disk."""
        self._run = None
        if self.place is not None:
            self._file("run").unlink(missing_ok=True)

    def _keep(self, run: Run, rounds: int) -> None:
        """Write the run first: a kill between the two files leaves one that is only scored again."""
        if self.score is not None:
            run.save(self._file("run"))
        if run.population.leads:
            checkpoint.write(self._file(f"{rounds}"), _flat(self.score, run.number))
        self._run = None

    def _file(self, end: str) -> Path:
        assert self.place is not None
        return self.place.with_name(f"{self.place.name}.{end}.safetensors")


def folder_of(path: Path | str, about: Mapping[str, Any], writes: bool) -> Path:
    """Return the folder of a search, which is new or of the same search.

    Raises:
        ValueError: another search, or something else, is in it.
    """
    folder, mine = Path(path), {name: describe(value) for name, value in about.items()}
    file = folder / "search.json"
    if not file.exists():
        if writes:  # other ranks may find it half made
            if folder.exists() and any(folder.iterdir()):
                raise ValueError(f"Expected an empty folder for a search, or one of a search, but got {folder}")
            folder.mkdir(parents=True, exist_ok=True)
            files.write_json(file, mine, private=False)
        return folder
    theirs = files.read_json(file)
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise ValueError(
                f"Expected the folder of a search with {name} {value}, but {folder} is of one with {theirs.get(name)}; "
                "give this search a folder of its own"
            )
    return folder


def _flat(score: Score | None, rounds: int) -> dict[str, torch.Tensor]:
    """Return a score as tensors; of a trial that diverged there are the rounds only."""
    fields = {} if score is None else {name: value for name, value in score._asdict().items() if value is not None}
    tensors = {name: torch.as_tensor(value, dtype=_FLOATS.get(name)) for name, value in fields.items()}
    return {"rounds": torch.tensor(rounds), **tensors}


def _read(file: Path) -> tuple[Score | None, int]:
    """Return (score, rounds) of `_flat`."""
    flat = checkpoint.read(file)
    rounds = int(flat.pop("rounds"))
    fields: dict[str, Any] = {name: leaf if leaf.dim() else leaf.item() for name, leaf in flat.items()}
    return Score(**fields) if fields else None, rounds
