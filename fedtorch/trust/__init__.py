"""Protection against clients and servers that are not trusted, and records of runs.

`privacy` bounds disclosure, `secure` hides the terms of sums, `robust` aggregates despite faulty clients, `attacks`
tests these protections; `record`, `drift`, `explain` and `fairness` document a run and its effects on groups.

>>> import fedtorch as ft
>>> round(ft.trust.privacy.gaussian_noise(epsilon=1.0, delta=1e-5), 2)  # standard deviations a unit of sensitivity
3.73
>>> from fedtorch.sites.secure.neighbours import neighbourhoods
>>> neighbourhoods(10)  # whom each of ten masks with, against a server that cheats
Neighbourhoods(neighbours=8, threshold=5, colluding=1)
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
