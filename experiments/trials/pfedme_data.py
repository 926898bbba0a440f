"""MNIST as the authors of pFedMe gave it to 20 users, and what their repository has of the runs on it.

Source: github.com/CharlieDinh/pFedMe, `data/Mnist/generate_niid_20users.py` as it was when the results were stored
(commits 378a4d4 and 5a74360, June 2020), and `results/*.h5`, whose accuracies are whole multiples of 1/174 990 and
1/524 700: ten runs on 17 499 rows of test and 52 470 of training, which that script gives to the row and later versions
do not.

The script takes rows of a digit from its first or second on for every user, so that users share rows and a row of one
user's test may train another; and it takes a row too few where it begins at the second, so that labels of 17 users
slip by one row. Both are kept.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import torch

import fedtorch as ft

USERS, LABELS = 20, 2
METRICS = ("test accuracy", "training accuracy", "training loss")
RUNS, TESTED, TRAINED = 10, 17_499, 52_470
Stored = dict[int, tuple[int, int, float]]  # rows that ten runs got right, of test and training, and the mean loss
SERVER: Stored = {
    0: (14020, 42440, 2.512776646),
    10: (125033, 374999, 1.031526557),
    50: (152481, 457062, 0.466311486),
    100: (156872, 471015, 0.376834445),
    200: (159625, 479608, 0.321953129),
    400: (161158, 485303, 0.283145791),
    799: (162499, 490220, 0.253063780),
}
SERVER_20: Stored = {
    0: (14020, 42440, 2.512776646),
    10: (136385, 408625, 0.753158315),
    50: (156348, 469544, 0.388449393),
    100: (159318, 478891, 0.327423602),
    200: (161119, 484991, 0.286666291),
    400: (162385, 489708, 0.257037217),
    799: (163455, 494257, 0.232010090),
}
OWN: Stored = {
    0: (156560, 471300, 0.804745941),
    10: (158485, 476232, 0.396489631),
    50: (162034, 486991, 0.285635058),
    100: (163294, 490507, 0.254173607),
    200: (163903, 493314, 0.232802085),
    400: (164695, 496614, 0.212794638),
    799: (165432, 499698, 0.195229912),
}


class Users(NamedTuple):
    """The rows of the 20 users; x `(784,)` float32, each pixel less its mean over its sd."""

    train: ft.data.FederatedData
    test: ft.data.FederatedData


def published(stored: Stored, round: int) -> dict[str, float]:
    """The stored metrics of a round."""
    tested, trained, loss = stored[round]
    return dict(zip(METRICS, (tested / (RUNS * TESTED), trained / (RUNS * TRAINED), loss)))


def shares(rows: int, parts: int, draws: np.random.RandomState) -> list[int]:
    """The rows of a digit in parts: each but the last between 1 / (parts + 1) and a half of what is left."""
    sizes = []
    for _ in range(parts - 1):
        sizes.append(int(draws.randint(rows // (parts + 1), rows // 2)))
        rows -= sizes[-1]
    return [*sizes, rows]


def takes(labels: np.ndarray) -> list[list[tuple[int, int, int]]]:
    """(digit, first row, end) of each user's digits."""
    digits = np.bincount(labels, minlength=10)
    parts = USERS * LABELS // 10
    draws = np.random.RandomState(1)
    sizes = [shares(int(rows), parts, draws) for rows in digits]
    counts = iter([digit[part] for part in range(parts) for digit in sizes])
    begun = labels[:10] == 9  # what the script's loop over digits leaves behind
    made: list[list[tuple[int, int, int]]] = [[] for _ in range(USERS)]
    for user in range(USERS):
        for j in range(LABELS):
            digit, size = (user + j) % 10, next(counts)
            if begun[digit] + size < digits[digit]:
                made[user].append((digit, int(begun[digit]), size))
                begun[digit] = True
    return made


def users() -> Users:
    """The rows of all users, three quarters for training, in the script's order."""
    loaded = [ft.data.mnist(train) for train in (True, False)]
    x = torch.cat([images for images, _ in loaded]).flatten(1).mul_(255).round_().numpy()
    y = torch.cat([labels for _, labels in loaded]).numpy()
    x = (x - x.mean(0, dtype=np.float64).astype(np.float32)) / (
        x.std(0, dtype=np.float64).astype(np.float32) + np.float32(0.001)
    )
    of_digit = [np.flatnonzero(y == digit) for digit in range(10)]
    shuffles = random.Random(1)
    parts: tuple[list, list] = ([], [])
    for taken in takes(y):
        rows = np.concatenate([of_digit[digit][first:end] for digit, first, end in taken])
        said = np.concatenate([np.full(end, digit) for digit, _, end in taken])[: len(rows)]
        order = list(range(len(rows)))
        shuffles.shuffle(order)
        cut = int(0.75 * len(rows))
        for part, chosen in zip(parts, (order[:cut], order[cut:])):
            part.append((torch.from_numpy(x[rows[chosen]]), torch.from_numpy(said[chosen]).long()))
    return Users(*(ft.data.from_tensors(part) for part in parts))
