"""What a site notes when a run begins there, in the run's folder of states: the algorithm's name and its own rows.

A server that goes on with a run, or a site that does after it was killed, finds the same there or is refused. What is
noted of rows stays at the site, which says only whether they are the same.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fedtorch import checkpoint
from fedtorch.data import FederatedData
from fedtorch.data.digests import different, noted
from fedtorch.sites.rounds.policy import Refusal

OTHER_ROWS = "the site's rows are others than those with which the run began there"
_FILE = "began.safetensors"


def check_begun(folder: Path, algorithm: str, data: FederatedData, anyway: bool) -> None:
    """Note what a run begins with, or compare it with what it began with; `anyway` takes and notes other rows.

    Raises:
        Refusal: it is another algorithm, or the rows are others.
        ValueError: what was noted is damaged.
    """
    path, rows = folder / _FILE, dict(noted(data))
    if path.exists():
        before = checkpoint.read(path)
        check_name(bytes(before["algorithm"].tolist()).decode(), algorithm)
        same = different(before, rows, data.names) is None
        if same:
            return
        if not anyway:
            raise Refusal(OTHER_ROWS)
    text = torch.tensor(list(algorithm.encode()), dtype=torch.uint8)
    checkpoint.write(path, {**rows, "algorithm": text}, private=True)


def check_name(before: str, now: str) -> None:
    """Refuse another algorithm than that with which a run began: states of one would be told by the rules of another.

    Example:
        >>> check_name("fedavg", "gibbs")
        Traceback (most recent call last):
        fedtorch.sites.rounds.policy.Refusal: the run has begun as 'fedavg' at the site, and does not go on as 'gibbs'
    """
    if before != now:
        raise Refusal(f"the run has begun as {before!r} at the site, and does not go on as {now!r}")
