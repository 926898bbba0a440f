"""A run's report, one self-contained page for a browser; see `fedtorch.report.folder`.

>>> import tempfile, torch, fedtorch as ft
>>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor([1.0, 2.0]))] * 3)
>>> run = ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1))), ft.InProcess(data), rounds=2)
>>> with tempfile.TemporaryDirectory() as folder:
...     ft.report.write(run, folder).name
'report.html'
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
