"""Several runs of one algorithm as one: repetitions that differ in their data and their start alone, side by side.

Run r of R has K clients, and they are the clients r·K … r·K + K − 1 of one federation. Every run has a server of its
own and hears its own clients alone, so its numbers are those that it has by itself, up to the rounding of stacks of
another width; what is drawn at random is drawn anew for each. Local work is done for all of them at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedtorch as ft
from fedtorch import Exchange, tree
from fedtorch.tree import Tree

_SMALL_BLOCK = 4096  # rows, padding included, that are not worth dividing by size


class _Messages(NamedTuple):
    """Messages `(M, ...)` as they came, and the clients that they are from `(M,)`."""

    ids: Tensor
    message: Tree


class Joined(ft.InProcess):
    """The clients of all runs, as many in each, in blocks that are padded little: there are enough to fill them."""

    def __init__(self, sets: Sequence[ft.data.FederatedData]) -> None:
        if len({len(each) for each in sets}) != 1:
            raise ValueError(f"Expected as many clients in every run, but got {[len(each) for each in sets]}")
        super().__init__(ft.data.from_tensors([rows for each in sets for rows in each]))

    def blocks(self) -> list[tuple[Tensor, ft.data.ClientData]]:
        """Blocks of similar size."""
        return self.data.buckets(small=_SMALL_BLOCK)


def side_by_side(algorithm: ft.Algorithm, starts: Sequence[Tree], clients: int) -> ft.Algorithm:
    """The algorithm of all runs.

    Args:
        algorithm: of a run by itself, with its attacks and exchange.
        starts: the parameters that each run starts from.
        clients: of a run, K.

    Shapes: server state, outbox and aggregate are stacks of those of the runs, `(R, ...)`.
    """
    return dataclasses.replace(
        algorithm,
        start=tree.stack(starts),
        init=partial(_init, algorithm, clients),
        outbox=partial(_each, algorithm.outbox),
        server=partial(_server, algorithm.server),
        exchange=_apart(algorithm.exchange, clients, len(starts)),
        report=None,
    )


def server(run: ft.Run, number: int) -> Tree:
    """The server's state of one of the runs."""
    return _of(run.server, number)


def _of(stacked: Tree, number: int) -> Tree:
    return tree.map(lambda leaf: leaf[number], stacked)


def _runs(stacked: Tree) -> Iterator[Tree]:
    return (_of(stacked, number) for number in range(len(tree.leaves(stacked)[0])))


def _each(function: Callable[..., Tree], *stacked: Tree) -> Tree:
    """A function of one run's values, for all of them."""
    return tree.stack([function(*values) for values in zip(*map(_runs, stacked))])


def _init(algorithm: ft.Algorithm, clients: int, parameters: Tree, everybody: int) -> tuple[Tree, Tree]:
    made = [algorithm.init(start, clients) for start in _runs(parameters)]
    return tree.stack([server for server, _ in made]), made[0][1]


def _server(server: Callable[[Tree, Tree, Tensor], Tree], state: Tree, aggregate: Tree, key: Tensor) -> Tree:
    return _each(lambda one, heard: server(one, heard, key), state, aggregate)


def _apart(exchange: Exchange, clients: int, runs: int) -> Exchange:
    """`exchange` in every run by itself."""

    def scatter(outbox: Tree, ids: Tensor | slice) -> Tree:
        return tree.concatenate([exchange.scatter(_of(outbox, r), i) for r, _, i in _parts(ids, clients)])

    def finish(found: _Messages) -> Tree:
        found = tree.take(found, found.ids.argsort())
        parts = {
            r: exchange.finish(exchange.gather(tree.take(found.message, rows), ids))
            for r, rows, ids in _parts(found.ids, clients)
        }
        if len(parts) < runs:
            raise ValueError(f"Expected answers in all {runs} runs, but got some in {len(parts)}; ask more clients")
        return tree.stack(list(parts.values()))

    return Exchange(
        scatter=scatter,
        gather=lambda messages, ids: _Messages(_indices(ids), messages),
        merge=tree.concatenate,
        finish=finish,
        traffic=lambda outbox, messages, ids: exchange.traffic(_of(outbox, 0), messages, ids),
        additive=False,
    )


def _indices(ids: Tensor | slice) -> Tensor:
    return torch.arange(ids.start, ids.stop) if isinstance(ids, slice) else ids


def _parts(ids: Tensor | slice, clients: int) -> Iterator[tuple[int, Any, Tensor]]:
    """(run, its rows among ascending `ids`, its clients by their own numbers)."""
    everybody = _indices(ids)
    run = everybody // clients
    for r in run.unique().tolist():
        rows = (run == r).nonzero()[:, 0]
        yield r, slice(int(rows[0]), int(rows[-1]) + 1), everybody[rows] - r * clients
