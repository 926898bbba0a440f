"""What FedBench has stored of its runs: test accuracy after some of 50 rounds, mean and sd of three runs.

Source: github.com/NechbaMohammed/FLBenchmark, `results/agg_experiments/**/METHOD_rounds50_epochs10.csv`; the last round
is what the page of results prints (github.com/NechbaMohammed/FLBenchmarkUI, `index.html`, commit fa77cd5). The sd is
divided by the number of runs, three. On FCUBE the stored rounds 0 to 49 of FedAdagrad and of FedAdam are the same,
digit by digit, so that one of the two files holds the other's: both are beside them. Of FedYogi there nothing is stored
but what the page prints.
"""

from __future__ import annotations

Curve = dict[int, tuple[float, float]]  # (accuracy, sd) by round

FCUBE: dict[str, Curve] = {
    "FedAvg": {
        1: (0.9120, 0.0396),
        2: (0.9743, 0.0074),
        5: (0.9947, 0.0034),
        20: (0.9957, 0.0012),
        50: (0.9957, 0.0005),
    },
    "FedProx": {
        1: (0.9287, 0.0058),
        2: (0.9760, 0.0054),
        5: (0.9933, 0.0012),
        20: (0.9973, 0.0005),
        50: (0.9967, 0.0012),
    },
    "FedNova": {
        1: (0.9237, 0.0258),
        2: (0.9860, 0.0045),
        5: (0.9940, 0.0022),
        20: (0.9973, 0.0012),
        50: (0.9987, 0.0012),
    },
    "FedAdagrad": {
        1: (0.8667, 0.0953),
        2: (0.9393, 0.0133),
        5: (0.9800, 0.0049),
        20: (0.9880, 0.0062),
        50: (0.9953, 0.0012),
    },
    "FedAdam": {
        1: (0.8667, 0.0953),
        2: (0.9393, 0.0133),
        5: (0.9800, 0.0049),
        20: (0.9880, 0.0062),
        50: (0.9967, 0.0012),
    },
    "FedYogi": {50: (0.9967, 0.0012)},
    "SCAFFOLD": {
        1: (0.8897, 0.0684),
        2: (0.9460, 0.0088),
        5: (0.9613, 0.0091),
        20: (0.9627, 0.0130),
        50: (0.9707, 0.0128),
    },
}
MNIST: dict[str, Curve] = {
    "FedAvg": {
        1: (0.7668, 0.0054),
        2: (0.9416, 0.0105),
        3: (0.9711, 0.0006),
        4: (0.9766, 0.0004),
        5: (0.9810, 0.0007),
        10: (0.9859, 0.0005),
        50: (0.9885, 0.0005),
    },
    "FedProx": {
        1: (0.7131, 0.0075),
        2: (0.9402, 0.0061),
        3: (0.9684, 0.0024),
        4: (0.9785, 0.0013),
        5: (0.9814, 0.0004),
        10: (0.9754, 0.0143),
        50: (0.9891, 0.0003),
    },
    "FedNova": {
        1: (0.7831, 0.0178),
        2: (0.9480, 0.0044),
        3: (0.9680, 0.0087),
        4: (0.9791, 0.0021),
        5: (0.9813, 0.0012),
        10: (0.9856, 0.0011),
        50: (0.9897, 0.0003),
    },
    "FedAdagrad": {
        1: (0.5763, 0.0179),
        2: (0.8075, 0.0162),
        3: (0.8623, 0.0103),
        4: (0.9089, 0.0057),
        5: (0.9390, 0.0033),
        10: (0.9777, 0.0008),
        50: (0.9885, 0.0005),
    },
    "FedAdam": {
        1: (0.6673, 0.0580),
        2: (0.8710, 0.0494),
        3: (0.8745, 0.0959),
        4: (0.9472, 0.0164),
        5: (0.9591, 0.0084),
        10: (0.9775, 0.0019),
        50: (0.9846, 0.0002),
    },
    "FedYogi": {
        1: (0.3409, 0.0461),
        2: (0.7703, 0.0198),
        3: (0.8300, 0.0140),
        4: (0.8656, 0.0098),
        5: (0.9078, 0.0144),
        10: (0.9819, 0.0019),
        50: (0.9886, 0.0006),
    },
}
