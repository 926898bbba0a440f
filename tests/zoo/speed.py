"""How much faster a BERT of two layers is stacked than client by client: `PYTHONPATH=tests python -m zoo.speed`.

Rounds of both take turns in one process. `results.json` keeps it for the number of threads that OMP_NUM_THREADS says.
On a busy machine OMP_WAIT_POLICY=passive lets threads wait for each other without work. Arguments are numbers of
settings.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from typing import Any

import torch

import fedtorch as ft
from fedtorch.data import FederatedData
from zoo.cases.language import bert, project
from zoo.masks import register
from zoo.results import RESULTS, write

CLIENTS, ROWS, STEPS, ROUNDS = 20, 8, 16, 7
SETTINGS: list[dict[str, Any]] = [
    {"hidden": 32, "rows": "8 each"},
    {"hidden": 64, "rows": "8 each"},
    {"hidden": 128, "rows": "8 each"},
    {"hidden": 32, "rows": "8 to 12"},
    {"hidden": 32, "rows": "8 to 12", "mask": "always made"},
]


def sentences(ragged: bool) -> FederatedData:
    """Sentences of 16 tokens, the last up to eight of them padded."""
    counts = ROWS + torch.arange(CLIENTS) % (5 if ragged else 1)
    total, generator = int(counts.sum()), torch.Generator().manual_seed(0)
    integers = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator)
    mask = torch.arange(STEPS) < integers(STEPS // 2, STEPS + 1, total, 1)
    rows = {"input_ids": integers(3, 60, total, STEPS), "attention_mask": mask.long(), "labels": integers(0, 2, total)}
    return FederatedData(rows, counts)


def ratio(setting: dict[str, Any]) -> float:
    """Return seconds client by client over seconds stacked, the median over rounds that take turns."""
    hidden = setting["hidden"]
    net = bert(hidden_size=hidden, intermediate_size=2 * hidden)
    if "mask" in setting:
        net.set_attn_implementation(register())
    data, module = sentences("to" in setting["rows"]), project(net)
    rounds = []
    for batched in (True, False):
        rowwise = batched and "mask" in setting  # with the mask a row's loss is its own
        local = ft.gradient_descent(module, epochs=1, batch_size=4, batched=batched, rowwise=rowwise)
        rounds.append(ft.Run(ft.fedavg(local), ft.InProcess(data)).rounds(ROUNDS))
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    ratios = []
    for _ in range(ROUNDS):
        seconds = []
        for each in rounds:
            began = clock()
            next(each)
            seconds.append(clock() - began)
        ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios[1:])


def main() -> None:
    """Measure all settings in this process."""
    warnings.simplefilter("ignore")
    threads = torch.get_num_threads()
    chosen = [SETTINGS[int(number)] for number in sys.argv[1:]] or SETTINGS
    measured = [{**setting, "threads": threads, "ratio": round(ratio(setting), 1)} for setting in chosen]
    sys.stdout.write("\n".join(map(str, measured)) + "\n")
    kept = json.loads(RESULTS.read_text())
    new = [{**setting, "threads": threads} for setting in chosen]
    others = [e for e in kept.get("speed", []) if {k: v for k, v in e.items() if k != "ratio"} not in new]
    kept["speed"] = sorted(others + measured, key=lambda each: each["threads"])
    write(kept)


if __name__ == "__main__":
    main()
