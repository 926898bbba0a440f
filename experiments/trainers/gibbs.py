"""Gibbs sampling under a Trainer: it stops when four chains agree, by the largest R-hat of the shared effects.

The sampler keeps draws and logs no loss; a callback reads its R-hat every 25 rounds and logs it. Draws are in the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch.callbacks import EarlyStopping

import fedtorch as ft
from experiments.trainers.training import Criterion, Script, Size, Training, command
from fedtorch.models.gibbs import sparse

SIZES = {"smoke": Size(4, 20, 50), "cpu": Size(10, 30, 500)}
EFFECTS = (1.0, -0.5, 0.0, 0.0)


def r_hat(run: ft.Run) -> float:
    """The largest of the shared effects."""
    return float(sampler_of(run).summary().filter(like="theta", axis=0)["r_hat"].max())


def sampler_of(run: ft.Run) -> ft.Sampler:
    """The sampler that follows a run."""
    (sampler,) = run.recorders
    assert isinstance(sampler, ft.Sampler)
    return sampler


def make(size: Size, device: str) -> Training:
    """Sites whose effects scatter about shared ones, of which two are zero."""
    x = ft.random.normal(ft.random.key(0), (size.clients, size.rows, len(EFFECTS)), torch.float64)
    own = 0.1 * ft.random.normal(ft.random.key(1), (size.clients, len(EFFECTS), 1), torch.float64)
    noise = ft.random.normal(ft.random.key(2), (size.clients, size.rows), torch.float64)
    y = (x @ (torch.tensor(EFFECTS, dtype=torch.float64)[:, None] + own))[..., 0] + noise
    data = ft.data.FederatedData((x.flatten(0, 1), y.flatten()), torch.full((size.clients,), size.rows))
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2, chains=4)
    federation = ft.Federation(
        algorithm,
        ft.InProcess(data, device=device),
        torch.zeros(len(EFFECTS)),
        record=ft.Sampler(burn_in=20),
    )
    stopping = EarlyStopping("r_hat", stopping_threshold=1.02, patience=size.rounds, check_finite=False)
    return Training(federation, stopping, callbacks=(Criterion("r_hat", r_hat, every=25),))


def found(federation: ft.Federation) -> Mapping[str, float]:
    """R-hat, and how sure it is that effects are in the model."""
    included = sampler_of(federation.run).mean()["prior.included"]
    return {
        "largest R-hat": r_hat(federation.run),
        "inclusion of effects, least": float(included[:2].min()),
        "inclusion of zeros, largest": float(included[2:].max()),
    }


SCRIPT = Script("trainers.gibbs", SIZES, make, found)


def main(argv: Sequence[str] | None = None) -> None:
    """Sample, cut off, go on."""
    command(SCRIPT, __doc__, argv)


if __name__ == "__main__":
    main()
