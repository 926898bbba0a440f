"""Pyro guides of z: the distribution in a guide's only sample statement is the encoder's.

A guide is called with rows `(N, F)`, like a module of `fedtorch.models.own_encoders`, and samples z once, for all
draws and rows together. Effect handlers read its distribution: they draw nothing, and neither read nor write Pyro's
store of parameters, since the weights are the party's or the server's. Pyro has one stack of handlers a process, so
that nodes in threads of one process cannot run guides at the same time.

Source: Bingham et al. (2019), "Pyro: deep universal probabilistic programming".
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import Distribution, biject_to

from fedtorch.models.encoders import EncoderFactory
from fedtorch.models.own_encoders import OwnEncoder


def pyro_guide(guide: Callable[[Tensor], Any]) -> EncoderFactory:
    """Make encoders from a Pyro guide q(z | s), for `amortised` and `sums`.

    Args:
        guide: called with rows `(N, F)`, for all draws and rows at once; has one sample statement, of shape `(N, C)` or
            `(N,)` with an event of C, and is a module (such as a `PyroModule`), a method of one, or a function with
            `pyro.param` statements. Its inputs are those of an encoder, and it samples z_j in `amortised` and the noisy
            predictor in `sums`, like an encoder that returns a distribution.

    Raises:
        ValueError: raised when the guide is used: no or several latent variables; observations, factors or scaled
            densities; random numbers besides z; or `pyro.module` statements in a function.

    >>> import pyro, pyro.distributions as dist, torch, fedtorch as ft
    >>> def guide(eta):  # (N, 1)
    ...     shift = pyro.param("shift", torch.zeros(()))
    ...     sd = pyro.param("sd", torch.tensor(0.5), constraint=dist.constraints.positive)
    ...     with pyro.plate("rows", len(eta)):
    ...         pyro.sample("z", dist.Normal(eta[:, 0] + shift, sd))
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.bernoulli(), [ft.vfl.linear(1), ft.vfl.linear(2)], rho=1.0)
    >>> data = ft.vfl.VerticalData((torch.ones(3, 1), torch.ones(3, 2)), torch.tensor([0.0, 1.0, 1.0]))
    >>> family = ft.vfl.Guide(ft.vfl.amortised(pyro_guide(guide)))
    >>> fit = ft.vfl.sfvi(model, family, data, steps=2)
    >>> sorted(fit.parameters.parties[0]["z"]), len(pyro.get_param_store())
    (['values/sd', 'values/shift'], 0)
    """
    return partial(_encoder, guide)


def _encoder(guide: Callable[[Tensor], Any], inputs: int, outputs: int) -> OwnEncoder:
    return OwnEncoder(_Guide(guide, torch.zeros(3, inputs)), inputs, outputs)


class _Guide(nn.Module):
    """A module with the guide's parameters, from rows to the distribution in the guide's sample statement.

    Args:
        guide: as in `pyro_guide`.
        rows: with which a function is called once to learn its parameters.
    """

    def __init__(self, guide: Callable[[Tensor], Any], rows: Tensor) -> None:
        super().__init__()
        owner = guide if isinstance(guide, nn.Module) else getattr(guide, "__self__", None)
        self.owner = copy.deepcopy(owner) if isinstance(owner, nn.Module) else None
        self.values = nn.ParameterDict()
        self.constraints: dict[str, Any] = {}
        if self.owner is None:
            self._call: Callable[[Tensor], Any] | None = guide
            with torch.no_grad(), _Handlers(self, begins=True):
                guide(rows)
        elif isinstance(guide, nn.Module):
            self._call = None
        else:
            self._call = types.MethodType(guide.__func__, self.owner)  # type: ignore[attr-defined]

    def forward(self, rows: Tensor) -> Distribution:
        """Return the distribution of z."""
        with pyro.get_param_store().scope(), _Handlers(self) as handlers:
            (self.owner if self._call is None else self._call)(rows)  # type: ignore[misc]
        if len(handlers.laws) != 1:
            raise ValueError(f"Expected a guide with one sample statement, but got {sorted(handlers.laws)}")
        return next(iter(handlers.laws.values()))

    def begin(self, name: str, start: Any, constraint: Any) -> None:
        """Add a parameter of a function, unconstrained."""
        value = start() if callable(start) else start
        if name not in self.values and value is not None:
            self.constraints[name] = constraint
            self.values[name] = nn.Parameter(biject_to(constraint).inv(value.detach().clone()))


class _Handlers(Messenger):
    """Effect handlers of a guide's statements: they record the distribution of z and supply the parameters' values.

    Args:
        guide: whose parameters are supplied.
        begins: whether a function's `pyro.param` statements create its parameters.
    """

    def __init__(self, guide: _Guide, begins: bool = False) -> None:
        super().__init__()
        self.guide, self.begins = guide, begins
        self.laws: dict[str, Distribution] = {}

    def _pyro_sample(self, message: Any) -> None:
        name, law = message["name"], message["fn"]
        if site_is_subsample(message):
            if law.subsample_size not in (None, law.size):
                raise ValueError(f"Expected a guide of all rows, but got plate {name!r} of some of them")
            return
        if message["infer"].get("_deterministic", False):
            return
        scale = message["scale"]
        if message["is_observed"] or message["mask"] is not None or not isinstance(scale, float) or scale != 1.0:
            raise ValueError(
                f"Expected a guide that samples z and nothing else, but got {name!r} observed, masked or scaled"
            )
        self.laws[name] = law
        message["value"], message["done"] = torch.zeros(law.batch_shape + law.event_shape), True

    def _pyro_param(self, message: Any) -> None:
        name, start = message["name"].replace(".", "/"), message["args"][1] if len(message["args"]) > 1 else None
        if "$$$" in name and self.guide.owner is None:
            raise ValueError(
                f"Expected a guide function with pyro.param, but got pyro.module ({name!r}); make the guide a module "
                "with these networks, whose forward samples z"
            )
        if self.guide.owner is None:
            if self.begins:
                self.guide.begin(name, start, message["kwargs"].get("constraint"))
            if name not in self.guide.values:
                raise ValueError(
                    f"Expected a start of pyro.param {name!r}, but got none when the guide was first called"
                )
            flat = self.guide.values[name]
            message["value"], message["done"] = biject_to(self.guide.constraints[name])(flat), True
        elif start is not None:  # of a module, whose weights are in their places
            message["value"], message["done"] = start() if callable(start) else start, True
