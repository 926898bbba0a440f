"""The questions that sites answer after a fit, by name: nothing else that comes over the wire decides what is computed.

>>> sorted(QUESTIONS)
['coefficients', 'densities', 'deviations', 'effects', 'evidence', 'variables']
"""

from __future__ import annotations

from fedtorch.inference._sites import COEFFICIENTS, DEVIATIONS
from fedtorch.inference.comparison import DENSITIES, EVIDENCE
from fedtorch.inference.marginal_effects import EFFECTS, VARIABLES

QUESTIONS = {kind.name: kind for kind in (COEFFICIENTS, DEVIATIONS, DENSITIES, EVIDENCE, VARIABLES, EFFECTS)}
