"""The questions that sites answer after a fit, by name. Messages select among these and cannot run other code.

They are the kinds in the modules of `fedtorch.inference` and in two posteriors of algorithms. `Kind.answered_by` says
after which fits each is answered.

>>> QUESTIONS["calibration"].tells
'checks'
>>> from fedtorch.federation.posterior import Posterior
>>> answered(Posterior())
{}
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from fedtorch import inference
from fedtorch.federation.algorithms.ep import hierarchical
from fedtorch.federation.algorithms.matrix_normal import posterior as matrix_normal
from fedtorch.federation.posterior import Posterior
from fedtorch.federation.runs.holders import Kind

_HERE = [each.name for each in pkgutil.iter_modules(inference.__path__, f"{inference.__name__}.")]
_MODULES = (hierarchical, matrix_normal, *(import_module(name) for name in _HERE if name != __name__))
_EVERY = [value for module in _MODULES for value in vars(module).values() if isinstance(value, Kind)]
QUESTIONS = {kind.name: kind for kind in _EVERY}


def answered(posterior: Posterior) -> dict[str, Kind]:
    """Return the questions that sites answer after a fit with this posterior, by name."""
    return {name: kind for name, kind in QUESTIONS.items() if kind.answered_by(posterior)}
