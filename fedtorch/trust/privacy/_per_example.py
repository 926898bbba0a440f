r"""Sums of clipped gradients of examples, for many clients at once.

Every client draws a Poisson batch of its own rows: each row independently with probability q, so that batches differ in
size and may be empty. Each example's gradient g_i is cut to a norm of at most C, and what is returned is

.. math:: \frac{1}{q n} \Bigl(\sum_i g_i \min(1, C / \|g_i\|) + z\, C\, \xi\Bigr),

with the client's number of rows n, whoever was drawn. Gradients are taken by `vmap` over clients and examples; where
all that is trained are weights and biases of `nn.Linear`, `nn.Conv1d` and `nn.Conv2d`, no example's gradient is kept: a
layer with inputs a and gradients g of its outputs has ‖g_i a_iᵀ‖² = Σ_st (a_s·a_t)(g_s·g_t) over its positions, and the
clipped sum is one matrix product ("ghost norms"). Sums are in the module's dtype, whose rounding is not accounted for.

Sources: Abadi et al. (2016), "Deep learning with differential privacy", Algorithm 1; Goodfellow (2015), "Efficient
per-example gradient computations"; Bu, Wang, Zha and Karypis (2023), "Differentially private optimization on large
model at small cost", for the single backward pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedtorch import random, tree
from fedtorch.federation.local_solvers.batches import MODULE, Batch
from fedtorch.federation.local_solvers.objective import Objective
from fedtorch.federation.local_solvers.stacked_loss import Gradients, StackedLoss
from fedtorch.module_randomness import Drawn
from fedtorch.tree import Tree
from fedtorch.trust.privacy._layers import ghost_squares, linear_layers, recorded
from fedtorch.trust.privacy._spending import Spending, on_grid
from fedtorch.trust.privacy.clipping import SLACK


class PrivateLoss(StackedLoss):
    """A stacked loss whose gradients are clipped by example, and noised.

    Args:
        objective: one client's loss.
        tensors: names of what is trained.
        clip: the bound C on an example's gradient.
        rate: q, with which every row is drawn.
        spending: where noise comes from, whose release has the noise z.
        ghost: whether layers may be worth it: False makes every example's gradient.
        most: rows of a client's batch, beyond which it is cut; None never cuts.
    """

    def __init__(
        self,
        objective: Objective,
        tensors: Sequence[str],
        clip: float,
        rate: float,
        spending: Spending,
        ghost: bool,
        most: int | None = None,
    ) -> None:
        super().__init__(objective, tensors, [], batched=True)
        self.clip, self.rate, self.spending, self.most = clip, rate, spending, most
        self.layers = linear_layers(objective.module, tensors) if ghost else None
        self.checked = False  # whether the loss of a batch is known to be the mean of its examples'
        self._shapes: list[tuple[int, ...]] = []  # of the layers' outputs for one example

    def gradients(
        self, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Batch, index: int, key: Tensor
    ) -> Gradients:
        """The private gradients of one step; losses are NaN unless the noise is seeded. See `StackedLoss.gradients`.

        Args:
            tensors: what is trained, `(K, ...)`.
            buffers: none.
            batch: all of the clients' rows.
            index: of the step.
            key: `(K,)` the clients' keys, for the module's draws and to tell blocks apart.
        """
        if index == 0:
            self.spending.begin(key, MODULE if self.random else None)
        roster = hashlib.sha256(key.cpu().numpy().tobytes()).digest()
        drawn = self._draw(batch, index, roster)
        rows, taken = poisson_batch(batch.rows, drawn)
        values = [tensors[name].detach() for name in self.tensors]
        sums, losses = self.clipped(values, rows, taken, index, random.fold_in(key, index) if self.random else None)
        noised = self._noised(sums, batch.size, index, roster)
        if self.spending.entropy.guarantees:
            losses = torch.full_like(losses, torch.nan)
        return losses, {}, {}, noised

    def clipped(
        self, values: Sequence[Tensor], rows: Tree, taken: Tensor, index: int, key: Tensor | None
    ) -> tuple[list[Tensor], Tensor]:
        """(Σ of clipped gradients `(K, ...)` of each tensor, mean losses `(K,)`) over rows `(K, B)` that are taken."""
        some = self.by_example if self.layers is None else self.by_layer
        if self.layers is not None and not self._shapes:
            self._learn_shapes(values, rows, index, key)
        with nullcontext() if key is None else Drawn(key):
            return some(values, rows, taken, index, "error" if key is None else "different")

    def by_example(
        self, values: Sequence[Tensor], rows: Tree, taken: Tensor, index: int, randomness: str
    ) -> tuple[list[Tensor], Tensor]:
        """`clipped`, by making every example's gradient."""
        one = lambda own, row: self.single(own, tree.map(lambda leaf: leaf[None], row), None, index)[0]
        each = vmap(grad_and_value(one), in_dims=(None, 0), randomness=randomness)
        gradients, losses = vmap(each, randomness=randomness)(tuple(values), rows)
        squares = [gradient.flatten(2).to(torch.float64).square().sum(2) for gradient in gradients]
        share = self._share(torch.stack(squares).sum(0), taken)
        return [_weighted(share, gradient) for gradient in gradients], _mean(losses, taken)

    def by_layer(
        self, values: Sequence[Tensor], rows: Tree, taken: Tensor, index: int, randomness: str
    ) -> tuple[list[Tensor], Tensor]:
        """`clipped`, from inputs and outputs' gradients of the linear layers, in one pass."""
        assert self.layers is not None
        moves = [values[0].new_zeros(*taken.shape, *shape).requires_grad_() for shape in self._shapes]

        def one(own: Sequence[Tensor], own_moves: Sequence[Tensor], row: Tree) -> tuple[Tensor, list[Tensor]]:
            with recorded(self.layers or (), own_moves) as seen:
                loss = self.single(own, row, None, index)[0]
            return loss, [inputs.detach() for inputs, _ in seen]

        with torch.enable_grad():
            losses, inputs = vmap(one, randomness=randomness)(tuple(values), tuple(moves), rows)
            backs = torch.autograd.grad(losses.sum(), moves)
        count = taken.shape[1]
        parts = zip(self.layers, inputs, backs)
        pairs = [(layer.inputs(a), layer.outputs(g) * count) for layer, a, g in parts]  # the loss is a mean of B
        squares = [ghost_squares(a, g, layer.bias is not None) for (a, g), layer in zip(pairs, self.layers)]
        total = torch.stack(squares).sum(0)
        share = self._share(total, taken)
        finite = bool(total.isfinite().all())
        found: dict[str, Tensor] = {}
        for (a, g), layer in zip(pairs, self.layers):
            if not finite:  # nought times infinity would be NaN
                a, g = (torch.where(tree.along(share > 0, x), x, 0.0) for x in (a, g))
            flat = (g * tree.along(share.to(g.dtype), g)).flatten(1, 2)
            found[layer.weight] = (flat.mT @ a.flatten(1, 2)).reshape(len(a), *layer.shape)
            if layer.bias is not None:
                found[layer.bias] = flat.sum(1)
        return [found[name] for name in self.tensors], self._without_padding(
            losses.detach(), values, rows, taken, index
        )

    def _learn_shapes(self, values: Sequence[Tensor], rows: Tree, index: int, key: Tensor | None) -> None:
        """Finds out the shapes of the layers' outputs for one example."""

        def one(own: Sequence[Tensor], row: Tree) -> Tensor:
            with recorded(self.layers or (), None) as seen:
                loss = self.single(own, row, None, index)[0]
            self._shapes = [tuple(output.shape[1:]) for _, output in seen]
            return loss

        first = tree.map(lambda leaf: leaf[:, :1], rows)
        with torch.no_grad(), nullcontext() if key is None else Drawn(key):
            vmap(one, randomness="error" if key is None else "different")(tuple(values), first)

    def _without_padding(
        self, losses: Tensor, values: Sequence[Tensor], rows: Tree, taken: Tensor, index: int
    ) -> Tensor:
        """Mean losses `(K,)` of those examples that are taken, for the history of a simulation."""
        if self.spending.entropy.guarantees or bool(taken.all()):
            return losses
        first = tree.map(lambda leaf: leaf[:, :1], rows)  # what fills a batch up
        with torch.no_grad():
            padded = self.stacked([*values, *tree.leaves(first)], first, index, "different")[0]
        count = taken.sum(1)
        return (losses * taken.shape[1] - padded * (taken.shape[1] - count)) / count

    def _share(self, squares: Tensor, taken: Tensor) -> Tensor:
        """By how much each example's gradient is scaled, `(K, B)` float64; 0 for what is not taken or not finite."""
        norm = torch.where(squares.isfinite() & taken, squares, torch.inf).sqrt()
        return (self.clip * SLACK / norm).clamp(max=1)

    def _draw(self, batch: Batch, index: int, roster: bytes) -> Tensor:
        """Which rows take part, `(K, N)` bool on the CPU."""
        clients, width = batch.leaves[0].shape[:2]
        purpose = self.spending.open(f"rows of step {index}", roster)
        coins = self.spending.entropy.uniforms(purpose, clients * width).reshape(clients, width)
        drawn = (coins < self.rate) & (torch.arange(width) < batch.size[:, None])
        if self.most is None or width <= self.most:
            return drawn
        last = torch.where(drawn, coins, 1.0).kthvalue(self.most, 1, keepdim=True).values
        return drawn & (coins <= last)

    def _noised(self, sums: Sequence[Tensor], counts: Tensor, index: int, roster: bytes) -> list[Tensor]:
        """Sums with noise, divided by the expected numbers of rows, each in its dtype."""
        sizes = [leaf[0].numel() for leaf in sums]
        flat = torch.cat([leaf.flatten(1).to("cpu", torch.float64) for leaf in sums], 1)
        scale = torch.tensor(self.spending.release.noise * self.clip, dtype=torch.float64)
        uniforms = partial(self.spending.entropy.uniforms, self.spending.open(f"noise of step {index}", roster))
        noise = self.spending.release.mechanism.draw(uniforms, flat.numel()).reshape(flat.shape)
        noised = on_grid(flat + scale * noise, scale) / (self.rate * counts[:, None])
        parts = noised.split(sizes, 1)
        return [part.reshape(leaf.shape).to(leaf.device, leaf.dtype) for part, leaf in zip(parts, sums)]


def poisson_batch(rows: Tree, drawn: Tensor) -> tuple[Tree, Tensor]:
    """(rows `(K, B, ...)` that were drawn, in front, and which they are, `(K, B)` bool); B is what the largest needs.

    The others repeat a client's first row.
    """
    client, row = drawn.nonzero().T
    width = max(int(drawn.sum(1).max()) if len(drawn) else 0, 1)
    place = drawn.cumsum(1)[client, row] - 1
    chosen = torch.zeros(len(drawn), width, dtype=torch.int64)
    chosen[client, place] = row
    taken = torch.arange(width) < drawn.sum(1)[:, None]
    device = tree.leaves(rows)[0].device
    numbers = torch.arange(len(drawn), device=device)[:, None]
    chosen = chosen.to(device)
    return tree.map(lambda leaf: leaf[numbers, chosen], rows), taken.to(device)


def _weighted(share: Tensor, gradient: Tensor) -> Tensor:
    """Σ_i share_i g_i: `(K, B)` and `(K, B, ...)` -> `(K, ...)`; what has no share is left out, also if not finite."""
    share = share.to(gradient.dtype)
    kept = torch.where(tree.along(share > 0, gradient), gradient, 0.0).flatten(2)
    return (share[:, None] @ kept)[:, 0].reshape(gradient.shape[0], *gradient.shape[2:])


def _mean(losses: Tensor, taken: Tensor) -> Tensor:
    """Mean losses over the rows that are taken; NaN where there are none."""
    return torch.where(taken, losses, 0.0).sum(1) / taken.sum(1)
