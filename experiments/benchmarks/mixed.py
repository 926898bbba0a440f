"""Logistic mixed models by expectation propagation beside statsmodels, and against their numbers of coefficients.

- `hospitals`: 20 hospitals, 3973 rows, 5 coefficients, correlated intercepts and slopes; statsmodels'
  BinomialBayesMixedGLM (whose intercepts and slopes are not correlated) by its Laplace approximation and by variational
  inference, on the same rows; and lme4's glmer of the same model, by its Laplace approximation, where `Rscript` has
  lme4 (`apt-get install r-cran-lme4`), which says itself how long it took.
- `coefficients`: 4 clients of 230 rows, 14 coefficients of which 1 to 4 differ between clients.

Figures are seconds of processor time, medians over ways that take turns.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.benchmarks.parts import measure
from fedtorch.federation.algorithms.ep import corrected, settled
from fedtorch.models import hierarchical
from fedtorch.progress import quiet

REPETITIONS = 3
Client = tuple[Tensor, Tensor]
GLMER = """
suppressMessages(library(lme4)); d <- read.csv(commandArgs(TRUE)[1])
for (i in 1:4) {
  t <- system.time(glmer(y ~ x1 + x2 + x3 + x4 + (1 + x1 | g), data=d, family=binomial))
  print(t[[1]] + t[[2]])
}
"""


def simulated(counts: Sequence[int], features: int, spread: Sequence[float]) -> list[Client]:
    """Clients of a logistic model with an intercept, whose first coefficients differ by these sds."""
    generator = torch.Generator().manual_seed(0)
    centre = 0.4 * torch.randn(features, generator=generator, dtype=torch.float64)
    clients = []
    for count in counts:
        x = torch.randn(count, features, generator=generator, dtype=torch.float64)
        x[:, 0] = 1
        common_part = 0.4**0.5 * torch.randn((), generator=generator, dtype=torch.float64)
        own = common_part + 0.6**0.5 * torch.randn(len(spread), generator=generator, dtype=torch.float64)
        theta = centre.clone()
        theta[: len(spread)] += torch.tensor(spread, dtype=torch.float64) * own
        chance = torch.rand(count, generator=generator, dtype=torch.float64)
        clients.append((x, (chance < (x @ theta).sigmoid()).double()))
    return clients


def fit(model: hierarchical.Model, clients: list[Client]) -> ft.Run:
    """Expectation propagation until it has settled."""
    population = ft.InProcess(ft.data.from_tensors(clients))
    return ft.run(ft.ep(model), population, rounds=50, until=settled(), progress=False)


def peer(clients: list[Client], method: str) -> Callable[[], object]:
    """The fit of statsmodels with independent random intercepts and slopes of the second column."""
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

    x, y = (torch.cat(part).numpy() for part in zip(*clients))
    group = np.repeat(np.arange(len(clients)), [len(each[1]) for each in clients])
    one = (group[:, None] == np.arange(len(clients))).astype(float)
    effects, kinds = np.hstack([one, one * x[:, 1:2]]), np.repeat([0, 1], len(clients))

    def fitted() -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that the Laplace approximation has not converged
            return getattr(BinomialBayesMixedGLM(y, x, effects, kinds), method)()

    return fitted


def glmer(clients: list[Client]) -> list[float]:
    """Seconds of processor time of lme4's fit, a first one left out; nothing where there is no lme4."""
    if shutil.which("Rscript") is None:
        return []
    x, y = (torch.cat(part).numpy() for part in zip(*clients))
    group = np.repeat(np.arange(len(clients)), [len(each[1]) for each in clients])
    with tempfile.TemporaryDirectory() as folder:
        script, rows = Path(folder) / "fit.R", Path(folder) / "rows.csv"
        script.write_text(GLMER)
        table = np.column_stack([x[:, 1:], y, group])
        np.savetxt(rows, table, delimiter=",", header="x1,x2,x3,x4,y,g", comments="", fmt="%.17g")
        done = subprocess.run(["Rscript", str(script), str(rows)], capture_output=True, text=True, check=False)
    return [float(line.split()[-1]) for line in done.stdout.splitlines()[1:]] if done.returncode == 0 else []


def hospitals(smoke: bool) -> list[common.Row]:
    """The fit, its correction and the fits of statsmodels."""
    counts = [30] * 4 if smoke else [*range(104, 294, 10), 202 + 3]
    counts = counts if smoke else [*counts[:-1], 3973 - sum(counts[:-1])]
    clients = simulated(counts, 5, [0.6, 0.3])
    model = hierarchical.generalised.logistic(hierarchical.normal(5, random=[0, 1], correlated=True))
    run = fit(model, clients)

    def correction() -> object:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of the few rows of a smoke test
            return corrected(run)

    ways: dict[str, Callable[[], object]] = {
        "expectation propagation": partial(fit, model, clients),
        "its correction": correction,
        "statsmodels, fit_map": peer(clients, "fit_map"),
        "statsmodels, fit_vb": peer(clients, "fit_vb"),
    }
    repetitions = 1 if smoke else REPETITIONS
    times = measure.interleaved(ways, repetitions, warm=0 if smoke else 1, clock=time.process_time)
    setting = f"{len(clients)} hospitals, {sum(counts)} rows, 5 coefficients, "
    rows = [common.Row(setting + name, "s", value) for name, value in measure.medians(times).items()]
    ours = times["expectation propagation"]
    for name in ("statsmodels, fit_vb", "statsmodels, fit_map"):
        rows.append(
            common.Row(f"{setting}expectation propagation over {name}", "ratio", measure.ratio(ours, times[name]))
        )
    theirs = [] if smoke else glmer(clients)
    if theirs:
        seconds = statistics.median(theirs)
        rows.append(common.Row(setting + "lme4, glmer", "s", seconds))
        rows.append(
            common.Row(f"{setting}expectation propagation over lme4, glmer", "ratio", statistics.median(ours) / seconds)
        )
    ratio = measure.ratio(times["its correction"], ours)
    return [*rows, common.Row(f"{setting}correction over expectation propagation", "ratio", ratio)]


def coefficients(smoke: bool) -> list[common.Row]:
    """The fit against the number of coefficients that differ."""
    rows = []
    for random in range(1, 3 if smoke else 5):
        clients = simulated([40 if smoke else 230] * 4, 14, [0.5] * random)
        model = hierarchical.generalised.logistic(hierarchical.normal(14, random=range(random)))
        spent = common.seconds(partial(fit, model, clients), time.process_time)
        rows.append(common.Row(f"4 clients, 14 coefficients, {random} of which differ", "s", spent))
    return rows


def parts(smoke: bool) -> measure.Parts:
    """The benchmarks by name."""
    return {"coefficients": partial(coefficients, smoke), "hospitals": partial(hospitals, smoke)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all parts, or one."""
    measure.run("mixed", __doc__, parts, argv)


if __name__ == "__main__":
    main()
