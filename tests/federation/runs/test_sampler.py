"""Draws, moments and diagnostics of a sampler, on disk and after a break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracles.closed_forms import distance, linear_clients, same_bits

import fedtorch as ft
from fedtorch.federation.runs.sampler import RunningMoments, load_arviz
from fedtorch.models.gibbs import sparse

SIZES = [12, 5, 9]


def begun(made: ft.Sampler, **arguments: Any) -> ft.Run:
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2, chains=3)
    return ft.Run(algorithm, ft.InProcess(linear_clients(SIZES)), torch.zeros(3), record=made, **arguments)


def sampler(rounds: int, **arguments: Any) -> ft.Sampler:
    """A sampler that has followed a run."""
    made = ft.Sampler(**arguments)
    list(begun(made).rounds(rounds))
    return made


def test_moments_are_those_of_the_draws() -> None:
    made = sampler(24, burn_in=3, thin=2)
    draws = made.draws()["theta"]
    assert draws.shape == (3, 10, 3)
    moments = made.moments["theta"]
    assert distance(moments.mean, draws.mean(1)) < 1e-13
    assert distance(moments.sd(), draws.std(1)) < 1e-13
    assert distance(made.mean()["theta"], draws.flatten(0, 1).mean(0)) < 1e-13
    assert distance(made.sd()["theta"], draws.flatten(0, 1).std(0)) < 1e-13
    every = torch.stack([round.server.variables.theta for round in begun(ft.Sampler()).rounds(24)], 1)
    assert torch.equal(draws, every[:, 4::2])


@pytest.mark.parametrize("stop", [2, 6, 11])
def test_a_run_goes_on_bit_for_bit(stop: int, tmp_path: Path) -> None:
    settings = {"burn_in": 3, "thin": 2, "block": 3}
    cohort = {"cohort": 2, "seed": 7}
    runs = [begun(ft.Sampler(folder=tmp_path / name, **settings), **cohort) for name in ("whole", "parts", "parts")]
    whole, stopped, resumed = runs
    list(whole.rounds(20))
    list(stopped.rounds(stop))
    stopped.save(tmp_path / "begun.safetensors")
    list(stopped.rounds(stop + 5))  # what is done after the checkpoint is done again
    list(resumed.load(tmp_path / "begun.safetensors").rounds(20))
    assert same_bits(resumed.recorders[0].draws(), whole.recorders[0].draws())
    assert same_bits(resumed.recorders[0].moments, whole.recorders[0].moments)
    assert same_bits(resumed.server, whole.server)
    assert resumed.bytes_up == whole.bytes_up


def test_draws_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    memory, disk = sampler(8), sampler(8, folder=tmp_path / "own", block=3)
    kept = {path.name: path.stat().st_mode & 0o077 for path in (tmp_path / "own").iterdir()}
    assert kept == dict.fromkeys(["draws-000000.safetensors", "draws-000001.safetensors"], 0)  # for nobody else
    assert same_bits(memory.draws(), disk.draws())
    neither = sampler(8, keep=False)
    assert same_bits(neither.moments, memory.moments)
    with pytest.raises(ValueError, match="Expected draws that were kept"):
        neither.draws()


def test_summary_and_trace() -> None:
    made = sampler(45, burn_in=5)
    table = made.summary()
    assert set(table.columns) == {
        "mean", "sd", "hdi_2.5%", "hdi_97.5%", "mcse_mean", "mcse_sd", "ess_bulk", "ess_tail", "r_hat"
    }  # fmt: skip
    assert table.loc["theta[1]", "mean"] == pytest.approx(float(made.mean()["theta"][1]), rel=1e-12)
    draws = made.draws()["theta"][..., 1]
    inside = (draws >= table.loc["theta[1]", "hdi_2.5%"]) & (draws <= table.loc["theta[1]", "hdi_97.5%"])
    assert int(inside.sum()) == pytest.approx(0.95 * draws.numel(), abs=2)
    assert 0 < table.loc["theta[1]", "ess_bulk"] < 400
    tails = load_arviz().ess(draws.numpy(), method="tail", prob=(0.05, 0.95))
    assert table.loc["theta[1]", "ess_tail"] == pytest.approx(float(tails), rel=1e-12)
    with load_arviz().rc_context({"plot.max_subplots": 2}):
        figures = made.trace("theta"), made.trace("theta", "noise")
    assert [len(figure.axes) for figure in figures] == [2, 4]
    import matplotlib.pyplot as plt

    plt.close("all")


def test_quantities_of_the_model_are_watched() -> None:
    """And not where the sampler keeps θ less its moves, which wanders."""
    assert set(sampler(2).draws()) == {
        "theta", "precision", "noise", "prior.included", "prior.variance", "prior.inclusion"
    }  # fmt: skip


def test_sampler_records_client_states() -> None:
    def watch(round: ft.Round) -> dict[str, torch.Tensor]:
        return {"site": round.clients.table.read(slice(0, 3)).variables.theta.transpose(0, 1)}

    assert sampler(2, watch=watch).draws()["site"].shape == (3, 2, 3, 3)


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected thin of at least 1, but got 0"):
        ft.Sampler(thin=0)
    with pytest.raises(ValueError, match="Expected rounds after the burn-in of 5, but got none"):
        sampler(4, burn_in=5).mean()
    run = begun(ft.Sampler())
    run.step()
    run.save(tmp_path / "run")
    with pytest.raises(ValueError, match=r"Expected a checkpoint of a run with seed 1, but got one with 0"):
        begun(ft.Sampler(), seed=1).load(tmp_path / "run")
    with pytest.raises(ValueError, match=r"Expected the draws of a sampler with settings .*'keep': False"):
        begun(ft.Sampler(keep=False)).load(tmp_path / "run")
    with pytest.raises(ValueError, match=r"Expected the draws of a sampler with settings .*'folder': True"):
        begun(ft.Sampler(folder=tmp_path)).load(tmp_path / "run")
    one = RunningMoments(torch.tensor(1.0), torch.zeros(2), torch.zeros(2))
    assert torch.equal(one.sd(), torch.zeros(2))
