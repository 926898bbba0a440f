"""What a fitted model says, in the words of a paper: effects of sites, predictions, contrasts, tables.

`run.summary()` is the table of what all sites share. The functions of this package take the run: `ranef` has the
coefficients of each site, `predict` intervals of rows, `contrasts` and `marginal_effects` what follows from the
coefficients, `adapted` a new site's posterior from its rows, `to_inferencedata` all of it for ArviZ. `imputed`
completes rows with missing cells, several times, and `pooled` joins the fits of what it has completed.

>>> import torch, fedtorch as ft
>>> fits = [(torch.tensor([slope]), torch.tensor([[0.04]])) for slope in (0.9, 1.0, 1.2)]
>>> round(float(ft.inference.pooled(fits).mean[0]), 2)
1.03
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
