"""Expectation propagation of up to a hundred thousand devices: rounds, seconds, memory, and whether it is right.

Devices with an intercept and a slope from N(μ, diag τ²) and five rows each. The processor's seconds are those of the
whole run in one process, bytes those that a device sends, as the run counts them. The reference is maximum marginal
likelihood, whose standard errors the posterior's sds must meet where devices are many: "off by" is the largest distance
of the posterior mean from it in posterior sds, "sds of" the ratios of sds.

Source: Yue, Kontar, Estrada Gómez (2022), Algorithm 3, which is run for K = 100 there.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import torch
from matplotlib.figure import Figure

import fedtorch as ft
from experiments import common, result_pages
from fedtorch.federation.algorithms.ep import posterior, settled
from fedtorch.federation.algorithms.maximum_likelihood import estimates, maximised
from fedtorch.models import hierarchical

ROWS, MEAN, SDS, NOISE = 5, (1.0, -2.0), (0.5, 1.0), 0.25
READING = result_pages.Reading(smaller="seconds|MiB")


def simulate(devices: int, seed: int) -> ft.data.FederatedData:
    """All devices' rows, one after the other."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    theta = torch.tensor(MEAN) + torch.tensor(SDS) * draw(devices, 2)
    x = torch.stack([torch.ones(devices, ROWS, dtype=torch.float64), draw(devices, ROWS)], -1)
    y = (x @ theta[..., None])[..., 0] + NOISE**0.5 * draw(devices, ROWS)
    return ft.data.FederatedData((x.flatten(0, 1), y.flatten()), torch.full((devices,), ROWS))


def measure(devices: int, seed: int) -> dict[str, float]:
    """A run of expectation propagation, and how far it is from maximum likelihood."""
    data, model = simulate(devices, seed), hierarchical.linear(hierarchical.normal(2, sd=10.0), noise=NOISE)
    before, start = common.peak_megabytes(), time.process_time()
    run = ft.run(ft.ep(model), ft.InProcess(data), rounds=60, until=settled(0.01))
    spent, after = time.process_time() - start, common.peak_megabytes()
    q = posterior(run, tolerance=0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        best = estimates(ft.run(ft.maximum_likelihood(model), ft.InProcess(data), rounds=20, until=maximised()))
    ratio = q.stddev / best.errors
    return {
        "rounds": run.number,
        "seconds of a processor": spent,
        "MiB more than before": after - before,
        "bytes of a device and round": run.bytes_up / run.number / devices,
        "off by": float(((q.mean - best.mean) / q.stddev).abs().max()),
        "sds of maximum likelihood's, least": float(ratio.min()),
        "sds of maximum likelihood's, most": float(ratio.max()),
    }


def draw(found: dict[int, list[dict[str, float]]]) -> Figure:
    """Seconds and memory by the number of devices."""
    figure, axes = common.subplots(1, 2, figsize=(8, 3.2))
    for axis, metric in zip(axes, ("seconds of a processor", "MiB more than before")):
        axis.loglog(list(found), [max(runs[0][metric], 1e-2) for runs in found.values()], "o-")
        axis.set_xlabel("devices")
        axis.set_ylabel(metric)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Three sizes, the largest last, for memory is a peak."""
    options = common.arguments(__doc__).parse_args(argv)
    sizes = (100, 1000) if options.smoke else (1000, 10_000, 100_000)
    found = {size: [measure(size, seed) for seed in range(options.seeds)] for size in sizes}
    rows = [row for size, runs in found.items() for row in common.over_seeds(f"K = {size}", runs)]
    common.show_rows("Expectation propagation of many devices", rows, ".4g")
    common.finish("fedlin.scale", rows, options, lambda: {"fedlin_scale": draw(found)})


if __name__ == "__main__":
    main()
