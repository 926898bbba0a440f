"""What differs from the run that was saved is refused by name, before anything is loaded, with the way round it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from support.oracles.closed_forms import linear, linear_clients, same_bits, sgd
from support.small_federations import trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fedtorch as ft
from fedtorch.trust import privacy

DATA = linear_clients([4, 5, 6])


class Regression(L.LightningModule):
    """Brings its own optimiser, with a learning rate of its own, and asks of its Trainer what it is told to."""

    def __init__(self, rate: float = 0.1, decay: float = 0.5, asks: str = "", second: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.linear, self.bias = linear(bias=False), nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def training_step(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.linear(batch[0])[:, 0] + self.bias, batch[1])

    def configure_optimizers(self) -> Any:
        rate, scheduler = self.hparams["rate"], torch.optim.lr_scheduler
        if self.hparams["asks"]:
            rate = rate / getattr(self.trainer, self.hparams["asks"])
        groups = [{"params": [self.bias], "weight_decay": 0.0}, {"params": self.linear.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=rate)
        warm = [scheduler.LinearLR(optimizer), scheduler.ExponentialLR(optimizer, self.hparams["decay"])]
        return [optimizer], [scheduler.SequentialLR(optimizer, warm, [2])]


def descent(batch_size: int | None = None, **arguments: Any) -> ft.LocalSolver:
    return ft.gradient_descent(Regression(**arguments), epochs=1, batch_size=batch_size)


def faithful(batch_size: int | None = None, **arguments: Any) -> ft.LocalSolver:
    return ft.lightning_fit(Regression(**arguments), max_epochs=1, batch_size=batch_size)


def run_of(local: ft.LocalSolver, data: Any = DATA, chunk: int | None = None) -> ft.Run:
    return ft.Run(ft.fedavg(local), ft.InProcess(data, chunk))


def refused(saved: ft.Run, other: ft.Run, path: Path, message: str) -> None:
    """Refused by name with nothing loaded, and taken `anyway`."""
    saved.save(path)
    with pytest.raises(ValueError, match=f"Expected a checkpoint of a run {message}.*; pass anyway=True"):
        other.load(path)
    assert other.number == 0
    assert other.load(path, anyway=True).number == saved.number


@pytest.mark.parametrize("local", [descent, faithful])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"rate": 0.2}, r"with local\.optimizer\.lr 0\.06+.*, but got one with 0\.03+"),
        ({"decay": 0.6}, r"with local\.scheduler .*, but got one with "),
        ({"batch_size": 2}, r"with local\.batch_size 2, but got one with None"),
    ],
)
def test_the_module_s_own_optimiser(
    local: Callable[..., ft.LocalSolver], other: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(run_of(local()), run_of(local(**other)), tmp_path / "run", message)
    assert run_of(local()).load(tmp_path / "run").number == 0  # of the same


def test_the_module_s_own_optimiser_under_privacy(tmp_path: Path) -> None:
    settings = {
        "clip": 1.0,
        "noise": 2.0,
        "sampling_rate": 0.5,
        "steps": 1,
        "delta": 1e-3,
        "ledger": tmp_path / "ledger",
    }
    private = lambda rate: run_of(privacy.example_level(Regression(rate, asks=""), **settings))
    refused(
        private(0.1), private(0.2), tmp_path / "run", r"with local\.optimizer\.lr 0\.06+.*, but got one with 0\.03+"
    )


def test_trainer_settings_are_compared_by_module_numbers(tmp_path: Path) -> None:
    asks = {"asks": "num_training_batches"}
    other = run_of(faithful(rate=0.2, **asks))
    refused(run_of(faithful(**asks)), other, tmp_path / "run", r"with local\.module\.rate 0\.2, but got one with 0\.1")


def test_options_are_what_loggers_get() -> None:
    settings = descent().settings
    assert settings["optimizer"] == "AdamW"
    assert settings["optimizer.lr"] == pytest.approx(0.1 / 3)  # LinearLR begins there
    assert settings["optimizer.weight_decay"] == (0.0, 0.01)
    assert not {name for name in settings if name.endswith(("fused", "foreach", "params"))}
    given = ft.gradient_descent(linear(), steps=1, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD)
    assert (given.settings["optimizer"], given.settings["optimizer.lr"]) == (torch.optim.SGD, 0.001)
    assert "scheduler" not in given.settings


def moved(client: int, row: int, by: float) -> ft.data.FederatedData:
    """One number of one row changed."""
    return DATA.map(
        lambda rows: (rows[0], rows[1].index_add(0, DATA.starts[client] + row, torch.tensor([by]).double()))
    )


def test_other_rows_of_the_same_clients(tmp_path: Path) -> None:
    saved, here = run_of(sgd(0.1)), "on the rows that are here, but "
    saved.step()
    shorter = linear_clients([4, 4, 6])
    refused(saved, run_of(sgd(0.1), shorter), tmp_path / "run", f"{here}client 'client 1' has 4 rows and had 5")
    other = moved(2, 3, 1e-12)
    refused(saved, run_of(sgd(0.1), other), tmp_path / "run", f"{here}client 'client 2' has other rows")
    swapped = DATA.map(lambda rows: (rows[0][:, [1, 0, 2]], rows[1]))
    refused(saved, run_of(sgd(0.1), swapped), tmp_path / "run", f"{here}clients have their rows in another order")
    assert run_of(sgd(0.1), chunk=1).load(tmp_path / "run").number == 1


def test_rows_on_disk_are_counted_only(tmp_path: Path) -> None:
    """They would have to be read for a digest."""
    saved = run_of(sgd(0.1))
    saved.save(tmp_path / "run")
    for data in (DATA, moved(0, 0, 1.0), linear_clients([4, 4, 6])):
        data.to_file(tmp_path / "rows.safetensors")
        other = run_of(sgd(0.1), ft.data.FederatedData.from_file(tmp_path / "rows.safetensors"))
        if len(data.rows[1]) == len(DATA.rows[1]):
            assert other.load(tmp_path / "run").number == 0
        else:
            with pytest.raises(ValueError, match="client 'client 1' has 4 rows and had 5"):
                other.load(tmp_path / "run")


def test_loaders_are_known_by_their_length(tmp_path: Path) -> None:
    loaders = lambda rows: {
        name: DataLoader(TensorDataset(*(leaf[:n] for leaf in own)), batch_size=2)
        for name, own, n in zip(DATA.names, DATA, rows)
    }
    saved, same, other = (
        run_of(sgd(0.1), ft.data.from_loaders(loaders(rows))) for rows in ([4, 5, 6], [4, 5, 6], [4, 3, 6])
    )
    refused(saved, other, tmp_path / "run", "on the rows that are here, but client 'client 1' has 3 rows and had 5")
    same.load(tmp_path / "run")


def test_clients_that_grow_may_have_other_rows(tmp_path: Path) -> None:
    grow = lambda data: ft.Run(ft.fedavg(sgd(0.1)), ft.Growing(data, lambda rounds: torch.full((3,), 2 + rounds)))
    run = grow(DATA)
    run.step()
    run.save(tmp_path / "run")
    assert grow(linear_clients([9, 9, 9])).load(tmp_path / "run").number == 1


def test_a_checkpoint_without_notes_of_rows_is_taken(tmp_path: Path) -> None:
    """As versions before wrote them."""
    run = run_of(sgd(0.1))
    run.step()
    flat = {name: leaf for name, leaf in run.state_dict().items() if not name.startswith(("rows.", "ended"))}
    other = run_of(sgd(0.1))
    other.load_state_dict(flat)
    assert same_bits(other.server, run.server)


def test_a_trainer_refuses_the_same_and_takes_it_anyway(tmp_path: Path) -> None:
    federation = lambda local, **more: ft.Federation(ft.fedavg(local), ft.InProcess(DATA), **more)
    outer = trainer(max_epochs=1)
    outer.fit(federation(descent()))
    outer.save_checkpoint(tmp_path / "one.ckpt")
    fit = lambda model: trainer(max_epochs=2).fit(model, ckpt_path=tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match=r"local\.optimizer\.lr .*pass anyway=True.* ft\.Federation\(…, anyway=True\)"):
        fit(federation(descent(rate=0.2)))
    other = federation(descent(rate=0.2), anyway=True)
    fit(other)
    assert other.round == 2
    more = ft.data.from_tensors([*DATA, (torch.ones(2, 3).double(), torch.ones(2).double())], [*DATA.names, "new"])
    with pytest.raises(ValueError, match=r"with 4 clients, but got one with 3; pass joined='new'.* ft\.Federation\(…,"):
        fit(ft.Federation(ft.fedavg(descent()), ft.InProcess(more)))
    joined = ft.Federation(ft.fedavg(descent()), ft.InProcess(more), joined="new")
    fit(joined)
    assert (joined.round, len(joined.run.last.ids)) == (2, 4)


def test_a_run_that_stopped_early_says_so(tmp_path: Path) -> None:
    run = run_of(sgd(0.1))
    list(run.rounds(3))
    assert run.ended == ""
    list(run.rounds(9, until=lambda history: len(history) == 5))
    assert run.ended == "stopped after 5 of 9 rounds by until="
    run.save(tmp_path / "run.safetensors")
    resumed = run_of(sgd(0.1)).load(tmp_path / "run.safetensors")
    assert resumed.ended == run.ended
    assert run.ended in ft.report.write(run, tmp_path / "written").read_text()
    from fedtorch.report.folder import render

    assert run.ended in render(tmp_path).read_text()  # of the checkpoint alone
    list(resumed.rounds(6))
    assert resumed.ended == ""


def test_a_trainer_s_early_stop_is_in_the_report(tmp_path: Path) -> None:
    federation = ft.Federation(ft.fedavg(sgd(0.1)), ft.InProcess(DATA))
    callback = ft.Report(tmp_path)
    stop = EarlyStopping("train_loss", stopping_threshold=1e9)
    trainer(max_epochs=8, callbacks=[callback, stop]).fit(federation)
    assert federation.run.ended.startswith("stopped after 1 of 8 rounds by EarlyStopping: Stopping threshold reached")
    assert "stopped after 1 of 8 rounds by EarlyStopping" in callback.page.read_text()
    trainer(max_epochs=1, callbacks=callback).fit(ft.Federation(ft.fedavg(sgd(0.1)), ft.InProcess(DATA)))
    assert "stopped" not in callback.page.read_text()


class Frozen(nn.Module):
    """A frozen layer, class weights in a buffer, and a layer that is trained."""

    def __init__(self, base: float = 1.0, scale: float = 2.0, **layers: Any) -> None:
        super().__init__()
        self.base = linear(bias=False).requires_grad_(False)
        self.base.weight[0, 1] = base
        self.register_buffer("scale", torch.tensor([scale]).double(), persistent=False)
        settings = {"p": 0.1, "activation": nn.Tanh, "function": torch.tanh, "eps": 1e-5, "own": "a", **layers}
        encoder = nn.TransformerEncoderLayer(2, 1, 2, settings["p"], settings["function"], dtype=torch.float64)
        self.layers = nn.Sequential(
            settings["activation"](), nn.LayerNorm(1, settings["eps"], dtype=torch.float64), Own(settings["own"])
        )
        self.unused = encoder.requires_grad_(False)
        self.head = nn.Linear(1, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.base(x)) * self.scale)[:, 0]


class Own(nn.Module):
    """A layer of somebody, who says what it is made of, and keeps an object."""

    def __init__(self, setting: str) -> None:
        super().__init__()
        self.setting, self.kept, self.function = setting, object(), lambda x: x

    def extra_repr(self) -> str:
        return f"setting={self.setting}, kept={self.kept}"

    def forward(self, x: Tensor) -> Tensor:
        return x


def on_frozen(**changed: Any) -> ft.Run:
    torch.manual_seed(0)
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    loss = nn.SmoothL1Loss(beta=changed.pop("beta", 1.0))
    return run_of(ft.gradient_descent(Frozen(**changed), steps=1, loss=loss, optimizer=make))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"base": 3.0}, r"with the checksum of module\.base\.weight -?\d+, but got one with -?\d+"),
        ({"scale": 2.5}, r"with the checksum of module\.scale -?\d+, but got one with -?\d+"),
        ({"p": 0.2}, r"with module\.unused\.self_attn\.dropout 0\.2, but got one with 0\.1"),
        ({"activation": nn.SiLU}, r"with module\.layers\.0 SiLU, but got one with Tanh"),
        ({"function": nn.functional.softsign}, r"with module\.unused\.activation softsign, but got one with tanh"),
        ({"eps": 1e-3}, r"with module\.layers\.1\.eps 0\.001, but got one with 1e-05"),
        (
            {"own": "b"},
            r"with module\.layers\.2\.extra_repr setting=b, kept=<object object>, but got one with setting=a",
        ),
        ({"beta": 0.5}, r"with local\.loss SmoothL1Loss.*beta: 0\.5.*, but got one with .*beta: 1\.0"),
    ],
)
def test_another_module(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Frozen tensors and what layers are made with; the same module, made anew, is taken."""
    saved = on_frozen()
    saved.step()
    refused(saved, on_frozen(**changed), tmp_path / "run", message)
    assert on_frozen().load(tmp_path / "run").number == 1


def test_trained_tensors_may_begin_elsewhere_and_torch_may_know_more_settings(tmp_path: Path) -> None:
    """A run's own states come from the checkpoint; buffers that training changes, too."""
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)

    def begun(mean: float) -> ft.Run:
        module = nn.Sequential(linear(bias=False), nn.BatchNorm1d(1, dtype=torch.float64), nn.Flatten(0))
        module[1].running_mean.fill_(mean)
        module[0].weight.data.fill_(mean)
        loss = nn.functional.mse_loss
        return run_of(ft.gradient_descent(module, steps=1, loss=loss, optimizer=make, buffers="local"))

    saved, other = begun(0.0), begun(1.0)
    saved.step()
    saved.save(tmp_path / "run")
    assert same_bits(other.load(tmp_path / "run").server, saved.server)
    newer = begun(0.0)
    newer.algorithm.module[1].of_a_newer_torch = 3
    newer = ft.Run(newer.algorithm, newer.population)
    assert newer.load(tmp_path / "run").number == 1


def test_checkpoint_without_layers_is_compared_by_tensors() -> None:
    """As versions before wrote them."""
    flat = on_frozen().state_dict()
    said = json.loads(bytes(flat["module"].tolist()))
    del said["layers"]
    flat["module"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    on_frozen(p=0.2).load_state_dict(flat)
    with pytest.raises(ValueError, match=r"checksum of module\.base\.weight"):
        on_frozen(base=3.0).load_state_dict(flat)
