"""A site whose process Flower starts for every message: the `ClientApp` for a server of `transport.flower`.

The site's settings come from its SuperNode's command, not from the app::

    flower-supernode … --node-config 'name="ward 7" data="/srv/my_data.py" states="/srv/states"'

`data` is the site's file, see `rounds.configuration`; `states` a folder for its states, from which the next process
continues; the optional `save` is the file for the clients' tensors after a run.

A site's first frame on a stream:

>>> import tempfile
>>> from pathlib import Path
>>> from fedtorch import wire
>>> from fedtorch.sites.flower import site as flower
>>> folder = tempfile.TemporaryDirectory()
>>> lines = [
...     "import torch, fedtorch as ft",
...     "data = ft.data.from_tensors([(torch.ones(20, 2), torch.ones(20))], names=['bed 1'])",
...     "algorithms = {'averaging': lambda: ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1)))}",
... ]
>>> _ = Path(f"{folder.name}/my_data.py").write_text("; ".join(lines))
>>> settings = {"name": "ward 7", "data": f"{folder.name}/my_data.py", "states": f"{folder.name}/states"}
>>> name, (hello,) = flower.take_part(settings, opens=True, payloads=[])
>>> name, wire.metadata(hello)["clients"]
('ward 7', ['bed 1'])
>>> folder.cleanup()
>>> from importlib.util import find_spec
>>> app = flower.app() if find_spec("flwr") else None  # does this for every message, if flwr is installed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedtorch.sites.flower import transport as flower
from fedtorch.sites.rounds.configuration import read_configuration
from fedtorch.sites.rounds.site import deliver


def app() -> Any:
    """Return the `ClientApp`: `app = fedtorch.sites.flower.site.app()` in the app's client module."""
    return flower.client_app(take_part)


def take_part(settings: Mapping[str, Any], opens: bool, payloads: Sequence[bytes]) -> tuple[str, list[bytes]]:
    """Return (the site's name, its answers to frames of the server); see `transport.flower.client_app`.

    Raises:
        ValueError: the node's settings are incomplete.
    """
    missing = [name for name in ("name", "data", "states") if not isinstance(settings.get(name), str)]
    if missing:
        raise ValueError(f"Expected {' and '.join(missing)} in the SuperNode's --node-config, each a text in quotes")
    answers, ended = deliver(read_configuration(settings["data"]), settings["states"], opens, payloads)
    if ended is not None and "save" in settings:
        ended.save(settings["save"])
    return settings["name"], answers
