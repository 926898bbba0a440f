"""Sites over Flower's deployment engine beside the same sites over gRPC: what a round costs, warm.

A SuperLink and two SuperNodes on this machine's loopback, without telemetry, each in processes of their own, start the
app in `flower_app`: FedAvg of a linear model, and SCAFFOLD, whose clients' states lie in the sites' folders between
messages. Rounds over gRPC are measured before and after.

Flower has a virtual environment of its own, `.venv-peers/flower-sites`, or the Python that `FEDTORCH_FLOWER` names
(where both are missing nothing is measured): `pip install torch flwr==1.41.0 numpy safetensors filelock
lightning torchmetrics`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

import fedtorch as ft
from experiments import common
from experiments.benchmarks import remote
from experiments.benchmarks.parts import measure
from experiments.benchmarks.parts.remote_problem import ALGORITHMS, clients

APP = Path(__file__).parent / "flower_app"
ROOT = Path(__file__).parents[2]
SITES = ("1", "2")
SITE = """
from experiments.benchmarks.parts.remote_problem import ALGORITHMS, clients

data, algorithms = clients(["{name}"]), ALGORITHMS
"""


def interpreter() -> Path | None:
    """A Python that has flwr and what fedtorch needs of other packages, if there is one."""
    found = Path(os.environ.get("FEDTORCH_FLOWER", ROOT / ".venv-peers" / "flower-sites" / "bin" / "python"))
    return found if found.exists() else None


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens at."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def environment(folder: Path) -> dict[str, str]:
    """Of all of Flower's processes: no telemetry, its files in `folder`, its programs first on the path."""
    python = interpreter()
    assert python is not None
    own = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(folder / "flwr"), "OMP_NUM_THREADS": "1"}
    path = {"PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]), "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own, **path}


@contextmanager
def engine(folder: Path, names: Sequence[str] = SITES) -> Iterator[Callable[[str], None]]:
    """A SuperLink, and a SuperNode for each site, until the end; their logs and the sites' states are in `folder`.

    Yields a function that kills a site's SuperNode and starts another in its place.
    """
    link, *nodes = free_ports(1 + len(names))
    home = folder / "flwr"
    home.mkdir()
    here = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
    (home / "config.toml").write_text(here)
    commands = {
        "link": ["flower-superlink", "--insecure", "--port", str(link), "--disable-runtime-dependency-installation"]
    }
    for name, port in zip(names, nodes):
        offer = folder / f"site-{name}.py"
        offer.write_text(SITE.format(name=name))
        own = {"name": name, "data": offer, "states": folder / f"states-{name}", "save": folder / f"{name}.safetensors"}
        config = " ".join(f'{key}="{value}"' for key, value in own.items())
        commands[name] = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{link}", "--port", str(port)]
        commands[name] += ["--node-config", config]
    started: dict[str, subprocess.Popen[bytes]] = {}

    def begin(name: str) -> None:
        if name in started:
            stop(started[name])
        with (folder / f"{name}.log").open("ab") as log:
            started[name] = subprocess.Popen(
                commands[name], env=environment(folder), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    try:
        for name in commands:
            begin(name)
            if name == "link":
                wait_for(link)
        yield begin
    finally:
        for each in started.values():
            stop(each)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill it and what it has started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(port: int, seconds: float = 120.0) -> None:
    """Until somebody listens there."""
    ends = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > ends:
                raise TimeoutError(f"Expected somebody at port {port} within {seconds:g} s, but nobody was") from None
            time.sleep(0.2)


def submit(folder: Path, algorithm: str, rounds: int, seconds: float = 900.0) -> dict:
    """Run the app, and return what its server has written."""
    out = folder / f"{algorithm}.json"
    config = f'sites="{",".join(SITES)}" algorithm="{algorithm}" rounds={rounds} out="{out}"'
    command = ["flwr", "run", str(APP), "--run-config", config]
    subprocess.run(command, env=environment(folder), check=True, stdout=subprocess.DEVNULL, timeout=seconds)
    ends = time.monotonic() + seconds
    while not out.exists():
        if time.monotonic() > ends:
            logs = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in folder.glob("*.log"))
            raise TimeoutError(f"Expected the app to end within {seconds:g} s, but it did not\n{logs}")
        time.sleep(0.5)
    time.sleep(1.0)
    return json.loads(out.read_text())


def away(found: dict[str, list], algorithm: str, rounds: int) -> float:
    """The largest difference of the server's state from that of a run in this process."""
    wanted = ft.run(ALGORITHMS[algorithm](), ft.InProcess(clients(SITES)), rounds=rounds, seed=0)
    own = {name: leaf for name, leaf in ft.tree.items(wanted.server)}
    return max(float((torch.tensor(found[name], dtype=leaf.dtype) - leaf).abs().max()) for name, leaf in own.items())


def over_grpc(algorithm: str, rounds: int) -> list[float]:
    """Seconds of each round after the first, of the same sites over gRPC."""
    with remote.serving([[name] for name in SITES]) as (host, names, _):
        run = ft.Run(ALGORITHMS[algorithm](), remote.population(host, names, algorithm), seed=0)
        return measure.round_seconds(run, 1 + rounds)[1:]


def rows(rounds: int) -> list[common.Row]:
    """Both algorithms over both transports."""
    result = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        before = {name: over_grpc(name, 200) for name in ALGORITHMS}
        with engine(folder):
            found = {name: submit(folder, name, rounds) for name in ALGORITHMS}
        after = {name: over_grpc(name, 200) for name in ALGORITHMS}
    for name, make in ALGORITHMS.items():
        setting = f"{(make.__doc__ or name).split()[0]}, two sites, {rounds} rounds"
        slow, fast = statistics.median(found[name]["seconds"][1:]), statistics.median(before[name] + after[name])
        result += [
            common.Row(setting, "s until both sites are met, Flower", found[name]["met"]),
            common.Row(setting, "s of the first round, Flower", found[name]["seconds"][0]),
            common.Row(setting, "s of a later round, Flower", slow),
            common.Row(setting, "s of a later round, gRPC", fast),
            common.Row(setting, "Flower's round in gRPC's rounds", slow / fast),
            common.Row(setting, "bytes down a round, both", found[name]["down"]),
            common.Row(setting, "bytes up a round, both", found[name]["up"]),
            common.Row(setting, "largest difference from one process", away(found[name]["server"], name, rounds)),
        ]
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; --smoke does few rounds."""
    options = common.arguments(__doc__).parse_args(argv)
    with common.quiet():
        found = [] if interpreter() is None else rows(3 if options.smoke else 6)
    common.show_rows(f"remote_flower ({common.machine()})", found, ".4g")
    common.finish("benchmarks.remote_flower", found, options)


if __name__ == "__main__":
    main()
