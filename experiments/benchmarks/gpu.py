"""A GPU's figures: tests, every kernel beside its bound, `torch.compile` and the vendor's library, and whole jobs.

Without a CUDA device nothing is measured, and a table that is not there says so. Parts that have been measured on this
machine are in `results/gpu.json` and are not measured again without `--fresh`, so that what breaks off goes on.
`--smoke` takes the same ways on the CPU, tiny, with the kernels in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from experiments import common
from experiments.benchmarks.parts import gpu_beside, gpu_jobs, gpu_kernels
from experiments.benchmarks.parts.gpu_timing import Rates, device_of, rates

RESULTS = Path(__file__).parent / "results"
DEVICE = "the device"
UNMEASURED = "not measured: no device yet"  # what the table says without one


@cache
def measured(device: str, small: bool) -> Rates:
    """What the device can do."""
    return rates(device, small)


def ceilings(small: bool, device: str) -> list[common.Row]:
    """The device's own rates."""
    found = measured(device, small)
    names = ("copy, GB/s", "float32 product without TF32, GFLOP/s", "float64 product, GFLOP/s")
    return [common.Row(DEVICE, name, value / 1e9) for name, value in zip(names, found)]


def tests(small: bool, device: str) -> list[common.Row]:
    """How many tests of the device's numbers against the CPU's pass, and how many do not."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run([*command, *["--collect-only"] * small], capture_output=True, text=True, check=False)
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    counts = {name: sum(map(int, re.findall(rf"(\d+) {name}", summary))) for name in ("passed", "failed", "error")}
    if not small and (done.returncode or not counts["passed"]):
        sys.stderr.write(done.stdout[-4000:])
    wrong = counts["failed"] + counts["error"]
    return [common.Row("tests", "passed", counts["passed"]), common.Row("tests", "failed", wrong)]


def parts(small: bool, device: str) -> dict[str, Callable[[], list[common.Row]]]:
    """All parts by name, in order."""
    kernel = lambda name: gpu_kernels.rows(name, small, device, measured(device, small))
    return {
        "device": partial(ceilings, small, device),
        "tests": partial(tests, small, device),
        **{name: partial(kernel, name) for name in gpu_kernels.CASES},
        "linear_clients": lambda: gpu_beside.linear_clients(small, device, measured(device, small)),
        **{name: partial(job, small, device) for name, job in gpu_jobs.JOBS.items()},
    }


def roofline(rows: Sequence[common.Row]) -> Figure:
    """What kernels reach, by operations a byte, under what the device can do."""
    of = lambda setting, metric: next((r.ours for r in rows if (r.setting, r.metric) == (setting, metric)), None)
    copy, *peaks = (row.ours for row in rows if row.setting == DEVICE)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    intensity = torch.logspace(-2, 3, 200).tolist()
    for peak, name in zip(peaks, ("float32", "float64")):
        axes.plot(intensity, [min(copy * each, peak) for each in intensity], label=name)
    for setting in dict.fromkeys(row.setting for row in rows):
        at, rate = of(setting, "operations a byte"), of(setting, "GFLOP/s")
        if at is not None and rate is not None:
            axes.plot(at, rate, "o", color="black")
            axes.annotate(
                setting.partition(":")[0], (at, rate), textcoords="offset points", xytext=(5, -10), fontsize=8
            )
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="GFLOP/s")
    axes.legend()
    return figure


def kept_in(file: Path, fresh: bool) -> dict[str, list[common.Row]]:
    """The parts that this machine has measured before."""
    if fresh or not file.exists():
        return {}
    found = json.loads(file.read_text())
    if found["machine"] != common.machine():
        return {}
    return {name: [common.Row(**row) for row in rows] for name, rows in found["parts"].items()}


def keep(file: Path, done: dict[str, list[common.Row]]) -> None:
    """Write what has been measured, all or nothing."""
    text = json.dumps(
        {"machine": common.machine(), "parts": {n: [asdict(r) for r in rows] for n, rows in done.items()}}
    )
    temporary = file.with_suffix(".part")
    temporary.write_text(text + "\n")
    os.replace(temporary, file)


def attempted(measure: Callable[[], list[common.Row]]) -> list[common.Row] | None:
    """The rows of a part; None where it breaks off, so that the others still have the device's time."""
    try:
        return measure()
    except Exception:
        traceback.print_exc()
        return None
    finally:
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what has not been measured, or say that there is no device."""
    parser = common.arguments(__doc__)
    parser.add_argument(
        "--part", action="append", choices=sorted(parts(True, "cpu")), help="only this part; repeatable"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what has been measured")
    parser.add_argument("--kept", type=Path, help="where parts are kept (default results/gpu.json; none for --smoke)")
    options = parser.parse_args(argv)
    device = device_of(options.smoke)
    if device is None:
        sys.stderr.write("No CUDA device: nothing has been measured; `--smoke` shows that the benchmark runs.\n")
        common.finish("benchmarks.gpu", [], options)
        return
    file = options.kept or (None if options.smoke else RESULTS / "gpu.json")
    done = {} if file is None else kept_in(file, options.fresh)
    small = options.smoke
    with common.quiet():
        for name, measure in parts(small, device).items():
            if name not in done and (options.part is None or name in options.part):
                sys.stderr.write(f"{name}\n")
                found = measure() if small else attempted(measure)
                if found is not None:
                    done[name] = common.of_part(name, found)
                if file is not None:
                    keep(file, done)
    rows = [row for name in parts(small, device) if name in done for row in done[name]]
    common.show_rows(f"gpu ({common.machine()})", rows, ".4g")
    if not small and options.out is None:
        options.out = RESULTS
    draw = (lambda: {"gpu": roofline(rows)}) if "device" in done else None
    common.finish("benchmarks.gpu", rows, options, draw)


if __name__ == "__main__":
    main()
