"""Cut the rows of each label into parts for random partitioners, and give the parts to clients."""

from __future__ import annotations

import heapq

import numpy
import torch
from torch import Tensor

from fedtorch import random


def ranks(codes: Tensor, key: Tensor) -> Tensor:
    """Return the place of each row in a random order of the rows of its class, 0…n_c−1."""
    order = random.permutation(key, len(codes))
    order = order[codes[order].argsort(stable=True)]
    sizes = codes.bincount()
    rank = torch.empty_like(codes)
    rank[order] = torch.arange(len(codes)) - (sizes.cumsum(0) - sizes)[codes[order]]
    return rank


def cut(codes: Tensor, alpha: float, clients: int, minimum: int, key: Tensor) -> Tensor:
    """Cut the rows of each class, in random order, by Dirichlet proportions over the clients."""
    sizes = codes.bincount()
    bounds = _dirichlet(alpha, (len(sizes), clients), random.fold_in(key, 0)).cumsum(1)  # (C, K)
    place = (ranks(codes, random.fold_in(key, 1)).double() + 0.5) / sizes[codes]  # in (0, 1)
    assignment = torch.empty_like(codes)
    for c in range(len(sizes)):
        members = codes == c
        assignment[members] = torch.searchsorted(bounds[c], place[members], right=True)
    return _fill_up(assignment.clamp(max=clients - 1), clients, minimum, random.fold_in(key, 2))


def _dirichlet(alpha: float, shape: tuple[int, int], key: Tensor) -> Tensor:
    generator = numpy.random.Generator(numpy.random.Philox(key=int(key) & (2**64 - 1)))
    return torch.from_numpy(generator.dirichlet(numpy.full(shape[1], alpha), shape[0]))


def _fill_up(assignment: Tensor, clients: int, minimum: int, key: Tensor) -> Tensor:
    """Move random rows of the largest clients to those with fewer than `minimum`."""
    counts = assignment.bincount(minlength=clients)
    target = _level(counts, minimum)
    moved = (ranks(assignment, key) >= target[assignment]).nonzero().squeeze(1)
    assignment = assignment.clone()
    assignment[moved] = torch.arange(clients).repeat_interleave((target - counts).clamp(min=0))
    return assignment


def _level(counts: Tensor, minimum: int) -> Tensor:
    """Return the sizes once small clients have `minimum` rows and the largest, lowered to one level, paid for it."""
    total, raised = int(counts.sum()), counts.clamp(min=minimum)
    low, high = minimum, int(raised.max())  # the highest level at which the sizes fit into the total
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int(raised.clamp(max=middle).sum()) <= total else (low, middle - 1)
    target = raised.clamp(max=low)
    above = (raised > low).nonzero().squeeze(1)
    target[above[: total - int(target.sum())]] += 1
    return target


def apportion(sizes: Tensor, clients: int, count: int) -> Tensor:
    """Return the number of shards of each label, `clients · count` in all, by the divisor method of Webster.

    Every label has one at least, and no more than there are clients (a client gets a label once) or rows.
    """
    labels, shards = len(sizes), clients * count
    if not 1 <= count <= labels:
        raise ValueError(f"Expected between 1 and {labels} labels per client, as many as there are, but got {count}")
    if shards < labels:
        raise ValueError(
            f"Expected at least {labels} shards, so that every label is given away, but got {clients} "
            f"clients × {count} labels; take more of either"
        )
    bound = sizes.clamp(max=clients)
    if int(bound.sum()) < shards:
        raise ValueError(
            f"Expected rows for {clients} clients × {count} labels, but the labels have {sizes.tolist()} "
            "rows; take fewer clients or labels per client"
        )
    n, most, result = sizes.tolist(), bound.tolist(), [1] * labels
    queue = [(-n[c] / 3, c) for c in range(labels) if most[c] > 1]
    heapq.heapify(queue)
    for _ in range(shards - labels):
        _, c = heapq.heappop(queue)
        result[c] += 1
        if result[c] < most[c]:
            heapq.heappush(queue, (-n[c] / (2 * result[c] + 1), c))
    return torch.tensor(result)


def deal(shards: Tensor, clients: int, count: int, key: Tensor) -> Tensor:
    """Deal shards, `count` of different labels to every client: each shard's client, ordered by label.

    A label with as many shards left as there are clients left must be taken; the others are drawn without
    replacement, in proportion to the shards left. This never runs out: no label ever has more shards than
    there are clients left.
    """
    draws = random.exponential(key, (clients, len(shards)), torch.float64).numpy()
    left = shards.numpy().astype(numpy.float64)
    owners: list[list[int]] = [[] for _ in range(len(shards))]
    for client in range(clients):
        race = numpy.divide(draws[client], left, out=numpy.full_like(left, numpy.inf), where=left > 0)
        race[left == clients - client] = -1.0
        chosen = race.argsort(kind="stable")[:count]
        left[chosen] -= 1
        for c in chosen:
            owners[c].append(client)
    return torch.tensor([client for owner in owners for client in owner])
