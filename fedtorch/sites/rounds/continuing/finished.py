"""Read from a checkpoint that a run is over: a server that is started again with it waits for no site."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtorch import checkpoint
from fedtorch.sites.rounds.sites import Brings, Sites

LAST_WORD = 10.0  # seconds in which a site that may have missed that the run is over can come back


def state_of(over: bool, bring: Mapping[str, Brings]) -> dict[str, Tensor]:
    """Return as tensors whether sites are told that the run is over, and what they have brought."""
    text = json.dumps({name: each._asdict() for name, each in bring.items()}).encode()
    return {"over": torch.tensor(over), "bring": torch.tensor(list(text), dtype=torch.uint8)}


def brought_to(path: Path | str | None, sites: Sequence[str]) -> dict[str, Brings] | None:
    """Return what these sites have brought to a checkpoint's run, if that is over; None if they are waited for.

    Raises:
        ValueError: the file is no checkpoint.
    """
    if path is None or not Path(path).exists():
        return None
    flat = checkpoint.below("clients.", checkpoint.read(path))
    if not bool(flat.get("over", False)):
        return None
    bring = json.loads(bytes(flat["bring"].tolist()))
    if set(bring) != set(sites):
        return None
    return {
        name: Brings(tuple(bring[name]["clients"]), tuple(bring[name]["rows"]), *_how(bring[name])) for name in sites
    }


def _how(bring: Mapping[str, Any]) -> tuple[Any, str | None, bool]:
    return bring["schema"], bring.get("design"), bring.get("joined", False)


def tell_all(sites: Sites, tell: Callable[[Mapping[int, str]], Iterable[int]], seconds: float) -> None:
    """Tell sites as they come, until all have been told or time is up.

    Args:
        sites: of the run.
        tell: sites that are here, by number -> the numbers of those that were told.
        seconds: for those that are not here.
    """
    left, ends = dict(enumerate(sites.names)), time.monotonic() + seconds
    while True:
        connected = {index: site for index, site in left.items() if sites.is_here(site)}
        for index in tell(connected) if connected else ():
            del left[index]
        if not left or time.monotonic() >= ends:
            return
        sites.look(ends)
