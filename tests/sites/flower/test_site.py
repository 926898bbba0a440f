"""Sites whose process lives for one message: over a stand-in for Flower's engine, and over that where it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.oracles.closed_forms import ROUNDING, distance
from support.scripts.flower_grid import LIBRARY, Grid
from support.sites import offers

import fedtorch as ft
from experiments.benchmarks import remote_flower
from experiments.benchmarks.parts.remote_problem import ALGORITHMS, clients
from fedtorch import checkpoint, tree
from fedtorch.sites import Remote, SiteConfiguration
from fedtorch.sites.flower import _post, site as site, transport as transport
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds.session import SiteSession
from fedtorch.sites.rounds.site import deliver


class Brief:
    """A site of which every message finds a new one."""

    def __init__(self, name: str, configuration: SiteConfiguration, folder: Path) -> None:
        self.name, self.configuration, self.folder = name, configuration, folder
        self.ended: SiteSession | None = None
        self.fails = 0

    def __call__(self, settings: Any, opens: bool, payloads: Sequence[bytes]) -> tuple[str, list[bytes]]:
        said, ended = deliver(self.configuration, self.folder, opens, payloads)
        self.ended = self.ended or ended
        if self.fails:
            self.fails -= 1
            raise RuntimeError("killed after its work, before it could say so")
        return self.name, said


def test_states_outlive_the_process_of_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of one process, also where an answer is lost and the site goes back to what the server counts on."""
    monkeypatch.setattr(_post, "library", lambda: LIBRARY)
    monkeypatch.setattr(_post, "_LONGEST_PAUSE", 0.01)
    data, controlled = clients(["1", "2", "3"]), ALGORITHMS["controlled"]
    brought = offers(data, controlled)
    sites = {name: Brief(name, configuration, tmp_path / name) for name, configuration in brought.items()}
    host = transport.serve(Grid(dict(enumerate(sites.values()))), pause=0.001)
    population = Remote(host, list(sites), "it", quorum=1.0, seconds=20.0)
    run = ft.Run(controlled(), population, seed=3)
    run.step()
    run.step()
    sites["b"].fails = 1
    for _ in range(2):
        run.step()
    population.finish(run)
    host.close()
    wanted = ft.run(controlled(), ft.InProcess(data), rounds=4, seed=3)
    assert distance(run.server, wanted.server) < ROUNDING
    visits = [each.ended for each in sites.values() if each.ended is not None]
    assert distance(tree.concatenate([session.tensors() for session in visits]), wanted.tensors()) < ROUNDING


def test_a_site_that_has_begun_nothing_is_silent(tmp_path: Path) -> None:
    configuration = SiteConfiguration(clients(["1"]), ALGORITHMS)
    said, ended = deliver(configuration, tmp_path, True, [])
    assert (len(said), ended) == (1, None)
    assert deliver(configuration, tmp_path, False, []) == ([], None)
    (refusal,), _ = deliver(configuration, tmp_path, False, [b"no payload"])
    assert "does not understand" in frames.read(refusal, "a").text("reason")


def test_what_a_supernode_has_to_say(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected name and states in the SuperNode's --node-config"):
        site.take_part({"data": "my_data.py"}, True, [])
    file = Path(__file__).parents[2] / "support" / "scripts" / "my_data.py"
    name, said = site.take_part({"name": "a", "data": str(file), "states": str(tmp_path)}, True, [])
    assert (name, len(said)) == ("a", 1)


def flower(test: Callable[..., None]) -> Callable[..., None]:
    """A slow test of Flower's own engine."""
    missing = remote_flower.interpreter() is None
    test = pytest.mark.skipif(missing, reason="FEDTORCH_FLOWER is to name a Python that has flwr")(test)
    return pytest.mark.slow(pytest.mark.timeout(900)(test))


def is_that_of_one_process(folder: Path, server: dict[str, list], rounds: int) -> None:
    """Checks the server's state, and what the sites have saved."""
    assert remote_flower.away(server, "controlled", rounds) < ROUNDING
    data = clients(remote_flower.SITES)
    wanted = ft.run(ALGORITHMS["controlled"](), ft.InProcess(data), rounds=rounds, seed=0).tensors()
    for k, client in enumerate(data.names):
        saved = checkpoint.read(folder / f"{client.partition('/')[0]}.safetensors")
        mine = {name: saved[f"{client}.{name}"] for name in wanted}
        assert distance(mine, tree.map(lambda leaf, k=k: leaf[k], wanted)) < ROUNDING


@flower
def test_flowers_own_engine(tmp_path: Path) -> None:
    """A SuperLink and two SuperNodes; SCAFFOLD's states lie in the sites' folders between messages."""
    with remote_flower.engine(tmp_path):
        found = remote_flower.submit(tmp_path, "controlled", rounds=3)
    is_that_of_one_process(tmp_path, found["server"], 3)


@flower
def test_a_supernode_that_is_killed_and_started_again(tmp_path: Path) -> None:
    """It is another node to Flower, which sees after a minute or two that the first one has gone."""
    with remote_flower.engine(tmp_path) as again, ThreadPoolExecutor() as pool:
        found = pool.submit(remote_flower.submit, tmp_path, "controlled", 3, 600.0)
        while not found.done() and not list((tmp_path / "states-1").glob("*/*.safetensors")):
            time.sleep(0.1)
        again("1")
        server = found.result()["server"]
    is_that_of_one_process(tmp_path, server, 3)
