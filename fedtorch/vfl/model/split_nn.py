"""Stacks of networks: one module with many sets of weights, evaluated in one call.

`Stacked` holds `B` copies of any module's parameters in tensors `(B, ...)` (folds × models × seeds) and evaluates them
in one batched call. `mlp` is the plain network of the split-network literature, whose last layer is called `last`.
`NetworkPredictor` is a party's predictor made of a stack.

>>> import torch
>>> from fedtorch import random
>>> stack = Stacked(mlp(5, [8, 8], 2), random.fold_in(random.key(0), torch.arange(3)))
>>> stack(torch.zeros(10, 5)).shape
torch.Size([3, 10, 2])
"""

from __future__ import annotations

import copy
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedtorch import functional
from fedtorch._untrained import refuse_untrained
from fedtorch.module_randomness.interception import KeyedRandomness
from fedtorch.random.draws import bits
from fedtorch.stacked_layers import WithoutReading
from fedtorch.vfl.model.predictors import Prior

_GENERATOR = threading.Lock()  # layers draw their weights from torch's one generator, which threads share


def mlp(
    width: int,
    hidden: Sequence[int] = (8, 8),
    outputs: int = 1,
    *,
    dropout: float = 0.0,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Make a multilayer perceptron: hidden layers with activations and dropout, and a linear layer called `last`.

    It maps rows `(..., n, width)` to `(..., n, outputs)`.

    Args:
        width: features of a row.
        hidden: widths of the hidden layers; none for a linear model.
        outputs: of the last layer.
        dropout: probability with which a hidden unit is dropped in training.
        activation: makes an activation.

    Raises:
        ValueError: a width that is not positive, or a probability outside [0, 1).
    """
    if min(width, outputs, *hidden) < 1 or not 0 <= dropout < 1:
        raise ValueError(
            f"Expected positive widths and dropout in [0, 1), but got {[width, *hidden, outputs]} and {dropout}"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (before, after) in enumerate(zip([width, *hidden], hidden)):
        layers[f"linear{i}"], layers[f"activation{i}"] = _Linear(before, after), activation()
        if dropout:
            layers[f"dropout{i}"] = nn.Dropout(dropout)
    layers["last"] = _Linear([width, *hidden][-1], outputs)
    return nn.Sequential(layers)


class _Linear(nn.Linear):
    """A linear layer of rows `(..., n, width)` that computes with rows last: half the time for narrow layers."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.mT + self.bias.unsqueeze(-1)).mT


class Stacked(nn.Module):
    """`B` copies of a module that differ in their weights.

    Every copy is initialised anew by the `reset_parameters` of the module's layers, from its own key. Parameters of
    layers without `reset_parameters` start as they are in `module`.

    Args:
        module: any module of rows `(n, ...)` to `(n, C)`.
        keys: `(B,)` one key a copy.
        row_dims: dimensions of one row: 1 for a table, 3 for images. Rows with one dimension more are shared by the
            copies; rows with two more are stacked.

    Attributes:
        names: of the module's parameters.
        trained_names: names of the parameters that the stack holds: all but the released ones.
        weights: the parameters in the order of `trained_names`, `(B, ...)` each.
        draws: whether the module draws random numbers in training mode; None before it has run in it.

    Raises:
        ValueError: keys of another shape, or running statistics (BatchNorm), which are shared state.
    """

    def __init__(self, module: nn.Module, keys: Tensor, row_dims: int = 1) -> None:
        super().__init__()
        if keys.ndim != 1 or not len(keys):
            raise ValueError(f"Expected keys (B,), but got shape {tuple(keys.shape)}; see fedtorch.random.fold_in")
        for name, part in module.named_modules():
            if getattr(part, "running_mean", None) is not None:
                raise ValueError(f"Expected no running statistics, but got {name!r}; use GroupNorm or LayerNorm")
        copies = [functional.parameters(_initialised(module, key)) for key in keys]
        self.names, self.row_dims, self.size = list(copies[0]), row_dims, len(keys)
        self.weights = nn.ParameterList([torch.stack([c[name] for c in copies]) for name in self.names])
        self.trained_names = list(self.names)
        # In a list, so that the template's own parameters are not registered.
        self._template = [copy.deepcopy(module).requires_grad_(False)]
        self._swap = functional.Swap(self._template[0], self.names)
        self.draws: bool | None = None

    def forward(
        self,
        x: Tensor,
        replaced: Mapping[str, Tensor] | None = None,
        keys: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Evaluate all copies on rows.

        Args:
            x: `(n, ...)` for all copies, or `(B, n, ...)`.
            replaced: weights to use in place of the stack's own, `(B, ...)` each.
            keys: makes the keys `(B,)` of dropout and other draws in training mode; called only if the module draws.

        Returns:
            `(B, n, C)`.

        Raises:
            ValueError: rows of another number of dimensions; no keys for a module that draws random numbers; or, at the
                first call in training mode, parameters of the module that are not registered.
        """
        if x.ndim not in (self.row_dims + 1, self.row_dims + 2):
            raise ValueError(
                f"Expected rows of {self.row_dims} dimensions, but got shape {tuple(x.shape)}; see row_dims"
            )
        template = self._template[0]
        if template.training != self.training:
            template.train(self.training)
        if any(buffer.device != x.device for buffer in template.buffers()):
            template.to(x.device)
            self._swap = functional.Swap(template, self.names)
        trained = dict(zip(self.trained_names, self.weights))
        weights = [(trained if replaced is None or n not in replaced else replaced)[n] for n in self.names]
        call = vmap(
            self._one, in_dims=(0 if x.ndim == self.row_dims + 2 else None, *(0 for _ in weights)),
            randomness="different",
        )  # fmt: skip
        if not self.training or self.draws is False:
            with WithoutReading():
                return call(x, *weights)
        drawn = KeyedRandomness(x.new_zeros(self.size, dtype=torch.int64) if keys is None else keys())
        with drawn, WithoutReading():
            result = call(x, *weights)
        if self.draws is None:
            refuse_untrained(result, weights, template)
        self.draws = drawn.calls > 0
        if self.draws and keys is None:
            raise ValueError("Expected keys for a module that draws random numbers, but got None")
        return result

    def release(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Remove weights from the stack and return them; `forward` expects them as `replaced` from then on."""
        trained = dict(zip(self.trained_names, self.weights))
        self.trained_names = [name for name in self.trained_names if name not in names]
        self.weights = nn.ParameterList([trained[name] for name in self.trained_names])
        return {name: trained[name].detach() for name in names}

    def _one(self, x: Tensor, *weights: Tensor) -> Tensor:
        with self._swap(weights):
            return self._template[0](x)


class NetworkPredictor(nn.Module):
    r"""A predictor that is a network for each element of a batch, :math:`g(x, \theta) = f(x; \varphi, \theta)`.

    θ are the weights that match `random`; the module holds the others, φ, which training maximises over.

    Args:
        stack: the networks, from rows `(n, ...)` to `(B, n, C)`; the random weights are removed from it.
        outputs: C.
        random: shell patterns of the weights that are random; none by default.
        prior: of θ; flat by default.
        weight_sd: standard deviation of a normal prior on φ, `()` or `(B,)`; flat by default.
        name: of the party, for error messages.

    Attributes:
        start: θ of the networks as passed, `(B, size)`.
    """

    start: Tensor
    precision: Tensor  # (B, 1) of the prior of φ

    def __init__(
        self,
        stack: Stacked,
        outputs: int,
        *,
        random: str | Sequence[str] = (),
        prior: Prior | None = None,
        weight_sd: Tensor | None = None,
        name: str = "party",
    ) -> None:
        super().__init__()
        self.stack, self.outputs, self.name, self.row_dims, self.width = stack, outputs, name, stack.row_dims, None
        names = functional.split(dict.fromkeys(stack.names, torch.empty(0)), random)[0]
        released = stack.release(list(names))
        self.prior, self.regular = prior, weight_sd is not None
        self.shapes = {name: value.shape[1:] for name, value in released.items()}
        self.size = sum(shape.numel() for shape in self.shapes.values())
        flat = [value.flatten(1) for value in released.values()]
        like = flat[0] if flat else stack.weights[0]
        self.register_buffer("start", torch.cat([like.detach().new_zeros(stack.size, 0), *flat], 1), persistent=False)
        sd = torch.as_tensor(math.inf if weight_sd is None else weight_sd).expand(stack.size).to(like, copy=True)
        self.register_buffer("precision", sd.square().reciprocal().reshape(-1, 1).detach(), persistent=False)

    def forward(self, theta: Tensor, x: Tensor, keys: Callable[[], Tensor] | None = None) -> Tensor:
        """Return g of each draw of θ `(B, M, size)` on rows `(n, ...)` or `(B, n, ...)`, `(B, M, C, n)`.

        Args:
            theta: θ.
            x: features.
            keys: makes the keys `(B,)` of dropout and other draws in training mode.

        Raises:
            ValueError: features that the networks cannot take, or networks of another number of outputs.
        """
        try:
            each = [self.stack(x, self._named(one), keys) for one in theta.unbind(1)]
        except (RuntimeError, IndexError) as error:
            raise ValueError(
                f"Expected features that the network of {self.name!r} takes, but got {x.dtype} of shape "
                f"{tuple(x.shape)}: {error}; give the network their width"
            ) from error
        stacked = torch.stack(each, 1) if len(each) > 1 else each[0].unsqueeze(1)
        if stacked.ndim != 4 or stacked.shape[-1] != self.outputs:
            raise ValueError(
                f"Expected networks of {self.name!r} that map rows (n, ...) to (n, {self.outputs}), but got "
                f"{(stacked.shape[2], *stacked.shape[3:])}; see `widths`"
            )
        return stacked.mT

    def log_prior(self, theta: Tensor) -> Tensor:
        """Return log p(θ) + log p(φ) up to a constant, `(B, M)`."""
        of_theta = theta.new_zeros(theta.shape[:-1]) if self.prior is None else self.prior(theta)
        if not self.regular or not len(self.stack.weights):
            return of_theta
        squares = torch.stack([weight.square().flatten(1).sum(1) for weight in self.stack.weights]).sum(0)
        return of_theta - 0.5 * self.precision * squares.unsqueeze(1)

    def _named(self, theta: Tensor) -> dict[str, Tensor]:
        """Return the random weights by name of θ `(B, size)`."""
        parts = theta.split([shape.numel() for shape in self.shapes.values()], -1) if self.shapes else ()
        return {name: part.unflatten(1, shape) for (name, shape), part in zip(self.shapes.items(), parts)}


def _initialised(module: nn.Module, key: Tensor) -> nn.Module:
    """Return a copy whose layers are initialised anew, and leave the global generator unchanged."""
    result = copy.deepcopy(module)
    with _GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(bits(key, 1)))
        for part in result.modules():
            reset = getattr(part, "reset_parameters", None)
            if callable(reset):
                reset()
    return result
