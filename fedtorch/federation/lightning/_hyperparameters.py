"""Describe the settings of a run as loggers take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedtorch.checkpoint import describe
from fedtorch.federation.runs.run import Run


def hyperparameters(run: Run, of_clients: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run and of its module, flat: numbers and text as they are, other values as text.

    Args:
        run: not yet begun, or resumed.
        of_clients: settings of the clients' optimisers and schedules that depend on the run's length and the clients'
            rows, and stand in the place of those with which the local solver was made before it knew them.
    """
    local = {f"local.{name}": value for name, value in of_clients.items()}
    known = {name: local.get(name, value) for name, value in run.algorithm.settings.items()}
    of_run = {"seed": run.seed, "cohort": run.cohort, "faults": run.faults, "clients": len(run.population.names)}
    module = run.algorithm.module
    of_module = getattr(module, "hparams", {}) if getattr(module, "_log_hyperparams", False) else {}
    plain = (bool, int, float, str, type(None))
    return {
        name.replace(".", "/"): value if isinstance(value, plain) else describe(value)
        for name, value in {**known, **of_run, **_flat(of_module, "module")}.items()
    }


def _flat(settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return nested settings flat, their names joined by slashes."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        path = f"{prefix}/{name}"
        flat.update(_flat(value, path) if isinstance(value, Mapping) else {path: value})
    return flat
