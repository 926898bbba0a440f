"""Projects by theme."""

from zoo.cases import forecasting, generative, language, science, vision

CASES = [*language.CASES, *vision.CASES, *science.CASES, *generative.CASES, *forecasting.CASES]
