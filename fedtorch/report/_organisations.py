"""Organisations of a run and their clients; whose numbers are a mean that stands for several clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def joined(losses: pd.DataFrame, organisations: Mapping[str, Sequence[str]]) -> tuple[pd.DataFrame, set[str]]:
    """Return losses in which an organisation that sends the mean of its clients is one line, and who does.

    Where no client may be told from others, a site sends their mean in the place of each: the same number for all of
    its clients in every round.

    Args:
        losses: `round`, `client`, `train_loss`.
        organisations: clients by organisation.
    """
    losses, shared = losses.copy(), set()
    for name, clients in organisations.items():
        inside = losses["client"].isin(list(clients))
        rounds = losses[inside].groupby("round")["train_loss"]
        if len(clients) < 2 or not inside.any() or rounds.size().max() < 2 or rounds.nunique(dropna=False).max() > 1:
            continue
        shared.add(name)
        losses.loc[inside, "client"] = f"{name}: mean of {len(clients)} clients"
    return losses.drop_duplicates(["round", "client"], ignore_index=True), shared


def organisations(clients: Mapping[str, Sequence[str]], shared: set[str]) -> list[list[str]]:
    """Return a line for each organisation: its name, its clients, and what its numbers are.

    >>> organisations({"north": ["a", "b"], "south": ["c"]}, {"north"})
    [['north', '2: a, b', 'the mean of 2 clients'], ['south', '1: c', "each client's own"]]
    """
    lines = []
    for name, own in clients.items():
        few = ", ".join(own[:4]) + ", …" * (len(own) > 4)
        numbers = f"the mean of {len(own)} clients" if name in shared else "each client's own"
        lines.append([name, f"{len(own):,}: {few}", numbers])
    return lines
