"""Vertical federation: parties that hold different features of the same rows.

Parties (`Party`) align their rows (`align`), privately.

The posterior of a model (`augmented`, `power`) is approximated by a guide (`Guide(sums())`), which `sfvi` fits in one
graph. A split network (`SplitNetwork`) is such a model with networks as predictors, trained by a Lightning `Trainer`.
Among parties, both are trained by the same halves of a protocol (`iteration`): in one process, over ranks (`ranks`)
or between organisations (`remote`; `resuming` where connections break and processes die, `delay=` where connections
are slow). Every fit has the methods of `ft.Run`, `rounds`, `history`, `save`, `load` and `evaluate`, and
`ft.report.write` takes it.

Features stay where they are, but the messages of training reveal more than predictions do: gradients of a split
network reveal the labels to the parties, and averaging a party's messages over steps removes the noise ρ. With `sums`
a party sends a summand under masks. See `split` and `iteration`.

>>> import torch, fedtorch as ft
>>> clinic = ft.vfl.Party("clinic", ["ann", "bob", "cem"], torch.tensor([[1.0], [2.0], [3.0]]), ["age"])
>>> labels = ft.vfl.Party("registry", ["cem", "ann"], response=torch.tensor([1.0, 0.0]))
>>> ft.vfl.align([clinic, labels]).data.features[0].flatten()  # of the rows that both have, by identifier
tensor([1., 3.])
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
