"""`lightning_fit` leaves no trace of its Trainers, wherever it runs."""

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
from lightning.pytorch.utilities import rank_zero_only
from support.small_fits import COUNTS, Measured, Momentum, Net, Random, assert_same, block, clients, pull, solve
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import tree


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
        assert seen == [True] * 4  # the first fit is taken twice

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

    def test_module_warnings_are_shown(self) -> None:
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
