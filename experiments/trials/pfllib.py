"""PFLlib's clients and ours on the same MNIST users: seven personalised methods, weight by weight.

PFLlib's tables (`docs/benchmark.html`) are of Fashion-MNIST, CIFAR-100, Tiny ImageNet and AG News, none of which was
at hand, so its own clients are run here, of a checkout (`--pfllib DIR`, github.com/TsingZ0/PFLlib), on MNIST and users
of our choosing: 20 users, each with 100 rows to train and 50 to test of digits by Dirichlet(0.1), as in its label skew,
a network of 32 hidden units, 20 rounds, all users in each, 5 epochs of all rows as one batch, SGD of rate 0.1, float32.
Rows, first weights and steps are the same, so weights differ by rounding. Its server's mean by rows is taken here;
users have as many. Without `--pfllib` ours are run alone.

As PFLlib has them, not as papers do where these differ: Ditto with λ = 0.1 from its own first weights, personal first;
pFedMe (λ = 15, K = 5) is compared by the server's model, as its personal one is overwritten; APFL's personal model is
trained by itself, its α (0.5 at first) by the product of gradients; FedRep trains the head for 5 epochs, then the body;
FedBABU's users train all weights for 5 epochs in the end, here from the server's body.

Source: github.com/TsingZ0/PFLlib, `system/flcore/clients/client*.py`, commit d832e76f.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtorch as ft
from experiments import common
from experiments.trials import pfedme
from fedtorch import tree
from fedtorch.data import ClientData
from fedtorch.tree import Tree

USERS, TRAINED, TESTED, HIDDEN, EPOCHS, LR, LAMBDA, ALPHA = 20, 100, 50, 32, 5, 0.1, 0.1, 0.5
PULL = pfedme.Setting(EPOCHS, lr=0.01, size=TRAINED)
Rows = list[tuple[Tensor, Tensor]]


class Network(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Flatten(), nn.Linear(784, HIDDEN), nn.ReLU())
        self.head = nn.Linear(HIDDEN, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.head(self.base(x))
        return logits


class Users(NamedTuple):
    """The rows of the users, and the weights that all begin with."""

    train: Rows
    test: Rows
    network: Network


def users(seed: int) -> Users:
    """Digits by Dirichlet(0.1), no row twice."""
    x, y = ft.data.mnist()
    x, draws = x.flatten(1), np.random.default_rng(seed)
    left = [draws.permutation(np.flatnonzero(y.numpy() == digit)).tolist() for digit in range(10)]
    parts: tuple[Rows, Rows] = ([], [])
    for _ in range(USERS):
        counts = draws.multinomial(TRAINED + TESTED, draws.dirichlet(np.full(10, 0.1)))
        mine = draws.permutation([left[digit].pop() for digit, count in enumerate(counts) for _ in range(count)])
        for part, rows in zip(parts, (mine[:TRAINED], mine[TRAINED:])):
            part.append((x[rows], y[rows]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Users(*parts, Network())


def descent(network: Network, epochs: int = EPOCHS, body: bool = True, head: bool = True) -> ft.LocalSolver:
    """Steps on all rows of a part of the network, the others' rate being zero."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        each = list(parameters)
        return torch.optim.SGD([{"params": each[:2], "lr": LR * body}, {"params": each[2:], "lr": LR * head}], lr=LR)

    return ft.gradient_descent(network, steps=epochs, loss=F.cross_entropy, optimizer=optimizer)


def fedrep(network: Network) -> ft.Algorithm:
    """FedPer whose users train the head first, then the body."""
    head, body = descent(network, body=False), descent(network, head=False)

    def solve(start: Tree, state: Tree, data: Any, quadratic: Any, turn: ft.Turn) -> Any:
        first = head.solve(start, state, data, quadratic, turn)
        return body.solve(first.parameters, first.state, data, quadratic, turn)

    return ft.personal_layers(dataclasses.replace(body, solve=solve), "head.*")


class Mixed(NamedTuple):
    """What a user of APFL keeps; `(K, ...)`."""

    solver: Tree
    personal: Tree
    alpha: Tensor


def apfl(local: ft.LocalSolver, lr: float, steps: int = EPOCHS) -> ft.Algorithm:
    """APFL as PFLlib has it: `local` goes one step at rate `lr`, after which α moves.

    A step may be an epoch: then α moves by the sum of its gradients, all at the weights that came before.
    """

    def step(parameters: Tree, state: Mixed, data: ClientData, turn: ft.Turn) -> tuple[Tree, Tree]:
        new = local.solve(parameters, state.solver, data, None, turn).parameters
        return new, tree.scale(tree.subtract(parameters, new), 1 / lr)  # and the gradient

    def client(inbox: Tree, state: Mixed, data: ClientData, turn: ft.Turn) -> ft.Reply:
        shared, personal, alpha = inbox, state.personal, state.alpha
        for number in range(steps):
            same = turn.with_key(partial(ft.random.fold_in, turn.key, number))  # minibatches of both models
            shared, of_shared = step(shared, state, data, same)
            personal, of_personal = step(personal, state, data, same)
            slope = 0.02 * alpha
            for name, leaf in tree.subtract(personal, shared).items():
                part = alpha.view(-1, *[1] * (leaf.ndim - 1))
                slope = slope + (leaf * (part * of_personal[name] + (1 - part) * of_shared[name])).flatten(1).sum(1)
            alpha = (alpha - lr * slope).clamp(0, 1)
        mixed = tree.map(lambda a, b: a + alpha.view(-1, *[1] * (a.ndim - 1)) * (b - a), shared, personal)
        return ft.Reply(ft.Mean(shared, data.count), Mixed(state.solver, mixed, alpha), {})

    def init(parameters: Tree, clients: int) -> tuple[Tree, Mixed]:
        alpha = torch.tensor(ALPHA, dtype=tree.leaves(parameters)[0].dtype)
        return parameters, Mixed(local.init(parameters), parameters, alpha)

    return ft.Algorithm(
        init=init,
        outbox=lambda server: server,
        client=client,
        server=lambda server, aggregate, key: aggregate.value,
        model=lambda inbox, state: state.personal,
        prepare=local.prepare,
        **pfedme.of_solver(local, algorithm="apfl", lr=lr, steps=steps),
    )


def run(algorithm: ft.Algorithm, rows: Sequence[Any], rounds: int, start: Tree = None) -> ft.Run:
    """All users in all rounds."""
    return ft.run(algorithm, ft.InProcess(ft.data.from_tensors(rows)), start, rounds=rounds, progress=False)


def babu(of: Users, rounds: int) -> Tree:
    """The body is federated under the first head, then users train all of their own."""
    body = run(ft.fedavg(descent(of.network, head=False)), of.train, rounds).server
    return run(ft.separate(descent(of.network)), of.train, 1, body).tensors()


def server_of_pfedme(of: Users, rounds: int) -> Tree:
    """The server's model, for all users."""
    rows = tuple(torch.cat(leaves) for leaves in zip(*of.train))
    algorithm = pfedme.pfedme(PULL, rows, of.network)
    made = run(algorithm, list(torch.arange(USERS * TRAINED).split(TRAINED)), rounds)
    return pfedme.copies(made.server, USERS)


OURS: dict[str, Callable[[Users, int], Tree]] = {
    "FedAvg": lambda of, rounds: run(ft.fedavg(descent(of.network)), of.train, rounds).tensors(),
    "FedPer": lambda of, rounds: run(ft.personal_layers(descent(of.network), "head.*"), of.train, rounds).tensors(),
    "FedRep": lambda of, rounds: run(fedrep(of.network), of.train, rounds).tensors(),
    "FedBABU": babu,
    "Ditto": lambda of, rounds: run(ft.ditto(descent(of.network), LAMBDA), of.train, rounds).tensors(),
    "pFedMe, server": server_of_pfedme,
    "APFL": lambda of, rounds: run(apfl(descent(of.network, 1), LR), of.train, rounds).tensors(),
}
CLIENTS = {
    "FedAvg": ("clientavg", "clientAVG"),
    "FedPer": ("clientper", "clientPer"),
    "FedRep": ("clientrep", "clientRep"),
    "FedBABU": ("clientbabu", "clientBABU"),
    "Ditto": ("clientditto", "clientDitto"),
    "pFedMe, server": ("clientpFedMe", "clientpFedMe"),
    "APFL": ("clientapfl", "clientAPFL"),
}


def theirs(name: str, of: Users, rounds: int) -> Tree:
    """What PFLlib's clients end with, its checkout being on the path."""
    base: Any = importlib.import_module("flcore.clients.clientbase")
    module, kind = CLIENTS[name]
    base.read_client_data = lambda dataset, id, is_train, few_shot: list(zip(*(of.train if is_train else of.test)[id]))
    settings = dict(model=of.network, algorithm=name, dataset="", device="cpu", save_folder_name="", num_classes=10)
    settings |= dict(batch_size=TRAINED, local_learning_rate=LR, local_epochs=EPOCHS, plocal_epochs=EPOCHS, few_shot=0)
    settings |= dict(learning_rate_decay=False, learning_rate_decay_gamma=1.0, fine_tuning_epochs=EPOCHS, mu=LAMBDA)
    settings |= dict(alpha=ALPHA, lamda=PULL.strength, K=pfedme.INNER, p_learning_rate=PULL.lr)
    if name.startswith("pFedMe"):
        settings["local_learning_rate"] = PULL.outer
    build = getattr(importlib.import_module(f"flcore.clients.{module}"), kind)
    with torch.random.fork_rng(devices=[]):  # clients seed torch's generator
        clients = [build(Namespace(**settings), k, TRAINED, TESTED, train_slow=0, send_slow=0) for k in range(USERS)]
        whole = name in ("FedAvg", "Ditto", "pFedMe, server", "APFL")
        server = copy.deepcopy(of.network if whole else of.network.base)
        for _ in range(rounds):
            for client in clients:
                client.set_parameters(server)
                if name == "Ditto":
                    client.ptrain()
                client.train()
            sent = [client.model if whole else client.model.base for client in clients]
            with torch.no_grad():
                for leaf, *each in zip(server.parameters(), *(model.parameters() for model in sent)):
                    leaf.copy_(torch.stack([other.data for other in each]).mean(0))
        for client in clients:
            client.set_parameters(server)
            if name == "FedBABU":
                client.fine_tune()
    models = [client.model_per if name in ("Ditto", "APFL") else client.model for client in clients]
    return tree.stack([{key: leaf.detach() for key, leaf in model.named_parameters()} for model in models])


def accuracy(models: Tree, of: Users) -> float:
    """The share of all users' test rows that their models have right."""
    x, y = (torch.stack(leaves) for leaves in zip(*of.test))
    hidden = (x @ models["base.1.weight"].mT + models["base.1.bias"][:, None]).relu()
    logits = hidden @ models["head.weight"].mT + models["head.bias"][:, None]
    return float((logits.argmax(-1) == y).double().mean())


def largest(a: Tree, b: Tree) -> float:
    """The largest difference of a weight."""
    return max(float((a[name] - b[name]).abs().max()) for name in b)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all methods; with --smoke two rounds."""
    parser = common.arguments(__doc__)
    parser.add_argument("--pfllib", type=Path, metavar="DIR", help="a checkout of PFLlib, whose clients are run too")
    options = parser.parse_args(argv)
    if options.pfllib is not None:
        sys.path.insert(0, str(options.pfllib / "system"))
    rounds, sets = 2 if options.smoke else 20, [users(seed) for seed in range(options.seeds)]
    rows = []
    for name, build in OURS.items():
        mine = [build(of, rounds) for of in sets]
        scores = [accuracy(models, of) for models, of in zip(mine, sets)]
        rows.append(common.row(name, "test accuracy", scores))
        if options.pfllib is not None:
            others = [theirs(name, of, rounds) for of in sets]
            rows.append(common.row(name, "PFLlib's", [accuracy(models, of) for models, of in zip(others, sets)]))
            gap = max(largest(a, b) for a, b in zip(mine, others))
            rows.append(common.Row(name, "largest difference of a weight", gap))
    common.show_rows("Personalised methods on MNIST", rows, ".3g")
    common.finish("trials.pfllib", rows, options)


if __name__ == "__main__":
    main()
