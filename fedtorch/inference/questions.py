"""The questions that sites answer after a fit, by name: nothing else that comes over the wire decides what is computed.

>>> len(QUESTIONS), QUESTIONS["calibration"].tells
(10, 'checks')
"""

from __future__ import annotations

from fedtorch.inference._sites import COEFFICIENTS, DEVIATIONS
from fedtorch.inference.checks import CALIBRATION, HISTOGRAM, MEANS, POWERS
from fedtorch.inference.comparison import DENSITIES, EVIDENCE
from fedtorch.inference.marginal_effects import EFFECTS, VARIABLES

_EVERY = (COEFFICIENTS, DEVIATIONS, DENSITIES, EVIDENCE, VARIABLES, EFFECTS, CALIBRATION, POWERS, HISTOGRAM, MEANS)
QUESTIONS = {kind.name: kind for kind in _EVERY}
