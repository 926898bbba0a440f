"""Cut the rows of each label into parts for random partitioners, and give the parts to clients."""

from __future__ import annotations

import heapq

import numpy
import torch
from torch import Tensor

from fedtorch import random


def grouped(codes: Tensor, groups: int) -> Tensor:
    """Return the rows of group 0, then those of 1, …, each in their order, `(total,)`: a counting sort.

    >>> grouped(torch.tensor([1, 0, 1, 0]), 2)
    tensor([1, 3, 0, 2])
    """
    from scipy.sparse import coo_matrix

    total = len(codes)
    place = codes.to(torch.int32).numpy(), numpy.arange(total, dtype=numpy.int32 if total < 2**31 else numpy.int64)
    rows = coo_matrix((numpy.ones(total, numpy.int8), place), shape=(groups, total)).tocsr().indices
    return torch.from_numpy(rows).to(torch.int64)


def _shuffled(codes: Tensor, sizes: Tensor, key: Tensor) -> Tensor:
    """Return the rows class by class, each class in random order, `(total,)`."""
    order = random.permutation(key, len(codes))
    small = torch.uint8 if len(sizes) <= 2**8 else torch.int32  # smaller elements fit the cache better
    return order[grouped(codes.to(small)[order], len(sizes))]


def _places(sizes: Tensor) -> Tensor:
    """Return 0…n_c−1 for each class, concatenated."""
    return torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)


def ranks(codes: Tensor, key: Tensor) -> Tensor:
    """Return the position of each row in a random order of the rows of its class, 0…n_c−1."""
    sizes = codes.bincount()
    return torch.empty_like(codes).scatter_(0, _shuffled(codes, sizes, key), _places(sizes))


def cut(codes: Tensor, alpha: float, clients: int, minimum: int, key: Tensor) -> Tensor:
    """Cut the rows of each class, in random order, by Dirichlet proportions over the clients."""
    sizes = codes.bincount()
    bounds = _dirichlet(alpha, (len(sizes), clients), random.fold_in(key, 0)).cumsum(1)  # (C, K)
    order = _shuffled(codes, sizes, random.fold_in(key, 1))
    part = torch.empty(len(codes), dtype=torch.int32)  # int32 halves the bytes of random writes
    start = 0
    for bound, size in zip(bounds, sizes.tolist()):
        at = (torch.arange(size).double() + 0.5) / size  # in (0, 1)
        part[order[start : start + size]] = torch.searchsorted(bound, at, right=True, out_int32=True)
        start += size
    return _fill_up(part.clamp_(max=clients - 1).to(torch.int64), clients, minimum, random.fold_in(key, 2))


def take(codes: Tensor, alphas: Tensor, wanted: Tensor, key: Tensor) -> Tensor:
    """Give each client its number of rows, by Dirichlet proportions over the classes that have rows left.

    Args:
        codes: `(total,)` classes of the rows.
        alphas: `(K,)` concentrations.
        wanted: `(K,)` rows of each client, `total` in all.
    """
    sizes = codes.bincount()
    generator = _generator(random.fold_in(key, 0))
    left, shares = sizes.numpy().copy(), sizes.double().numpy() / len(codes)
    counts = numpy.zeros((len(wanted), len(sizes)), numpy.int64)
    turns = random.permutation(random.fold_in(key, 1), len(wanted))
    # clients with few classes come first, while those have rows left
    turns = turns[alphas[turns].sort(stable=True).indices]
    for client in turns.tolist():
        # Logarithms of gamma numbers, because those of small shapes round to 0: Γ(a) = Γ(a + 1) U^(1/a).
        shape = float(alphas[client]) * shares
        log_share = numpy.log(generator.gamma(shape + 1)) + numpy.log1p(-generator.random(len(shape))) / shape
        while (lacking := int(wanted[client]) - counts[client].sum()) > 0:
            weight = numpy.exp(numpy.where(left > 0, log_share - log_share[left > 0].max(), -numpy.inf))
            drawn = numpy.minimum(generator.multinomial(lacking, weight / weight.sum()), left)
            counts[client] += drawn
            left -= drawn
    owner = torch.arange(len(wanted)).repeat(len(sizes)).repeat_interleave(torch.from_numpy(counts.T.reshape(-1)))
    return torch.empty_like(codes).scatter_(0, _shuffled(codes, sizes, random.fold_in(key, 2)), owner)


def equal_shards(codes: Tensor, clients: int, count: int, key: Tensor) -> Tensor:
    """Cut the rows, ordered by class and at random within it, into shards of equal size, and deal `count` to each."""
    shards, total = clients * count, len(codes)
    order = _shuffled(codes, codes.bincount(), random.fold_in(key, 0))
    owner = random.permutation(random.fold_in(key, 1), shards) % clients
    return torch.empty_like(codes).scatter_(0, order, owner[torch.arange(total) * shards // total])


def _dirichlet(alpha: float, shape: tuple[int, int], key: Tensor) -> Tensor:
    return torch.from_numpy(_generator(key).dirichlet(numpy.full(shape[1], alpha), shape[0]))


def _generator(key: Tensor) -> numpy.random.Generator:
    return numpy.random.Generator(numpy.random.Philox(key=int(key) & (2**64 - 1)))


def _fill_up(assignment: Tensor, clients: int, minimum: int, key: Tensor) -> Tensor:
    """Move random rows of the largest clients to those with fewer than `minimum`."""
    counts = assignment.bincount(minlength=clients)
    if int(counts.min()) >= minimum:
        return assignment
    target = _level(counts, minimum)
    beyond = _places(counts) >= target.repeat_interleave(counts)
    moved = _shuffled(assignment, counts, key)[beyond].sort().values
    assignment[moved] = torch.arange(clients).repeat_interleave((target - counts).clamp(min=0))
    return assignment


def _level(counts: Tensor, minimum: int) -> Tensor:
    """Raise small clients' sizes to `minimum` and lower the largest to one level, so that the total stays the same."""
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

    Every label has at least one, and no more than there are clients (a client gets a label once) or rows.
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
    """Deal shards, `count` of different labels to every client; return each shard's client, ordered by label.

    A label with as many shards left as clients must be chosen; the others are drawn without replacement, in proportion
    to their remaining shards. This never runs out: no label ever has more shards than there are clients left.
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
