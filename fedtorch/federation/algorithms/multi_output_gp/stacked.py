"""A Gaussian process of one unit as functions of the stacked tensors of many."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import functional, tree
from fedtorch.data import BadClients
from fedtorch.federation.algorithms.multi_output_gp._steps import UnitSteps, in_parts
from fedtorch.federation.turn import Turn
from fedtorch.learns import Learns, tells
from fedtorch.models.gaussian import pack, unpack
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.models.gaussian_process import ConvolvedGP
    from fedtorch.models.gaussian_process.algebra import GaussianSite

POSTERIOR = ("posterior_mean", "posterior_root")
MOMENTS = "unit_moments"


@tells(
    Learns(
        "the outputs of a unit with no more rows than inducing values, of one row its input, too; its amplitudes and "
        "noise",
        helps="sums under masks",
    )
)
class Contribution(NamedTuple):
    """A unit's contribution to q(g), or the sum over units."""

    precision: Tensor  # (P (P + 1) / 2,) lower triangle of B
    shift: Tensor  # (P,) a
    constant: Tensor  # () c
    own_moments: Tensor  # ((D + 1) (D + 2) / 2,) lower triangle of (1, φ)(1, φ)', φ its own parameters
    units: Tensor  # () how many


class StackedGP:
    """Evaluate the module as functions of stacked tensors `(K, ...)`; shared ones may be `(1, ...)`."""

    def __init__(self, module: ConvolvedGP, exact_units: bool) -> None:
        from fedtorch.models.gaussian_process import ConvolvedGP
        from fedtorch.models.gaussian_process.algebra import at_first_go
        from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

        if not isinstance(module, ConvolvedGP):
            raise TypeError(
                f"Expected a ConvolvedGP, but got {type(module).__name__}; make one of inducing inputs and your "
                "kernel, ConvolvedGP(inducing, kernel)"
            )
        if tuple(module.batch_shape):
            raise ValueError(
                f"Expected a module of one unit, but got batch_shape={tuple(module.batch_shape)}; leave it away"
            )
        self.module = copy.deepcopy(module)
        self.module.rebase()
        self.module.observed = None
        self.module.unit_moments = self.module.no_moments()
        self.at_first_go = at_first_go
        self.exact_units = module.keeps_whole(exact_units)
        self.gaussian = isinstance(module.likelihood, gpytorch.likelihoods.GaussianLikelihood)
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        self.shared, self.own = list(self.module.shared_names), list(self.module.unit_names)
        self.values = {n: named[n].detach().clone() for n in [*self.shared, *self.own, "basis", *POSTERIOR, MOMENTS]}
        self.trained = [n for n in self.own if getattr(named[n], "requires_grad", False)]
        self.scales = [n for n in self.own if n not in self.trained]
        # by names, because finding their places walks the module
        self._swaps: dict[tuple[str, ...], functional.Swap] = {}
        self._elsewhere: dict[torch.device, StackedGP] = {}

    def at(self, like: Tensor) -> StackedGP:
        """Return this with the module's other tensors, such as inducing inputs, on the device of a tensor."""
        device = like.device
        if device == self.module.inducing.device:
            return self
        if device not in self._elsewhere:
            there = self._elsewhere[device] = copy.copy(self)
            there.module, there._swaps = copy.deepcopy(self.module).to(device), {}
        return self._elsewhere[device]

    @property
    def fixed(self) -> dict[str, Any]:
        """Return the settings, besides hyperparameters, that sites and server must share: inducing inputs, columns,
        kernels.

        Numbers are rounded, so that another processor's `linspace` gives the same.
        """
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        coarse = {torch.float64: torch.float32, torch.float32: torch.bfloat16}
        values = {n: t.detach() for n, t in named.items() if n not in self.values}
        rounded = {n: t.to(coarse.get(t.dtype, t.dtype)) + 0 for n, t in values.items()}  # adding 0 turns −0 into 0
        return {"parts": [type(part).__qualname__ for part in self.module.modules()], **rounded}

    def start(self, *more: str) -> dict[str, Tensor]:
        """Return the initial shared and trained tensors, and those named `more`."""
        return {name: self.values[name].clone() for name in [*self.shared, *self.trained, *more]}

    def on(self, values: dict[str, Tensor], function: Callable[[], Any]) -> Any:
        """Call `function()` with `values` in the places of the module's tensors."""
        names = tuple(name for name in values if name in self.values)
        if names not in self._swaps:
            self._swaps[names] = functional.Swap(self.module, names)
        with self._swaps[names]([values[name] for name in names]):
            return function()

    def work(self, part: Callable[..., Any], work: UnitSteps, turn: Turn, data: Any, *stacked: Tree) -> Any:
        """Call `part(*stacked, data, keys, gp=, work=)` on the units of a block, in chunks."""
        work.note(turn, data.count)
        function = partial(part, gp=self.at(data.mask), work=work)
        return self.at_first_go(in_parts, function, self.module.points * data.mask.shape[1], *stacked, data, turn.key)

    def initial_units(self, received: dict[str, Tensor], rows: Tree, mask: Tensor, train: bool) -> dict[str, Tensor]:
        """Return units' initial own tensors, `(K, ...)`; weights that are not trained stay the module's."""
        x, y, extra = rows
        unit = self.module.initial_units(y, mask, *extra)
        if train and self.module.chooses_weights:
            unit["kernel.weight"] = self.on(
                {**received, **unit},
                lambda: self.module.initial_weights(x, y, mask, *extra, exact_units=self.exact_units),
            )
        return unit

    def gradient(
        self,
        fixed: dict[str, Tensor],
        free: dict[str, Tensor],
        names: Sequence[str],
        rows: Tree,
        mask: Tensor,
        factor: Tensor,
        units: int | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (each unit's part of the bound plus its priors `(K,)`, gradients with respect to `names` of `free`).

        With `units`, its risk (14) instead, with the sign turned: minus a share of the divergence.
        """
        x, y, extra = rows
        moving = {name: free[name].detach().clone().requires_grad_() for name in names}

        def part() -> Tensor:
            value = self.module.expected_log_likelihood(x, y, mask, *extra, exact_units=self.exact_units)
            value = factor * value
            if units is not None:
                return value - self.module.divergence() / units
            return value + self.module.log_prior(True) if set(names) <= set(self.own) else value

        with torch.enable_grad():
            value = self.on({**fixed, **free, **moving}, part)
            gradients = torch.autograd.grad(value.sum(), list(moving.values()), allow_unused=True) if moving else ()
        gradient = {n: torch.zeros_like(free[n]) if g is None else g for n, g in zip(names, gradients)}
        return value.detach(), gradient

    def site(self, values: dict[str, Tensor], rows: Tree, mask: Tensor, factor: Tensor) -> Contribution:
        """Return the units' contributions, `(K, ...)`."""
        x, y, extra = rows
        site: GaussianSite = self.on(values, lambda: self.module.site(x, y, mask, *extra, exact_units=self.exact_units))
        moments_of_own = self.own_moments({name: values[name] for name in self.own})
        contribution = Contribution(
            pack(site.precision), site.shift, site.constant, moments_of_own, torch.ones_like(site.constant)
        )
        return tree.scale(contribution, factor)._replace(own_moments=moments_of_own, units=contribution.units)

    def own_moments(self, parameters: dict[str, Tensor]) -> Tensor:
        """Return the moments of units' own parameters for their messages, `(K, ...)`."""
        from fedtorch.models.gaussian_process.unit_prior import moments

        return pack(moments(self.on(parameters, lambda: self.module.unit_vector(self.trained))))

    def posterior(self, shared: dict[str, Tensor], mean: Tensor, root: Tensor) -> dict[str, Tensor]:
        """Return q(t) and its basis, by the names of the module's buffers: t is white under the prior at `shared`."""
        with torch.no_grad():
            basis = self.on(shared, self.module.root)
            basis = basis.expand(*mean.shape[:-1], *self.values["basis"].shape)
        return {"basis": basis, "posterior_mean": mean, "posterior_root": root}

    def combine(self, total: Contribution) -> tuple[Tensor, Tensor, Tensor]:
        """Return (mean, root, bound) of q(t) from the prior and the sum of the sites."""
        from fedtorch.models.gaussian_process.algebra import posterior

        precision = unpack(total.precision)
        return posterior(torch.eye(self.module.points).to(precision), precision, total.shift, total.constant)

    def carry(
        self, mean: Tensor, root: Tensor, before: dict[str, Tensor], after: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the same q(g) in values t that are white under the prior at other shared hyperparameters."""
        with torch.no_grad():
            basis = self.on(before, self.module.root)
            change = self.on({**after, "basis": basis}, self.module.change).to(mean)
        return change @ mean, change @ root

    def shared_gradient(self, shared: dict[str, Tensor], mean: Tensor, root: Tensor) -> dict[str, Tensor]:
        """Return the gradient of −KL(q ‖ p) and of the shared priors."""
        moving = {name: value.detach().clone().requires_grad_() for name, value in shared.items()}
        like = self.values["posterior_mean"].dtype
        posterior = self.posterior(shared, mean.to(like), root.to(like))
        with torch.enable_grad():
            value = self.on({**moving, **posterior}, lambda: self.module.log_prior(False) - self.module.divergence())
            gradients = torch.autograd.grad(value, list(moving.values()), allow_unused=True)
        return {n: torch.zeros_like(shared[n]) if g is None else g for n, g in zip(shared, gradients)}

    def predict(self, tensors: Tree, inputs: Tree) -> Tensor:
        """Return means of f, `(K, N)`."""

        def means(tensors: Tree, inputs: Tensor) -> Tensor:
            here = self.at(inputs)
            return here.on(tensors, lambda: here.module.marginals(inputs)[0])

        with torch.no_grad():
            return in_parts(means, inputs.shape[1] * self.module.points, tensors, inputs)

    def check(self, data: Any) -> Any:
        """Raise unless the rows are (x `(d,)`, y, …) in the module's form, with at least one row per unit."""
        from fedtorch.models.gaussian_process.checks import check_values

        rows = data.batch
        dtype = self.values["posterior_mean"].dtype
        dims = self.module.inducing.shape[-1]
        if not isinstance(rows, tuple) or len(rows) < 2 or rows[0].shape[2:] != (dims,) or rows[1].ndim != 2:
            shapes = [tuple(leaf.shape[2:]) for leaf in tree.leaves(rows)]
            raise ValueError(f"Expected rows (x, y) of shapes ({dims},) and (), but got {shapes}")
        if rows[0].dtype != dtype or rows[1].dtype != dtype:
            raise ValueError(
                f"Expected rows in the module's {dtype}, but got {rows[0].dtype} and {rows[1].dtype}; use data.to"
            )
        empty = (data.count == 0).nonzero()[:, 0]
        if len(empty):
            raise BadClients(empty, "expected at least one row, but got none; leave such clients out with data.select")
        try:
            check_values(self.module, rows[0], *rows[2:])
        except ValueError as error:
            refused = [k for k in range(len(data.count)) if _refuses(check_values, self.module, k, rows)]
            raise BadClients(torch.tensor(refused), str(error)) from error
        return data


def _refuses(check: Callable[..., None], module: ConvolvedGP, number: int, rows: tuple[Tensor, ...]) -> bool:
    """Return whether a unit's rows have a value outside the domain of the module's parts."""
    try:
        check(module, rows[0][number], *(extra[number] for extra in rows[2:]))
    except ValueError:
        return True
    return False
