"""`lightning_fit`: the numbers of `gradient_descent` where both apply, and no trace of the Trainers."""

from __future__ import annotations

import logging
import os
import random as python_random
import signal
import warnings

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import tree

F = nn.functional
COUNTS = (3, 8, 9)  # n < B, n = B, n = B + 1 for B = 8


def clients(dtype: torch.dtype = torch.float64) -> ft.data.FederatedData:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for n in COUNTS:
        x = torch.randn(n, 2, generator=generator, dtype=dtype)
        rows.append((x, x.sum(1, keepdim=True) + torch.randn(n, 1, generator=generator, dtype=dtype)))
    return ft.data.from_tensors(rows)


class Net(L.LightningModule):
    """A small network; subclasses change the optimiser."""

    def __init__(self, hidden: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def configure_optimizers(self) -> object:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Momentum(Net):
    def configure_optimizers(self) -> object:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


class Adam(Net):
    def configure_optimizers(self) -> object:
        groups = [{"params": self.net[0].parameters()}, {"params": self.net[2].parameters(), "lr": 0.03}]
        optimizer = torch.optim.Adam(groups, lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def block(data: ft.data.FederatedData) -> ft.data.ClientData:
    return data.stack(range(len(data)))


def keys(count: int = len(COUNTS)) -> Tensor:
    return ft.random.fold_in(ft.random.key(3), torch.arange(count))


def solve(local: ft.LocalSolver, quadratic: ft.Quadratic | None = None, data: object = None) -> ft.Local:
    data = block(clients()) if data is None else data
    count = len(data.count)
    start, state = tree.expand((local.parameters, local.init(local.parameters)), count)
    return local(start, state, data, quadratic, keys(count))


def pull(local: ft.LocalSolver, count: int = len(COUNTS)) -> ft.Quadratic:
    scale = torch.arange(1, count + 1, dtype=torch.float64)
    return ft.Quadratic(scale / 4, tree.scale(tree.expand(local.parameters, count), scale / 10))


def assert_same(first: object, second: object, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)


class TestAgainstGradientDescent:
    @pytest.mark.parametrize("module", [Momentum(), Adam()], ids=["momentum", "adam"])
    @pytest.mark.parametrize("batch_size", [2, 8, None])
    @pytest.mark.parametrize("quadratic", [False, True])
    def test_same_numbers(self, module: Net, batch_size: int | None, quadratic: bool) -> None:
        fit = ft.lightning_fit(module, batch_size=batch_size, max_epochs=3)
        descent = ft.gradient_descent(module, batch_size=batch_size, epochs=3)
        added = pull(fit) if quadratic else None
        found, expected = solve(fit, added), solve(descent, added)
        assert_same(found.parameters, expected.parameters)
        assert_same(found.steps, expected.steps)
        assert_same(found.info["loss"], expected.info["loss"])

    def test_max_steps(self) -> None:
        fit = ft.lightning_fit(Momentum(), batch_size=2, max_steps=7)
        descent = ft.gradient_descent(Momentum(), batch_size=2, steps=7)
        assert_same(solve(fit).parameters, solve(descent).parameters)

    @pytest.mark.parametrize("mu", [0.0, 0.5])
    def test_fedavg(self, mu: float) -> None:
        locals_ = (
            ft.lightning_fit(Momentum(), batch_size=4, max_epochs=2),
            ft.gradient_descent(Momentum(), batch_size=4, epochs=2),
        )
        data = clients()
        rounds = [list(ft.Run(ft.fedavg(local, mu=mu), ft.InProcess(data)).rounds(2)) for local in locals_]
        assert_same(rounds[0][-1].server, rounds[1][-1].server)
        assert_same(rounds[0][-1].info["loss"], rounds[1][-1].info["loss"].double())

    def test_chunks_change_nothing(self) -> None:
        local = ft.lightning_fit(Random(), batch_size=4, max_epochs=1)
        whole, single = (
            list(ft.Run(ft.fedavg(local), ft.InProcess(clients(), chunk=c)).rounds(2))[-1].server for c in (None, 1)
        )
        assert_same(whole, single)

    def test_batches_come_as_lists_and_dicts(self) -> None:
        seen = []

        class Peek(Net):
            def training_step(self, batch: object, batch_idx: int) -> Tensor:
                seen.append(batch)
                rows = batch["rows"] if isinstance(batch, dict) else batch
                return super().training_step(rows, batch_idx)

        x, y = clients()[2]
        solve(
            ft.lightning_fit(Peek(), batch_size=5, max_epochs=1, max_steps=1),
            data=block(ft.data.from_tensors([(x, y)])),
        )
        nested = block(ft.data.from_tensors([{"rows": (x, y)}]))
        solve(ft.lightning_fit(Peek(), batch_size=5, max_epochs=1, shuffle=False), data=nested)
        assert isinstance(seen[0], list)
        assert torch.equal(seen[1]["rows"][0], x[:5])
        assert torch.equal(seen[2]["rows"][0], x[5:])


def looped(step: object, module: nn.Module, quadratic: ft.Quadratic, data: ft.data.ClientData) -> dict[str, Tensor]:
    """Client by client, the quadratic written as a loss: `step(module, extra, x, y)` trains one client."""
    done = []
    for k, n in enumerate(data.count.tolist()):
        own = ft.functional.load(module, {})

        def extra(names: object = None, own: nn.Module = own, k: int = k) -> Tensor:
            terms = [
                quadratic.precision[k] / 2 * p.square().sum() - (quadratic.shift[name][k] * p).sum()
                for name, p in own.named_parameters()
                if names is None or name.startswith(names)
            ]
            return torch.stack(terms).sum()

        step(own, extra, data.batch[0][k, :n], data.batch[1][k, :n])
        done.append(ft.functional.parameters(own))
    return tree.stack(done)


class TestQuadratic:
    def test_gradient_accumulation(self) -> None:
        local = ft.lightning_fit(Net(), batch_size=1, max_epochs=1, accumulate_grad_batches=3, shuffle=False)
        data = block(clients())

        def step(own: nn.Module, extra: object, x: Tensor, y: Tensor) -> None:
            optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
            for first in range(0, len(x), 3):
                optimizer.zero_grad()
                part = (own(x[first : first + 3]) - y[first : first + 3]).square().sum() / 3
                (part + extra()).backward()
                optimizer.step()

        found = solve(local, pull(local))
        assert_same(found.parameters, looped(step, Net(), pull(local), data))
        assert_same(found.steps, torch.tensor([0.1, 0.3, 0.3], dtype=torch.float64))
        plain = solve(ft.lightning_fit(Net(), batch_size=1, max_steps=1, accumulate_grad_batches=3, shuffle=False))
        x, y = data.batch[0][:, :3], data.batch[1][:, :3]
        assert_same(plain.info["loss"], (Net()(x) - y).square().mean((1, 2)).detach())

    def test_several_optimisers_and_gradients_of_none(self) -> None:
        class Two(Net):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))

            def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
                first, second = self.optimizers()
                for optimizer in (first, second):
                    optimizer.zero_grad()
                loss = F.mse_loss(self(batch[0]), batch[1])
                self.manual_backward(loss)
                first.step()
                second.step()
                first.step()  # with the loss's gradients as they were, which must not hold the quadratic's

            def configure_optimizers(self) -> object:
                first = torch.optim.SGD([*self.net[0].parameters(), self.unused], lr=0.1)
                return first, torch.optim.Adam(self.net[2].parameters(), lr=0.2)

        def step(own: nn.Module, extra: object, x: Tensor, y: Tensor) -> None:
            first, second = own.configure_optimizers()
            gradients = torch.autograd.grad(F.mse_loss(own(x), y), list(own.net.parameters()))
            for optimizer in (first, second, first):
                own.zero_grad()
                extra().backward()
                for p, gradient in zip(own.net.parameters(), gradients):
                    p.grad += gradient
                optimizer.step()

        local = ft.lightning_fit(Two(), max_epochs=1)
        found = solve(local, pull(local))
        assert_same(found.parameters, looped(step, Two(), pull(local), block(clients())))
        assert_same(found.steps, torch.full((3,), 0.2, dtype=torch.float64))
        assert "loss" not in found.info

    def test_closures(self) -> None:
        class Newton(Net):
            def configure_optimizers(self) -> object:
                return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

        def step(own: nn.Module, extra: object, x: Tensor, y: Tensor) -> None:
            optimizer = own.configure_optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(own(x), y) + extra()
                loss.backward()
                return loss

            optimizer.step(closure)

        local = ft.lightning_fit(Newton(), max_epochs=1)
        found = solve(local, pull(local))
        assert_same(found.parameters, looped(step, Newton(), pull(local), block(clients())))
        assert_same(found.steps, torch.full((3,), 0.1, dtype=torch.float64))

    def test_line_searches_are_refused(self) -> None:
        class Search(Net):
            def configure_optimizers(self) -> object:
                return torch.optim.LBFGS(self.parameters(), line_search_fn="strong_wolfe")

        local = ft.lightning_fit(Search(), max_epochs=1)
        assert solve(local).parameters["net.0.weight"].isfinite().all()
        with pytest.raises(TypeError, match="line search"):
            solve(local, pull(local))


class Random(Net):
    """Draws from all generators and leaves a mess behind."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        noise = torch.rand(()) + python_random.random() + np.random.rand()  # noqa: NPY002
        self.log("noise", noise)
        return F.mse_loss(self(F.dropout(x, 0.5)), y) * noise

    def teardown(self, stage: str) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        torch.backends.cudnn.deterministic = True
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        os.environ["PL_GLOBAL_SEED"] = "5"
        os.environ.pop("WORLD_SIZE", None)
        rank_zero_only.rank = 7
        logging.getLogger("lightning.pytorch").setLevel(logging.DEBUG)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        warnings.simplefilter("ignore")


def surroundings() -> dict[str, object]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": python_random.getstate(),
        "numpy": str(np.random.get_state()),  # noqa: NPY002
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "dtype": torch.get_default_dtype(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "environment": dict(os.environ),
        "rank": rank_zero_only.rank,
        "levels": [logging.getLogger(f"lightning{name}").level for name in ("", ".pytorch", ".fabric")],
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "warnings": list(warnings.filters),
    }


class TestNoTrace:
    def test_reproducible_and_the_surroundings_untouched(self) -> None:
        local = ft.lightning_fit(Random(), batch_size=4, max_epochs=2, deterministic=True, benchmark=True)
        torch.use_deterministic_algorithms(False)
        before = surroundings()
        first = solve(local)
        after = surroundings()
        assert after == before
        torch.rand(3), np.random.rand(), python_random.random()  # noqa: NPY002
        second = solve(local)
        assert_same(first, second, 0.0)
        assert len(set(first.info["noise"].tolist())) == len(COUNTS)

    def test_under_deterministic_algorithms(self) -> None:
        seen = []

        class Look(Net):
            def on_train_start(self) -> None:
                seen.append(torch.are_deterministic_algorithms_enabled())

        torch.use_deterministic_algorithms(True)
        try:
            solve(ft.lightning_fit(Look(), max_epochs=1))
            assert torch.are_deterministic_algorithms_enabled()
        finally:
            torch.use_deterministic_algorithms(False)
        assert seen == [True] * 3

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
    def test_under_other_modes(self, mode: object) -> None:
        class Manual(Net):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                self.float()

            def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
                self.manual_backward(super().training_step(batch, batch_idx))
                self.optimizers().step()

        local = ft.lightning_fit(Manual(), max_epochs=1)
        expected = solve(local, pull(local), block(clients(torch.float32)))
        with mode():
            before = surroundings()
            found = solve(local, pull(local), block(clients(torch.float32)))
            assert surroundings() == before
        assert_same(found.parameters, tree.map(torch.clone, expected.parameters), 0.0)

    def test_silent_and_without_files(
        self, tmp_path: object, monkeypatch: pytest.MonkeyPatch, capfd: object, caplog: object
    ) -> None:
        monkeypatch.chdir(tmp_path)

        class Validated(Net):
            def validation_step(self, batch: object, batch_idx: int) -> None: ...

        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            solve(ft.lightning_fit(Validated(), batch_size=2, max_epochs=1))
        assert [str(w.message) for w in heard] == []
        assert tuple(capfd.readouterr()) == ("", "")
        assert caplog.records == []
        assert list(tmp_path.iterdir()) == []

    def test_warnings_of_the_module_are_heard(self) -> None:
        class Own(Net):
            def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
                warnings.warn("mine", UserWarning, stacklevel=1)
                return super().training_step(batch, batch_idx)

        with pytest.warns(UserWarning, match="mine"):
            solve(ft.lightning_fit(Own(), max_epochs=1))

    def test_interrupts_are_raised_before_a_commit(self) -> None:
        class Stop(Net):
            stop = False

            def on_train_batch_end(self, outputs: object, batch: list[Tensor], batch_idx: int) -> None:
                if Stop.stop and len(batch[0]) == COUNTS[1]:
                    signal.raise_signal(signal.SIGINT)

        local = ft.lightning_fit(Stop(), max_epochs=1)
        run = ft.Run(ft.fedavg(local), ft.InProcess(clients()))
        first = run.step()
        saved = first.clients.state_dict()
        Stop.stop = True
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        try:
            before = surroundings()
            with pytest.raises(KeyboardInterrupt):
                run.step()
            assert surroundings() == before
        finally:
            signal.signal(signal.SIGINT, handler)
        assert_same(first.clients.state_dict(), saved)

    def test_errors_of_the_module_pass_through(self) -> None:
        class Fails(Net):
            def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
                raise RuntimeError("broken on purpose")

        before = surroundings()
        with pytest.raises(RuntimeError, match="broken on purpose"):
            solve(ft.lightning_fit(Fails(), max_epochs=1))
        assert surroundings() == before


class Outer(L.LightningModule):
    """Runs a local solver in its training step, as a federation does."""

    def __init__(self, local: ft.LocalSolver) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.local, self.found, self.batches = local, [], 0
        self.weight = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: object, batch_idx: int) -> None:
        before = surroundings()
        self.found.append(solve(self.local, pull(self.local), block(clients())))
        assert surroundings() == before
        assert self.trainer.training
        self.log("loss", self.found[-1].info["loss"].mean())
        self.batches += 1

    def train_dataloader(self) -> object:
        return [0, 1]

    def configure_optimizers(self) -> object:
        return torch.optim.SGD(self.parameters(), lr=0.1)


TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "NODE_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "x",
    "PL_TRAINER_DEVICES": "2",
    "PL_TRAINER_STRATEGY": "ddp",
    "PL_GLOBAL_SEED": "11",
}


class Measured(Random):
    """With torchmetrics, whose states are gathered over ranks if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.error.update(self(x), y)
        self.log_dict(self.error, on_epoch=True, on_step=False)
        self.log("mean", y.mean(), sync_dist=True, on_step=False, on_epoch=True, batch_size=len(y))
        return super().training_step(batch, batch_idx)


class TestNested:
    @pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
    def test_in_the_step_of_another_trainer(self, precision: str) -> None:
        local = ft.lightning_fit(Momentum(), batch_size=4, max_epochs=1)
        outer = Outer(local)
        trainer = L.Trainer(
            max_epochs=1,
            precision=precision,
            deterministic=True,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer.fit(outer)
            assert torch.are_deterministic_algorithms_enabled()
        finally:
            torch.use_deterministic_algorithms(False)
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        assert outer.batches == 2
        assert trainer.global_step == 0
        expected = solve(local, pull(local))
        for found in outer.found:
            assert_same(found, expected, 0.0)
        assert_same(float(trainer.callback_metrics["loss"]), float(expected.info["loss"].mean()), 1e-6)

    def test_alone_under_torchrun(self, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
        local = ft.lightning_fit(Measured(), batch_size=4, max_epochs=1)
        expected = solve(local)
        for name, value in TORCHRUN.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(rank_zero_only, "rank", 1)
        dist = torch.distributed
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

        def refuse(*args: object, **kwargs: object) -> None:
            raise AssertionError("a client's Trainer took part in the federation's process group")

        for name in ("all_gather", "all_reduce", "barrier", "broadcast", "init_process_group", "reduce"):
            monkeypatch.setattr(dist, name, refuse)
        try:
            before = surroundings()
            found = solve(local)
            assert surroundings() == before
        finally:
            dist.destroy_process_group()
        assert_same(found, expected, 0.0)


class TestAnyModule:
    def test_hooks_schedulers_callbacks_and_logs(self) -> None:
        class Everything(Net):
            def __init__(self) -> None:
                super().__init__()
                self.lstm = nn.LSTM(1, 3, batch_first=True).double()

            def on_train_epoch_end(self) -> None:
                self.log("epoch", float(self.current_epoch))

            def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
                x, y = batch
                loss = F.mse_loss(self.net[2](self.lstm(x[..., None])[0][:, -1]), y)
                self.log("watched", 1.0, on_epoch=True, on_step=False, batch_size=len(x))
                if len(x) == 3:
                    self.log("small", torch.tensor(2.0))
                return {"loss": loss, "other": x}

            def configure_optimizers(self) -> object:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
                return {
                    "optimizer": optimizer,
                    "lr_scheduler": {"scheduler": plateau, "monitor": "watched"},
                }

        stop = L.pytorch.callbacks.EarlyStopping("watched", patience=2)
        local = ft.lightning_fit(Everything(), max_epochs=9, callbacks=stop, gradient_clip_val=1.0)
        first = solve(local)
        # Epochs 1 and 2 are without improvement, and halve the rate after each.
        assert_same(first.steps, torch.full((3,), 0.1 + 0.1 + 0.05, dtype=torch.float64))
        assert_same(first.info["epoch"], torch.full((3,), 2.0, dtype=torch.float64))
        assert first.info["small"].isnan().tolist() == [False, True, True]
        assert stop.wait_count == 0

    def test_metrics(self) -> None:
        info = solve(ft.lightning_fit(Measured(), max_epochs=1)).info
        data = block(clients())
        mean = torch.stack([data.batch[1][k, :n].mean() for k, n in enumerate(COUNTS)])
        assert_same(info["mean"], mean, 1e-6)
        assert set(info) == {"MeanSquaredError", "mean", "noise", "loss"}

    @pytest.mark.parametrize("policy", ["refuse", "local", "average"])
    def test_buffers(self, policy: str) -> None:
        class Norm(Net):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.BatchNorm1d(2).double()

            def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
                return F.mse_loss(self.net(self.norm(batch[0])), batch[1])

        local = ft.lightning_fit(Norm(), max_epochs=2, buffers=policy)
        if policy == "refuse":
            with pytest.raises(ValueError, match=r"norm\.running_mean.*buffers='local'.*'average'"):
                solve(local)
            return
        descent = ft.gradient_descent(Norm(), epochs=2, buffers=policy)
        found, expected = solve(local), solve(descent)
        assert_same(found.parameters, expected.parameters)
        assert_same(found.state, expected.state)
        again = local(found.parameters, found.state, block(clients()), None, keys())
        expected = descent(expected.parameters, expected.state, block(clients()), None, keys())
        assert_same(again[:2], expected[:2])
        tensors = local.tensors(found.parameters, found.state)
        assert local.predict(tensors, block(clients()).batch[0]).shape == (3, 9, 1)

    def test_frozen_parameters_stay(self) -> None:
        class Frozen(Net):
            thaw = False

            def __init__(self) -> None:
                super().__init__()
                self.net[0].requires_grad_(False)

            def on_train_start(self) -> None:
                self.net[0].requires_grad_(Frozen.thaw)

        local = ft.lightning_fit(Frozen(), max_epochs=1)
        assert sorted(local.parameters) == ["net.2.bias", "net.2.weight"]
        before = local.module.net[0].weight.clone()
        expected = solve(ft.gradient_descent(Frozen(), epochs=1, ignore_hooks=["on_train_start"]))
        assert_same(solve(local).parameters, expected.parameters)
        assert torch.equal(local.module.net[0].weight, before)
        Frozen.thaw = True
        with pytest.raises(ValueError, match=r"unfreezes the parameters net\.0\.weight, net\.0\.bias"):
            solve(local)

    def test_nobody(self) -> None:
        local = ft.lightning_fit(Net(), max_epochs=1, buffers="local")
        start, state = tree.expand((local.parameters, local.init(local.parameters)), 0)
        data = tree.take(block(clients()), slice(0, 0))
        found = local(start, state, data, None, keys(0))
        assert_same(found, ft.Local(start, state, torch.zeros(0, dtype=torch.float64), {}))

    def test_a_client_without_rows_stays(self) -> None:
        x, y = clients()[0]
        data = ft.data.FederatedData((x, y), torch.tensor([0, 3]), allow_empty=True)
        local = ft.lightning_fit(Net(), batch_size=2, max_epochs=1)
        found = solve(local, data=block(data))
        assert_same(tree.take(found.parameters, slice(0, 1)), tree.expand(local.parameters, 1), 0.0)
        assert found.steps[0] == 0
        assert found.info["loss"].isnan().tolist() == [True, False]

    def test_arguments_are_not_changed(self) -> None:
        local = ft.lightning_fit(Net(), max_epochs=1)
        start, state = tree.stack([local.parameters] * 3), tree.expand(local.init(local.parameters), 3)
        data = block(clients())
        before = tree.map(torch.clone, (start, data.batch))
        local(start, state, data, None, keys())
        assert_same((start, data.batch), before, 0.0)
        module = Net()
        module.trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
        assert ft.lightning_fit(module, max_epochs=1).module._trainer is None
        assert module._trainer is not None


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({}, ValueError, "max_epochs= or max_steps="),
            ({"max_epochs": 1, "batch_size": 0}, ValueError, "batch_size of at least 1"),
            ({"max_epochs": 1, "reset": "never"}, ValueError, "gradient_descent"),
            ({"max_epochs": 1, "reset": "always"}, ValueError, "'always'"),
            ({"max_epochs": 1, "buffers": "mean"}, ValueError, "'mean'"),
            ({"max_epochs": 1, "strategy": "ddp"}, ValueError, "strategy"),
            ({"max_epochs": 1, "num_nodes": 2, "devices": 2}, ValueError, "num_nodes, devices=2"),
            ({"max_epochs": 1, "devices": "auto"}, ValueError, "devices='auto'"),
            ({"max_epochs": 1, "epochs": 3}, TypeError, "epochs"),
        ],
    )
    def test_arguments(self, arguments: dict[str, object], error: type, message: str) -> None:
        with pytest.raises(error, match=message):
            ft.lightning_fit(Net(), **arguments)

    def test_modules(self) -> None:
        with pytest.raises(TypeError, match=r"LightningModule, but got Linear; use ft\.gradient_descent"):
            ft.lightning_fit(nn.Linear(2, 1), max_epochs=1)
        with pytest.raises(ValueError, match="trainable parameters"):
            ft.lightning_fit(Net().requires_grad_(False), max_epochs=1)
