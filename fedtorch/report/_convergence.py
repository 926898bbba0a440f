"""Sentences on expectation propagation: whether it has settled, why steps were short, which clients were left out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fedtorch.federation.algorithms.ep import settled
from fedtorch.plots.charts import number
from fedtorch.report._words import rounds

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("mean_change", "sd_change", "damping", "remaining", "improper", "failed", "moved")
_FAR = 5.0  # the most sds that a mean may move in a round without damping


def propagation(table: pd.DataFrame) -> list[str]:
    """Return sentences about the rounds of a run; none if the history is not of expectation propagation.

    Args:
        table: the history, from the first round on.
    """
    if not len(table) or not set(COLUMNS[:5]) <= set(table):
        return []
    return [_end(table), *_steps(table), *_improper(table), *_failed(table)]


def _end(table: pd.DataFrame) -> str:
    last = table.iloc[-1]
    count = f"{len(table):,} round{'s' * (len(table) > 1)}"
    if not math.isfinite(last["mean_change"]):
        return f"Not settled after {count}: the product of the prior and all clients' sites is not a density yet."
    moved = (
        f"the last round moved a mean by {number(last['mean_change'])} of its standard deviation, and a standard "
        f"deviation by {number(100 * last['sd_change'])} %"
    )
    if settled()(table):
        return f"Settled after {count}: {moved}, at the most."
    return f"Not settled after {count}: {moved}. The numbers below may still change; allow more rounds."


def _steps(table: pd.DataFrame) -> list[str]:
    """Return a sentence on the steps, with the reasons of those that were shortened."""
    taken, numbers = table["damping"].to_numpy(float), table["round"].to_numpy(int)
    damping = taken[0]  # the first round is never shortened
    short = numbers[taken < 0.999 * damping]
    if not len(short):
        full = "whole" if damping == 1 else f"of {number(damping)}, as asked,"
        return [f"All steps were {full}: none had to be shortened."]
    least = taken.min() / damping
    text = (
        f"Steps were shorter than asked in {rounds(short.tolist())}, with a smallest of {number(least)} of a step, "
        "because "
    )
    return [text + "; and ".join(_causes(table, taken, numbers)) + "."]


def _causes(table: pd.DataFrame, taken: np.ndarray, numbers: np.ndarray) -> list[str]:
    """Return the reasons of more damping, each with the rounds that it followed."""
    change = table[["mean_change", "sd_change"]].max(axis=1, skipna=False).to_numpy(float)
    improper = table["improper"].to_numpy(float)
    halved = np.flatnonzero(np.diff(taken) < -1e-12)
    nothing = [int(numbers[i]) for i in halved if not math.isfinite(change[i])]
    far = [int(numbers[i]) for i in halved if math.isfinite(change[i]) and table["mean_change"].iloc[i] > _FAR]
    cavity = [int(numbers[i]) for i in halved if int(numbers[i]) not in (*nothing, *far) and improper[i] > 0]
    beside = [int(numbers[i]) for i in halved if int(numbers[i]) not in (*nothing, *far, *cavity)]
    words = {
        "the product of all clients' sites was not a density, so that all sites moved back by half a step": nothing,
        "a mean moved by more than five standard deviations, so that all sites moved back by half a step": far,
        "some client's cavity was improper, so that all sites moved back by half a step": cavity,
        "means and standard deviations moved no less than in the round before, as whole steps of all clients at once "
        "overshoot the solution": beside,
    }
    return [f"in {rounds(which)} {why}" for why, which in words.items() if which]


def _improper(table: pd.DataFrame) -> list[str]:
    share, numbers = table["improper"].to_numpy(float), table["round"].to_numpy(int)
    bad = numbers[share > 0].tolist()
    if not bad:
        return ["Every client's cavity (the prior and the other clients' sites) was a density throughout."]
    end = (
        "the last round among them, so that such clients kept an old site"
        if bad[-1] == numbers[-1]
        else "not at the end"
    )
    most = number(100 * float(np.nanmax(share)))
    return [
        f"In {rounds(bad)} up to {most} % of the clients had an improper cavity: the product of the prior and the "
        "other clients' sites was not a density, because only this client's rows inform some coefficient "
        f"({end}). A narrower prior, more clients, or fewer coefficients that differ between clients help."
    ]


def _failed(table: pd.DataFrame) -> list[str]:
    if "failed" not in table or not (table["failed"] > 0).any():
        return []
    bad = table["round"][table["failed"] > 0].astype(int).tolist()
    return [
        f"In {rounds(bad)} some clients could not compute the moments of their posterior and kept their old sites; a "
        "narrower prior or more nodes (rule=) help."
    ]
