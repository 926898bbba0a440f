"""Two companies and a registry: the protocol in one process, over processes, and that nothing is left of a failure."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from experiments import demo_company, demo_vertical, local_sites
from experiments.demo_company import COLUMNS
from fedtorch.sites import Hub
from fedtorch.sites.streams import memory
from fedtorch.sites.vertical import over_hub, over_link

ROOT = Path(__file__).parents[2]
SITES = """
import sys, time
from pathlib import Path

def take_part(name, folder, address, *arguments):
    assert name == "good" or sys.stdin.readline().startswith("fedtorch1.")
    (Path(folder) / f"{name} is here").touch()
    if name == "bad":
        raise SystemExit(3)
    time.sleep(float(arguments[0]))
"""
WAITS = """
import sys, time
from experiments import local_sites
with local_sites.serving() as server, local_sites.processes(server, "some_sites", ["good"], "60"):
    while not (server.folder / "good is here").exists():
        time.sleep(0.01)
    print(server.folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def _some_sites(tmp_path, monkeypatch):
    (tmp_path / "some_sites.py").write_text(SITES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def in_one_process(folder, steps, seed, act, half):
    """What `demo_vertical.by_processes` does, with threads for processes."""
    data, hub = demo_company.table(seed), Hub()
    for name in ("registry", *COLUMNS):
        (folder / name).mkdir(exist_ok=True)
    sides = {
        "train": lambda name: demo_company.trains(name, data, steps, seed, folder / name),
        "predict": lambda name: demo_company.answers(name, data, seed, folder / name),
    }
    with ThreadPoolExecutor() as pool:
        links = [pool.submit(over_link, sides[act](name), memory.link(hub, name), seconds=60) for name in COLUMNS]
        result = over_hub(half(folder / "registry"), hub, list(COLUMNS), seconds=60)[0]
        for link in links:
            link.result(60)
    return result


def check(found):
    plain, private = found["plain"], found["private labels, ε = 1"]
    assert plain["labels found by the clinic"] == 1.0
    assert plain["largest difference from one process"] == 0.0  # the same operations on the same shapes
    # Whatever a guess is made of, ε = 1 lets e/(1 + e) = 0.73 of evenly spread labels through; 400 have an sd of 0.025.
    assert private["labels found by the clinic"] < 0.80
    assert {"AUROC", "accuracy"} <= found["clinic alone"].keys() & found["laboratory alone"].keys()


def test_two_companies_train_keep_predict_and_leak(tmp_path):
    steps, seed = 5, 0
    do = partial(in_one_process, tmp_path, steps, seed)
    found = demo_vertical.results(demo_company.table(seed), steps, seed, tmp_path, do)
    check(found)
    kept = {file.name for name in ("registry", *COLUMNS) for file in (tmp_path / name).glob("*.safetensors")}
    assert kept == {"plain.safetensors", "epsilon_10.safetensors", "epsilon_1.safetensors"}
    figure = demo_vertical.draw({name: {metric: [value] for metric, value in of.items()} for name, of in found.items()})
    dots = [line.get_xdata() for line in figure.axes[1].lines if line.get_marker() == "o"]
    assert dots == [[found[way]["labels found by the clinic"]] for way in demo_company.WAYS]


@pytest.mark.slow  # five processes
def test_demo_vertical(tmp_path, capfd):
    demo_vertical.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    found = {}
    for row in json.loads((tmp_path / "rows.json").read_text())["rows"]:
        found.setdefault(row["setting"], {})[row["metric"]] = row["ours"]
    check(found)
    said = capfd.readouterr().out
    assert all(said.count(f"[{name}] ends") == 2 for name in COLUMNS)
    assert (tmp_path / "demo_vertical.png").stat().st_size > 5_000


@pytest.mark.usefixtures("_some_sites")
def test_a_site_that_fails_ends_the_demo_and_the_other_sites():
    with local_sites.serving() as server:
        begun = time.monotonic()
        with (
            pytest.raises(RuntimeError, match=r"Expected all sites to end well, but got exit codes .*'bad': 3"),
            local_sites.processes(server, "some_sites", ["good", "bad"], "60"),
        ):
            time.sleep(50)
        assert time.monotonic() - begun < 40
    assert not server.folder.exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("_some_sites")
def test_a_demo_that_is_told_to_end_leaves_no_process_and_no_file():
    path = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": path}
    demo = subprocess.Popen([sys.executable, "-c", WAITS], env=environment, stdout=subprocess.PIPE, text=True)
    folder = Path(demo.stdout.readline().strip())
    assert children(demo.pid) != []
    sites = children(demo.pid)
    demo.terminate()
    assert demo.wait(30) == 128 + signal.SIGTERM
    demo.stdout.close()
    assert [site for site in sites if Path(f"/proc/{site}").exists()] == []
    assert not folder.exists()


def children(pid):
    """Processes that a process has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if int(status.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(status.parent.name)
    return found
