"""DP-SGD on stacked clients against a plain loop over clients, steps and examples."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.oracles.closed_forms import distance, linear, linear_clients
from support.small_federations import Classifier, classes
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.tree import Tree
from fedtorch.trust import privacy
from fedtorch.trust.privacy.examples._layers import ghost_squares, linear_layers
from fedtorch.trust.privacy.examples._per_example import PrivateLoss, poisson_batch
from fedtorch.trust.privacy.examples.examples import Cut

SIZES = [7, 3, 12, 5]
DATA = linear_clients(SIZES, outputs=2)
K = len(SIZES)
DELTA = 1e-2
NOTHING = 1e-9  # noise, in clips, which does not count


def mlp(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6, bias=bias), nn.Tanh(), nn.Linear(6, 2)).double()


class Sequences(nn.Module):
    """Linear layers at four positions of a sequence, which is made of a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        shifts = torch.arange(4, dtype=x.dtype)[:, None]
        return self.last(torch.relu(self.first(x[:, None, :] + shifts))).mean(1)


class Convolution(nn.Module):
    """A convolution and a norm of each example, of which there are no ghost norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.convolution, self.norm, self.head = nn.Conv1d(1, 4, 2), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.convolution(x[:, None, :]).flatten(1)))


class Images(nn.Module):
    """Convolutions in one and in two dimensions, with all settings that ghost norms know, on what is made of a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.line = nn.Conv1d(1, 4, 3, stride=2, padding=1, dilation=2, bias=False)
        self.plane = nn.Conv2d(1, 3, (2, 3), stride=(1, 2), padding=(0, 1))
        self.head = nn.Linear(4 * 3 + 3 * 2 * 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        long = torch.cat([x, x.square(), x.sin()], 1)  # (n, 9)
        line = torch.tanh(self.line(long[:, None])[:, :, :3]).flatten(1)
        return self.head(torch.cat([line, torch.tanh(self.plane(long.reshape(-1, 1, 3, 3))).flatten(1)], 1))


class Twice(nn.Module):
    """One layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


MODULES = {
    "mlp": mlp,
    "mlp without bias": lambda: mlp(False),
    "sequences": lambda: Sequences().double(),
    "images": lambda: Images().double(),
    "convolution": lambda: Convolution().double(),
    "twice": lambda: Twice().double(),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-3),
}


def private(
    module: nn.Module | None = None, seed: int | None = 0, optimizer: str = "sgd", **settings
) -> ft.LocalSolver:
    settings = {
        "clip": 0.5,
        "noise": NOTHING,
        "sampling_rate": 0.5,
        "steps": 4,
        "delta": DELTA,
        "ghost": True,
        **settings,
    }
    return privacy.example_level(
        mlp() if module is None else module,
        loss=settings.pop("loss", nn.functional.mse_loss),
        optimizer=OPTIMIZERS[optimizer],
        entropy=None if seed is None else privacy.from_seed(seed),
        **settings,
    )


def loss_of(local: ft.LocalSolver) -> PrivateLoss:
    return local.solve.__self__.loss


def trained(local: ft.LocalSolver, data: ft.data.FederatedData = DATA, rounds: int = 1) -> list[Tree]:
    run = ft.run(ft.separate(local), ft.InProcess(data), rounds=rounds)
    return [{name: leaf[k] for name, leaf in run.tensors().items()} for k in range(len(data))]


def watch(local: ft.LocalSolver, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The rows that steps draw, `(K, N)` each."""
    seen, draw = [], PrivateLoss._draw

    def see(self, *arguments) -> Tensor:
        seen.append(draw(self, *arguments))
        return seen[-1]

    monkeypatch.setattr(PrivateLoss, "_draw", see)
    return seen


def plain(module: nn.Module, drawn: list[Tensor], clip: float, rate: float, optimizer: str) -> list[Tree]:
    """DP-SGD without noise, example by example."""
    ends = []
    for k, (x, y) in enumerate(DATA):
        own = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
        descent = OPTIMIZERS[optimizer](list(own.values()))
        for taken in drawn:
            total = {name: torch.zeros_like(p) for name, p in own.items()}
            for i in taken[k].nonzero()[:, 0].tolist():
                loss = nn.functional.mse_loss(functional_call(module, own, (x[i : i + 1],)), y[i : i + 1])
                gradient = dict(zip(own, torch.autograd.grad(loss, list(own.values()))))
                norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
                for name, g in gradient.items():
                    total[name] += g * min(1.0, clip * (1 - 2**-20) / norm)
            for name, p in own.items():
                p.grad = total[name] / (rate * len(x))
            descent.step()
        ends.append({name: p.detach() for name, p in own.items()})
    return ends


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_the_loop_over_examples(name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of 1e-9 clips, which Adam with this eps enlarges by at most a thousand."""
    module = MODULES[name]()
    local = private(module, optimizer=optimizer)
    drawn = watch(local, monkeypatch)
    found = trained(local)
    assert len(drawn) == 4
    expected = plain(module, drawn, 0.5, 0.5, optimizer)
    assert all(distance(one, other) < 1e-6 for one, other in zip(found, expected))
    assert (loss_of(local).layers is None) == (name in ("convolution", "twice"))


@pytest.mark.parametrize("clip", [0.05, 1e6])
@pytest.mark.parametrize("name", ["mlp", "mlp without bias", "sequences", "images"])
def test_ghost_norms_clip_as_the_examples_own_gradients_do(name: str, clip: float) -> None:
    ghost, apart = (trained(private(MODULES[name](), clip=clip, noise=NOTHING / clip, ghost=g)) for g in (True, False))
    assert all(distance(one, other) < 1e-7 for one, other in zip(ghost, apart))


def test_noise_has_the_size_that_is_accounted() -> None:
    """One step from one state by a gradient of zeros; the standard deviation has an error of 1/√(2·n)."""
    rows = [(torch.zeros(n, 3).double(), torch.zeros(n, 2).double()) for n in (20, 50)] * 50
    data = ft.data.from_tensors(rows)
    module = nn.Linear(3, 2).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    local = private(module, clip=0.3, noise=2.0, sampling_rate=0.25, steps=1)
    for counts in (20, 50):
        moves = [end for end, (x, _) in zip(trained(local, data), data) if len(x) == counts]
        numbers = torch.cat([leaf.flatten() for move in moves for leaf in move.values()]) / 0.1
        size = float(numbers.std()) * 0.25 * counts / (2.0 * 0.3)
        assert size == pytest.approx(1.0, abs=4 / math.sqrt(2 * len(numbers)))
        assert len(numbers.unique()) > 0.99 * len(numbers)


def test_one_row_changes_a_step_by_no_more_than_its_clip() -> None:
    changed = [(x.clone(), y.clone()) for x, y in DATA]
    base, most = (
        trained(private(sampling_rate=1.0, steps=1)),
        0.5 / 12 * 0.1 * 2,
    )  # C/(qn) times the learning rate, replaced
    for factor in (0.0, -1.0, 1e3, 1e200):
        x, y = (leaf.clone() for leaf in DATA[2])
        y[9] *= factor
        changed[2] = (x, y)
        other = trained(private(sampling_rate=1.0, steps=1), ft.data.from_tensors(changed))
        moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(other[2].values(), base[2].values())))
        assert 0 < moved <= most * (1 + 1e-6)
        assert all(distance(other[k], base[k]) < 1e-7 for k in (0, 1, 3))


def test_batches_are_poisson() -> None:
    """Rows independently with probability q, also none at all, and in front of what fills the batch up."""
    steps = 250
    local = private(sampling_rate=0.3, steps=steps)
    with pytest.MonkeyPatch.context() as patch:
        drawn = watch(local, patch)
        trained(local)
    counts = torch.stack(drawn).sum(2).double()  # (steps, K)
    sizes = torch.tensor(SIZES).double()
    assert bool((counts == 0).any())
    error = (sizes * 0.3 * 0.7 / steps).sqrt()
    assert bool(((counts.mean(0) - 0.3 * sizes).abs() < 4 * error).all())
    variance = sizes * 0.3 * 0.7
    assert bool(((counts.var(0) / variance - 1).abs() < 4 * math.sqrt(2 / steps) * 1.5).all())
    together = torch.stack(drawn)[:, 2].double().T.corrcoef()
    assert float((together - torch.eye(12)).abs().max()) < 5 / math.sqrt(steps)
    mask = torch.tensor([[False, True, True], [False, False, False], [True, True, False]])
    rows, taken = poisson_batch({"x": torch.arange(9).reshape(3, 3)}, mask)
    assert taken.tolist() == [[True, True], [False, False], [True, True]]
    assert rows["x"].tolist() == [[1, 2], [3, 3], [6, 7]]


def test_batches_that_are_cut_keep_some_of_their_rows_and_cost_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row that was drawn stays as likely as any other: of the 12 rows of the third client here 2 at most."""
    local = private(sampling_rate=0.5, steps=200, noise=3.0, cut=Cut(batch=2, rows=12))
    drawn = watch(local, monkeypatch)
    trained(local)
    counts = torch.stack(drawn).sum(2)
    assert int(counts.max()) == 2
    each = torch.stack(drawn)[:, 2].double().mean(0)
    chance = float(counts[:, 2].double().mean()) / 12
    assert float((each - chance).abs().max()) < 5 * math.sqrt(chance * (1 - chance) / 200)
    assert local.budget.release.excess == pytest.approx(1 - sum(math.comb(12, i) for i in range(3)) / 2**12)
    for batch, same in ((12, True), (11, False)):
        cuts = (None, Cut(batch, 12))
        solvers = [private(sampling_rate=0.5, steps=3, noise=3.0, cut=each) for each in cuts]
        one, two = (ft.run(ft.fedavg(local), ft.InProcess(DATA), rounds=1) for local in solvers)
        assert distance(one.server, two.server) == 0  # nobody drew so many
        assert (one.history["epsilon"].iloc[0] == two.history["epsilon"].iloc[0]) == same


def test_cuts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="batch of at least 1"):
        private(cut=Cut(0, 10))
    with pytest.raises(ValueError, match=r"'client 2'.* at most the rows of Cut"):
        ft.Run(ft.fedavg(private(cut=Cut(4, 11))), ft.InProcess(DATA))


def test_the_history_has_the_epsilon_of_all_steps(tmp_path: Path) -> None:
    local = private(noise=1.3, sampling_rate=0.2, steps=3, ledger=tmp_path / "ledger", budget=2.0)
    run = ft.run(ft.fedavg(local), ft.InProcess(DATA), rounds=50, cohort=2)
    expected = [privacy.epsilon(noise=1.3, sampling_rate=0.2, rounds=3 * t, delta=DELTA) for t in (1, 2)]
    assert run.history["epsilon"].tolist()[:2] == pytest.approx(expected, rel=1e-3)
    assert run.number == privacy.rounds_for(epsilon=2.0, noise=1.3, sampling_rate=0.2, delta=DELTA) // 3
    assert run.algorithm.budget.claim.unit == "example"
    assert "server included" in run.algorithm.budget.claim.adversary


@pytest.mark.parametrize("algorithm", [
    lambda local: ft.fedprox(local, 0.3), ft.scaffold, ft.fedadam,
    lambda local: ft.personal_layers(local, "2.*"), lambda local: ft.feddyn(local, 1.0),
], ids=["fedprox", "scaffold", "fedadam", "personal_layers", "feddyn"])  # fmt: skip
def test_any_algorithm_that_solves_once_a_round_trains_with_it(algorithm) -> None:
    """As with the rows' own gradients, if every row is drawn, nothing is clipped and there is no noise to speak of."""
    local = ft.gradient_descent(mlp(), steps=4, loss=nn.functional.mse_loss, optimizer=OPTIMIZERS["sgd"])
    one = ft.run(algorithm(local), ft.InProcess(DATA), rounds=3).tensors()
    other = ft.run(algorithm(private(sampling_rate=1.0, clip=1e3, noise=1e-12)), ft.InProcess(DATA), rounds=3)
    assert distance(one, other.tensors()) < 1e-6
    assert other.history["epsilon"].iloc[-1] > 0


def test_two_solutions_in_a_round_are_not_one() -> None:
    with pytest.raises(RuntimeError, match="train once a round"):
        ft.run(ft.ditto(private(), 0.5), ft.InProcess(DATA), rounds=1)


def test_losses_are_reported_in_simulations_only() -> None:
    data = linear_clients([90], outputs=2)
    make = lambda seed: ft.run(
        ft.fedavg(private(seed=seed, sampling_rate=0.99, steps=1)), ft.InProcess(data), rounds=1
    ).history["train_loss"]  # fmt: skip
    (x, y) = data[0]
    assert float(make(0).iloc[0]) == pytest.approx(float(nn.functional.mse_loss(mlp()(x), y).detach()), rel=0.1)
    assert math.isnan(make(None).iloc[0])


def test_losses_of_a_simulation_leave_padding_out(monkeypatch: pytest.MonkeyPatch) -> None:
    local = private(steps=1, sampling_rate=0.6)
    drawn = watch(local, monkeypatch)
    round = ft.Run(ft.fedavg(local), ft.InProcess(DATA)).step()
    for k, (x, y) in enumerate(DATA):
        taken = drawn[0][k, : len(x)]
        if bool(taken.any()):
            mean = nn.functional.mse_loss(mlp()(x[taken]), y[taken])
            assert float(round.info["loss"][k]) == pytest.approx(float(mean.detach()))


def test_dropout_is_drawn_by_example_and_a_module_of_lightning_trains() -> None:
    data = classes()
    ends = []
    for ghost in (True, False):
        local = privacy.example_level(Classifier(), clip=1.0, noise=NOTHING, sampling_rate=0.5, steps=3, delta=1e-3,
                                      entropy=privacy.from_seed(0), ghost=ghost)  # fmt: skip
        assert loss_of(local).layers is None or ghost
        ends.append(ft.run(ft.fedavg(local), ft.InProcess(data), rounds=2).server)
    assert distance(*ends) < 1e-4  # float32


class Mixing(nn.Module):
    """Subtracts the batch's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


def test_modules_that_branch_on_values_are_refused() -> None:
    """Examples are evaluated one by one under `vmap`, where clients cannot be divided."""

    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if (x > 0).all() else -super().forward(x)

    with pytest.raises(ValueError, match=r"torch\.vmap can compute example by example, but it cannot run Branching"):
        ft.Run(ft.fedavg(private(Branching(3, 2).double())), ft.InProcess(DATA))


def test_losses_that_mix_examples_are_refused() -> None:
    normalised = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)).double()
    for module, said in ((normalised, "BatchNorm1d mixes"), (Mixing(), "the loss of a batch mixes")):
        with pytest.raises(ValueError, match=said):
            ft.Run(ft.fedavg(private(module)), ft.InProcess(DATA))
    spread = lambda output, target: (output - target).square().mean().sqrt()
    with pytest.raises(ValueError, match="the loss of a batch mixes"):
        ft.Run(ft.fedavg(private(loss=spread)), ft.InProcess(DATA))
    tracking = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    with pytest.raises(ValueError, match="BatchNorm1d mixes"):
        ft.Run(ft.fedavg(private(tracking)), ft.InProcess(DATA))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clip": 0.0}, "positive finite clip"),
        ({"noise": 0.0}, "positive finite noise"),
        ({"sampling_rate": 0.0}, "rate above 0"),
        ({"steps": 0}, "at least 1"),
        ({"delta": 0.0}, "delta above 0"),
        ({"budget": -1.0}, "positive budget"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        private(**wrong)


def test_delta_has_to_be_below_one_over_the_rows() -> None:
    with pytest.raises(ValueError, match=r"'client 2'.* 12 rows"):
        ft.Run(ft.fedavg(private(delta=1 / 12)), ft.InProcess(DATA))


def test_layers_are_found_where_all_that_is_trained_is_in_them() -> None:
    module = mlp()
    names = [name for name, _ in module.named_parameters()]
    assert [layer.weight for layer in linear_layers(module, names) or []] == ["0.weight", "2.weight"]
    assert linear_layers(module, names[:-1]) is None
    assert linear_layers(Convolution(), [n for n, _ in Convolution().named_parameters()]) is None
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    assert linear_layers(tied, [n for n, _ in tied.named_parameters()]) is None


@pytest.mark.parametrize("positions", [1, 3, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_squared_norms_are_those_of_gradients_made_by_vmap(positions: int, bias: bool) -> None:
    """With few positions by their products, with many by the gradient itself: 2 T² against 4 · 5."""
    a, g = (random.normal(random.key(k), (2, 3, positions, d), torch.float64) for k, d in ((0, 5), (1, 4)))
    weight, offset = torch.zeros(4, 5).double(), torch.zeros(4).double()
    loss = lambda w, b, x, y: ((x @ w.mT + b) * y).sum()
    each = vmap(vmap(grad(loss, argnums=(0, 1)), in_dims=(None, None, 0, 0)), in_dims=(None, None, 0, 0))
    by_weight, by_bias = each(weight, offset, a, g)
    expected = by_weight.square().sum((2, 3)) + bias * by_bias.square().sum(2)
    assert float((ghost_squares(a, g, bias) / expected - 1).abs().max()) < 1e-12


def test_convolutions_of_other_kinds_take_the_examples_own_gradients() -> None:
    for other in (nn.Conv1d(4, 4, 3, groups=2), nn.Conv1d(4, 4, 3, padding="same"),
                  nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), nn.Conv3d(4, 4, 1)):  # fmt: skip
        assert linear_layers(other, ["weight", "bias"]) is None
    assert linear_layers(nn.Conv1d(4, 4, 3), ["weight", "bias"]) is not None


def test_a_step_of_private_gradients_leaves_scalars_and_integers_alone() -> None:
    """Rows of any dtype travel with their examples."""
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(n, 5, generator=generator), torch.randint(3, (n,), generator=generator)) for n in (9, 4)]
    local = privacy.example_level(nn.Linear(5, 3), clip=1.0, noise=1.0, sampling_rate=0.5, steps=2, delta=DELTA,
                                  loss=nn.functional.cross_entropy, optimizer=OPTIMIZERS["adam"])  # fmt: skip
    run = ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors(rows)), rounds=2)
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(run.server))


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.6])
def test_training_losses_are_means_of_the_steps_that_drew_rows(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a step size of nothing every step has the loss of the start; a client that never draws has NaN."""
    module = mlp()
    local = privacy.example_level(
        module, clip=1.0, noise=1.0, sampling_rate=rate, steps=8, delta=DELTA, loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0), entropy=privacy.from_seed(3),
    )  # fmt: skip
    drawn = watch(local, monkeypatch)
    run = ft.run(ft.separate(local), ft.InProcess(DATA), rounds=1)
    found = run.client_losses.set_index("client")["train_loss"].sort_index().tolist()
    for k, (x, y) in enumerate(DATA):
        masks = [taken[k, : len(x)] for taken in drawn if taken[k].any()]
        each = [nn.functional.mse_loss(module(x[mask]), y[mask]).item() for mask in masks]
        assert found[k] == pytest.approx(sum(each) / len(each) if each else math.nan, nan_ok=True)
    assert rate > 0.1 or any(not d[k].any() for d in drawn for k in range(K))


def test_the_loss_of_a_step_with_rows_is_nan_where_theirs_is() -> None:
    """Only steps without rows are left out."""
    loss = lambda output, target: nn.functional.mse_loss(output, target) * torch.nan
    local = private(loss=loss, ghost=False)
    run = ft.run(ft.separate(local), ft.InProcess(DATA), rounds=1)
    assert run.client_losses["train_loss"].isna().all()
