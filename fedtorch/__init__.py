"""fedtorch: federated statistical, probabilistic and deep modelling on PyTorch and Lightning.

A federation is an algorithm (what clients and server compute) on a population (where the clients run):
`ft.Federation(ft.fedavg(local), ft.InProcess(data))` is a LightningModule, so a Lightning `Trainer` runs the rounds.
"""

import lazy_loader

# The names stand in `__init__.pyi`, for type checkers as for this; each is imported when somebody asks for it.
__getattr__, __dir__, _ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.1.0"
