r"""Clipping of one client's message before it enters a sum.

Adaptive clipping follows a quantile γ of the messages' norms: every client reports whether its norm is within the bound
C, as 1 − γ or −γ. These bits are summed with their own noise, and with the sum divided by the expected number of
clients, b,

.. math:: C \leftarrow C\, e^{-\eta b}.

A silent client adds nothing to the sum, and so does not move the bound. (With bits 0 or 1, or ±½, silence would count
as an answer: at γ = 0.9, with three of ten clients silent, the bound would grow without limit.) One client enters the
sum with at most max(γ, 1 − γ), for the median ½ as in the source. Noise of multiples z_v on the values and z_b on the
bits costs as much as one release of noise (z_v⁻² + z_b⁻²)^{−1/2}: a `share` s of a budget z is z_b = z/√s and z_v =
z/√(1 − s).

Source: Andrew, Thakkar, McMahan and Ramaswamy (2021), "Differentially private learning with adaptive clipping",
Algorithm 1 and Theorem 1.

>>> import torch
>>> from fedtorch.trust.privacy.clipping import clip_rows
>>> from fedtorch.trust.privacy.noise import gaussian
>>> clip_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0, gaussian)[0]
tensor([[0.6000, 0.8000],
        [0.3000, 0.4000]])
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.tree import Tree
from fedtorch.trust.privacy.noise import Mechanism

SLACK = 1 - 2.0**-20  # rounding up in float32 stays within the bound


class AdaptiveClip(NamedTuple):
    """Follow a quantile of the norms with the bound.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import privacy
        >>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor([30.0, 40.0]))] * 20)
        >>> private = ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1))) | privacy.client_level(
        ...     AdaptiveClip(start=0.1, lr=0.2), noise=0.01, delta=1e-2, entropy=privacy.from_seed(0))
        >>> run = ft.run(private, ft.InProcess(data), rounds=2)
        >>> round(float(run.history["clip"].iloc[-1]), 3)  # nobody is within it, so that it grows: 0.1 exp(2 · 0.2 · ½)
        0.122
    """

    quantile: float = 0.5  # target quantile of the clients' norms
    start: float = 0.1
    lr: float = 0.2  # η
    share: float = 0.05  # share of the budget for the bits


Clip = float | Mapping[str, float] | AdaptiveClip


def clip_rows(value: Tree, bound: float | Tensor, mechanism: Mechanism) -> tuple[Tree, Tensor]:
    """Scale stacked trees down to a norm of at most `bound` per client; also return the norms before, `(K,)` float64.

    A client with NaN, Inf or numbers that overflow is clipped to zeros, and its norm is infinite. Numbers of 16 bits
    become float32, because their rounding could exceed the bound. Complex numbers count as two real ones.

    Raises:
        TypeError: leaves of whole numbers.
    """
    pairs = tree.as_real(value)
    leaves = tree.leaves(pairs)
    for leaf in leaves:
        if not leaf.is_floating_point():
            raise TypeError(f"Expected real or complex numbers to clip, but got {leaf.dtype}")
    norm = mechanism.norm(_numbers(leaves))
    norm = torch.where(norm.isfinite(), norm, torch.inf)
    share = (bound * SLACK / norm).clamp(max=1)

    def cut(leaf: Tensor) -> Tensor:
        wide = leaf if leaf.dtype in (torch.float32, torch.float64) else leaf.to(torch.float32)
        return torch.where(tree.along(share > 0, wide), wide * tree.along(share.to(wide.dtype), wide), 0.0)

    return tree.from_real(tree.map(cut, pairs), value), norm


def _numbers(leaves: list[Tensor]) -> Tensor:
    """Return all numbers of each client, `(K, D)` float64."""
    return torch.cat([leaf.reshape(len(leaf), math.prod(leaf.shape[1:])).to(torch.float64) for leaf in leaves], 1)


def bounds_of(value: Tree, clip: Mapping[str, float]) -> list[float]:
    """Return the bound of every leaf, by the shell pattern that its path matches.

    Raises:
        ValueError: a leaf that no pattern matches or several do, or a pattern that matches none.

    >>> parameters = {"0.weight": torch.zeros(3, 2), "0.bias": torch.zeros(3), "2.weight": torch.zeros(1, 3)}
    >>> bounds_of(parameters, {"*.weight": 1.0, "*.bias": 0.1})
    [1.0, 0.1, 1.0]
    """
    bounds, used = [], set()
    for name, _ in tree.items(value):
        matching = [pattern for pattern in clip if fnmatch.fnmatchcase(name, pattern)]
        if len(matching) != 1:
            raise ValueError(f"Expected one pattern of clip to match {name!r}, but {matching} of {list(clip)} do")
        used.add(matching[0])
        bounds.append(float(clip[matching[0]]))
    if len(used) < len(clip):
        raise ValueError(f"Expected every pattern of clip to match a parameter, but {set(clip) - used} match none")
    return bounds
