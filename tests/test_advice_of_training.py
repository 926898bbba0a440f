"""What messages about training, data and scores recommend works, as in `test_advice`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.models.gibbs import sparse

X = ft.random.normal(ft.random.key(0), (3, 6, 2))
ROWS = [(x, x[:, :1]) for x in X]
DATA = ft.data.from_tensors(ROWS)


def refusal(call: Callable[[], Any], *words: str) -> str:
    """Return the message of a refusal that has these words."""
    with pytest.raises((TypeError, ValueError, RuntimeError)) as found:
        call()
    assert [word for word in words if word not in str(found.value)] == []
    return str(found.value)


def descent(module: nn.Module | None = None, **options: Any) -> ft.LocalSolver:
    settings: dict[str, Any] = {"steps": 2, "optimizer": lambda p: torch.optim.SGD(p, 0.1), **options}
    if not isinstance(module, L.LightningModule):
        settings = {"loss": nn.functional.mse_loss, **settings}
    return ft.gradient_descent(nn.Linear(2, 1) if module is None else module, **settings)


def trained(algorithm: ft.Algorithm, data: ft.data.FederatedData = DATA, rounds: int = 1, **options: Any) -> ft.Run:
    return ft.run(algorithm, ft.InProcess(data), rounds=rounds, progress=False, **options)


class Module(L.LightningModule):
    """A linear regression."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


# -- local training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_buffers_that_training_changes_are_kept_or_averaged(buffers: str) -> None:
    refusal(lambda: trained(ft.fedavg(descent(normed()))), "buffers='local'", "buffers='average'")
    assert trained(ft.fedavg(descent(normed(), buffers=buffers))).number == 1


def test_a_batch_of_one_row_is_left_out() -> None:
    data = ft.data.from_tensors([(x[:5], y[:5]) for x, y in ROWS])
    make = lambda **more: descent(normed(), buffers="local", batch_size=2, steps=3, **more)
    refusal(lambda: trained(ft.fedavg(make()), data), "drop_last=True")
    assert trained(ft.fedavg(make(drop_last=True)), data).number == 1


def test_states_of_optimisers_of_any_kind_go_on_with_stacked_clients() -> None:
    refusal(lambda: ft.lightning_fit(Module(), reset="never", max_epochs=1), "ft.gradient_descent(..., reset='never')")
    assert trained(ft.fedavg(descent(Module(), optimizer=None, reset="never")), rounds=2).number == 2


def test_a_schedule_over_all_rounds_is_told_how_many_there_are() -> None:
    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            total = self.trainer.estimated_stepping_batches
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(total))]

    make = lambda **more: ft.fedavg(descent(Scheduled(), optimizer=None, **more))
    refusal(lambda: trained(make()), "gradient_descent(..., rounds=50)")
    refusal(lambda: trained(make(rounds=50), rounds=2), "give both the same number")
    assert trained(make(rounds=2), rounds=2).number == 2


def test_rows_share_steps_of_stacked_clients_only() -> None:
    refusal(lambda: descent(rowwise=True, batched=False), "batched='auto' or True")
    assert trained(ft.fedavg(descent(rowwise=True, batched="auto"))).number == 1


def test_losses_that_branch_on_values_go_client_by_client() -> None:
    branching = lambda output, target: (
        (output - target).square().mean() * (2 if output.detach().sum().item() > 0 else 1)
    )
    make = lambda **more: ft.fedavg(descent(loss=branching, **more))
    refusal(lambda: trained(make(batched=True)), "batched='auto' or batched=False", "ft.lightning_fit")
    for batched in ("auto", False):
        assert trained(make(batched=batched)).number == 1


def test_a_capture_of_steps_that_are_not_alike_is_given_up() -> None:
    class Counting(Module):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (1 + batch_idx)

    make = lambda **more: ft.fedavg(descent(Counting(), optimizer=None, batch_size=2, **more))
    refusal(lambda: trained(make(compile=True)), "use compile=False")
    assert trained(make(compile=False)).number == 1


def test_optimisers_by_hand_are_trained_by_a_trainer() -> None:
    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    refusal(lambda: trained(ft.fedavg(descent(Manual(), optimizer=None))), "ft.lightning_fit")
    assert trained(ft.fedavg(ft.lightning_fit(Manual(), max_epochs=1, batch_size=3))).number == 1


def test_a_client_that_cannot_train_is_left_out_of_its_rounds() -> None:
    bad = ft.data.from_tensors([*ROWS[:2], (1e30 * X[2], ROWS[2][1])])
    refusal(lambda: trained(ft.fedavg(descent()), bad), "ft.Run(…, on_bad_message='drop')", "ft.Federation(…, on_bad")
    run = ft.Run(ft.fedavg(descent()), ft.InProcess(bad), on_bad_message="drop")
    run.step()
    assert all(bool(leaf.isfinite().all()) for leaf in ft.tree.leaves(run.server))


# -- algorithms -----------------------------------------------------------------------------------------------------


def test_if_all_parameters_are_personal_clients_train_apart() -> None:
    refusal(lambda: ft.personal_layers(descent(), ["*"]), "use ft.separate")
    assert trained(ft.separate(descent())).number == 1


def test_first_moments_go_without_correction_of_bias() -> None:
    refusal(lambda: ft.fedadam(descent(), lr=0.1, initial=0.01), "pass bias_correction=False")
    assert trained(ft.fedadam(descent(), lr=0.1, initial=0.01, bias_correction=False)).number == 1


def test_a_body_is_the_feature_map_of_a_linear_head() -> None:
    body = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    heads = lambda: ft.separate(ft.least_squares(ft.LinearHead(2, intercept=False)))
    refusal(lambda: ft.shared_body(descent(body), heads()), "ft.LinearHead(features, body, given=True)")
    plain = ft.LinearHead(2, body, intercept=False)
    said = refusal(lambda: ft.shared_body(descent(plain), heads()), "ft.LinearHead(features, body, given=True)")
    assert 'buffers="local"' in said
    given = ft.LinearHead(2, body, given=True, intercept=False)
    data = ft.data.from_tensors([(x, y[:, 0]) for x, y in ROWS])
    assert trained(ft.shared_body(descent(given, buffers="local"), heads()), data).number == 1


def test_a_run_begins_at_parameters_where_there_are_no_others() -> None:
    said = refusal(lambda: trained(ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=1)), "torch.zeros(3)")
    assert "ft.normal_em(columns=3)" in said
    data = ft.data.from_tensors([(x, y[:, 0]) for x, y in ROWS])
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=1)
    assert ft.run(algorithm, ft.InProcess(data), torch.zeros(2), rounds=1, progress=False).number == 1


def test_samplers_record_what_is_asked() -> None:
    data = ft.data.from_tensors([(x.double(), y[:, 0].double()) for x, y in ROWS])

    def run(**record: Any) -> ft.Run:
        algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=1)
        start = torch.zeros(2).double()
        return ft.run(algorithm, ft.InProcess(data), start, rounds=8, progress=False, **record)

    plain = run()
    refusal(plain.summary, "record=ft.Sampler(burn_in=100)")
    recorded = run(record=ft.Sampler(burn_in=2))
    assert len(recorded.summary())
    refusal(lambda: ft.inference.ranef(recorded), "record=ft.Sampler(burn_in=…, sites=True)")
    assert len(ft.inference.ranef(run(record=ft.Sampler(burn_in=2, sites=True))))


# -- runs and scores ------------------------------------------------------------------------------------------------


def test_cohorts_are_numbers_or_shares() -> None:
    go = lambda cohort: trained(ft.fedavg(descent()), cohort=cohort).number
    refusal(lambda: go(0.4), "ft.poisson_cohort(0.4, 3)")
    refusal(lambda: go([]), "cohort=None")
    assert [go(ft.poisson_cohort(0.4, 3)), go(None), go([0, 1]), go(2)] == [1, 1, 1, 1]


def test_clients_that_have_joined_since_begin_anew(tmp_path: Path) -> None:
    before = trained(ft.fedavg(descent()), ft.data.from_tensors(ROWS[:2], names=["a", "b"]))
    before.save(tmp_path / "run")
    more = lambda: ft.Run(ft.fedavg(descent()), ft.InProcess(ft.data.from_tensors(ROWS, names=["a", "b", "c"])))
    refusal(lambda: more().load(tmp_path / "run"), "run.load(path, joined='new')")
    assert more().load(tmp_path / "run", joined="new").number == 1


def test_other_clients_are_scored_as_unseen() -> None:
    run = trained(ft.fedavg(descent()))
    others = ft.data.from_tensors(ROWS[:2])
    refusal(
        lambda: run.evaluate(others, {"mse": ft.metrics.mean_squared_error()}),
        "unseen=True",
        "such as all rows as one client",
    )
    assert len(run.evaluate(others, {"mse": ft.metrics.mean_squared_error()}, unseen=True)["mse"].clients) == 2
    pooled = ft.data.from_tensors([(torch.cat([x for x, _ in ROWS]), torch.cat([y for _, y in ROWS]))])
    assert len(run.evaluate(pooled, {"mse": ft.metrics.mean_squared_error()}, unseen=True)["mse"].clients) == 1


def test_metrics_are_given_by_name() -> None:
    run = trained(ft.fedavg(descent()))
    wrongs: tuple[Any, ...] = ({}, ft.metrics.mean_squared_error())
    for wrong in wrongs:
        refusal(lambda wrong=wrong: run.evaluate(DATA, wrong), "metrics={'accuracy': ft.metrics.accuracy()}")
    module = nn.Linear(2, 2)
    labels = ft.data.from_tensors([(x, (y[:, 0] > 0).long()) for x, y in ROWS])
    run = trained(ft.fedavg(descent(module, loss=nn.functional.cross_entropy)), labels)
    assert 0 <= run.evaluate(labels, metrics={"accuracy": ft.metrics.accuracy()})["accuracy"].overall <= 1


def test_rows_that_are_no_pairs_are_split() -> None:
    run = trained(ft.fedavg(descent()))
    rows = ft.data.from_tensors([{"inputs": x, "targets": y} for x, y in ROWS])
    metrics = {"mse": ft.metrics.mean_squared_error()}
    refusal(lambda: run.evaluate(rows, metrics), "split=lambda rows: (inputs, targets)")
    split = lambda rows: (rows["inputs"], rows["targets"])
    found, plain = run.evaluate(rows, metrics, split=split), run.evaluate(DATA, metrics)
    assert found["mse"].overall == pytest.approx(plain["mse"].overall)


def test_functions_say_whether_more_is_better() -> None:
    far = lambda output, target: (output - target).abs().mean()

    def best(metric: Any, **more: Any) -> Any:
        settings = {"mu": [0.0, 1.0]}
        return ft.grid(lambda mu: ft.fedavg(descent(), mu=mu), settings, ft.InProcess(DATA), rounds=1,
                       validation=DATA, metric=metric, progress=False, **more).best  # fmt: skip

    refusal(lambda: best(far), "largest_is_best=True (as for accuracy) or False", "ft.metrics.mean_of(function, larg")
    assert best(far, largest_is_best=False) == best(ft.metrics.mean_of(far, largest_is_best=False))


# -- data -----------------------------------------------------------------------------------------------------------


def test_data_are_made_of_tensors() -> None:
    refusal(lambda: trained(ft.fedavg(descent()), [1, 2]), "ft.data.from_tensors")  # type: ignore[arg-type]
    assert len(ft.data.from_tensors(ROWS)) == 3


def test_names_are_strings_one_per_client() -> None:
    refusal(lambda: ft.data.from_tensors(ROWS, names=[1, 2, 3]), "use str()")  # type: ignore[list-item]
    refusal(lambda: ft.data.from_tensors(ROWS, names=["a"]), "pass one per client")
    assert ft.data.from_tensors(ROWS, names=[str(k) for k in range(3)]).names == ("0", "1", "2")


def test_sparse_tensors_become_dense() -> None:
    sparsely = [(x.to_sparse(), y) for x, y in ROWS]
    refusal(lambda: trained(ft.fedavg(descent()), ft.data.from_tensors(sparsely)), "to_dense")
    assert trained(ft.fedavg(descent()), ft.data.from_tensors([(x.to_dense(), y) for x, y in sparsely])).number == 1


class FreezesLater(L.LightningModule):
    """A module whose third step freezes a layer, which no `vmap` lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.global_step == 2:
            self.layer.bias.requires_grad_(False)
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_an_error_of_torch_in_a_later_step_comes_with_advice_that_leads_to_the_next() -> None:
    said = refusal(lambda: trained(ft.fedavg(descent(FreezesLater(), steps=4, batched=True))), "batched='auto'")
    assert "functorch" in said  # torch's own words stay
    refusal(lambda: trained(ft.fedavg(descent(FreezesLater(), steps=4))), "ft.lightning_fit")
    fit = ft.lightning_fit(FreezesLater(), max_epochs=4)
    assert trained(ft.fedavg(fit)).number == 1
