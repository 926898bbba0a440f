"""Uses an installed fedtorch as someone who has just installed it: `python -I installed.py PART`, a part per extra.

It knows the installed package only, nothing of the repository, and runs in an environment without the tests' own needs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from contextlib import redirect_stdout, suppress
from importlib import metadata
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

COMMAND = str(Path(sysconfig.get_path("scripts")) / "fedtorch")
MY_DATA = """
import os

import torch

import fedtorch as ft

x = torch.arange(30, dtype=torch.float64).reshape(2, 5, 3).square().sin()
clients = {name: (rows, rows.sum(1)) for name, rows in zip("ab", x)}
here = os.environ.get("SITE", "ab")
data = ft.data.from_tensors([clients[name] for name in here], names=list(here))
algorithms = {"mean": lambda: ft.fedavg(ft.least_squares(ft.LinearHead(3, intercept=False, dtype=torch.float64)))}
"""
PAGE = """---
file_format: mystnb
kernelspec:
  name: python3
---

# A page

```{code-cell} python
import fedtorch as ft

ft.Network.ring(6)
```
"""


def said(*command: str) -> str:
    """What a command prints; its errors go where ours go."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def base() -> None:
    """The README's four lines, and the command line."""
    import fedtorch

    place = Path(fedtorch.__file__)
    assert Path(sysconfig.get_path("purelib")) in place.parents, f"Expected the installed package, but got {place}"
    assert metadata.version("fedtorch") == fedtorch.__version__
    text = metadata.metadata("fedtorch")["Description"]
    lines = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    names: dict[str, object] = {}
    with redirect_stdout(StringIO()):  # its progress bar
        exec(compile(lines, "README.md", "exec"), names)
    torch, federation, data = names["torch"], names["federation"], names["data"]
    scores = federation.run.evaluate(data, {"accuracy": fedtorch.metrics.accuracy()})  # type: ignore[attr-defined]
    assert federation.round == 50  # type: ignore[attr-defined]
    assert federation.client_module(3)(torch.zeros(1, 64)).shape == (1, 10)  # type: ignore[attr-defined]
    assert scores["accuracy"].overall > 0.8, scores
    assert "usage: fedtorch" in said(COMMAND, "--help")
    assert "digits" in said(COMMAND, "data", "list")
    assert "CC BY 4.0" in said(COMMAND, "data", "get", "digits")
    _programs(place.parent)


def _programs(package: Path) -> None:
    """Programs are compiled by numba, and nothing by a C compiler."""
    from fedtorch.programs.philox import fold_keys

    assert fold_keys.usable()
    assert not [file for ending in ("c", "h", "so") for file in package.rglob(f"*.{ending}")]


def triton() -> None:
    """A program in Triton's interpreter, beside its reference."""
    os.environ |= {"TRITON_INTERPRET": "1", "FEDTORCH_PROGRAMS": "off"}
    import torch

    from fedtorch import random

    key = random.key(3)
    reference = random.normal(key, (9,), torch.float64)
    os.environ["FEDTORCH_PROGRAMS"] = "interpret"
    found = random.normal(key, (9,), torch.float64)
    assert "fedtorch.programs.triton.philox" in sys.modules
    torch.testing.assert_close(found, reference, rtol=1e-13, atol=1e-13)  # rounding of a logarithm and a cosine


def privacy() -> None:
    """ε by privacy-loss distributions, beside the value that dp-accounting and prv-accountant agree on."""
    from fedtorch.trust import privacy as fedtorch_privacy

    epsilon = fedtorch_privacy.epsilon(noise=1.0, sampling_rate=0.01, rounds=1000, delta=1e-5)
    assert abs(epsilon - 1.8283) < 1e-3, epsilon  # prv-accountant's interval is 1.8182 to 1.8383


def remote() -> None:
    """Two sites as processes that enrol and join by the commands; the same numbers as in one process."""
    import torch

    import fedtorch as ft
    from fedtorch import checkpoint
    from fedtorch.sites import Roster, serve
    from fedtorch.sites.enrolment import EnrolmentServer
    from fedtorch.sites.identity import identity

    folder, sites = Path.cwd(), []
    (folder / "my_data.py").write_text(MY_DATA)
    said(COMMAND, "authority", "authority", "--server", "server")
    roster = Roster(folder / "server" / "roster.json")
    enrolling = EnrolmentServer("authority", "127.0.0.1:0", roster)
    for name in ("a", "b"):
        token = said(COMMAND, "invite", name, "--authority", "authority", "--at", f"127.0.0.1:{enrolling.port}").strip()
        said(COMMAND, "enrol", token, "--identity", name)
    enrolling.close()
    host = serve("127.0.0.1:0", identity.read("server"), roster)
    try:
        for name in ("a", "b"):
            join = [COMMAND, "join", f"127.0.0.1:{host.port}", "--data", "my_data.py", "--identity", name]
            sites.append(subprocess.Popen([*join, "--save", f"{name}.safetensors"], env={**os.environ, "SITE": name}))
        own: dict[str, object] = {}
        exec(MY_DATA, own)
        algorithm, data = own["algorithms"]["mean"](), own["data"]  # type: ignore[index]
        population = ft.Remote(host, ["a", "b"], "mean", {}, quorum=1.0, seconds=120.0, agreed=roster.rows)
        run = ft.run(algorithm, population, rounds=2)
        population.finish(run)
        assert [site.wait(60) for site in sites] == [0, 0]
    finally:
        for site in sites:
            with suppress(ProcessLookupError):
                site.kill()
        host.close()
    assert checkpoint.read(folder / "a.safetensors")
    here = ft.run(algorithm, ft.InProcess(data), rounds=2)  # type: ignore[arg-type]
    gap = (run.global_module()(torch.eye(3).double()) - here.global_module()(torch.eye(3).double())).abs().max()
    assert gap < 1e-12, gap  # rounding of sums in another order


def tune() -> None:
    """A search that Optuna leads."""
    import torch

    import fedtorch as ft

    data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=3, seed=0)
    build = lambda mu: ft.fedprox(ft.least_squares(torch.nn.Linear(10, 1)), mu)
    metric = ft.metrics.mean_squared_error()
    given = {"validation": 0.3, "metric": metric, "trials": 6, "rounds": 9, "search": "tpe"}
    result = ft.tune(build, {"mu": [0.0, 1e3, 1e9]}, ft.InProcess(data), **given)  # type: ignore[arg-type]
    assert result.run.number == 9 > min(result.rounds)


def export() -> None:
    """A model as ONNX, which predicts alike."""
    import onnx
    import torch
    from onnx.reference import ReferenceEvaluator

    import fedtorch as ft

    data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=3, seed=0)
    run = ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1))), ft.InProcess(data), rounds=2)
    module, x = run.global_module().eval(), data[0][0]
    torch.onnx.export(module, (x,), "model.onnx", dynamo=True, input_names=["x"])
    (output,) = ReferenceEvaluator(onnx.load("model.onnx")).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), module(x).detach(), rtol=1e-5, atol=1e-3)  # of about 150


def docs() -> None:
    """A page whose code runs while it is built, as strictly as the documentation is."""
    Path("conf.py").write_text('extensions = ["myst_nb"]\nhtml_theme = "furo"\nnb_execution_raise_on_error = True\n')
    Path("index.md").write_text(PAGE)
    said(sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", ".", "out")
    assert "Network(nodes=6, edges=6)" in re.sub("<[^>]*>", "", Path("out", "index.html").read_text())


PARTS = {part.__name__: part for part in (base, triton, privacy, remote, tune, export, docs)}

if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        os.chdir(scratch)
        PARTS[sys.argv[1]]()
        os.chdir("/")
    print(f"{sys.argv[1]}: works", flush=True)
