"""The trial of pFedMe: its rounds are the authors' loop, its rows are theirs, and the first round comes out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedtorch as ft
from experiments import result_pages
from experiments.trials import pfedme, pfedme_data


def authors_user(
    start: torch.nn.Linear, x: torch.Tensor, y: torch.Tensor, begin: int, of: pfedme.Setting
) -> dict[str, list[torch.Tensor]]:
    """A user's round as `userpsnl.py` has it, from minibatch `begin` of its loader on."""
    theta = [leaf.detach().clone() for leaf in start.parameters()]
    shared = [leaf.clone() for leaf in theta]
    batches = list(zip(x.split(20), y.split(20)))
    for number in range(begin, begin + of.batches):
        rows, labels = batches[number % len(batches)]
        for _ in range(5):
            for leaf in theta:
                leaf.requires_grad_()
            gradients = torch.autograd.grad(F.cross_entropy(rows @ theta[0].T + theta[1], labels), theta)
            theta = [
                (leaf - of.lr * (gradient + of.strength * (leaf - w) + 0.001 * leaf)).detach()
                for leaf, gradient, w in zip(theta, gradients, shared)
            ]
        shared = [w - of.strength * of.outer * (w - leaf) for w, leaf in zip(shared, theta)]
    return {"θ": theta, "w": shared}


def test_a_round_is_the_authors_loop() -> None:
    draws, setting = torch.Generator().manual_seed(0), pfedme.Setting(batches=3, lr=0.05)
    rows = [(torch.randn(n, 784, generator=draws), torch.randint(10, (n,), generator=draws)) for n in (25, 61, 40)]
    data = ft.data.from_tensors(rows)
    algorithm = pfedme.pfedme(setting, ft.tree.concatenate(rows))
    run = ft.Run(algorithm, pfedme.OneBlock(ft.data.from_tensors(pfedme.places(data))))
    module = pfedme.linear()
    for round in range(2):
        users = [authors_user(module, x, y, 3 * round, setting) for x, y in rows]
        run.step()
        tensors = run.tensors()
        for k, user in enumerate(users):
            torch.testing.assert_close(tensors["weight"][k], user["θ"][0], atol=1e-5, rtol=0)
        weight = sum(len(y) * user["w"][0] for (_, y), user in zip(rows, users)) / 126
        torch.testing.assert_close(run.server["weight"], weight, atol=1e-5, rtol=0)
        module.load_state_dict(run.server)


@pytest.mark.slow
def test_whole_local_solutions_are_proximal_points_and_w_goes_to_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """w ← Σ n_k θ_k / N, θ_k = prox_{f_k / λ}(w) by Newton's method, ends where w is that mean."""
    monkeypatch.setattr(pfedme, "INNER", 150)
    draws, strength = torch.Generator().manual_seed(0), 0.2
    rows = [(torch.randn(n, 2, generator=draws).double(), torch.randint(3, (n,), generator=draws)) for n in (9, 14)]
    setting = pfedme.Setting(batches=1, lr=0.5, strength=strength, outer=1 / strength, size=14)
    module = torch.nn.Linear(2, 3).double()
    for leaf in module.parameters():
        torch.nn.init.zeros_(leaf)  # what all classes have in common decays by the ridge alone
    algorithm = pfedme.pfedme(setting, ft.tree.concatenate(rows), module)
    data = ft.data.from_tensors(rows)
    run = ft.Run(algorithm, pfedme.OneBlock(ft.data.from_tensors(pfedme.places(data))))
    for _ in run.rounds(30):
        pass
    w = torch.cat([leaf.flatten() for leaf in run.server.values()])  # that the last round begins with
    run.step()

    def objective(theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = x @ theta[:6].reshape(3, 2).T + theta[6:]
        pull = 0.5 * strength * (theta - w).square().sum()
        return F.cross_entropy(logits, y) + pull + 0.5 * 0.001 * theta.square().sum()

    best, names = torch.zeros_like(w), list(run.server)
    assert names == ["weight", "bias"]
    for k, (x, y) in enumerate(rows):
        theta = w.clone()
        for _ in range(8):
            slope = torch.func.grad(objective)(theta, x, y)
            theta = theta - torch.linalg.solve(torch.func.hessian(objective)(theta, x, y), slope)
        found = torch.cat([run.tensors()[name][k].flatten() for name in names])
        torch.testing.assert_close(found, theta, rtol=0, atol=1e-6)  # (1 − ½ 0.2)^150 and its like
        best += len(y) / 23 * theta
    after = torch.cat([leaf.flatten() for leaf in run.server.values()])
    torch.testing.assert_close(after, best, rtol=0, atol=1e-6)
    assert float((after - w).norm()) < 1e-2 * float(w.norm())  # it contracts by λ / (λ + curvature) a round


def test_users_take_rows_as_the_script_does() -> None:
    labels = np.concatenate([[5, 0, 4, 1, 9, 2, 1, 3, 1, 4], np.arange(10).repeat(6800)])
    taken = pfedme_data.takes(labels)
    assert [len(user) for user in taken] == [2] * 20
    assert all([digit for digit, _, _ in user] == [k % 10, (k + 1) % 10] for k, user in enumerate(taken))
    firsts = {digit: [first for user in taken for d, first, _ in user if d == digit] for digit in range(10)}
    assert firsts == {digit: [int(digit == 4), 1, 1, 1] for digit in range(10)}
    assert sum(end for user in taken for _, _, end in user) == len(labels)


@pytest.mark.slow
def test_what_is_stored_of_the_first_round_comes_out(tmp_path: Path) -> None:
    try:
        ft.data.mnist(train=False)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    pfedme.main(["--smoke", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    known = [{name: value for name, value in row.items() if value is not None} for row in rows if row["published"]]
    assert [result_pages.compared(row, pfedme.READING) for row in known] == ["agrees"] * 6
