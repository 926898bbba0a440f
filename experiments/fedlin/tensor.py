"""Federated tensor regression of low rank: shared factors of the columns, each device's own factors of the rows.

The paper names tensor regression as a next step (section 7) and says no more of it. Inputs are matrices X `(p, q)`, and
y = ⟨B_k, X⟩ + noise with B_k = U_k V': V `(q, R)` is the same for all devices, U_k `(p, R)` the device's own, and those
of devices are related. It needs no code of its own: y = ⟨U_k, XV⟩ is a `ft.LinearHead` on the body X ↦ XV, a linear
layer along the last axis, so that `ft.shared_body` averages V while HM1 finds U_k. Beside it: HM1 and ridge regression
on all p·q entries (the penalty of the latter chosen by the error itself, which is generous), U_k of each device alone,
and alternating least squares on all rows in one place in plain NumPy. With noise of variance 0.25 and 30 rows a
device there are half as many rows as B_k has entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedtorch as ft
from experiments import common, result_pages
from fedtorch.models.linear import SufficientStatistics, ridge

P, Q, RANK, NOISE = 6, 10, 2, 0.5
PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
READING = result_pages.Reading(smaller=".")


def simulate(units: int, rows: int, seed: int) -> tuple[ft.data.FederatedData, Tensor]:
    """Rows of inputs `(p, q)` `(x, y)`, and all B_k `(K, p, q)`."""
    generator = torch.Generator().manual_seed(70_000 + seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shared = draw(Q, RANK) / RANK**0.5
    own = (draw(units, 3) @ draw(3, P * RANK) / 3**0.5 + 0.2 * draw(units, P * RANK)).reshape(units, P, RANK)
    truth = own @ shared.mT
    x = draw(units, rows, P, Q)
    y = torch.einsum("knpq,kpq->kn", x, truth) + NOISE * draw(units, rows)
    return ft.data.from_tensors(list(zip(x, y))), truth


def composed(data: ft.data.FederatedData, heads: ft.Algorithm, rounds: int, seed: int) -> Tensor:
    """B_k of a shared V under heads that `heads` finds, `(K, p, q)`."""
    generator = torch.Generator().manual_seed(seed)
    along = nn.Linear(Q, RANK, bias=False, dtype=torch.float64)
    with torch.no_grad():
        along.weight.copy_(torch.randn(RANK, Q, generator=generator, dtype=torch.float64) / Q**0.5)
    head = ft.LinearHead(
        P * RANK, nn.Sequential(along, nn.Flatten(-2)), intercept=False, given=True, dtype=torch.float64
    )
    trained = ft.gradient_descent(
        head,
        steps=5,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        buffers="local",
    )
    tensors = ft.run(ft.shared_body(trained, heads), ft.InProcess(data), rounds=rounds, seed=seed).tensors()
    return tensors["coefficients"].reshape(-1, P, RANK) @ tensors["feature_map.0.weight"]


def alternating(data: ft.data.FederatedData, sweeps: int, seed: int) -> np.ndarray:
    """B_k by alternating least squares with all rows in one place, in NumPy."""
    rows = [(x.numpy(), y.numpy()) for x, y in data]
    shared = np.random.default_rng(seed).standard_normal((Q, RANK))
    for _ in range(sweeps):
        own = []
        for x, y in rows:
            own.append(np.linalg.lstsq((x @ shared).reshape(len(y), -1), y, rcond=None)[0].reshape(P, RANK))
        design = np.concatenate([np.einsum("npq,pr->nqr", x, u).reshape(len(y), -1) for (x, y), u in zip(rows, own)])
        shared = np.linalg.lstsq(design, np.concatenate([y for _, y in rows]), rcond=None)[0].reshape(Q, RANK)
    return np.stack(own) @ shared.T


def compare(units: int, rows: int, rounds: int, seed: int) -> dict[str, float]:
    """The root mean squared error of the entries of B_k by every way."""
    data, truth = simulate(units, rows, seed)
    flat = data.map(lambda pair: (pair[0].flatten(1), pair[1]))
    linear = ft.least_squares(ft.LinearHead(P * RANK, intercept=False, dtype=torch.float64))
    entries = ft.least_squares(ft.LinearHead(P * Q, intercept=False, dtype=torch.float64))
    known = SufficientStatistics.of(flat)
    noise = NOISE**2  # told to all: rows are too few to estimate it from residuals of 60 entries
    found = {
        "shared V, HM1 for U": composed(data, ft.matrix_normal(linear), rounds, seed),
        "shared V, U alone": composed(data, ft.separate(linear), rounds, seed),
        "HM1 on all entries": ft.run(
            ft.matrix_normal(entries, noise=noise), ft.InProcess(flat), rounds=60
        ).server.parameters.reshape(truth.shape),
        "alternating least squares in one place": torch.from_numpy(alternating(data, 200, seed)),
    }
    errors = {name: float((each - truth).square().mean().sqrt()) for name, each in found.items()}
    alone = [ridge(known, penalty).reshape(truth.shape) for penalty in PENALTIES]
    errors["ridge on all entries, the best penalty"] = min(
        float((each - truth).square().mean().sqrt()) for each in alone
    )
    return errors | {"no model (all zeros)": float(truth.square().mean().sqrt())}


def draw(rows: Sequence[common.Row]) -> Figure:
    """Errors of all ways."""
    figure, axis = common.subplots(figsize=(7, 3))
    shown = sorted(rows, key=lambda row: row.ours)
    axis.barh([row.metric for row in shown], [row.ours for row in shown], xerr=[row.sd or 0.0 for row in shown])
    axis.set_xlabel("RMSE of the entries of $B_k$, ± sd over runs")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """All ways over simulated federations."""
    options = common.arguments(__doc__).parse_args(argv)
    sizes = (8, 20, 20) if options.smoke else (40, 30, 400)
    runs = [compare(*sizes, seed) for seed in range(options.seeds)]
    rows = common.over_seeds(f"K = {sizes[0]}, {sizes[1]} rows", runs)
    common.show_rows(f"Tensor regression, {options.seeds} runs", rows)
    common.finish("fedlin.tensor", rows, options, lambda: {"fedlin_tensor": draw(rows)})


if __name__ == "__main__":
    main()
