"""Imports modules of the package anew, in a process that refuses `fedtorch.federation`.

Usage: without_federation.py MODULE…
"""

import importlib
import sys

for loaded in [name for name in sys.modules if name.partition(".")[0] == "fedtorch"]:
    del sys.modules[loaded]
sys.modules["fedtorch.federation"] = None  # type: ignore[assignment]
for name in sys.argv[1:]:
    importlib.import_module(name)
