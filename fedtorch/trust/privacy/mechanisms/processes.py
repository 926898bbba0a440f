r"""Differential privacy of single rows for multi-output Gaussian processes: noise is added once, to the units' sums.

At given hyperparameters and with Gaussian noise of variance σ², all that `ft.fedmgp` needs from a unit are sums over
its rows r = (φ(x), y), with φ(x) the row's dependence on the white values t at the inducing inputs,

.. math:: B = \sum_i \varphi_i \varphi_i^\top / \sigma^2, \qquad a = \sum_i \varphi_i y_i / \sigma^2,

and ‖φ(x)‖² is at most the prior's variance. The mechanism is therefore that of `NoisedSums`, with the rows' φ for
features. Hyperparameters learnt from the rows, and gradients with respect to shared ones, would be sent in every round
and are not bounded: they stay fixed at the module's values, which must not have been fitted to the rows.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.algorithms.multi_output_gp.exact import UnitMessage, UnitState, fedmgp
from fedtorch.federation.algorithms.multi_output_gp.stacked import Contribution, StackedGP
from fedtorch.federation.exchanges.exchange import Mean
from fedtorch.federation.turn import Turn
from fedtorch.models.gaussian import pack
from fedtorch.random.entropy import Entropy
from fedtorch.trust.privacy.mechanisms.sums import NoisedSums

if TYPE_CHECKING:
    from fedtorch.models.gaussian_process import ConvolvedGP


class _Released(NamedTuple):
    """A block's data: the noised sums of its units alone; leaves `(K, ...)`."""

    told: Contribution
    count: Tensor  # type: ignore[assignment]  # rows, which are public


def private_process(
    module: ConvolvedGP,
    *,
    clip_targets: float,
    noise: float,
    delta: float,
    ridge: float = 0.0,
    budget: float | None = None,
    ledger: Path | str | None = None,
    entropy: Entropy | None = None,
) -> Algorithm:
    """Build `ft.fedmgp` at the module's hyperparameters for units that send `NoisedSums` of their rows, released once.

    Args:
        module: of one unit, with Gaussian noise, without means and own processes. It sets the scale and noise of all
            units.
        clip_targets: outputs of a larger size are cut to it.
        noise: z, in units of the sensitivity.
        delta: δ, below one over any unit's rows.
        ridge: added to the scaled sums, see `NoisedSums`; the prior already acts as one.
        budget: the largest ε of the ledger; a run that would exceed it is refused.
        ledger: a file that only grows; None keeps it in memory.
        entropy: source of the noise; default: the operating system's.

    Raises:
        ValueError: settings out of range, or a module whose units have parameters that depend on their rows.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.gaussian_process import ConvolvedGP
        >>> from fedtorch.trust import privacy
        >>> x = torch.linspace(0, 1, 400, dtype=torch.float64)[:, None]
        >>> data = ft.data.from_tensors([(x, (6 * x[:, 0]).sin())] * 3)
        >>> module = ConvolvedGP(torch.linspace(0, 1, 8, dtype=torch.float64)[:, None])
        >>> algorithm = privacy.private_process(module, clip_targets=1.0, noise=2.0, delta=1e-4)
        >>> run = ft.run(algorithm, ft.InProcess(data), rounds=1)
        >>> round(float(run.history["epsilon"].iloc[-1]), 2)
        1.7
    """
    plain = fedmgp(module, steps=0, server_lr=0.0, accept_disclosure=True)
    gp = StackedGP(module, False)
    if not gp.gaussian or gp.exact_units or gp.module.offset is not None:
        raise ValueError(
            "Expected a module with Gaussian noise and without mean and own_kernel, which needs only sums of the rows, "
            "but got another"
        )
    sums = NoisedSums(
        clip_features=math.sqrt(_variance(gp)), clip_targets=clip_targets, noise=noise, delta=delta, ridge=ridge,
        budget=budget, ledger=ledger, entropy=entropy,
    )  # fmt: skip
    made = dataclasses.replace(plain, prepare=partial(_prepare, gp, sums), client=partial(_client, gp))
    return made | sums.protect()


def _variance(gp: StackedGP) -> float:
    """Return the prior's variance, which is the same everywhere: at an inducing input."""
    with torch.no_grad():
        inputs = gp.module.embed(gp.module.inducing)
        return float(gp.module.kernel.variance(inputs).max())


def _prepare(gp: StackedGP, sums: NoisedSums, data: Any) -> _Released:
    """Return the noised sums of the units of a block."""
    x, y, *_ = gp.check(data).batch
    module = gp.module
    with torch.no_grad():
        seen = module.see(x, data.mask.to(y.dtype))
        statistics = sums.of(seen.basis @ seen.change, y, data.mask, data.count)
        variance = module.likelihood.noise.to(torch.float64)
    rest = statistics.count * _variance(gp) - statistics.gram.diagonal(dim1=1, dim2=2).sum(1)
    constant = statistics.count * (2 * math.pi * variance).log() + (statistics.power + rest.clamp(min=0)) / variance
    moments = gp.own_moments({name: gp.values[name] for name in gp.own})  # from the module, not from rows
    contribution = Contribution(
        pack(statistics.gram / variance),
        statistics.cross / variance,
        -0.5 * constant,
        moments.expand(len(constant), -1),
        torch.ones_like(constant),
    )
    return _Released(tree.to(contribution, y.dtype), data.count)


def _client(gp: StackedGP, inbox: Any, state: UnitState, data: _Released, turn: Turn) -> Reply:
    """Send the same contribution in every round."""
    one = torch.ones_like(data.told.units)
    nothing = {name: gp.values[name].new_zeros(len(one), *gp.values[name].shape) for name in gp.shared}
    message = UnitMessage(Mean(nothing, one.to(torch.float64)))
    return Reply(message, state._replace(told=data.told), {})
