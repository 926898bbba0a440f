"""Split networks: all folds × models as one batch beside one after another, with the same code.

40 pairs of small networks (10 folds × a plain and three hierarchical Bayes models) on the heart-disease rows: a slice
of the 50 000 iterations of `experiments.vfl.heart`, in one graph with the optimiser and without Lightning's loop around
it. Each repetition times the stack and then one network of it, a hierarchical Bayes one, whose time counts 40 times;
the ratios are medians over repetitions. Beside the clock stands the CPU time of all threads, which other programs
disturb less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from experiments import common
from experiments.vfl import heart_models as vfl_heart_models
from fedtorch import data as ft_data, vfl
from fedtorch.vfl.fit.captured import CapturedBound
from fedtorch.vfl.fit.part import draw_noises
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.model.split_nn import mlp
from fedtorch.vfl.split_network import adam

STEPS = 50_000


def stepper(size: int, captured: bool = False) -> Callable[[int], None]:
    """A function that takes iterations of `size` networks on training rows of the folds.

    Args:
        size: more than the 40 of the folds are these again.
        captured: whether an iteration is captured and replayed.
    """
    table = ft_data.heart_failure()
    fold = vfl_heart_models.folds(len(table.y), 1)
    train, _ = vfl_heart_models.standardised(table, fold)
    copies = 4 * -(-size // 40)
    rows = vfl_heart_models.vertical(table, train, fold.train, fold.weight, copies)
    cut = lambda value: value[:size]
    rows = vfl.VerticalData(tuple(map(cut, rows.features)), cut(rows.response), weight=cut(rows.weight))
    rho = torch.tensor([1.0, 5.0, 10.0, 0.0]).repeat(-(-size // 4))[:size]
    bottoms = [mlp(len(columns), (8, 8), 2) for columns in table.parties]
    bayes = vfl.HierarchicalBayes(rho=rho)
    model = vfl.SplitNetwork(bottoms, likelihoods.categorical(2), seed=range(size), bayes=bayes).train()
    optimizer = adam(model.parameters())
    replayed = CapturedBound(model.model, model.server.guide, model.variational) if captured else None
    here = rows.to_dtype(model.server.rho.dtype)
    share = 1 / here.total.to(here.response).reshape(-1, 1)
    done = 0

    def take(count: int) -> None:
        nonlocal done
        for _ in range(count):
            if replayed is None:
                optimizer.zero_grad()
                model.losses(rows, done).sum().backward()
            else:
                noise = draw_noises([model.server, *model.parties], done, rows.response.shape[-1])
                replayed.backward(here, noise, share)
            optimizer.step()
            done += 1

    return take


def seconds(take: Callable[[int], None], steps: int) -> tuple[float, float]:
    """Of an iteration by the clock, and of all cores' work."""
    start, work = time.perf_counter(), time.process_time()
    take(steps)
    return (time.perf_counter() - start) / steps, (time.process_time() - work) / steps


def main(argv: Sequence[str] | None = None) -> None:
    """Print milliseconds of an iteration, minutes of all, and the ratio."""
    options = common.arguments(__doc__ or "").parse_args(argv)
    repeats, steps = (1, 2) if options.smoke else (7, 64)
    networks = 40
    stack, single = stepper(networks), stepper(1)
    stack(3), single(3)
    times = [(*seconds(stack, steps), *seconds(single, 2 * steps)) for _ in range(repeats)]
    together, work, alone, alone_work = (statistics.median(column) for column in zip(*times))
    ratio, work_ratio = (statistics.median(networks * t[i + 2] / t[i] for t in times) for i in (0, 1))
    setting = f"{networks} networks, {torch.get_num_threads()} threads"
    rows = [
        common.Row(setting, "ms per iteration, one batch", 1e3 * together),
        common.Row(setting, "ms per iteration, one after another", 1e3 * alone * networks),
        common.Row(setting, f"minutes for {STEPS} iterations, one batch", together * STEPS / 60),
        common.Row(setting, f"CPU minutes for {STEPS} iterations, one batch", work * STEPS / 60),
        common.Row(
            setting, f"CPU minutes for {STEPS} iterations, one after another", alone_work * networks * STEPS / 60
        ),
        common.Row(setting, "one after another / one batch", ratio),
        common.Row(setting, "one after another / one batch, CPU time", work_ratio),
    ]
    common.show(f"{setting}: {common.machine()}", ["", "ours"], [[row.metric, f"{row.ours:.2f}"] for row in rows])
    common.write("vfl_split", rows, options.json)


if __name__ == "__main__":
    main()
