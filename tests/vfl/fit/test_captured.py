"""Captured iterations give the numbers of iterations, whatever rows and noise they are given."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from support import splits
from support.verticals import GUIDES, KEY, MODELS, SD, gaussian_data, logistic_data, predictors
from torch import nn

from fedtorch import tree, vfl
from fedtorch.vfl.fit.captured import CapturedBound
from fedtorch.vfl.fit.guide import Noise
from fedtorch.vfl.fit.part import draw_noises
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.model.split_nn import mlp

ROUNDING = {"rtol": 1e-12, "atol": 1e-13}  # of float64, over some steps of the same operations


FITS = [("augmented", "mean field", None), ("power", "amortised", 7), ("augmented", "sums, low rank, joint", 7)]


@pytest.mark.parametrize(("name", "guide", "batch_size"), FITS)
@pytest.mark.slow
def test_fits_are_those_of_iterations(name, guide, batch_size) -> None:
    data = gaussian_data(rows=12)
    model = MODELS[name](likelihoods.gaussian(SD), predictors(), torch.tensor([0.5, 1.0]))
    options = {"key": KEY, "steps": 4, "draws": 2, "size": 2, "batch_size": batch_size}
    plain, captured = (vfl.sfvi(model, GUIDES[guide](), data, compile=compile, **options) for compile in (False, True))
    for one, other in zip(tree.leaves(captured.parameters), tree.leaves(plain.parameters)):
        torch.testing.assert_close(one, other, **ROUNDING)
    torch.testing.assert_close(captured.bounds, plain.bounds, **ROUNDING)


def network(dropout: float = 0.0) -> vfl.SplitNetwork:
    bottoms = [nn.Sequential(mlp(width, [4], 1), nn.Dropout(dropout)) for width in (2, 1)]
    bayes = vfl.HierarchicalBayes(rho=torch.tensor([1.0, 5.0, 0.0]), random=["0.last.*"])
    return vfl.SplitNetwork(bottoms, likelihoods.bernoulli(), seed=range(3), bayes=bayes).double().train()


def gradients_of(split: vfl.SplitNetwork) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in split.named_parameters()}


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_split_networks(dropout) -> None:
    data, split = logistic_data([2, 1], 9), network(dropout)
    captured = CapturedBound(split.model, split.server.guide, split.variational)
    here = data.to_dtype(torch.float64)
    share = 1 / here.total.double()
    for step in range(3):
        split.zero_grad()
        losses = split.losses(data, step)
        losses.sum().backward()
        wanted = gradients_of(split)
        split.zero_grad()
        noise = draw_noises([split.server, *split.parties], step, 9)
        value = captured.backward(here, noise, share)
        torch.testing.assert_close(-value.squeeze(1) * share, losses.detach(), **ROUNDING)
        for name, gradient in gradients_of(split).items():
            assert (gradient is None) == (wanted[name] is None), name
            if gradient is not None:
                torch.testing.assert_close(gradient, wanted[name], **ROUNDING)
    reason = "the networks draw random numbers" if dropout else None
    assert captured.eager == reason
    if not torch.cuda.is_available():
        assert captured.one_by_one == (reason or "the tensors are on cpu")


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize(
    ("name", "batch_size"),
    [pytest.param("amortised", None, marks=pytest.mark.slow), ("amortised", 7), ("dropout", None), ("dropout", 7)],
)
def test_a_trainer_of_captured_steps(name: str, batch_size: int | None, tmp_path: Path) -> None:
    """The numbers of plain steps, with gradients that the Trainer clips; so has dropout, which is not captured."""
    rows, trained = splits.data(), []
    for compiles in (False, True):
        split = splits.CASES[name]()
        split.compiles = compiles
        trainer = L.Trainer(
            max_epochs=3, gradient_clip_val=0.1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(split, vfl.VerticalLoader(rows, batch_size=batch_size, row_dims=split.model.row_dims))
        trained.append((trainer.callback_metrics["train_loss"], dict(split.named_parameters())))
        assert (split._captured is not None) == compiles
    torch.testing.assert_close(trained[1][0], trained[0][0], **ROUNDING)
    for key, weight in trained[0][1].items():
        torch.testing.assert_close(trained[1][1][key], weight, **ROUNDING)


def test_a_replay_runs_no_python(monkeypatch) -> None:
    data, calls = logistic_data([2, 1], 9), []
    split = network()
    captured = CapturedBound(split.model, split.server.guide, split.variational)
    from fedtorch.vfl.fit import captured as module

    original = module.bound
    monkeypatch.setattr(module, "bound", lambda *args: calls.append(1) or original(*args))
    for step in range(4):
        noise: Noise = draw_noises([split.server, *split.parties], step, 9)
        captured.backward(data.to_dtype(torch.float64), noise, torch.tensor(1.0).double())
    assert len(calls) == 2  # the first iteration, and the capture in the second


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_replays_one_graph() -> None:
    data = gaussian_data(rows=12)
    model = vfl.augmented(likelihoods.gaussian(SD), predictors(), torch.tensor([0.5, 1.0]))
    rows = vfl.VerticalData(tuple(x.cuda() for x in data.features), data.response.cuda())
    options = {"key": KEY, "steps": 5, "draws": 2, "size": 2}
    plain = vfl.sfvi(model, vfl.Guide(vfl.sums()), data, **options)
    captured = vfl.sfvi(model, vfl.Guide(vfl.sums()), rows, compile=True, **options)
    for one, other in zip(tree.leaves(captured.parameters), tree.leaves(plain.parameters)):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-8, atol=1e-9)
