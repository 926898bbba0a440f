"""Inference after a fit: effects of sites, predictions, contrasts, tables.

`run.summary()` is the table of the parameters that all sites share. The functions of this package take the run:
`ranef` returns the coefficients of each site, `predict` predictions of rows with intervals, `contrasts` and
`marginal_effects` quantities derived from the coefficients, `adapted` a new site's posterior from its rows, and
`to_inferencedata` the posterior for ArviZ. `imputed` completes rows with missing cells, several times, and `pooled`
combines the fits of the completed data sets.

>>> import torch, fedtorch as ft
>>> fits = [(torch.tensor([slope]), torch.tensor([[0.04]])) for slope in (0.9, 1.0, 1.2)]
>>> round(float(ft.inference.pooled(fits).mean[0]), 2)
1.03
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
