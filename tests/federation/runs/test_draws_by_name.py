"""Draws follow a client's name: who else is there, and in which order, changes nobody's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.data import linear_clients
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.federation.populations.population import Population
from fedtorch.federation.runs.cohorts import ByName, uniform_cohort
from fedtorch.models.gibbs import sparse
from fedtorch.random.named import numbers
from fedtorch.tree import Tree

NAMES = ("Turku", "Oulu", "Vaasa", "Espoo", "7", "0")
CLIENTS = dict(zip(NAMES, linear_clients([6, 6, 6, 6, 6, 6])))
COMPANIES = (NAMES[1:3], NAMES[::-1], ("Oulu", "0", "Espoo", "Vaasa"))
KEPT = ("Oulu", "Vaasa")  # in all of them


def data_of(names: Sequence[str]) -> ft.data.FederatedData:
    return ft.data.from_tensors([CLIENTS[name] for name in names], names=list(names))
