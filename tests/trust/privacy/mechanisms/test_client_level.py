"""Client-level privacy against explicit sums, and what clipping, weights and silence can do to them."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from support.oracles.closed_forms import ROUNDING, distance, linear, linear_clients, mean_squared_error, sgd
from torch import Tensor

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.exchanges.exchange import Mean, Sum
from fedtorch.federation.exchanges.robust.exchange import star as robust_star
from fedtorch.tree import Tree
from fedtorch.trust import privacy, robust
from fedtorch.trust.privacy import AdaptiveClip, clipping
from fedtorch.trust.privacy.noise import gaussian

SIZES = [5, 2, 9, 4, 17, 6]
DATA = linear_clients(SIZES)
K = len(SIZES)
DELTA = 1e-3
SETTINGS = {"clip": 0.7, "noise": 1.0, "delta": DELTA}


def private(algorithm: ft.Algorithm | None = None, seed: int | None = 0, **settings) -> ft.Algorithm:
    entropy = None if seed is None else privacy.from_seed(seed)
    settings = {**SETTINGS, "entropy": entropy, **settings}
    return (ft.fedavg(sgd(0.1, steps=2)) if algorithm is None else algorithm) | privacy.client_level(**settings)


def changes(data: ft.data.FederatedData = DATA) -> list[Tree]:
    """What every client's training changes in a round from the common start."""
    round = ft.Run(ft.separate(sgd(0.1, steps=2)), ft.InProcess(data)).step()
    tensors = round.clients.tensors(round.server, torch.arange(len(data)))
    start = ft.fedavg(sgd(0.1)).start
    return [tree.subtract({name: leaf[k] for name, leaf in tensors.items()}, start) for k in range(len(data))]


def norm(value: Tree) -> float:
    return math.sqrt(sum(float(leaf.square().sum()) for leaf in tree.leaves(value)))


def noiseless(**settings) -> ft.Algorithm:
    """Noise that does not count, which no budget would allow."""
    return private(**{"noise": 1e-9, **settings})


def step(algorithm: ft.Algorithm, population=None, **settings) -> Tree:
    """What a round changes in the server's parameters."""
    run = ft.Run(algorithm, population or ft.InProcess(DATA), **settings)
    before = run.server
    return tree.subtract(run.step().server, before)


CLOSE = 1e-8  # noise of 1e-9 clips on a mean, over few numbers, beside the slack of 2⁻²⁰ in the bound


@pytest.mark.parametrize("clip", [0.05, 0.7, 1e6])
def test_a_round_is_the_mean_of_clipped_changes_over_all_clients(clip: float) -> None:
    cut = [tree.scale(change, min(1.0, clip * (1 - 2**-20) / norm(change))) for change in changes()]
    expected = tree.map(lambda *each: sum(each) / K, *cut)
    assert distance(step(noiseless(clip=clip, noise=1e-9 / clip)), expected) < CLOSE


def test_noise_is_added_to_the_sum_in_units_of_the_clip() -> None:
    """Rounds of 61 numbers from one state: the standard deviation has an error of 1/√(2·1830)."""
    clip, noise, rounds = 0.7, 2.5, 30
    wide, algorithm = ft.InProcess(linear_clients(SIZES, 60)), ft.fedavg(sgd(0.1, linear(60), steps=2))
    plain = step(noiseless(algorithm=algorithm, clip=clip), wide)
    draws = []
    run = ft.Run(private(algorithm, clip=clip, noise=noise), wide)
    start = run.server
    for _ in range(rounds):
        run.server = start
        draws.append(tree.subtract(tree.subtract(run.step().server, start), plain))
    numbers = torch.cat([leaf.flatten() for each in draws for leaf in tree.leaves(each)]) * K / (noise * clip)
    error = 1 / math.sqrt(2 * len(numbers))
    assert float(numbers.std()) == pytest.approx(1.0, abs=4 * error)
    assert float(numbers.mean()) == pytest.approx(0.0, abs=4 / math.sqrt(len(numbers)))


def test_noised_sums_lie_on_a_grid_far_below_the_noise() -> None:
    change = step(private(clip=1.0, noise=1.0))
    sums = torch.cat([leaf.flatten() for leaf in tree.leaves(change)]) * K * 2**20
    # The parameters were subtracted again, whose rounding of 1e-16 counts 6 · 2²⁰ times.
    assert float((sums - sums.round()).abs().max()) < 1e-8
    assert float((sums / 2 - (sums / 2).round()).abs().max()) > 0.1


def test_weights_do_not_count_and_the_silent_are_zeros() -> None:
    silent = ft.Faults(after=lambda keys, ids: ids == 2)
    clip = 0.7 * (1 - 2**-20)
    cut = [tree.scale(change, min(1.0, clip / norm(change))) for change in changes()]
    expected = tree.map(lambda *each: sum(each) / K, *(cut[:2] + cut[3:]))
    assert distance(step(noiseless(), faults=silent), expected) < CLOSE
    heavy = ft.fedavg(sgd(0.1, steps=2), weight=lambda data: data.count.double() ** 3)
    assert distance(step(noiseless(algorithm=heavy), faults=silent), expected) < CLOSE


def test_one_client_changes_the_sum_by_no_more_than_the_clip() -> None:
    """Whatever it sends, also what overflows: the neighbour has zeros in its place."""
    without = step(noiseless(), faults=ft.Faults(after=lambda keys, ids: ids == 1))
    x, y = DATA[1]
    for factor in (1.0, 1e3, 1e100, 1e200):
        rows = list(DATA)
        rows[1] = (x, y * factor)
        change = step(noiseless(), ft.InProcess(ft.data.from_tensors(rows)))
        assert norm(tree.subtract(change, without)) * K <= 0.7 + 1e-7
        if factor == 1e200:
            assert distance(change, without) < CLOSE


def test_bounds_by_name_clip_every_parameter_alone() -> None:
    clip = {"w*": 0.05, "bias": 0.02}
    slack = 1 - 2**-20
    cut = [
        {name: c[name] * min(1.0, clip[key] * slack / float(c[name].norm())) for key, name in
         (("w*", "weight"), ("bias", "bias"))}
        for c in changes()
    ]  # fmt: skip
    expected = tree.map(lambda *each: sum(each) / K, *cut)
    assert distance(step(noiseless(clip=clip, noise=1e-8)), expected) < CLOSE
    run, draws = ft.Run(private(clip=clip, noise=1.0), ft.InProcess(DATA)), []
    start = run.server
    for _ in range(100):
        run.server = start
        draws.append(tree.subtract(run.step().server, start))
    for key, name in (("w*", "weight"), ("bias", "bias")):
        numbers = torch.stack([draw[name].flatten() - expected[name].flatten() for draw in draws])
        scale = float(numbers.std()) * K / (math.sqrt(2) * clip[key])
        assert scale == pytest.approx(1.0, abs=4 / math.sqrt(2 * numbers.numel()))


@pytest.mark.parametrize("clip", [{"weight": 1.0}, {"*": 1.0, "bias": 1.0}, {"*": 1.0, "head": 1.0}])
def test_bounds_that_do_not_fit_the_names_are_refused(clip: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="of clip to match"):
        step(private(clip=clip))


def test_laplace_noise_goes_with_absolute_values() -> None:
    whole = changes()
    total = [sum(float(leaf.abs().sum()) for leaf in tree.leaves(change)) for change in whole]
    cut = [tree.scale(change, min(1.0, 0.4 * (1 - 2**-20) / size)) for change, size in zip(whole, total)]
    expected = tree.map(lambda *each: sum(each) / K, *cut)
    settings = {"clip": 0.4, "mechanism": privacy.laplace}
    assert distance(step(noiseless(**settings)), expected) < CLOSE
    run = ft.run(private(noise=2.0, **settings), ft.InProcess(DATA), rounds=2)
    expected = [privacy.epsilon(noise=2.0, delta=DELTA, rounds=t, mechanism=privacy.laplace) for t in (1, 2)]
    assert run.history["epsilon"].tolist() == pytest.approx(expected)
    assert 0.49 < expected[0] < 0.5


def test_an_adaptive_clip_finds_the_quantile_and_spends_its_share() -> None:
    """In front of a model that stands still the bound comes to where half of the norms are below it."""
    data = linear_clients([20] * 400, seed=2)
    still = ft.fedavg(sgd(0.1, steps=2), lr=1e-12)
    settings = {"noise": 4.0, "clip": AdaptiveClip(0.5, start=0.05, lr=0.3, share=0.1)}
    run = ft.run(private(still, **settings), ft.InProcess(data), rounds=60)
    norms = torch.tensor([norm(change) for change in changes(data)])
    # The noise of a round's fraction is 4/√0.1/2/400 = 1.6 %, which the steps average.
    low, high = norms.quantile(torch.tensor([0.47, 0.53]))
    assert float(low) < run.history["clip"].iloc[-20:].mean() < float(high)
    assert run.history["epsilon"].iloc[-1] == pytest.approx(privacy.epsilon(noise=4.0, rounds=60, delta=DELTA))
    assert isinstance(run.global_module(), torch.nn.Linear)
    with pytest.raises(ValueError, match="gaussian"):
        private(clip=AdaptiveClip(), mechanism=privacy.laplace)


@pytest.mark.parametrize("quantile", [0.2, 0.9])
def test_an_adaptive_clip_finds_any_quantile_while_three_of_ten_are_silent(quantile: float) -> None:
    """Of the sorted norms, by themselves; a silent client is no answer, neither within the bound nor beyond it."""
    data = linear_clients([20] * 400, seed=2)
    still = ft.fedavg(sgd(0.1, steps=2), lr=1e-12)
    clip = AdaptiveClip(quantile, start=0.5, lr=0.3)
    run = ft.run(private(still, noise=1.0, clip=clip), ft.InProcess(data), faults=ft.dropouts(0.3), rounds=80)
    norms = torch.tensor([norm(change) for change in changes(data)])
    # A round's sum has an sd of at most 0.7 ½ √400 of who answers and 0.9/√0.05 of noise, 2 % of 400; forty of them.
    low, high = norms.quantile(torch.tensor([quantile - 0.03, quantile + 0.03]))
    assert float(low) < run.history["clip"].iloc[-40:].mean() < float(high)


@pytest.mark.slow
@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_the_noises_of_an_adaptive_clip_compose_to_the_one_that_is_accounted(quantile: float) -> None:
    """Andrew et al. (2021), Theorem 1, of bits ±½ with noise σ_b: values have (z⁻² − (2σ_b)⁻²)^−½."""
    share, noise = 0.3, 2.0
    values, bits = noise / math.sqrt(1 - share), noise / math.sqrt(share)
    assert values == pytest.approx((noise**-2 - (2 * (0.5 * bits)) ** -2) ** -0.5)
    still = ft.fedavg(sgd(0.1), lr=1e-12)  # all norms are within the bound, so that each tells 1 − γ
    clip = AdaptiveClip(quantile, start=1e3, lr=1e-3, share=share)
    run = ft.run(private(still, clip=clip, noise=noise), ft.InProcess(DATA), rounds=200)
    bounds = torch.tensor([1e3, *run.history["clip"]], dtype=torch.float64)
    told = -(bounds[1:] / bounds[:-1]).log() / clip.lr  # the noisy sums, over K
    most = max(quantile, 1 - quantile)  # that one client's answer adds
    assert float(told.mean()) == pytest.approx(1 - quantile, abs=4 * most * bits / K / math.sqrt(200))
    assert float(told.std()) * K / most / bits == pytest.approx(1.0, abs=4 / math.sqrt(400))


@pytest.mark.parametrize("algorithm", [
    lambda: ft.fedadam(sgd(0.1, steps=2)),
    lambda: ft.fedsgd(sgd(0.1).module, lr=0.1, loss=mean_squared_error),
    lambda: ft.personal_layers(sgd(0.1, steps=2), "bias"),
    lambda: ft.ditto(sgd(0.1, steps=2, batch_size=3), 0.5),
], ids=["fedadam", "fedsgd", "personal_layers", "ditto"])  # fmt: skip
@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.slow), {"sampling_rate": 0.5}, {"clip": AdaptiveClip()}],
    ids=["all", "some", "adaptive"],
)
@pytest.mark.filterwarnings("ignore:These are scores of the rows that a private run trains on")
def test_it_wraps_what_is_averaged_the_same_in_any_blocks(algorithm, settings: dict, monkeypatch) -> None:
    runs = []
    for small, wrap in ((16_384, None), (0, 1), (0, "duplicated")):
        monkeypatch.setattr("fedtorch.federation.populations.in_process.SMALL_BLOCK", small)
        faults = ft.dropouts(0.2) | (ft.duplicated() if wrap == "duplicated" else ft.Faults())
        where = ft.InProcess(DATA, chunk=1 if wrap else None)
        run = ft.run(private(algorithm(), **settings), where, rounds=4, faults=faults)
        runs.append(
            (run.server, run.tensors(), run.evaluate(DATA, {"mse": ft.metrics.mean_squared_error()})["mse"].clients)
        )
    # Grids of 2⁻²⁰ of the noise turn roundings into nothing, or rarely into a step of the grid.
    assert all(distance(runs[0], other) < 1e-5 for other in runs[1:])


def test_checkpoints_go_on_with_the_same_numbers(tmp_path: Path) -> None:
    make = lambda: ft.Run(private(clip=AdaptiveClip(), sampling_rate=0.7), ft.InProcess(DATA))
    whole, half = make(), make()
    for _ in whole.rounds(5):
        pass
    for _ in half.rounds(2):
        pass
    half.save(tmp_path / "half")
    resumed = make().load(tmp_path / "half")
    for _ in resumed.rounds(5):
        pass
    assert distance(resumed.server, whole.server) == 0
    assert resumed.history.drop(columns="seconds").equals(whole.history.drop(columns="seconds"))


def test_cohorts_with_a_rate_are_drawn_in_secret() -> None:
    """Two runs of one seed ask others, unless the entropy is seeded; the accountant counts the sampling."""
    data = linear_clients([3] * 200)
    asked = lambda entropy: [
        round.asked.tolist()
        for round in ft.Run(private(sampling_rate=0.3, seed=entropy), ft.InProcess(data), seed=1).rounds(5)
    ]  # fmt: skip
    assert asked(None) != asked(None)
    assert asked(4) == asked(4)
    sizes = torch.tensor([len(ids) for ids in asked(None) + asked(None)])
    assert float(sizes.double().mean()) == pytest.approx(60, abs=4 * math.sqrt(200 * 0.3 * 0.7 / 10))
    run = ft.run(private(sampling_rate=0.3, noise=2.0), ft.InProcess(data), rounds=2)
    expected = privacy.epsilon(noise=2.0, sampling_rate=0.3, rounds=2, delta=DELTA)
    assert expected <= run.history["epsilon"].iloc[-1] < 1.001 * expected
    assert "nobody who knows which clients" in run.algorithm.budget.claim.adversary


def test_a_cohort_of_fixed_size_is_not_amplified() -> None:
    cut = [tree.scale(change, min(1.0, 0.7 / norm(change))) for change in changes()]
    run = ft.Run(noiseless(size=2), ft.InProcess(DATA))
    before = run.server
    round = run.step()
    expected = tree.map(lambda *each: sum(each) / 2, *(cut[int(k)] for k in round.asked))
    assert distance(tree.subtract(round.server, before), expected) < 1e-6  # the slack of the bound
    run = ft.run(private(size=2), ft.InProcess(DATA), rounds=2)
    assert run.history["epsilon"].iloc[-1] == pytest.approx(privacy.epsilon(noise=1.0, rounds=2, delta=DELTA))


def test_noise_is_system_entropy_by_default() -> None:
    one, two = step(private(seed=None), seed=1), step(private(seed=None), seed=1)
    assert distance(one, two) > 1e-3
    assert distance(step(private(seed=2), seed=1), step(private(seed=2), seed=1)) == 0
    assert private(seed=None).budget.claim.entropy == "of the operating system"


def test_losses_are_logged_in_simulations_only() -> None:
    assert "train_loss" in ft.run(private(), ft.InProcess(DATA), rounds=1).history
    assert "train_loss" not in ft.run(private(seed=None), ft.InProcess(DATA), rounds=1).history


def test_noise_is_drawn_once_for_a_round_that_is_written_down() -> None:
    algorithm = private()
    partial = algorithm.exchange.gather((Mean({"w": torch.ones(K, 2)}, torch.ones(K)),), slice(0, K))
    with pytest.raises(RuntimeError, match="written the round into the ledger"):
        algorithm.exchange.finish(partial)
    ft.Run(algorithm, ft.InProcess(DATA)).step()
    with pytest.raises(RuntimeError, match="drawn once"):
        algorithm.exchange.finish(partial)


def test_a_trainer_stops_at_the_budget_and_logs_epsilon(tmp_path: Path) -> None:
    most = privacy.epsilon(noise=1.0, rounds=3, delta=DELTA)
    model = ft.Federation(private(budget=most), ft.InProcess(DATA))
    logger = CSVLogger(str(tmp_path))
    outer = L.Trainer(max_epochs=10, logger=logger, accelerator="cpu", enable_progress_bar=False,
                      enable_model_summary=False, log_every_n_steps=1)  # fmt: skip
    outer.fit(model)
    assert model.round == 3
    logger.save()
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        logged = [float(row["epsilon"]) for row in csv.DictReader(file) if row["epsilon"]]
    assert logged == pytest.approx(model.history["epsilon"].tolist(), rel=1e-6)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clip": 0.0}, "positive finite clip"),
        ({"clip": -1.0}, "positive finite clip"),
        ({"clip": {}}, "positive finite clip"),
        ({"clip": {"weight": 1.0, "bias": 0.0}}, "positive finite clip"),
        ({"clip": AdaptiveClip(quantile=1.0)}, "quantile"),
        ({"clip": AdaptiveClip(start=0.0)}, "positive finite clip"),
        ({"noise": 0.0}, "positive finite noise"),
        ({"noise": -1.0}, "positive finite noise"),
        ({"delta": 0.0}, "delta above 0"),
        ({"sampling_rate": 0.0}, "rate above 0"),
        ({"sampling_rate": 0.5, "size": 3}, "either a rate or a size"),
        ({"size": 0}, "size of at least 1"),
        ({"budget": 0.0}, "positive budget"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        private(**wrong)


def test_what_the_accountant_does_not_know_is_refused() -> None:
    for cohort in (3, ft.poisson_cohort(0.5, K)):
        with pytest.raises(ValueError, match="how clients are drawn"):
            ft.Run(private(), ft.InProcess(DATA), cohort=cohort)
    with pytest.raises(ValueError, match="below one over the 6 clients"):
        ft.Run(private(delta=1 / 6), ft.InProcess(DATA))


def test_what_cannot_be_bounded_is_refused() -> None:
    with pytest.raises(ValueError, match="running total is released"):
        private(ft.scaffold(sgd(0.1)))
    with pytest.raises(ValueError, match="adds messages up"):
        private(dataclasses.replace(ft.fedavg(sgd(0.1)), exchange=robust_star(robust.median())))
    with pytest.raises(ValueError, match="client_level twice"):
        private(private())
    with pytest.raises(ValueError, match="choose one level"):
        private(ft.fedavg(sgd(0.1)) | privacy.local_level(1.0, 1.0, delta=1e-3))
    plain = ft.fedavg(sgd(0.1))

    def summing(*arguments):
        reply = plain.client(*arguments)
        return reply._replace(message=reply.message._replace(change=Sum(reply.message.change.value)))

    with pytest.raises(TypeError, match="but got Sum"):
        step(private(dataclasses.replace(plain, client=summing)))


def test_half_precision_stays_within_the_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        rows = {"a": torch.randn(50, 300, generator=generator).to(dtype), "b": torch.randn(50, generator=generator)}
        cut, _ = clipping.clip_rows(rows, 0.1, gaussian)
        sizes = torch.cat([leaf.double().flatten(1) if leaf.ndim > 1 else leaf.double()[:, None]
                           for leaf in tree.leaves(cut)], 1).norm(dim=1)  # fmt: skip
        assert bool((sizes <= 0.1).all())
        assert float(sizes.min()) > 0.0999
    with pytest.raises(TypeError, match="Expected real or complex numbers to clip"):
        clipping.clip_rows({"count": torch.ones(3, dtype=torch.int64)}, 1.0, gaussian)


def test_sums_are_in_float64_whatever_is_sent() -> None:
    """In float32 a sum of 10⁴ clients moves by more than one client's last bits when another one changes."""
    exchange = private().exchange
    value = torch.full((10_000, 1), 0.1, dtype=torch.float32)
    sums: list[Tensor] = []
    for last in (0.1, 0.0):
        value[-1] = last
        message = Mean({"w": value.clone()}, torch.ones(10_000))
        sums.append(exchange.gather(message, slice(0, 10_000)).value["w"])
    assert float(sums[0] - sums[1]) == pytest.approx(float(torch.tensor(0.1)), abs=ROUNDING)


def test_scores_of_training_rows_warn_once_and_of_a_private_run_only(recwarn: pytest.WarningsRecorder) -> None:
    metrics = {"mse": ft.metrics.mean_squared_error()}
    others = linear_clients(SIZES, seed=9)
    for algorithm, data in ((ft.fedavg(sgd(0.1)), DATA), (private(), others)):
        ft.run(algorithm, ft.InProcess(DATA), rounds=1).evaluate(data, metrics)
    assert len(recwarn) == 0
    run = ft.run(private(), ft.InProcess(DATA), rounds=1)
    for data in (DATA.map(lambda rows: rows), DATA):
        run.evaluate(data, metrics)
    assert len(recwarn) == 1
    assert "the run's epsilon does not count them" in str(recwarn[0].message)
    assert recwarn[0].filename == __file__
