"""Protection against clients and servers that are not to be trusted, and records of what was done.

`privacy` bounds what is told, `secure` hides what is added up, `robust` aggregates in spite of some, `attacks` shows
what holds; `record`, `drift`, `explain` and `fairness` say what a run did, and to whom.

>>> import fedtorch as ft
>>> round(ft.trust.privacy.gaussian_noise(epsilon=1.0, delta=1e-5), 2)  # standard deviations a unit of sensitivity
3.73
>>> from fedtorch.sites.secure.neighbours import neighbourhoods
>>> neighbourhoods(10)  # whom each of ten masks with, against a server that cheats
Neighbourhoods(neighbours=8, threshold=5, colluding=1)
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
