"""Totals of persistent contributions by site, so that a site can withdraw its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.tree import Tree


class Account:
    """Sums of sites' contributions beyond their clients' initial states, and the sites that have been withdrawn.

    Args:
        sites: number of sites.
        zero: a site's sum before any contribution; None to store no sums, so that nothing can be withdrawn.

    Attributes:
        left: `(sites,)` whether a site has been withdrawn.
    """

    def __init__(self, sites: int, zero: Tree) -> None:
        self.left = torch.zeros(sites, dtype=torch.bool)
        self._totals = None if zero is None else tree.map(lambda leaf: leaf.repeat(sites, *[1] * leaf.ndim), zero)

    def add(self, site: int, change: Tree) -> None:
        """Add a site's contribution of a round."""
        if self._totals is not None:
            tree.map(lambda total, new: total[site].add_(new), self._totals, change)

    def withdraw(self, site: int) -> Tree:
        """Return a site's total, and mark the site as withdrawn.

        Raises:
            ValueError: it has been withdrawn before, or contributions by site are not stored.
        """
        if self._totals is None:
            raise ValueError(
                "Expected a population with withdrawals=True, which stores each site's contributions, and an algorithm "
                "with persistent contributions whose sums the server can read"
            )
        if self.left[site]:
            raise ValueError("Expected a site that takes part, but this one has been withdrawn before")
        self.left[site] = True
        return tree.map(lambda leaf: leaf[site].clone(), self._totals)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the account flat, for checkpoints."""
        return {"left": self.left.clone(), **tree.flatten(tree.to(self._totals, copy=True), "told")}

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`."""
        known = len(flat["left"])  # more sites may have been added since
        for mine, loaded in zip(
            tree.leaves((self.left, self._totals)),
            tree.leaves((flat["left"], tree.unflatten(flat, self._totals, "told"))),
            strict=True,
        ):
            mine.zero_()
            mine[:known].copy_(loaded)
