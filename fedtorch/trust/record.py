"""Record of a run as JSON beside its checkpoint: inputs, computations, people in charge, and costs.

A `RunRecord` follows a run and stores who was asked and who answered. `kept.save(run, path)` writes the checkpoint and,
beside it, `<path>.json`: fingerprints of data, code and checkpoint, settings, versions, network, bytes, the algorithm's
report (with a privacy budget, if any), faults, rounds, an estimate of energy (time × stated power). `verify`, and the
command `fedtorch record verify <path>.json`, detect later changes. They detect mistakes, not forgery, because
everything can be rewritten together with its digests; publish a record's digest to prevent that.

Source: Jung, "Federated learning: from theory to practice", section 8.2, requirements KR4 (transparency), KR6 (energy)
and KR7 (accountability).

>>> import tempfile, torch, fedtorch as ft
>>> from fedtorch.trust import record
>>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=4, seed=0)
>>> kept = record.RunRecord(watts=30.0)
>>> run = ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1))), ft.InProcess(data), rounds=2, record=kept)
>>> with tempfile.TemporaryDirectory() as folder:
...     path = kept.save(run, f"{folder}/run.safetensors")
...     [check.name for check in record.verify(path) if not check.holds]
[]
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import _files as files, checkpoint, tree
from fedtorch._lazy import only
from fedtorch.chained_log import canonical, chained, digest, entries_of, faults
from fedtorch.data import FederatedData
from fedtorch.federation.runs.run import Run
from fedtorch.history import Round
from fedtorch.networks.network import Network

__all__ = ["RunRecord"]
__dir__ = only(__all__)

_FORMAT = 2
_KINDS = ("asked", "lost_before", "late", "lost_after", "repeated", "refused")
_PACKAGES = ("torch", "numpy", "scipy", "lightning", "safetensors")


class Check(NamedTuple):
    """One check by `verify`.

    Example:
        >>> import tempfile, torch, fedtorch as ft
        >>> from fedtorch.trust import record
        >>> data, kept = ft.data.from_tensors([(torch.eye(1), torch.ones(1))]), record.RunRecord(note="by Ada")
        >>> local = ft.least_squares(torch.nn.Linear(1, 1))
        >>> run = ft.run(ft.fedavg(local), ft.InProcess(data), rounds=1, record=kept)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = kept.save(run, f"{folder}/run.safetensors")
        ...     _ = path.write_text(path.read_text().replace("by Ada", "by Bob"))
        ...     [check for check in record.verify(path) if not check.holds]
        [Check(name='record', holds=False, message='the record is as it was written')]
    """

    name: str
    holds: bool
    message: str


class RunRecord:
    """Record who was asked and who answered: `ft.run(..., record=RunRecord())`.

    Args:
        watts: the power that the machines take while they work, all together; None leaves energy out.
        note: further entries, such as the persons responsible and the model's purpose.

    Raises:
        ValueError: a power that is not positive.
    """

    def __init__(self, *, watts: float | None = None, note: str = "") -> None:
        if watts is not None and not watts > 0:
            raise ValueError(f"Expected a positive power in watts, or None, but got {watts}")
        self.watts, self.note = watts, note
        self._numbers: list[int] = []
        self._ids: dict[str, list[Tensor]] = {kind: [] for kind in _KINDS}

    def record(self, round: Round) -> None:
        """Record a round."""
        self._numbers.append(round.number)
        for kind, rounds in self._ids.items():
            rounds.append(getattr(round, kind).to("cpu", torch.int32))

    def state_dict(self) -> dict[str, Tensor]:
        """Return all rounds, flat."""
        flat = {"numbers": torch.tensor(self._numbers, dtype=torch.int64)}
        for kind, rounds in self._ids.items():
            flat[f"{kind}.counts"] = torch.tensor([len(ids) for ids in rounds], dtype=torch.int64)
            flat[f"{kind}.ids"] = torch.cat([torch.zeros(0, dtype=torch.int32), *rounds])
        return flat

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Replace all rounds."""
        self._numbers = flat["numbers"].tolist()
        for kind in _KINDS:
            parts = flat[f"{kind}.ids"].split(flat[f"{kind}.counts"].tolist())
            self._ids[kind] = [part.clone() for part in parts][: len(self._numbers)]

    def save(self, run: Run, path: Path | str) -> Path:
        """Write the checkpoint and the record beside it; return the record's path; with several ranks, call it on all.

        Args:
            run: followed by this record since its first round.
            path: of the checkpoint.

        Raises:
            ValueError: the record has not followed all rounds of this run.
        """
        if self._numbers != list(range(1, run.number + 1)):
            raise ValueError(
                f"Expected a record of all {run.number} rounds, but it has followed {len(self._numbers)}; pass it to "
                "the run as record= from the start"
            )
        run.save(path)
        written = Path(f"{path}.json")
        if run.population.leads:
            content = self.content(run, Path(path))
            content["digest"] = digest(canonical(content))
            files.replace(written, (json.dumps(content, indent=1) + "\n").encode())
        return written

    def content(self, run: Run, saved: Path) -> dict[str, Any]:
        """Return the record of a run whose checkpoint is `saved`."""
        seconds = float(run.log.frame()["seconds"].sum()) if len(run.log) else 0.0
        data = getattr(run.population, "data", None)
        settings = checkpoint_fingerprint(checkpoint.read(saved, "fingerprint".__eq__))
        return {
            "format": _FORMAT,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "note": self.note,
            "checkpoint": {"file": saved.name, "sha256": _of_file(saved)},
            "code": _code_digest(),
            "data": None if data is None else described(data),
            "settings": settings,
            "network": _network(run.algorithm.exchange.network),
            "versions": versions(),
            "machine": {"system": platform.platform(), "processor": platform.machine()},
            "rounds_done": run.number,
            "bytes": {"up": run.bytes_up, "down": run.bytes_down},
            "report": {} if run.last is None else {name: _number(value) for name, value in run.last.report.items()},
            "energy": _energy(seconds, self.watts),
            "faults": {kind: sum(map(len, self._ids[kind])) for kind in _KINDS[1:]},
            "clients": list(run.population.names),
            "rounds": self._rounds(),
        }

    def _rounds(self) -> list[dict[str, Any]]:
        """Return an entry per round, each with the hash of the one before."""
        return chained([self._round(row) for row in range(len(self._numbers))])

    def _round(self, row: int) -> dict[str, Any]:
        ids = {kind: rounds[row] for kind, rounds in self._ids.items()}
        missing = torch.cat([ids[kind] for kind in ("lost_before", "late", "lost_after", "refused")])
        answered = ids["asked"][~torch.isin(ids["asked"], missing)]
        faults = {kind: spans(each) for kind, each in ids.items() if kind == "asked" or len(each)}
        return {"round": self._numbers[row], **faults, "answered": spans(answered)}


def verify(path: Path | str, data: FederatedData | None = None) -> list[Check]:
    """Check whether a record, its checkpoint, this code and, if given, these data match.

    Raises:
        ValueError: the file is no record.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text())
        saved = path.parent / content["checkpoint"]["file"]
        rounds, wanted, version = content["rounds"], content["checkpoint"]["sha256"], content["format"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"Expected a record of a run in {path}, but got something else: {error!r}") from None
    if version != _FORMAT:
        raise ValueError(
            f"Expected a record of format {_FORMAT} in {path}, but got format {version}; verify it with the version of "
            f"fedtorch that wrote it, {content.get('versions', {}).get('fedtorch')}"
        )
    same = saved.is_file() and _of_file(saved) == wanted
    settings = checkpoint_fingerprint(checkpoint.read(saved, "fingerprint".__eq__)) if same else None
    checks = [
        Check("record", content.pop("digest", None) == digest(canonical(content)), "the record is as it was written"),
        Check("rounds", not faults(entries_of(rounds)), "every round's line follows from the lines before"),
        Check("checkpoint", same, f"{saved.name} is the file that was written"),
        Check("settings", settings == content["settings"], "the checkpoint is of a run with these settings"),
        Check("code", content["code"] == _code_digest(), "the package is the one that wrote it"),
    ]
    if data is not None:
        checks.append(Check("data", content["data"] == described(data), "the data are those of the run"))
    return checks


def checkpoint_fingerprint(flat: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the fingerprint of a checkpoint's run.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import record
        >>> data = ft.data.from_tensors([(torch.eye(1), torch.ones(1))])
        >>> run = ft.Run(ft.fedavg(ft.least_squares(torch.nn.Linear(1, 1)), mu=0.5), ft.InProcess(data), seed=3)
        >>> found = record.checkpoint_fingerprint(run.state_dict())
        >>> found["seed"], found["mu"]
        ('3', '0.5')
    """
    settings: dict[str, str] = json.loads(bytes(flat["fingerprint"].tolist()))
    return settings


def described(data: FederatedData) -> dict[str, Any]:
    """Return a digest of all rows, counts and names, and their numbers.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import record
        >>> data = ft.data.from_tensors([torch.zeros(2, 1), torch.zeros(3, 1)])
        >>> record.described(data)
        {'sha256': '...', 'clients': 2, 'rows': 5}
        >>> record.described(data) == record.described(data.map(lambda rows: rows + 1))
        False
    """
    hashed = hashlib.sha256(json.dumps(data.names).encode())
    for name, leaf in [("counts", data.counts), *tree.items(data.rows)]:
        numbers = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        hashed.update(f"{name} {leaf.dtype} {tuple(leaf.shape)}".encode())
        hashed.update(numbers.data)
    return {"sha256": hashed.hexdigest(), "clients": len(data), "rows": int(data.counts.sum())}


def _code_digest() -> str:
    """Return the sha256 of all source files of the package."""
    root, hashed = Path(tree.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        hashed.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return hashed.hexdigest()


def spans(ids: Tensor) -> str:
    """Return ascending numbers as ranges, such as `"0-2,5"`.

    Example:
        >>> import torch
        >>> from fedtorch.trust import record
        >>> record.spans(torch.tensor([0, 1, 2, 5]))
        '0-2,5'
    """
    if not len(ids):
        return ""
    ids = ids.sort().values
    breaks = ((ids[1:] - ids[:-1]) != 1).nonzero()[:, 0] + 1
    parts = ids.tensor_split(breaks)
    return ",".join(str(int(part[0])) if len(part) == 1 else f"{int(part[0])}-{int(part[-1])}" for part in parts)


def _of_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _network(network: Network | None) -> dict[str, Any] | None:
    """Return the number of a network's edges, and a digest of them."""
    return None if network is None else {"edges": len(network.edges), "is": checkpoint.describe(network.edges)}


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of its dependencies.

    Example:
        >>> from fedtorch.trust import record
        >>> list(record.versions())
        ['python', 'fedtorch', 'torch', 'numpy', 'scipy', 'lightning', 'safetensors']
    """
    known = {"python": platform.python_version()}
    for package in ("fedtorch", *_PACKAGES):
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            known[package] = "not installed"
    return known


def _energy(seconds: float, watts: float | None) -> dict[str, float | None]:
    """Return an estimate: the time of the rounds times the stated power."""
    return {"seconds": seconds, "watts": watts, "watt_hours": None if watts is None else seconds * watts / 3600}


def _number(value: Any) -> float | str:
    """Return a number in JSON: NaN and infinities as text."""
    return float(value) if math.isfinite(value) else str(float(value))
