"""Expectation propagation under a Trainer: it stops when `settled` says so.

That is when what the coming rounds would still add up to, and the last changes, are small against posterior standard
deviations. Logistic regressions of many clients, whose intercepts differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch.callbacks import EarlyStopping

import fedtorch as ft
from experiments.trainers.training import Criterion, Script, Size, Training, command
from fedtorch.federation.algorithms.ep import posterior, settled
from fedtorch.models import hierarchical

SIZES = {"smoke": Size(6, 20, 8), "cpu": Size(50, 40, 60)}
SLOPES = (1.0, -0.5)


def make(size: Size, device: str) -> Training:
    """Clients' rows of a constant and two covariates."""
    keys = ft.random.fold_in(ft.random.key(0), torch.arange(3))
    x = ft.random.normal(keys[0], (size.clients, size.rows, 3), torch.float64)
    x[..., 0] = 1.0
    intercepts = 0.5 * ft.random.normal(keys[1], (size.clients, 1), torch.float64)
    odds = intercepts + x[..., 1:] @ torch.tensor(SLOPES, dtype=torch.float64)
    y = (ft.random.uniform(keys[2], (size.clients, size.rows), torch.float64) < odds.sigmoid()).double()
    data = ft.data.FederatedData((x.flatten(0, 1), y.flatten()), torch.full((size.clients,), size.rows))
    model = hierarchical.generalised.logistic(hierarchical.normal(3, random=[0], names=["constant", "a", "b"]))
    federation = ft.Federation(ft.ep(model), ft.InProcess(data, device=device))
    stopping = EarlyStopping("settled", mode="max", stopping_threshold=0.5, patience=size.rounds)
    return Training(federation, stopping, callbacks=(Criterion("settled", lambda run: settled()(run.log)),))


def found(federation: ft.Federation) -> Mapping[str, float]:
    """What the rounds to come would add, and the slopes' errors, in posterior standard deviations."""
    law = posterior(federation.run)
    errors = (law.mean[1:3] - torch.tensor(SLOPES)) / law.covariance_matrix.diagonal()[1:3].sqrt()
    return {
        "still to come, in sd": float(federation.history["remaining"].iloc[-1]),
        "largest error of a slope, in sd": float(errors.abs().max()),
    }


SCRIPT = Script("trainers.propagation", SIZES, make, found)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, cut off, go on."""
    command(SCRIPT, __doc__, argv)


if __name__ == "__main__":
    main()
