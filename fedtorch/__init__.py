"""fedtorch: federated statistical, probabilistic and deep modelling on PyTorch and Lightning.

A federation is an algorithm (computations of clients and server) on a population (the clients, and where they run):
`ft.Federation(ft.fedavg(local), ft.InProcess(data))` is a LightningModule, so a Lightning `Trainer` runs the rounds.
"""

from fedtorch._lazy import attach

# `__init__.pyi` lists the names, for type checkers and for `attach`, which imports each on first use.
__getattr__, __dir__ = attach(__name__, __file__)
__version__ = "0.1.0"
