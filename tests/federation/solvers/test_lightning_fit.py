"""`lightning_fit`: the numbers of `gradient_descent` where both apply, and of plain loops where it does more."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from support.small_fits import (
    COUNTS,
    Adam,
    F,
    Measured,
    Momentum,
    Net,
    Random,
    assert_same,
    block,
    clients,
    keys,
    pull,
    solve,
)
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.algorithm import Local


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
        assert_same(found.lr_sum, expected.lr_sum)
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
        assert isinstance(seen[0], list)
        seen.clear()
        nested = block(ft.data.from_tensors([{"rows": (x, y)}]))
        solve(ft.lightning_fit(Peek(), batch_size=5, max_epochs=1, shuffle=False), data=nested)
        assert torch.equal(seen[0]["rows"][0], x[:5])
        assert torch.equal(seen[1]["rows"][0], x[5:])


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
        assert_same(found.lr_sum, torch.tensor([0.1, 0.3, 0.3], dtype=torch.float64))
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
        assert_same(found.lr_sum, torch.full((3,), 0.2, dtype=torch.float64))
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
        assert_same(found.lr_sum, torch.full((3,), 0.1, dtype=torch.float64))

    def test_line_searches_are_refused(self) -> None:
        class Search(Net):
            def configure_optimizers(self) -> object:
                return torch.optim.LBFGS(self.parameters(), line_search_fn="strong_wolfe")

        local = ft.lightning_fit(Search(), max_epochs=1)
        assert solve(local).parameters["net.0.weight"].isfinite().all()
        with pytest.raises(TypeError, match="line search"):
            solve(local, pull(local))


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
        assert_same(first.lr_sum, torch.full((3,), 0.1 + 0.1 + 0.05, dtype=torch.float64))
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
        again = local.solve(found.parameters, found.state, block(clients()), None, ft.Turn(keys(), 0))
        expected = descent.solve(expected.parameters, expected.state, block(clients()), None, ft.Turn(keys(), 0))
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

    def test_no_clients(self) -> None:
        local = ft.lightning_fit(Net(), max_epochs=1, buffers="local")
        start, state = tree.expand((local.parameters, local.init(local.parameters)), 0)
        data = tree.take(block(clients()), slice(0, 0))
        found = local.solve(start, state, data, None, ft.Turn(keys(0), 0))
        nothing = torch.zeros(0, dtype=torch.float64)
        assert_same(found, Local(start, state, nothing, {"loss": nothing}))

    def test_a_client_without_rows_stays(self) -> None:
        x, y = clients()[0]
        data = ft.data.FederatedData((x, y), torch.tensor([0, 3]), allow_empty=True)
        local = ft.lightning_fit(Net(), batch_size=2, max_epochs=1)
        found = solve(local, data=block(data))
        assert_same(tree.take(found.parameters, slice(0, 1)), tree.expand(local.parameters, 1), 0.0)
        assert found.lr_sum[0] == 0
        assert found.info["loss"].isnan().tolist() == [True, False]

    def test_arguments_are_not_changed(self) -> None:
        local = ft.lightning_fit(Net(), max_epochs=1)
        start, state = tree.stack([local.parameters] * 3), tree.expand(local.init(local.parameters), 3)
        data = block(clients())
        before = tree.map(torch.clone, (start, data.batch))
        local.solve(start, state, data, None, ft.Turn(keys(), 0))
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
