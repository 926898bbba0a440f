"""What a federation does about clients and servers that are not to be trusted.

`privacy` bounds what is told, `secure` hides what is added up, `robust` aggregates in spite of some, `attacks` shows
what holds; `record`, `drift`, `explain` and `fairness` say what a run did, and to whom.
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
