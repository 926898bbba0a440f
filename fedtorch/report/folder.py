"""The files of a run's report, and the page made from them.

- `history.safetensors`: the history of the run, see `fedtorch.history`. Where it is missing, the
  history of the newest checkpoint is read: of `run.save("….safetensors")`, or of a Trainer (`….ckpt`).
- `about.json`: the facts that a history does not have: clients' names, settings, network, posteriors, scores, the
  privacy claim. Where it is missing, clients are numbers, and the other facts are left out.
- `….safetensors.json`: a record of the run, which `fedtorch.trust.record.RunRecord` writes beside a checkpoint.
- `report.html`: the page, one file without scripts that fetches nothing.

Reading these files executes no code: they are JSON, safetensors, or a Trainer's checkpoint, read by
`weights_only=True`.

>>> import tempfile, torch, fedtorch as ft
>>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=4, seed=0)
>>> run = ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1))), ft.InProcess(data), rounds=3)
>>> with tempfile.TemporaryDirectory() as folder:
...     page = ft.report.write(run, folder)
...     sorted(path.name for path in page.parent.iterdir())
['about.json', 'history.safetensors', 'report.html']
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedtorch import _files as files, checkpoint
from fedtorch.checkpoint import below
from fedtorch.federation.runs.run import Run
from fedtorch.history import History
from fedtorch.metrics.scores import Score
from fedtorch.report._about import FORMAT, about
from fedtorch.report._page import Story, page
from fedtorch.report._posteriors import by_client
from fedtorch.trust import record
from fedtorch.vfl.fit.run import VerticalRun

if TYPE_CHECKING:
    from fedtorch.networks import Network

HISTORY, ABOUT, PAGE = "history.safetensors", "about.json", "report.html"
_TEXTS = ("fingerprint", "ended")  # of a checkpoint
_ODD = "Expected files of ft.report.write in"
_NOTHING: dict[str, Any] = {
    "format": FORMAT,
    "title": "",
    "written": "",
    "ended": "",
    "clients": [],
    "settings": {},
    "versions": {},
    "machine": "",
    "scores": {},
    "network": None,
    "posteriors": [],
    "privacy": None,
    "organisations": {},
    "absences": {},
    "goal": None,
    "audited": "",
    "missing": None,
    "disclosure": [],
}


def write(
    run: Run | VerticalRun,
    folder: Path | str,
    *,
    title: str = "",
    ended: str = "",
    scores: Mapping[str, Score] | None = None,
    network: Network | None = None,
) -> Path:
    """Write the report of a run into a folder and return the page's path; over ranks, the first one writes.

    Args:
        run: during or after training; or a vertical fit, such as `ft.vfl.sfvi` returns, whose parties count as clients.
        folder: of the report, made if it does not exist.
        title: of the page; default: the algorithm's name.
        ended: the reason why the run ended, if the report should give one; default: the reason of an early stop.
        scores: of the clients' models, from `run.evaluate(data, metrics)`.
        network: to draw, with its positions; default: that of the algorithm, if it has one.
    """
    folder, clients = Path(folder), by_client(run)
    if isinstance(run, VerticalRun) or run.population.leads:
        known = about(run, title=title, ended=ended, scores=scores, network=network, clients=clients)
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.write(folder / HISTORY, run.log.state_dict())
        files.replace(folder / ABOUT, (json.dumps(_plain(known), allow_nan=False) + "\n").encode())
        render(folder)
    return folder / PAGE


def render(folder: Path | str, out: Path | str | None = None) -> Path:
    """Make the page from a run's files in a folder and return its path.

    Args:
        folder: with a history or a checkpoint.
        out: path of the page; default: `report.html` in the folder.

    Raises:
        ValueError: there is no history, or a file is damaged.

    Example:
        >>> import tempfile, torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor([1.0, 2.0]))] * 3)
        >>> run = ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1))), ft.InProcess(data), rounds=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run.save(f"{folder}/run.safetensors")
        ...     render(folder).name, read(folder).table["round"].tolist()
        ('report.html', [1, 2])
    """
    path, story = Path(folder) / PAGE if out is None else Path(out), read(folder)
    try:
        made = page(story)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{_ODD} {folder}, but got something else: {error}") from error
    files.replace(path, made.encode())
    return path


def read(folder: Path | str) -> Story:
    """Read a run's files in a folder; raises as `render` does."""
    folder = Path(folder)
    flat = _history(folder)
    history = History()
    numbers = [str(i) for i in range(1 + int(max(flat["history.losses.ids"].tolist(), default=-1)))]
    try:
        history.load_state_dict(below("history.", flat))
        known = {**_NOTHING, **(json.loads((folder / ABOUT).read_text()) if (folder / ABOUT).exists() else {})}
        if known["format"] != FORMAT:
            raise ValueError(f"format {known['format']} instead of {FORMAT}")
        names = known["clients"] if len(known["clients"]) >= len(numbers) else numbers
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{_ODD} {folder}, but got something else: {error}") from error
    if not known["settings"] and "fingerprint" in flat:
        known["settings"] = record.checkpoint_fingerprint(flat)
    if not known["ended"] and "ended" in flat:
        known["ended"] = bytes(flat["ended"].tolist()).decode()
    return Story(
        table=history.frame(),
        losses=history.losses(names),
        about=known,
        records=[(path.name, _verified(path)) for path in sorted(folder.glob("*.safetensors.json"))],
    )


def _verified(path: Path) -> list[record.Check]:
    try:
        return record.verify(path)
    except ValueError as error:
        return [record.Check("record", False, str(error))]


def _history(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a history by names that begin with `history.`, with the texts of a checkpoint if any."""
    if (folder / HISTORY).exists():
        return {f"history.{name}": leaf for name, leaf in checkpoint.read(folder / HISTORY).items()}
    paths = [*folder.glob("*.safetensors"), *folder.rglob("*.ckpt")]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        flat = _of_trainer(path) if path.suffix == ".ckpt" else _of_run(path)
        if "history.values" in flat:
            return flat
    raise ValueError(
        f"Expected a run in {folder} (a checkpoint of run.save or of a Trainer, or files of ft.report.write), but got "
        "none; see fedtorch report --help"
    )


def _of_run(path: Path) -> dict[str, Tensor]:
    """Read the history, the fingerprint and the reason of the end from a checkpoint, without the models."""
    with checkpoint.opened(path, foreign=True) as content:
        wanted = [name for name in content.names if name.startswith("history.") or name in _TEXTS]
        if content.checked:
            return {name: content.tensor(name).clone() for name in wanted}
    return checkpoint.read(path) if wanted else {}  # `read` raises an error for a run's file without its digest


def _of_trainer(path: Path) -> dict[str, Tensor]:
    from fedtorch.checkpoint_io import PlainCheckpointIO

    content = PlainCheckpointIO().load_checkpoint(path)
    flat = content.get("state_dict", {}).get("_extra_state", {}) if isinstance(content, dict) else {}
    return flat if isinstance(flat, dict) else {}


def _plain(value: Any) -> Any:
    """Convert a value for JSON, with None for a number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value
