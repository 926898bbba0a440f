"""Keep the totals that each site has told for good, so that a site that leaves can have it withdrawn."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.tree import Tree


class Account:
    """The sums of what sites have told beyond their clients' initial states, and which sites have left.

    Args:
        sites: how many there are.
        nothing: what a site has told that has told nothing; None keeps no sums, and nothing can be withdrawn.
    """

    def __init__(self, sites: int, nothing: Tree) -> None:
        self.left = torch.zeros(sites, dtype=torch.bool)
        self._told = None if nothing is None else tree.map(lambda leaf: leaf.repeat(sites, *[1] * leaf.ndim), nothing)

    def add(self, site: int, change: Tree) -> None:
        """Take in what a site has told in a round."""
        if self._told is not None:
            tree.map(lambda total, new: total[site].add_(new), self._told, change)

    def withdraw(self, site: int) -> Tree:
        """Return a site's totals; from now on it has left.

        Raises:
            ValueError: it has left before, or no account was kept.
        """
        if self._told is None:
            raise ValueError(
                "Expected a population with withdrawals=True, which keeps what each site has told, of an algorithm "
                "whose clients tell sums for good that the server can read"
            )
        if self.left[site]:
            raise ValueError("Expected a site that takes part, but what this one told has been withdrawn before")
        self.left[site] = True
        return tree.map(lambda leaf: leaf[site].clone(), self._told)

    def state_dict(self) -> dict[str, Tensor]:
        """Return it flat, for checkpoints."""
        return {"left": self.left.clone(), **tree.flatten(tree.to(self._told, copy=True), "told")}

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Go back to what `state_dict` said."""
        known = len(flat["left"])  # sites, and others that have joined them since
        for mine, loaded in zip(
            tree.leaves((self.left, self._told)),
            tree.leaves((flat["left"], tree.unflatten(flat, self._told, "told"))),
            strict=True,
        ):
            mine.zero_()
            mine[:known].copy_(loaded)
