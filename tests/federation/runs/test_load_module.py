"""Models that come out: the server's, whole wherever it and the module's frozen tensors are, and that of a file."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.oracles.closed_forms import same_bits
from support.small_federations import CLASSES, FEATURES, Classifier, classes, solver, trainer
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.functional import checksum

DATA = classes(dtype=torch.float64)
X = torch.cat([x for x, _ in DATA])


class Adapter(nn.Module):
    """A frozen layer and a low-rank change of it, as PEFT makes them."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Weighted(nn.Module):
    """Scales its logits by a constant, and keeps a counter."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("scale", torch.tensor([1.0, 0.5, 2.0]), persistent=persistent)
        self.register_buffer("rows", torch.tensor(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class OwnLoss(L.LightningModule):
    """Has class weights in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(FEATURES, CLASSES), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def training_step(self, batch: Any) -> Tensor:
        return self.loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "adapters on a frozen base": lambda: Adapter(nn.Linear(FEATURES, CLASSES)),
    "class weights": lambda: Weighted(persistent=True),
    "class weights that no state_dict has": lambda: Weighted(persistent=False),
    "class weights of the loss": OwnLoss,
    "tied": lambda: _tied(),
}


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES))
    net[1].weight = net[0].weight
    return net


def made(name: str, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODULES[name]().double()


def descent(module: nn.Module, **settings: Any) -> ft.LocalSolver:
    own = isinstance(module, L.LightningModule)
    plain = {} if own else {"loss": nn.functional.cross_entropy, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
    return ft.gradient_descent(module, **{"epochs": 1, "batch_size": 4, **plain, **settings})


def as_in(module: nn.Module, run: ft.Run) -> Tensor:
    """Predictions by a plain deep copy whose trained tensors are those of the server."""
    module = copy.deepcopy(module).eval()
    server = getattr(run.server, "parameters", run.server)
    module.load_state_dict({**module.state_dict(), **server})
    return module(X).detach()


@pytest.mark.parametrize("make", [ft.fedavg, ft.fedadam])
@pytest.mark.parametrize("name", MODULES)
def test_the_server_and_what_is_frozen_are_a_whole_model(name: str, make: Any, tmp_path: Path) -> None:
    module = made(name)
    if name == "tied":  # whose state_dict has a name more
        expected = lambda run: nn.Module.__call__(run.client_module(0).eval(), X).detach()
    else:
        expected = lambda run: as_in(module, run)
    run = ft.run(make(descent(module)), ft.InProcess(DATA), rounds=2, cohort=3, progress=False)
    whole = run.global_module().eval()
    assert same_bits({"y": whole(X).detach()}, {"y": expected(run)})
    assert same_bits(dict(whole.named_buffers()), dict(module.named_buffers()))
    run.save(tmp_path / "run")
    loaded = ft.load_module(tmp_path / "run", made(name)).eval()
    assert type(loaded) is type(module)
    assert same_bits({"y": loaded(X).detach()}, {"y": whole(X).detach()})


def test_averaged_and_local_statistics(tmp_path: Path) -> None:
    module = norm().double()
    averaged = ft.fedavg(descent(module, buffers="average", batch_size=None))
    average = ft.run(averaged, ft.InProcess(DATA), rounds=2, progress=False)
    average.save(tmp_path / "average")
    loaded = ft.load_module(str(tmp_path / "average"), norm().double())
    assert same_bits(dict(loaded.state_dict()), dict(average.global_module().state_dict()))
    assert loaded[1].num_batches_tracked.dtype == torch.int64
    own = ft.fedbn(descent(module, buffers="local", batch_size=None))
    local = ft.run(own, ft.InProcess(DATA), rounds=1, progress=False)
    local.save(tmp_path / "local")
    for refused in (local.global_module, lambda: ft.load_module(tmp_path / "local", norm().double())):
        with pytest.raises(ValueError, match=r"lacks 1\.bias, 1\.running_mean, 1\.running_var, …; .*, or average"):
            refused()


def test_a_server_that_computes_what_it_sends_out(tmp_path: Path) -> None:
    plain = ft.fedavg(solver(dtype=torch.float64))
    doubled = dataclasses.replace(plain, outbox=lambda server: ft.tree.scale(server, 2.0))
    run = ft.Run(doubled, ft.InProcess(DATA))
    run.save(tmp_path / "run")
    loaded = ft.load_module(tmp_path / "run", Classifier().double())
    assert same_bits(dict(loaded.state_dict()), dict(run.global_module().state_dict()))
    again = ft.Run(doubled, ft.InProcess(DATA)).load(tmp_path / "run")
    assert same_bits(again.server, run.server)


def test_the_best_round_of_a_trainer(tmp_path: Path) -> None:
    scored = {"validation": classes(), "metrics": {"loss": nn.functional.cross_entropy}}
    federation = ft.Federation(ft.fedavg(solver()), ft.InProcess(classes()), **scored)  # type: ignore[arg-type]
    best = ModelCheckpoint(tmp_path, monitor="val_loss", filename="{epoch}", save_top_k=-1)
    trainer(max_epochs=3, callbacks=[best], enable_checkpointing=True).fit(federation)
    final = ft.load_module(tmp_path / "epoch=2.ckpt", Classifier())
    assert same_bits(dict(final.state_dict()), dict(federation.global_module().state_dict()))
    losses = {}
    for path in tmp_path.glob("*.ckpt"):
        module = ft.load_module(path, Classifier()).eval()
        x, y = (torch.cat(leaves) for leaves in zip(*classes()))
        losses[str(path)] = float(nn.functional.cross_entropy(module(x).detach(), y))
    assert min(losses, key=losses.__getitem__) == best.best_model_path
    assert losses[best.best_model_path] == pytest.approx(float(best.best_model_score), rel=1e-5)


def test_a_run_loads_the_checkpoint_of_a_trainer(tmp_path: Path) -> None:
    algorithm, population = ft.personal_layers(solver(), "head.*"), ft.InProcess(classes())
    federation = ft.Federation(algorithm, population)
    keep = ModelCheckpoint(tmp_path, filename="last")
    trainer(max_epochs=2, callbacks=[keep], enable_checkpointing=True).fit(federation)
    run = ft.Run(algorithm, population).load(keep.best_model_path)
    assert run.number == 2
    mine, theirs = (one.client_module("site 3") for one in (run, federation))
    assert same_bits(dict(mine.state_dict()), dict(theirs.state_dict()))
    with pytest.raises(
        ValueError, match=r"lacks head\.bias, head\.weight; use ft\.Run.*, or run\.client_module\(client\)$"
    ):
        ft.load_module(keep.best_model_path, Classifier())


def test_a_class_that_loads_the_checkpoint_of_a_federation_is_told_what_to_call(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, filename="last")
    outer = trainer(max_epochs=1, callbacks=[keep], enable_checkpointing=True)
    outer.fit(ft.Federation(ft.fedavg(solver()), ft.InProcess(classes())))

    class Wants(Classifier):
        def __init__(self, width: int) -> None:
            super().__init__()

    for kind, given in ((Classifier, {}), (Wants, {}), (Wants, {"width": 3}), (Classifier, {"strict": False})):
        with pytest.raises((ValueError, ImportError), match=r"of a federation: call fedtorch's load_module\(path, mod"):
            kind.load_from_checkpoint(tmp_path / "last.ckpt", **given)
    with pytest.raises(TypeError, match="made as for training, but got the class Classifier"):
        ft.load_module(tmp_path / "last.ckpt", Classifier)  # type: ignore[arg-type]


def test_models_of_the_nodes_of_a_graph_are_not_the_servers(tmp_path: Path) -> None:
    network = ft.Network.ring(len(DATA))
    run = ft.Run(ft.gtv(solver(dtype=torch.float64), network, alpha=0.1), ft.InProcess(DATA))
    run.save(tmp_path / "run")
    for refused in (run.global_module, lambda: ft.load_module(tmp_path / "run", Classifier().double())):
        with pytest.raises(ValueError, match=r"lacks body\.0\.bias, .* use .*run\.client_module"):
            refused()


def test_what_is_no_checkpoint_of_a_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected the path of a checkpoint, but got ''"):
        ft.load_module("", Classifier())
    with pytest.raises(FileNotFoundError):
        ft.load_module(tmp_path / "none", Classifier())
    (tmp_path / "torn").write_bytes(b"12")
    with pytest.raises(ValueError, match="Expected a safetensors file"):
        ft.load_module(tmp_path / "torn", Classifier())
    torch.save(Classifier().state_dict(), tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="but got that of another module; load it with its class's load_from_check"):
        ft.load_module(tmp_path / "other.ckpt", Classifier())
    torch.save({"state_dict": {"_extra_state": Classifier()}}, tmp_path / "code.ckpt")
    with pytest.raises(ValueError, match="objects that could run code"):
        ft.load_module(tmp_path / "code.ckpt", Classifier())
    without = ft.Run(dataclasses.replace(ft.fedavg(solver()), module=None), ft.InProcess(classes()))
    without.save(tmp_path / "without")
    with pytest.raises(ValueError, match="federation that trained a module, but got one without"):
        ft.load_module(tmp_path / "without", Classifier())


def test_another_module_is_refused(tmp_path: Path) -> None:
    run = ft.Run(ft.fedavg(descent(made("adapters on a frozen base"))), ft.InProcess(DATA))
    run.save(tmp_path / "run")
    with pytest.raises(ValueError, match=r"that was trained, but got Linear with \['bias', 'weight'\] besides"):
        ft.load_module(tmp_path / "run", nn.Linear(FEATURES, CLASSES))
    with pytest.raises(ValueError, match=r"'base\.weight', which was not trained .* same pretrained base"):
        ft.load_module(tmp_path / "run", made("adapters on a frozen base", seed=1))
    turned = made("adapters on a frozen base")
    turned.base.weight.data = turned.base.weight.flip(0)  # type: ignore[operator, union-attr]
    with pytest.raises(ValueError, match=r"'base\.weight', which was not trained"):
        ft.load_module(tmp_path / "run", turned)
    wide = Adapter(made("adapters on a frozen base").base, rank=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Expected shape \(3, 4\) for 'down\.weight', but got \(2, 4\)"):
        ft.load_module(tmp_path / "run", wide.double())


@pytest.mark.parametrize("count", [3, 5000])
def test_checksums_tell_numbers_in_another_order(count: int) -> None:
    numbers = torch.arange(count).to(torch.float32)
    assert checksum(numbers) == checksum(numbers.clone()) != checksum(numbers.flip(0))
    assert checksum(numbers) != checksum(numbers.index_fill(0, torch.tensor([count - 1]), -1.0))
    assert checksum(torch.zeros(0)) == 0
