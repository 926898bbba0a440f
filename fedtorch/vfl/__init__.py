"""Vertical federation: parties that hold different features of the same rows.

Parties (`Party`) align their rows (`align`), privately.

A model (`augmented`, `power`) is approximated by a guide (`Guide(sums())`) and fitted by `sfvi` in one graph. A
split network (`SplitNetwork`) is such a model with networks as predictors, and is trained by a Lightning `Trainer`.
Among parties, both are trained by the same halves of a protocol (`iteration`), in one process, over ranks
(`ranks`) or between organisations (`remote`; `resuming` where lines break and processes die, `delay=` where lines are
slow). Every fit answers to the verbs of `ft.Run`: `rounds`, `history`, `save`, `load`, `evaluate`, `ft.report.write`.

Features stay where they are, but training shows more than predictions do: gradients of a split network give the
parties the labels, and averaging what is sent over steps removes the noise ρ. What leaves a party with `sums` is a
summand under masks. See `split` and `iteration`.

>>> import torch, fedtorch as ft
>>> clinic = ft.vfl.Party("clinic", ["ann", "bob", "cem"], torch.tensor([[1.0], [2.0], [3.0]]), ["age"])
>>> labels = ft.vfl.Party("registry", ["cem", "ann"], response=torch.tensor([1.0, 0.0]))
>>> ft.vfl.align([clinic, labels]).data.features[0].flatten()  # of the rows that both have, by identifier
tensor([1., 3.])
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
