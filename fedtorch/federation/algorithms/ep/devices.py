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
    """Compute each device's own posterior given all devices' rows (section 4.2.1), where its rows are.

    From its cavity, in which what the others know of φ is normal: with five devices that is good to one per cent of an
    sd. Or from the posterior of φ as `corrected` has found it, p(θ_k | all) = ∫ p(θ_k | φ, y_k) p(φ | all) dφ being a
    mixture over its nodes. In a run `ft.without_server` a device's cavity is of the q that its own node has.

    Args:
        run: of `ep` with a hierarchical model.
        given: the corrected posterior of φ, whose nodes every device hears; memory goes with devices × nodes ×
            coefficients², so ask `corrected` for fewer `points` where that is much.
        tolerance: see `posterior`, which warns and raises alike.

    Raises:
        TypeError: a run of another algorithm, of factors without devices, or of a population that has not its data.
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
