"""Posteriors of each device from a run of expectation propagation."""

from __future__ import annotations

from torch import Tensor

from fedtorch import tree
from fedtorch.data import ClientData
from fedtorch.federation.algorithms.ep._checked import checked
from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.runs.holders import at_clients
from fedtorch.federation.runs.run import Run
from fedtorch.models import gaussian
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.gaussian import Natural
from fedtorch.models.hierarchical import Model


def devices(run: Run, *, given: Corrected | None = None, tolerance: float = 0.01) -> DevicePosterior:
    """Compute each device's own posterior given all devices' rows (section 4.2.1), where the device's rows are.

    By default from the device's cavity, a normal approximation to the others' information about φ: with five devices
    that is accurate to one per cent of an sd. With `given`, from the corrected posterior of φ: p(θ_k | all) = ∫ p(θ_k |
    φ, y_k) p(φ | all) dφ is a mixture over its nodes. In a run `ft.without_server` a device's cavity comes from its own
    node's q.

    Args:
        run: of `ep` with a hierarchical model.
        given: the corrected posterior of φ, whose nodes are sent to every device; memory grows with devices × nodes ×
            coefficients², so use `corrected` with fewer `points` if that is much.
        tolerance: as for `posterior`, with the same warnings and errors.

    Raises:
        TypeError: a run of another algorithm, of factors without devices, or of a population without its data.
    """
    model, data = checked(run, tolerance).model, getattr(run.population, "data", None)
    if not isinstance(model, Model) or data is None:
        raise TypeError(
            f"Expected a run of a hierarchical.Model on data at hand, but got one of a {type(model).__name__} on "
            f"{run.population!r}"
        )

    def own(cavity: dict[str, Tensor], block: ClientData) -> DevicePosterior:
        rows = model.prepare(block)
        if given is None:
            return model.devices(gaussian.moments(Natural(**cavity)), rows)
        nodes, weights = tree.expand((given.nodes, given.weights), len(block.count))
        return model.given(nodes, weights, rows)

    return at_clients(run)(data, own)
