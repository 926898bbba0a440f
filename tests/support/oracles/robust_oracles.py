"""Robust rules as their papers write them, with loops over messages `(M, D)` of equal weights."""

from __future__ import annotations

import torch
from torch import Tensor


def krum_scores(x: Tensor, faulty: int) -> Tensor:
    """Σ of the squared distances to the M − f − 2 nearest others (Blanchard et al. 2017, section 4), at least one."""
    scores = []
    for i in range(len(x)):
        distances = sorted(float((x[i] - x[j]).square().sum()) for j in range(len(x)) if j != i)
        scores.append(sum(distances[: max(1, len(x) - faulty - 2)]))
    return torch.tensor(scores)


def krum(x: Tensor, faulty: int, chosen: int = 1) -> Tensor:
    """The mean of the messages of least scores."""
    return x[krum_scores(x, faulty).argsort()[:chosen]].mean(0)


def bulyan(x: Tensor, faulty: int) -> Tensor:
    """El Mhamdi et al. (2018), section 4."""
    left, chosen = list(range(len(x))), []
    while len(chosen) < len(x) - 2 * faulty:
        best = left[int(krum_scores(x[left], faulty).argmin())]
        left.remove(best)
        chosen.append(x[best])
    picked = torch.stack(chosen)
    ordered = picked.sort(0).values
    middle = 0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])
    near = (picked - middle).abs().argsort(0)[: len(x) - 4 * faulty]
    return picked.gather(0, near).mean(0)


def clipped_mean(x: Tensor, centre: Tensor, radius: float) -> Tensor:
    """v + mean of (x_i − v) min(1, τ/‖x_i − v‖) (Karimireddy et al. 2021, Algorithm 2)."""
    return centre + torch.stack([(y - centre) * min(1.0, radius / float((y - centre).norm())) for y in x]).mean(0)


def fltrust(reference: Tensor, others: Tensor) -> Tensor:
    """Cao et al. (2021), Algorithm 2."""
    trust = torch.stack([torch.cosine_similarity(y, reference, 0).relu() for y in others])
    scaled = torch.stack([y * reference.norm() / y.norm() for y in others])
    return (trust[:, None] * scaled).sum(0) / trust.sum()


def mixed(x: Tensor, faulty: int) -> Tensor:
    """Every message as the mean of its M − f nearest, itself among them (Allouah et al. 2023, Algorithm 2)."""
    return torch.stack([x[(x - y).norm(dim=1).argsort()[: len(x) - faulty]].mean(0) for y in x])
