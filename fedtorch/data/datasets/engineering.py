"""Machines that wear out: turbofan engines and lithium-ion cells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from fedtorch.data.cache import locate
from fedtorch.data.datasets._frames import by_client, choose, read
from fedtorch.data.federated import FederatedData

BATTERIES = {"calce": "calce_cs2_cycles.csv", "xjtu": "xjtu_capacity.csv", "mit": "mit_capacity.csv"}


def cmapss(
    train: bool = True,
    sensors: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    remaining_life: bool = False,
) -> FederatedData:
    """Load run-to-failure records of 100 simulated turbofan engines, "1" … "100"; subset FD001 of C-MAPSS.

    Rows (x `(1,)`, the time in cycles, 1, 2, …; y `(len(sensors),)`, the measurements, in the units of the
    file), in the order of time. An engine has 128 to 362 cycles, 20631 in all; in the test part, which is cut
    before the failure, 13096 in all.

    Source: Saxena, Goebel, Simon, Eklund (2008), "Damage propagation modeling for aircraft engine
    run-to-failure simulation", NASA Prognostics Center of Excellence; a work of the U.S. Government, no licence
    stated.

    Args:
        train: True for the engines that run to failure, False for the test part.
        sensors: indices 1 … 21 of the sensors in the columns of y; default: all.
        dtype: of x and y.
        remaining_life: whether y has a last column with the engine's remaining cycles after the row: 0 in the last row
            of one that runs to failure; in the test part from the file of true values.
    """
    chosen = [int(name) for name in choose("sensors", _strings(sensors), _strings(range(1, 22)) or [])]
    table = numpy.loadtxt(locate("cmapss", f"{'train' if train else 'test'}_FD001.txt"))
    engines, cycles, y = table[:, 0].astype(int), table[:, 1], table[:, [4 + s for s in chosen]]
    if remaining_life:
        after = numpy.zeros(engines.max()) if train else numpy.loadtxt(locate("cmapss", "RUL_FD001.txt"))
        last = numpy.array([cycles[engines == engine].max() for engine in range(1, len(after) + 1)])
        y = numpy.column_stack((y, (last + after)[engines - 1] - cycles))
    return by_client(engines, (cycles[:, None], y), dtype, ["cycle"])


def battery(
    which: str = "calce", batches: Sequence[str] | None = None, dtype: torch.dtype = torch.float32
) -> FederatedData:
    """Load capacity of lithium-ion cells over their charge cycles; every cell is a client.

    Rows (x `(1,)`, the cycle 1, 2, …; y, the capacity in Ah), in the order of time:

    - "calce": 4 prismatic LCO cells (CS2_35 … CS2_38) of 1.1 Ah, 882 to 996 cycles;
    - "xjtu": 55 NCM cells of 2.0 Ah, in batches 2C (8 cells), 3C (15), R2.5 (8), R3 (8), RW (8) and
      Sim_satellite (8); 2C and 3C together are 23 cells;
    - "mit": 125 LFP cells of 1.1 Ah, charged fast, in batches 2017-05-12 (46), 2017-06-30 (43) and 2018-04-12
      (36).

    Source: CALCE Battery Group, University of Maryland (cite its articles); Wang et al. (2024), Nature
    Communications 15, 4332, CC BY 4.0; Severson et al. (2019), Nature Energy 4, 383–391, CC BY 4.0.

    Args:
        which: "calce", "xjtu" or "mit".
        batches: of the cells; default: all. "calce" has none.
        dtype: of x and y.
    """
    choose("batteries", [which], list(BATTERIES))
    frame = read("battery", BATTERIES[which])
    if batches is not None:
        if "batch" not in frame.columns:
            raise ValueError(f"Expected no batches for {which!r}, but got {batches!r}; only xjtu and mit have some")
        frame = frame[frame["batch"].isin(choose("batches", batches, list(frame["batch"].unique())))]
    x, y = frame[["cycle"]].to_numpy(dtype=numpy.float64), frame["capacity_Ah"].to_numpy(dtype=numpy.float64)
    return by_client(frame["cell"], (x, y), dtype, ["cycle"])


def _strings(numbers: Sequence[int] | None) -> list[str] | None:
    return None if numbers is None else [str(number) for number in numbers]
