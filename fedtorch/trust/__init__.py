"""Protection against clients and servers that are not to be trusted, and records of what was done.

`privacy` bounds what is told, `secure` hides what is added up, `robust` aggregates in spite of some, `attacks` shows
what holds; `record`, `drift`, `explain` and `fairness` say what a run did, and to whom.

>>> import fedtorch as ft
>>> round(ft.trust.privacy.gaussian_noise(epsilon=1.0, delta=1e-5), 2)  # standard deviations a unit of sensitivity
3.73
>>> ft.trust.secure.neighbourhoods(10)  # whom each of ten masks with, against a server that cheats
Neighbourhoods(neighbours=8, threshold=5, colluding=1)
"""

import importlib
from typing import Any

import lazy_loader

_own, __dir__, _ = lazy_loader.attach(
    __name__, submodules=["attacks", "drift", "explain", "fairness", "privacy", "record"]
)
_ELSEWHERE = {"robust": "fedtorch.federation.exchanges.robust", "secure": "fedtorch.sites.secure"}


def __getattr__(name: str) -> Any:
    return importlib.import_module(_ELSEWHERE[name]) if name in _ELSEWHERE else _own(name)
