"""Split networks: one graph equals messages equals an ordinary network, and what training needs around it."""

from __future__ import annotations

import copy
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.oracles.closed_forms import ROUNDING
from support.splits import CASES, KEYS, SGD, B, N, bayes, bottoms, data, distance, draw, network
from torch import Tensor, nn

from fedtorch import functional, random, vfl, wire
from fedtorch.models import encoders
from fedtorch.protocol.halves import encode, together
from fedtorch.vfl.fit.part import NodeNoise
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.model.predictors import normal_prior
from fedtorch.vfl.model.split_nn import NetworkPredictor, Stacked, mlp
from fedtorch.vfl.nodes.iteration import exchange, server_half
from fedtorch.vfl.nodes.node import Gradient, Iteration, Value


def in_one_graph(model: vfl.SplitNetwork, rows: vfl.VerticalData, steps: int) -> None:
    optimizer = model.configure_optimizers()
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        model.losses(rows, step).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("absent", [False, True], ids=["", "absent rows"])
@pytest.mark.parametrize("name", CASES)
def test_messages_give_the_numbers_of_one_graph(name: str, absent: bool) -> None:
    model, rows = CASES[name](), data()
    if absent:
        if "skip" in model.server.q.get("z", {}):
            pytest.skip("noise at the sum needs all parties")
        rows = rows._replace(present=random.bernoulli(random.key(3), 0.7, (N, 3)))
    other = copy.deepcopy(model)
    before = copy.deepcopy(model)
    in_one_graph(model, rows, 3)
    server, parties = other.nodes(rows, SGD)
    traffic = [exchange(server, parties, Iteration(step=step)) for step in range(3)]
    assert distance(model, other) < ROUNDING
    assert distance(model, before) > 1e-3
    widths = [party.outputs for party in model.parties]
    values = [torch.zeros(B, 1, width, N, dtype=torch.float64) for width in widths]
    expected = sum(wire.size(Value(v)) for v in values), sum(wire.size(Gradient(v)) for v in values)
    assert all(found == expected for found in traffic)
    assert expected[0] - 8 * B * sum(widths) * N < 200 * len(widths)  # beside the numbers, headers


@pytest.mark.parametrize("name", CASES)
def test_predictions_between_organisations_by_saved_parts(name: str, tmp_path: Path) -> None:
    """Each node makes the network anew, reads its own file and has its own rows: what comes out is `predict`."""
    trained, names, rows = CASES[name](), ["party 0", "party 1", "party 2"], data().features
    in_one_graph(trained, data(), 2)
    made = {node: CASES[name]() for node in ("server", *names)}
    for part in (trained.server, *trained.parties):
        part.save(tmp_path / part.name)
    made["server"].server.load(tmp_path / "server")
    halves = {0: made["server"].server_prediction(N, draws=5, seed=7)}
    for j, party in enumerate(names):
        made[party].parties[j].load(tmp_path / party)
        own = {"draws": 5, "seed": 7, "accept_disclosure": True}
        halves[j + 1] = made[party].party_prediction(party, rows[j], **own)
    found = together(halves)[0][0]
    assert torch.equal(found, trained.predict(rows, draws=5, seed=7))
    own = made["party 0"].predict(rows, draws=5, seed=7)  # where the others' halves have not been read
    assert not torch.equal(found, own)


def test_messages_of_a_prediction() -> None:
    """Values that only their sum should tell do not leave as they are, and a party has a name and rows of its own."""
    half = CASES["sums"]().party_prediction("party 1", data().features[1])
    with pytest.raises(ValueError, match="Expected a secure sum around a half"):
        encode(next(half))
    encode(next(CASES["plain"]().party_prediction("party 1", data().features[1])))
    with pytest.raises(ValueError, match=r"Expected one of the parties .*, but got 'party 7'"):
        CASES["plain"]().party_prediction("party 7", data().features[1])
    with pytest.raises(ValueError, match="Expected finite features of 'party 1', but got NaN"):
        CASES["plain"]().party_prediction("party 1", data().features[1] / 0)


def test_gradient_messages_are_autograd_s() -> None:
    """What comes down is the derivative of the joint bound per row, minus the loss, with respect to what went up."""
    model, rows = CASES["plain"](), data()
    server, parties = model.nodes(rows, SGD)
    values = [party.propose(Iteration()).sent for party in parties]
    leaves = [value.clone().requires_grad_() for value in values]
    total = sum(leaves)[:, 0] + rows.offset  # (B, C, N)
    log_p = total.log_softmax(1).gather(1, rows.response.long()[:, None])[:, 0]
    loss = -((log_p * rows.weight).sum(1) / rows.weight.sum(1)).sum()
    loss.backward()
    half, step = server_half(server, [Iteration()]), None
    for message in (None, *map(Value, values)):
        step = half.send(message)
    for leaf in leaves:
        assert torch.allclose(step.message.gradient, -leaf.grad, rtol=0, atol=ROUNDING)
        step = next(half, None)


@pytest.mark.parametrize("name", ["plain", "sums", "amortised"])
def test_minibatches_as_messages(name: str) -> None:
    model, rows = CASES[name](), data()._replace(weight=None)
    other, chosen = copy.deepcopy(model), torch.tensor([5, 1, 9])
    in_one_graph(model, rows.take(chosen), 1)
    server, parties = other.nodes(rows, SGD)
    exchange(server, parties, Iteration(rows=chosen))
    assert distance(model, other) < ROUNDING


def test_local_steps_follow_the_received_gradient() -> None:
    model, rows = CASES["amortised"](), data()
    once, thrice = copy.deepcopy(model), copy.deepcopy(model)
    for other, count in ((once, 1), (thrice, 3)):
        server, parties = other.nodes(rows, SGD)
        exchange(server, parties, Iteration(), local_steps=count)
    assert distance(once.server, thrice.server) == 0
    moved = [distance(model.parties[0], other.parties[0]) for other in (once, thrice)]
    assert moved[1] > 2 * moved[0] > 0


@pytest.mark.parametrize("name", ["plain", "sums", "amortised"])
def test_elements_do_not_influence_each_other(name: str) -> None:
    """Each element alone has the losses and gradients that it has in the stack; batched equals looped."""
    model, rows = CASES[name](), data()
    model.train()
    losses = model.losses(rows, 2)
    losses.sum().backward()
    for b in range(B):
        alone = copy.deepcopy(model)
        part = lambda value, b=b: value[b : b + 1]
        for module in alone.modules():
            for table in (module._parameters, module._buffers):
                for key, value in table.items():
                    if value is not None and value.ndim and len(value) == B:
                        table[key] = nn.Parameter(part(value.detach())) if table is module._parameters else part(value)
            if isinstance(module, Stacked):
                module.size = 1
        x = tuple(part(f) if f.ndim == 3 else f for f in rows.features)
        loss = alone.losses(vfl.VerticalData(x, part(rows.response), rows.offset, part(rows.weight)), 2)
        loss.sum().backward()
        assert torch.allclose(loss, losses[b : b + 1], rtol=0, atol=ROUNDING)
        for whole, own in zip(model.parameters(), alone.parameters()):
            if whole.grad is not None:
                assert torch.allclose(own.grad, part(whole.grad), rtol=0, atol=ROUNDING)


def test_permuted_parties_change_nothing() -> None:
    model, rows = CASES["plain"](), data()
    order = [2, 0, 1]
    other = copy.deepcopy(model)
    other.parties = nn.ModuleList([model.parties[j] for j in order])
    permuted = rows._replace(features=tuple(rows.features[j] for j in order))
    assert torch.allclose(model.losses(rows, 0), other.losses(permuted, 0), rtol=0, atol=ROUNDING)


def test_one_party_without_noise_is_an_ordinary_network() -> None:
    """Trained by torch alone on the same start, both for a plain network and where ρ is 0."""
    rows = vfl.VerticalData((draw(0, N, 3),), data().response[0])
    for prior in (None, vfl.HierarchicalBayes(rho=0.0)):
        model = network([bottoms()[0]], bayes=prior)
        party = model.parties[0]
        stack = party.network.stack
        start = dict(zip(stack.trained_names, stack.weights)) | party.network._named(party.q["theta"]["mean"])
        plain = [functional.load(bottoms()[0], {name: value[b] for name, value in start.items()}) for b in range(B)]
        in_one_graph(model, rows, 4)
        for b, module in enumerate(plain):
            optimizer = SGD(module.parameters())
            for _ in range(4):
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(rows.features[0]), rows.response.long()).backward()
                optimizer.step()
            expected = module(rows.features[0]).softmax(1).T
            assert torch.allclose(model.predict(rows.features)[b], expected, rtol=0, atol=ROUNDING)


def test_a_linear_network_is_the_linear_predictor() -> None:
    """The same model, whether its predictors hold a linear layer with random weights or are linear: fitted alike."""
    x, keys = [draw(0, 20, 3), draw(1, 20, 2)], KEYS[:1]
    rows = vfl.VerticalData(tuple(x), (x[0].sum(1) > 0).double())
    guide = vfl.Guide(vfl.sums(encoders.perceptron(4)), joint=True)
    layers = [Stacked(nn.Linear(width, 1, bias=False).double(), keys) for width in (3, 2)]
    networks = [NetworkPredictor(layer, 1, random="weight", prior=normal_prior()) for layer in layers]
    found = []
    for predictors in (networks, [vfl.linear(3), vfl.linear(2)]):
        for predictor in networks:
            predictor.start.zero_()
        model = vfl.augmented(likelihoods.bernoulli(), predictors, 0.7)
        fit = vfl.sfvi(model, guide, rows, steps=20, draws=3)
        found.append(torch.cat([part.flatten() for part in fit.moments()]))
    assert torch.allclose(*found, rtol=0, atol=ROUNDING)


def test_sfvi_trains_the_networks_of_a_model() -> None:
    """A split network's model outside of it: the bound rises, and the networks that were given stay as they were."""
    network_, rows = CASES["sums"](), data()._replace(weight=None)
    model, before = network_.model, copy.deepcopy(network_)
    fit = vfl.sfvi(model, network_.server.guide, rows, steps=60, lr=0.03, size=B, every=20)
    assert (fit.bounds[-1] > fit.bounds[0]).all()
    assert distance(network_, before) == 0
    trained, given = (m.predictors[0].stack.weights[0].detach() for m in (fit.model, model))
    assert not torch.equal(trained, given)


@pytest.mark.parametrize("rho", [1.3, 1e-4, 0.0])
def test_gaussian_bound_averages_to_its_closed_form(rho: float) -> None:
    """One party, one linear weight, Gaussian response, exact q(s | w): E of the bound is that of Bayesian regression.

    The augmented model is the regression with noise variance σ² + ρ², so with q(s | w) exact,
    E[bound] = E_q[log N(y; xw, σ² + ρ²)] − KL(q(w) ‖ N(0, 1)), also for a small ρ. At ρ = 0 it is not the limit, but a
    plain network: w is its mean, without prior and posterior.
    """
    x, y = draw(0, 20, 1), draw(1, 20)
    sd, size, draws = 0.8, 1, 500 if rho else 2
    prior = vfl.HierarchicalBayes(rho=rho, random="*", auxiliary=vfl.sums(encoders.affine(), skewed=False))
    model = vfl.SplitNetwork(
        [nn.Linear(1, 1, bias=False).double()], likelihoods.gaussian(sd), seed=range(size), bayes=prior
    ).double()
    # s | y, w ~ N(η + (y − η) ρ²/(ρ² + σ²), …) is what a new encoder, which answers zero, starts from.
    model.train()
    bounds = torch.stack([-20 * model.losses(vfl.VerticalData((x,), y), t)[0].detach() for t in range(draws)])
    q = model.parties[0].q["theta"]
    mean, spread = q["mean"][0, 0].detach(), q["log_sd"].exp()[0, 0].detach()
    variance = sd**2 + rho**2
    residuals, of_spread = (y - x[:, 0] * mean).square().sum(), spread**2 * x.square().sum()
    normaliser = 10 * torch.log(torch.tensor(2 * torch.pi * variance))
    kl = 0.5 * (spread**2 + mean**2 - 1) - spread.log()
    if rho == 0:
        assert torch.allclose(bounds, -0.5 * residuals / variance - normaliser, rtol=1e-6, atol=0)
        return
    error = bounds.std() / draws**0.5
    assert abs(bounds.mean() - (-0.5 * (residuals + of_spread) / variance - normaliser - kl)) < 4 * error
    assert kl + 0.5 * of_spread / variance > 8 * error  # by which a plain network's is higher


@pytest.mark.parametrize("auxiliary", [None, vfl.amortised()], ids=["sums", "amortised"])
def test_small_rho_gives_the_network_without_z(auxiliary: vfl.Auxiliary | None) -> None:
    """Trained by torch alone: the same steps on −E_q log p(y | Σ_j f_j(w)) + KL(q(w) ‖ N(0, 1)), up to O(ρ).

    By gradient descent, for Adam takes whole steps along an encoder's gradients however small a ρ makes them.
    """
    widths, rho, descend = [3, 2], [1e-3, 1e-4], lambda parameters: torch.optim.SGD(parameters, lr=0.03)
    x = [draw(j, N, width) for j, width in enumerate(widths)]
    y = (x[0].sum(1) - x[1][:, 0].square() > 0).double()
    model = vfl.SplitNetwork(
        [mlp(width, [4], 1, activation=nn.Tanh).double() for width in widths],
        likelihoods.bernoulli(),
        seed=[0, 0],
        bayes=vfl.HierarchicalBayes(rho=torch.tensor(rho), auxiliary=auxiliary),
        optimizer=descend,
    ).double()

    def weights(party: vfl.Part, b: int) -> dict[str, Tensor]:
        stack = party.network.stack
        named = (*zip(stack.trained_names, stack.weights), *party.q["theta"].items())
        return {name: value.detach()[b].clone().requires_grad_() for name, value in named}

    plain = [weights(party, 0) for party in model.parties]
    optimizer = descend([value for each in plain for value in each.values()])
    for step in range(8):
        loss, eta = torch.zeros((), dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
        for of, rows, party in zip(plain, x, model.parties):
            noise = party.noise.at(step, N, rows)[0][0, 0]
            theta = of["mean"] + of["log_sd"].exp() * noise
            eta = eta + torch.tanh(rows @ of["linear0.weight"].T + of["linear0.bias"]) @ theta[:4] + theta[4]
            standard = (theta - of["mean"].detach()) / of["log_sd"].detach().exp()  # sticking the landing
            loss = loss + 0.5 * (theta.square() - standard.square()).sum()
        loss = loss + nn.functional.binary_cross_entropy_with_logits(eta, y, reduction="sum")
        optimizer.zero_grad()
        (loss / N).backward()
        optimizer.step()
    begun = [weights(party, 0) for party in model.parties]
    in_one_graph(model, vfl.VerticalData(tuple(x), y), 8)
    away = lambda b, other: max(
        float((mine[name] - value).detach().abs().max())
        for mine, party in zip(other, model.parties)
        for name, value in weights(party, b).items()
    )
    near, nearer = away(0, plain), away(1, plain)
    assert near < 1e-3 * away(0, begun)
    assert nearer == pytest.approx(near / 10, rel=0.05)


def test_a_prior_on_the_other_weights_adds_their_squares() -> None:
    """Where ρ > 0; the last layer's have the prior of their own."""
    rows, sd = data()._replace(weight=None), torch.tensor([0.7, 0.2, 0.3], dtype=torch.float64)
    without, with_prior = (network(bayes=bayes(weight_sd=value)).losses(rows, 1) for value in (None, sd))
    weights = [weight for party in network().parties for weight in list(party.network.stack.weights)[:2]]
    squares = torch.stack([weight.square().flatten(1).sum(1) for weight in weights]).sum(0)
    expected = torch.where(torch.arange(B) == 1, 0, squares / (2 * sd.square() * N))
    assert torch.allclose(with_prior - without, expected, rtol=1e-6, atol=0)  # sds pass through float32


class Images(nn.Module):
    """A user's own convolutional bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 3)
        self.last = nn.Linear(2, 3)
        self.register_buffer("centre", torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.convolution(x - self.centre)).mean((-2, -1)))


@pytest.mark.parametrize("prior", [None, bayes()])
def test_convolutional_bottoms_and_tables_train_together(prior: vfl.HierarchicalBayes | None) -> None:
    images = draw(3, N, 1, 5, 5)
    model = network([Images().double(), bottoms()[0]], row_dims=[3, 1], bayes=prior, names=["scanner", "ward"])
    rows = vfl.VerticalData((images, draw(0, N, 3)), data().response)
    model.check(rows)
    before = model.log_score(rows).mean()
    for _ in range(10):
        in_one_graph(model, rows, 3)
    assert model.log_score(rows).mean() > before
    stacked = rows._replace(features=(images.expand(B, -1, -1, -1, -1), rows.features[1]))
    gap = model.predict(stacked.features) - model.predict(rows.features)  # convolutions of other shapes
    assert gap.abs().max() < ROUNDING


def trainer(folder: Path, **arguments: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **{"enable_checkpointing": False, "max_epochs": 2, **arguments},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["dropout", "amortised"])
def test_lightning_trainer_trains_a_split_network(name: str, tmp_path: Path) -> None:
    """And takes the steps of a plain loop, and writes checkpoints that can be loaded."""
    model, rows = CASES[name](), data()
    other = copy.deepcopy(model)
    loader = vfl.VerticalLoader(rows, steps=3)
    fit = trainer(tmp_path, enable_checkpointing=True)
    fit.fit(model, loader, vfl.VerticalLoader(rows))
    in_one_graph(other, rows, 6)
    assert distance(model, other) < ROUNDING
    assert model.validation_losses.shape == (B,)
    fresh = CASES[name]()
    fresh.load_state_dict(torch.load(fit.checkpoint_callback.best_model_path, weights_only=True)["state_dict"])
    assert distance(model, fresh) == 0
    predicted = trainer(tmp_path).predict(model, vfl.VerticalLoader(rows))
    assert torch.allclose(predicted[0].sum(1), torch.ones(B, N, dtype=torch.float64))


def test_minibatches_cover_an_epoch_and_keep_the_scale() -> None:
    rows = data()
    loader = vfl.VerticalLoader(rows, batch_size=4)
    batches = list(loader)
    assert len(batches) == len(loader) == 4
    seen = torch.cat([part.response[0] + 100 * part.features[0][:, 0] for part in batches])
    assert torch.equal(seen.sort().values, (rows.response[0] + 100 * rows.features[0][:, 0]).sort().values)
    scaled = torch.cat([part.weight * (len(part.response[0]) / N) for part in batches], 1)
    assert torch.allclose(scaled.sort().values, rows.weight.sort().values)
    assert not torch.equal(batches[0].response, next(iter(loader)).response)  # a new order


@pytest.mark.parametrize("name", ["plain", "amortised", "sums"])
@pytest.mark.slow
def test_minibatches_are_unbiased(name: str) -> None:
    """Averaged over an epoch and over noise, the loss is that of all rows, prior and all."""
    model, rows = CASES[name](), data()._replace(weight=None)
    parts = [rows.take(chosen) for chosen in random.permutation(random.key(0), N).split(2)]
    with torch.no_grad():
        whole = torch.stack([model.losses(rows, step) for step in range(200)])
        steps = torch.arange(200, 200 + 30 * len(parts)).reshape(30, -1).tolist()  # every minibatch's noise its own
        each = torch.stack([torch.stack([model.losses(p, s) for p, s in zip(parts, row)]).mean(0) for row in steps])
    error = (whole.var(0) / 200 + each.var(0) / 30).sqrt()
    assert ((whole.mean(0) - each.mean(0)).abs() < 4 * error + ROUNDING).all()


@pytest.mark.parametrize("name", ["plain", "amortised"])
def test_minibatches_of_weighted_rows_are_unbiased(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each element's weights are others, and some minibatches have no row that counts for one: exact over an epoch."""
    model, rows = CASES[name](), data()
    assert rows.weight is not None
    rows.weight[1, :10] = 0
    parts = [rows.take(chosen) for chosen in torch.arange(N).split(2)]
    # What is drawn is for rows in their places: leave it away.
    nothing = lambda self, step, rows, like: (like.new_zeros(1, 1, self.theta), like.new_zeros(1, 1, self.z, rows))
    monkeypatch.setattr(NodeNoise, "at", nothing)
    with torch.no_grad():
        whole, each = model.losses(rows, 0), torch.stack([model.losses(part, 0) for part in parts])
    assert torch.allclose(each.mean(0), whole, rtol=0, atol=ROUNDING)


def test_early_stopping_restores_every_element_s_best(tmp_path: Path) -> None:
    model, rows = network(optimizer=lambda p: torch.optim.Adam(p, lr=0.1)), data()
    odd = rows._replace(response=(rows.response + torch.arange(N) % 2) % 3)  # validation labels of another rule
    history, weights = [], []

    class Record(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                history.append(pl_module.validation_losses)
                weights.append(copy.deepcopy(pl_module.state_dict()))

    stop = vfl.StackedEarlyStopping(patience=4)
    fit = trainer(tmp_path, max_epochs=60, callbacks=[Record(), stop])
    fit.fit(model, vfl.VerticalLoader(rows, steps=2), vfl.VerticalLoader(odd))
    losses = torch.stack(history)
    assert len(losses) < 60
    for b in range(B):
        own = losses[:, b]
        until = next((t for t in range(len(own)) if t - int(own[: t + 1].argmin()) >= 4), len(own))
        best = int(own[: until + 1].argmin())
        assert int(stop.epoch[b]) == best
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter[b], weights[best][name][b])
    now = -(model.log_score(odd) * odd.weight).sum(1) / odd.weight.sum(1)
    assert torch.allclose(now, stop.best)
    assert (stop.best < losses[-1]).all()


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_training_is_the_same(tmp_path: Path) -> None:
    """Minibatches, noise, dropout, Adam's moments, a schedule and what early stopping keeps go on where they were."""

    def scheduled(parameters: Any) -> Any:
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    def fit(model: vfl.SplitNetwork, epochs: int, folder: str, resume: str | None = None) -> vfl.StackedEarlyStopping:
        stop = vfl.StackedEarlyStopping(patience=4)
        save = L.pytorch.callbacks.ModelCheckpoint(tmp_path / folder, save_last=True)
        loaders = vfl.VerticalLoader(data(), batch_size=4), vfl.VerticalLoader(data())
        fit = trainer(tmp_path, max_epochs=epochs, callbacks=[stop, save], enable_checkpointing=True)
        fit.fit(model, *loaders, ckpt_path=resume, weights_only=True)
        return stop

    make = lambda: network(bottoms(dropout=0.3), optimizer=scheduled, bayes=bayes())
    whole, first, rest = make(), make(), make()
    expected = fit(whole, 6, "whole")
    fit(first, 3, "part")
    found = fit(rest, 6, "part", str(tmp_path / "part" / "last.ckpt"))
    assert distance(whole, rest) == 0
    assert torch.equal(expected.best, found.best)
    assert torch.equal(expected.epoch, found.epoch)


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_checkpoints_are_plain_and_appear_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loader, path = CASES["plain"](), vfl.VerticalLoader(data(), steps=3), tmp_path / "kept.ckpt"
    fit = trainer(tmp_path)
    fit.fit(model, loader)
    fit.save_checkpoint(path)
    good = path.read_bytes()

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            fit.save_checkpoint(path)
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(good[:-700])
    with pytest.raises(ValueError, match=r"in .*kept\.ckpt, but got a damaged file"):
        trainer(tmp_path).fit(model, loader, ckpt_path=path)
    torch.save({"state_dict": Evil(tmp_path / "made")}, path)
    with pytest.raises(ValueError, match="objects that could run code"):
        trainer(tmp_path).fit(model, loader, ckpt_path=path, weights_only=False)
    assert not (tmp_path / "made").exists()
    with pytest.raises(ValueError, match="file of this machine, but got the address 'http://"):
        trainer(tmp_path).fit(model, loader, ckpt_path="http://127.0.0.1:9/last.ckpt")


@pytest.mark.parametrize("name", ["plain", "sums", "amortised"])
def test_save_load_and_predict_per_party(name: str, tmp_path: Path) -> None:
    model, rows = CASES[name](), data()
    in_one_graph(model, rows, 2)
    for node in (*model.parties, model.server):
        node.save(tmp_path / f"{node.name}.safetensors")
    fresh = CASES[name]()
    assert distance(model, fresh) > 0
    for node in (*fresh.parties, fresh.server):
        node.load(tmp_path / f"{node.name}.safetensors")
    assert torch.equal(fresh.predict(rows.features, draws=5), model.predict(rows.features, draws=5))
    with pytest.raises(ValueError, match="Expected parameters of party 'party 0', but got those of 'party 1'"):
        fresh.parties[0].load(tmp_path / "party 1.safetensors")
    # By the parties: each sends draws of its values, the server adds them up.
    fresh.eval()
    sent = [party.propose(x, random.key(0), 5) for party, x in zip(fresh.parties, rows.features)]
    total = fresh.model.cut(sent)
    assert torch.allclose(total.softmax(-2).mean(1), model.predict(rows.features, draws=5))


def test_predictions_average_over_weights_and_noise() -> None:
    """A Gaussian response: the draws' variance is that of the weights plus Jρ²."""
    rho, draws = 1.5, 1000
    prior = vfl.HierarchicalBayes(rho=rho, random="*", sd=0.4)
    linear = [nn.Linear(1, 1, bias=False).double() for _ in range(2)]
    model = vfl.SplitNetwork(linear, likelihoods.gaussian(1.0), bayes=prior).double()
    x = torch.tensor([[2.0]], dtype=torch.float64)
    totals = model.totals([x, x], draws, 0, True).flatten()
    bare = model.totals([x, x], draws, 0, False).flatten()
    for found, variance in ((totals, 2 * (0.4 * 2) ** 2 + 2 * rho**2), (bare, 2 * (0.4 * 2) ** 2)):
        assert abs(found.var() - variance) < 4 * variance * (2 / draws) ** 0.5


def test_noise_is_a_function_of_the_step() -> None:
    first, second = NodeNoise(KEYS[0], 3, 2), NodeNoise(KEYS[0], 3, 2)
    like = torch.zeros(1, dtype=torch.float64)
    later = second.at(130, 5, like)
    for step in (0, 130, 63, 64, 130):
        found = first.at(step, 5, like)
    assert all(torch.equal(a, b) for a, b in zip(found, later))
    assert not torch.equal(first.at(129, 5, like)[1], later[1])


def test_starts_leave_the_global_generator_alone() -> None:
    module = mlp(3, [4], 1)
    state = torch.random.get_rng_state()
    stack = Stacked(module, KEYS)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(Stacked(mlp(3, [4], 1), KEYS[1:]).weights[0], stack.weights[0][1:])
    assert not torch.equal(stack.weights[0][0], stack.weights[0][1])


def test_a_node_s_part_does_not_depend_on_the_others_modules() -> None:
    """So that every process can make its own without knowing theirs."""
    others = [mlp(1, [], 3).double() for _ in range(2)]
    whole, alone = network(bayes=bayes()), network([bottoms()[0], *others], bayes=bayes())
    assert distance(whole.parties[0], alone.parties[0]) == 0
    assert distance(whole.server, alone.server) == 0


def test_bad_input() -> None:
    model, rows = network(), data()
    with pytest.raises(ValueError, match="Expected features of 3 parties, but got 2"):
        model.check(rows._replace(features=rows.features[:2]))
    with pytest.raises(ValueError, match=f"Expected {N} rows of 1 dimensions of 'party 2'.*align the rows"):
        model.check(rows._replace(features=(*rows.features[:2], rows.features[2][1:])))
    with pytest.raises(ValueError, match="Expected finite features of 'party 0'"):
        model.check(rows._replace(features=(rows.features[0] * torch.nan, *rows.features[1:])))
    with pytest.raises(ValueError, match="Expected labels from 0 to 2"):
        model.check(rows._replace(response=rows.response + 1))
    with pytest.raises(ValueError, match="Expected features of 3 parties"):
        model.predict(rows.features[:1])
    with pytest.raises(ValueError, match="Expected rho ≥ 0"):
        vfl.HierarchicalBayes(rho=-1.0)
    with pytest.raises(ValueError, match="Expected rho of 3 elements, but got 2"):
        network(bayes=vfl.HierarchicalBayes(rho=torch.ones(2)))
    with pytest.raises(ValueError, match="Expected weight_sd of 3 elements, but got 2"):
        network(bayes=bayes(weight_sd=torch.ones(2)))
    with pytest.raises(ValueError, match="Expected positive sd and weight_sd"):
        bayes(weight_sd=torch.tensor([0.5, 0.0]))
    with pytest.raises(ValueError, match="Expected weight of 14 rows, but got shape"):
        model.check(rows._replace(weight=rows.weight[:, 1:]))
    with pytest.raises(ValueError, match=r"Expected networks of 'party 0' .* to \(n, 3\), but got \(14, 2\)"):
        network(bottoms(2)).losses(rows, 0)
    with pytest.raises(ValueError, match="Expected 3 numbers a row for the likelihood, but got 6"):
        network(bottoms(2), combine=vfl.concatenated, widths=[2, 2, 2]).losses(rows, 0)
    with pytest.raises(ValueError, match="Expected 3 numbers a row for the likelihood, but got 2"):
        network(bottoms(2), widths=[2, 2, 2], bayes=bayes()).losses(rows, 0)
    with pytest.raises(ValueError, match="Expected a pattern that matches"):
        network(bayes=bayes(random="head.*"))
    with pytest.raises(ValueError, match="Expected a sum at the cut layer"):
        network(bottoms(2), combine=vfl.concatenated, widths=[2, 2, 2], bayes=bayes(auxiliary=vfl.sums()))
    with pytest.raises(ValueError, match="Expected an amortised family"):
        network(bayes=bayes(auxiliary=vfl.mean_field()))
    with pytest.raises(ValueError, match="use GroupNorm"):
        network([nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))])
    with pytest.raises(ValueError, match="Expected parties with a name"):
        network(names=["a", "a", "b"])
    with pytest.raises(ValueError, match="Expected rows that all parties have"):
        CASES["sums"]().check(rows._replace(present=torch.ones(N, 3, dtype=torch.bool)))
    with pytest.raises(ValueError, match="Expected keys for a module that draws"):
        Stacked(mlp(3, [4], 1, dropout=0.5), KEYS).train()(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="Expected rows of 1 dimensions"):
        Stacked(mlp(3, [4], 1), KEYS)(torch.zeros(3))
    absent = data()._replace(present=torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=rf"Expected present of shape \({N}, 3\), but got \(3, 3\)"):
        network().check(absent)
    with pytest.raises(ValueError, match="a row with a positive weight for each element"):
        network().check(data()._replace(weight=torch.zeros(B, N)))


def test_parameters_in_a_plain_list_are_refused() -> None:
    """The stack would not train them."""

    class Holding(nn.Module):
        def __init__(self, frozen: bool) -> None:
            super().__init__()
            self.registered, self.plain = nn.Linear(3, 4), [nn.Linear(4, 1).requires_grad_(not frozen)]

        def forward(self, x: Tensor) -> Tensor:
            return self.plain[0](self.registered(x))

    with pytest.raises(ValueError, match=r"'plain\[0\]\.weight' and 1 more of Holding, which .* not registered"):
        Stacked(Holding(frozen=False), KEYS)(torch.zeros(2, 3))
    assert Stacked(Holding(frozen=True), KEYS)(torch.zeros(2, 3)).shape == (len(KEYS), 2, 1)


def test_failed_prediction_restores_training_mode() -> None:
    model, (first, second, third) = network().train(), data().features
    with pytest.raises(ValueError, match=rf"the same rows of all parties, but got \[{N}, 1, {N}\] of them"):
        model.predict([first, second[..., :1, :], third])  # one row would be everybody's
    with pytest.raises(ValueError, match="Expected features that the network of 'party 0' takes"):
        model.predict([first[:, :1], second, third])
    assert model.training


def test_threads_begin_with_the_weights_of_their_keys():
    """Nodes of one process are threads, and all layers draw from one generator."""
    prototype = mlp(40, [40] * 8)
    made = lambda k: Stacked(prototype, random.key(k).reshape(1)).state_dict()
    alone = [made(k) for k in range(4)]
    with ThreadPoolExecutor(4) as pool:
        beside = list(pool.map(made, [0, 1, 2, 3] * 25))
    for k, weights in enumerate(beside):
        assert all(leaf.equal(alone[k % 4][name]) for name, leaf in weights.items())
