r"""Sums of clipped gradients of examples, for many clients at once.

Every client draws a Poisson batch of its own rows: each row independently with probability q, so batches differ in size
and may be empty. Each example's gradient g_i is clipped to a norm of at most C, and the result is

.. math:: \frac{1}{q n} \Bigl(\sum_i g_i \min(1, C / \|g_i\|) + z\, C\, \xi\Bigr),

with the client's number of rows n, for any draw. Gradients are computed by `vmap` over clients and examples. If the
trained tensors are weights and biases of `nn.Linear`, `nn.Conv1d` and `nn.Conv2d` only, no example's gradient is
stored: a layer with inputs a and gradients g of its outputs has ‖g_i a_iᵀ‖² = Σ_st (a_s·a_t)(g_s·g_t) over its
positions, and the clipped sum is one matrix product ("ghost norms"). Each example's loss is computed separately in both
ways, so that no module can make one example change another's gradient. Sums are in the module's dtype, or float32 for
those of 16 bits; the rounding of sums over examples is not accounted for.

Sources: Abadi et al. (2016), "Deep learning with differential privacy", Algorithm 1; Goodfellow (2015), "Efficient
per-example gradient computations"; Bu, Wang, Zha and Karypis (2023), "Differentially private optimization on large
model at small cost", for the single backward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedtorch import tree
from fedtorch.federation.solvers.batches import MODULE, Batch
from fedtorch.federation.solvers.objective import Objective
from fedtorch.federation.solvers.stacked_loss import StackedLoss, StepResult
from fedtorch.module_randomness.interception import KeyedRandomness
from fedtorch.module_randomness.step_draws import StepKeys
from fedtorch.stacked_layers import WithoutReading
from fedtorch.tree import Tree
from fedtorch.trust.privacy.accounting.spending import Spending, on_grid
from fedtorch.trust.privacy.clipping import SLACK
from fedtorch.trust.privacy.examples._layers import Layer, LayerRecorder, ghost_squares, linear_layers
from fedtorch.trust.privacy.examples._operations import ExampleOperations

if TYPE_CHECKING:
    from fedtorch.federation.solvers.stacked_loss import Step

_LOG = logging.getLogger(__name__)


class PrivateLoss(StackedLoss):
    """Compute a stacked loss with gradients that are clipped by example, and noised.

    Args:
        objective: one client's loss.
        tensors: names of the trained tensors.
        clip: the bound C on an example's gradient.
        sampling_rate: q, with which every row is drawn.
        spending: source of noise z.
        ghost: whether layers may use ghost norms; False forms every example's gradient.
        most: largest batch of a client; larger ones are cut. None never cuts.
    """

    def __init__(
        self,
        objective: Objective,
        tensors: Sequence[str],
        clip: float,
        sampling_rate: float,
        spending: Spending,
        ghost: bool,
        most: int | None = None,
    ) -> None:
        super().__init__(objective, tensors, [], batched=True)
        self.clip, self.sampling_rate, self.spending, self.most = clip, sampling_rate, spending, most
        self.layers = linear_layers(objective.module, tensors) if ghost else None
        if ghost and self.layers is None:
            self._say("ghost=False: expected nothing but linear layers and convolutions to be trained")
        self.checked = False  # whether the loss of a batch is known to be the mean of its examples'
        self._shapes: dict[int, tuple[int, ...]] = {}  # of the layers' outputs for one example

    def shared(self, batch: Step) -> Sequence[tuple[Tensor | None, Batch]]:
        """Return nothing: examples are evaluated separately; `check_separable` compares them with the module."""
        return ()

    def gradients(
        self, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Step, index: int, keys: StepKeys
    ) -> StepResult:
        """Compute the private gradients of a step; losses are NaN unless noise is seeded. See `StackedLoss.gradients`.

        Args:
            tensors: trained tensors, `(K, ...)`.
            buffers: none.
            batch: all of the clients' rows.
            index: number of the step.
            keys: the clients', for the module's draws and those of rows and noise.
        """
        assert isinstance(batch, Batch), "clients with loaders are refused when a run begins"
        if index == 0:
            self.spending.begin(keys.keys, MODULE)
        drawn = self._draw(batch, index, keys.keys)
        rows, taken = poisson_batch(batch.rows, drawn)
        values = [tensors[name].detach() for name in self.tensors]
        sums, losses = self.clipped(values, rows, taken, index, keys[index].keys if self.random else None)
        noised = self._noised(sums, [value.dtype for value in values], batch.size, index, keys.keys)
        if self.spending.entropy.guarantees:
            losses = torch.full_like(losses, torch.nan)
        # Logs and metrics of rows have no noise; a step without rows has no loss.
        return StepResult(losses, {}, {}, noised, None, unlogged={"loss": ~taken.any(1).cpu()})

    def single(
        self, values: Sequence[Tensor], rows: Tree, weights: Tensor | None, index: int
    ) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor, ...]]:
        """Return one client's (loss, logs, new buffers), of operations that have gradients by example."""
        with ExampleOperations():
            return super().single(values, rows, weights, index)

    def clipped(
        self, values: Sequence[Tensor], rows: Tree, taken: Tensor, index: int, key: Tensor | None
    ) -> tuple[list[Tensor], Tensor]:
        """Sum clipped gradients of each tensor, `(K, ...)`, over rows `(K, B)`; also return mean losses `(K,)`."""
        if self.layers is not None:
            try:
                return self._by_layer(self.layers, values, rows, taken, index, key)
            except (IndexError, RuntimeError) as error:  # a layer that is called in an unsupported way
                self.layers = None
                self._say(f"ghost=False from now on: {error}")
        gradients, losses = self.by_example(values, rows, index, key)
        squares = [gradient.flatten(2).to(torch.float64).square().sum(2) for gradient in gradients]
        share = self._share(torch.stack(squares).sum(0), taken)
        return [_weighted(share, gradient) for gradient in gradients], _mean(losses, taken)

    def by_example(
        self, values: Sequence[Tensor], rows: Tree, index: int, key: Tensor | None
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Return every example's gradients `(K, B, ...)` of each tensor, and its loss, `(K, B)`."""
        one = lambda weights, row: self._of_example(weights, row, index)
        with nullcontext() if key is None else KeyedRandomness(key):
            return self._each(grad_and_value(one), (None, 0), key)(tuple(values), rows)

    def _by_layer(
        self,
        layers: Sequence[Layer],
        values: Sequence[Tensor],
        rows: Tree,
        taken: Tensor,
        index: int,
        key: Tensor | None,
    ) -> tuple[list[Tensor], Tensor]:
        """Compute `clipped` from inputs and outputs' gradients of the layers.

        Raises:
            RuntimeError: the loss depends on their weights and biases not only by one call of each.
        """
        if not self._shapes:
            self._learn_shapes(layers, values, rows, index, key)
        detached = [value.detach() for value in values]
        tracked = [value.detach().requires_grad_() for value in values]
        zeros = {
            number: values[0].new_zeros(*taken.shape, *shape).requires_grad_() for number, shape in self._shapes.items()
        }

        def one(
            tracked: Sequence[Tensor], detached: Sequence[Tensor], zeros: dict[int, Tensor], row: Tree
        ) -> tuple[Tensor, dict[int, Tensor]]:
            with LayerRecorder(layers, self._named(tracked), self._named(detached), zeros) as recorder:
                return self._of_example(tracked, row, index), recorder.inputs

        with torch.enable_grad(), nullcontext() if key is None else KeyedRandomness(key):
            each = self._each(one, (None, None, 0, 0), key)
            losses, inputs = each(tuple(tracked), tuple(detached), zeros, rows)
            gradients = torch.autograd.grad(losses.sum(), [*zeros.values(), *tracked], allow_unused=True)
        outside = [name for name, gradient in zip(self.tensors, gradients[len(zeros) :]) if gradient is not None]
        if outside:
            raise RuntimeError(f"its loss depends on {', '.join(outside)} other than by one call of a layer")
        backs = dict(zip(zeros, gradients))
        return self._of_layers(layers, values, inputs, backs, taken), _mean(losses.detach(), taken)

    def _of_layers(
        self,
        layers: Sequence[Layer],
        values: Sequence[Tensor],
        inputs: Mapping[int, Tensor],
        backs: Mapping[int, Tensor | None],
        taken: Tensor,
    ) -> list[Tensor]:
        """Return the sums of clipped gradients, from the layers' inputs and the gradients of their outputs."""
        pairs = {}
        for number, layer in enumerate(layers):
            back = backs.get(number)
            if number in inputs and back is not None:
                pairs[number] = layer.inputs(_wide(inputs[number])), layer.outputs(_wide(back))
        nothing = torch.zeros(taken.shape, dtype=torch.float64, device=taken.device)
        total = sum((ghost_squares(*pair, layers[n].bias is not None) for n, pair in pairs.items()), nothing)
        share = self._share(total, taken)
        finite = bool(total.isfinite().all())
        sums = {name: torch.zeros_like(_wide(value)) for name, value in zip(self.tensors, values)}
        for number, (a, g) in pairs.items():
            layer = layers[number]
            if not finite:  # nought times infinity would be NaN
                a, g = (torch.where(tree.along(share > 0, x), x, 0.0) for x in (a, g))
            flat = (g * tree.along(share.to(g.dtype), g)).flatten(1, 2)
            sums[layer.weight] = (flat.mT @ a.flatten(1, 2)).reshape(len(a), *layer.shape)
            if layer.bias is not None:
                sums[layer.bias] = flat.sum(1)
        return [sums[name] for name in self.tensors]

    def _learn_shapes(
        self, layers: Sequence[Layer], values: Sequence[Tensor], rows: Tree, index: int, key: Tensor | None
    ) -> None:
        """Find out the shapes of the layers' outputs for one example."""

        def one(weights: Sequence[Tensor], row: Tree) -> Tensor:
            with LayerRecorder(layers, self._named(weights), {}, {}) as recorder:
                loss = self._of_example(weights, row, index)
            self._shapes = recorder.shapes
            return loss

        first = tree.map(lambda leaf: leaf[:, :1], rows)
        with torch.no_grad(), nullcontext() if key is None else KeyedRandomness(key):
            self._each(one, (None, 0), key)(tuple(values), first)

    def _of_example(self, weights: Sequence[Tensor], row: Tree, index: int) -> Tensor:
        """Return the loss of one example computed separately, so that it cannot depend on others."""
        return self.single(weights, tree.map(lambda leaf: leaf[None], row), None, index)[0]

    def _each(self, one: Callable[..., Any], in_dims: tuple[int | None, ...], key: Tensor | None) -> Callable[..., Any]:
        """Map `one` over all clients and their examples."""
        randomness = "error" if key is None else "different"
        each = vmap(vmap(one, in_dims=in_dims, randomness=randomness), randomness=randomness)

        def mapped(*arguments: Any) -> Any:
            with WithoutReading():
                return each(*arguments)

        return mapped

    def _say(self, way: str) -> None:
        _LOG.warning("%s trains with %s", type(self.objective.module).__name__, way)

    def _named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.tensors, values))

    def _share(self, squares: Tensor, taken: Tensor) -> Tensor:
        """Return the factor of each example's gradient, `(K, B)` float64; 0 for rows not drawn or not finite."""
        norm = torch.where(squares.isfinite() & taken, squares, torch.inf).sqrt()
        return (self.clip * SLACK / norm).clamp(max=1)

    def _draw(self, batch: Batch, index: int, keys: Tensor) -> Tensor:
        """Return which rows take part, `(K, N)` bool on the CPU."""
        width = batch.leaves[0].shape[1]
        coins = self.spending.of_each(f"rows of step {index}", keys, width, lambda uniforms, count: uniforms(count))
        drawn = (coins < self.sampling_rate) & (torch.arange(width) < batch.size[:, None])
        if self.most is None or width <= self.most:
            return drawn
        last = torch.where(drawn, coins, 1.0).kthvalue(self.most, 1, keepdim=True).values
        return drawn & (coins <= last)

    def _noised(
        self, sums: Sequence[Tensor], dtypes: Sequence[torch.dtype], counts: Tensor, index: int, keys: Tensor
    ) -> list[Tensor]:
        """Return sums with noise, divided by the expected numbers of rows, each in its tensor's dtype."""
        sizes = [leaf[0].numel() for leaf in sums]
        flat = torch.cat([leaf.flatten(1).to(torch.float64) for leaf in sums], 1).cpu()
        scale = torch.tensor(self.spending.release.noise * self.clip, dtype=torch.float64)
        noise = self.spending.of_each(f"noise of step {index}", keys, flat.shape[1])
        noised = on_grid(flat + scale * noise, scale) / (self.sampling_rate * counts[:, None])
        parts = noised.split(sizes, 1)
        return [part.reshape(leaf.shape).to(leaf.device, d) for part, leaf, d in zip(parts, sums, dtypes)]


def poisson_batch(rows: Tree, drawn: Tensor) -> tuple[Tree, Tensor]:
    """Gather the rows that were drawn in front, `(K, B, ...)`, with their mask `(K, B)`; the largest batch gives B.

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
    """Sum share_i g_i: `(K, B)` and `(K, B, ...)` -> `(K, ...)`; a share of 0 leaves g_i out, also if not finite."""
    gradient = _wide(gradient)
    share = share.to(gradient.dtype)
    counted = torch.where(tree.along(share > 0, gradient), gradient, 0.0).flatten(2)
    return (share[:, None] @ counted)[:, 0].reshape(gradient.shape[0], *gradient.shape[2:])


def _wide(x: Tensor) -> Tensor:
    """Return numbers of 16 bits as float32: their own rounding would take a clipped gradient beyond its bound."""
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)


def _mean(losses: Tensor, taken: Tensor) -> Tensor:
    """Return mean losses over the drawn rows; NaN without any."""
    return torch.where(taken, losses, 0.0).sum(1) / taken.sum(1)
