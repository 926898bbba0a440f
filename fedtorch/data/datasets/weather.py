"""Weather in Finland: observations of the Finnish Meteorological Institute, a client per station.

Source: Finnish Meteorological Institute open data, CC BY 4.0, as handed out in the course of A. Jung,
"Federated learning: from theory to practice".
"""

from __future__ import annotations

import json

import numpy
import torch
from torch import Tensor

from fedtorch.data.datasets._frames import by_client, read
from fedtorch.data.federated import FederatedData

HOURLY = "Assignment_MLBasicsData.csv"


def fmi_weather(dtype: torch.dtype = torch.float32) -> FederatedData:
    """Load hourly air temperatures at 207 stations, in order of first appearance in the file, 19768 rows.

    Rows (x `(7,)`, y, the temperature in °C): latitude/100, longitude/100, year/2025, month/13, day/32, hour/25
    and minute/61. A station has 39 to 96 rows between 2023-12-28 11:00 and 2024-01-01 10:00, in the file's
    order, which is not that of time. Coordinates in degrees: `fmi_coordinates`.

    Source: see the module; the file of the course's coding assignments.

    Args:
        dtype: of x and y.
    """
    import pandas

    frame = read("fmi_weather", HOURLY)
    time = pandas.to_datetime(frame["Timestamp"], format="%Y-%m-%d %H:%M:%S").dt
    columns = {
        "latitude/100": frame["Latitude"] / 100,
        "longitude/100": frame["Longitude"] / 100,
        "year/2025": time.year / 2025,
        "month/13": time.month / 13,
        "day/32": time.day / 32,
        "hour/25": time.hour / 25,
        "minute/61": time.minute / 61,
    }
    x = numpy.stack([column.to_numpy(dtype=numpy.float64) for column in columns.values()], axis=1)
    return by_client(frame["name"], (x, frame["temp"].to_numpy(dtype=numpy.float64)), dtype, list(columns))


def fmi_coordinates(dtype: torch.dtype = torch.float64) -> Tensor:
    """Load latitude and longitude in degrees of the stations of `fmi_weather`, in their order, `(207, 2)`."""
    first = read("fmi_weather", HOURLY).drop_duplicates("name")
    return torch.tensor(first[["Latitude", "Longitude"]].to_numpy(), dtype=dtype)


def fmi_forecast(dtype: torch.dtype = torch.float32) -> FederatedData:
    """Load temperatures of the day after five days, at 192 stations with 10 rows each.

    Rows (x `(12,)`, y `(2,)`): latitude and longitude in degrees, the five days' maxima and the five days'
    minima in °C; then the maximum and minimum of the day to predict in °C.

    Source: see the module.

    Args:
        dtype: of x and y.
    """
    frame = read("fmi_weather", "FMI_data_2025.csv")
    days = [numpy.array([json.loads(cell) for cell in frame[name]], dtype=numpy.float64) for name in ("Tmax", "Tmin")]
    x = numpy.hstack([frame[["Latitude", "Longitude"]].to_numpy(), *days])
    names = ["latitude", "longitude", *(f"{name}_{day}" for name in ("tmax", "tmin") for day in range(1, 6))]
    return by_client(frame["Name"], (x, frame[["y_Tmax", "y_Tmin"]].to_numpy()), dtype, names)


def fmi_extremes(dtype: torch.dtype = torch.float32) -> FederatedData:
    """Load daily extreme temperatures at 199 stations, five days each from 2025-12-31 to 2026-01-04.

    Rows (x `(3,)`, y `(2,)`): latitude and longitude in degrees and the day 0 … 4; then the maximum and the
    minimum in °C.

    Source: see the module.

    Args:
        dtype: of x and y.
    """
    import pandas

    frame = read("fmi_weather", "fmidata.csv")
    day = (pandas.to_datetime(frame["day"]) - pandas.Timestamp("2025-12-31")).dt.days
    x = numpy.stack([frame["lat"], frame["lon"], day.astype(float)], axis=1)
    return by_client(frame["station"], (x, frame[["tmax", "tmin"]].to_numpy()), dtype, ["latitude", "longitude", "day"])
