"""The questions that sites answer after a fit, by name. Messages select among these and cannot run other code.

`Posterior.questions` lists the questions that a fit answers.

>>> QUESTIONS["calibration"].tells
'checks'
"""

from __future__ import annotations

from fedtorch.federation.algorithms.ep.hierarchical import COEFFICIENTS, DEVIATIONS, EVIDENCE
from fedtorch.federation.algorithms.matrix_normal.posterior import room_for, tell_average, tell_devices, tell_sums
from fedtorch.federation.runs.holders import Kind
from fedtorch.inference.checks import CALIBRATION, HISTOGRAM, MEANS, POWERS
from fedtorch.inference.comparison import DENSITIES
from fedtorch.inference.marginal_effects import EFFECTS, VARIABLES
from fedtorch.models.matrix_normal_posterior import Factors

_UNITS, _KNOWN = ("multiple", "noise", "factor"), ("known",)
_GIVEN = (*_UNITS, *Factors._fields)
FACTORS = Kind("factors", "effects", tell_sums, lambda form: room_for(form)[0], _UNITS, alone=True)
DEVICES = Kind("devices", "effects", tell_devices, lambda form: room_for(form)[1], _GIVEN, _KNOWN, by_client=True)
AVERAGE = Kind("average", "effects", tell_average, lambda form: room_for(form)[2], _GIVEN, _KNOWN, alone=True)
_EVERY = (COEFFICIENTS, DEVIATIONS, DENSITIES, EVIDENCE, VARIABLES, EFFECTS, CALIBRATION, POWERS, HISTOGRAM, MEANS)
QUESTIONS = {kind.name: kind for kind in (*_EVERY, FACTORS, DEVICES, AVERAGE)}
