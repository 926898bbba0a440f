"""What stays with a client: buffers, and optimisers kept over rounds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.oracles.plain_training import (
    CLOSE,
    FORMS,
    OPTIMISERS,
    NoMetrics,
    Odd,
    Session,
    check,
    keys,
    lit,
    net,
    over_rounds,
    own_rows,
    plain,
    seeded,
    solve,
    stacked_data,
    with_norm,
)
from torch import nn

from fedtorch import functional, tree
from fedtorch.federation.solvers.gradient_descent import gradient_descent
from fedtorch.federation.turn import Turn

pytestmark = pytest.mark.usefixtures("nothing_outside_changes")


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_batch_norm(buffers):
    data = stacked_data((2, 4, 6, 8, 10))
    result = check(with_norm(), data, F.cross_entropy, OPTIMISERS["adam"], buffers=buffers, epochs=2, batch_size=4)
    names = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    averaged = names if buffers == "average" else set()
    assert averaged <= result.parameters.keys()
    assert result.state.buffers.keys() == names - averaged


def test_averaged_buffers_start_at_what_the_server_sends():
    local = gradient_descent(
        with_norm(), epochs=1, loss=F.cross_entropy, optimizer=OPTIMISERS["sgd"], buffers="average"
    )
    start = tree.expand({**local.parameters, "1.running_mean": torch.full((4,), 9.0, dtype=torch.float64)}, 2)
    result = solve(local, stacked_data((4, 6)), keys(2), start=start)
    module = functional.load(with_norm(), {"1.running_mean": torch.full((4,), 9.0, dtype=torch.float64)})
    _, after, *_ = plain(
        Session(module, OPTIMISERS["sgd"], F.cross_entropy), own_rows(stacked_data((4, 6)), 1), keys(2)[1], epochs=1
    )
    torch.testing.assert_close(result.parameters["1.running_mean"][1], after["1.running_mean"], **CLOSE)


@pytest.mark.parametrize("module", ["plain", pytest.param("odd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", [name for name in OPTIMISERS if name != "tensor_rate"])
def test_optimisers_over_rounds_of_partial_participation(optimizer, module):
    over_rounds({"plain": net, "odd": lambda: seeded(Odd)}[module](), OPTIMISERS[optimizer], F.cross_entropy)


@pytest.mark.parametrize("form", ["two_schedulers", "lists_of_dicts", "dict_dict", "step_frequency", "warm_up"])
def test_schedules_over_rounds_of_partial_participation(form):
    over_rounds(lit(FORMS[form], kind=NoMetrics), None, None)


def test_a_solver_made_anew_continues_kept_states():
    make = lambda: gradient_descent(
        net(), loss=F.cross_entropy, optimizer=OPTIMISERS["adam"], reset="never", epochs=1, batch_size=4
    )
    local, data, key = make(), stacked_data(), keys(7)
    first = solve(local, data, key)
    again = solve(local, data, key, start=first.parameters, state=first.state)
    resumed = make().solve(first.parameters, first.state, data, None, Turn(key, 0))
    torch.testing.assert_close(resumed, again, rtol=0, atol=0)


def test_batch_norm_one_by_one():
    data = stacked_data((2, 4, 6, 8, 10))
    for buffers in ("local", "average"):
        check(
            with_norm(),
            data,
            F.cross_entropy,
            OPTIMISERS["adam"],
            buffers=buffers,
            epochs=2,
            batch_size=4,
            batched=False,
        )


def test_arguments_stay_as_they_are():
    local, data, key = (
        gradient_descent(
            with_norm(), loss=F.cross_entropy, optimizer=OPTIMISERS["adam"], steps=3, reset="never", buffers="local"
        ),
        stacked_data((4, 6)),
        keys(2),
    )
    first = solve(local, data, key)
    before = tree.map(torch.clone, (tuple(first[:2]), data, key))
    local.solve(first.parameters, first.state, data, None, Turn(key, 0))
    torch.testing.assert_close((tuple(first[:2]), data, key), before, rtol=0, atol=0)


def test_the_mode_of_a_module_is_kept():
    module = with_norm()
    module[1].eval()
    check(module, None, F.cross_entropy, OPTIMISERS["sgd"], epochs=1, batch_size=4)
    assert (module.training, module[1].training) == (True, False)


def test_changed_buffers():
    local = gradient_descent(with_norm(), epochs=1, loss=F.cross_entropy, optimizer=OPTIMISERS["sgd"])
    with pytest.raises(ValueError, match=r"changes the buffers .*1.running_mean, .*buffers='local'.*buffers='average'"):
        local.prepare(stacked_data())


CLOCKS = ("two_lists", "two_schedulers", "lists_of_dicts", "frequency", "step_frequency", "dict_dict", "warm_up")


EPOCHS = {"epochs": 1, "batch_size": 4}, {"epochs": 2, "batch_size": 4}
TWINS = ("two_schedulers", "lists_of_dicts", "frequency", "dict_dict")  # by epoch, as the others are


@pytest.mark.parametrize(
    ("form", "options"),
    [
        pytest.param(form, options, marks=pytest.mark.slow if form in TWINS and options is EPOCHS[1] else ())
        for form in CLOCKS
        for options in (*EPOCHS, {"steps": 3})
    ],
)
def test_schedules_run_on_the_federations_clock(form, options):
    over_rounds(lit(FORMS[form], kind=NoMetrics), None, None, reset="round", **options)


@pytest.mark.parametrize("reset", ["round", "never"])
@pytest.mark.parametrize("form", ["one_cycle", "max_epochs"])
def test_schedules_over_all_rounds(form, reset):
    over_rounds(lit(FORMS[form], kind=NoMetrics), None, None, reset=reset)


@pytest.mark.parametrize("form", ["one_cycle", "max_epochs"])
def test_module_needs_rounds_argument(form):
    with pytest.raises(RuntimeError, match=r"Expected rounds=.*gradient_descent\(\.\.\., rounds=50\).*'trainer\."):
        gradient_descent(lit(FORMS[form]), epochs=1)


class Clocked(NoMetrics):
    """A loss that reads where the training stands."""

    def training_step(self, batch, index):
        weight = 1 + 0.1 * self.trainer.current_epoch + 0.01 * self.trainer.global_step
        return weight * F.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize("options", [{"epochs": 1, "batch_size": 4}, {"epochs": 2, "batch_size": 4}])
def test_epochs_and_steps_that_a_loss_reads_go_on_over_rounds(options):
    over_rounds(seeded(Clocked), None, None, reset="round", **options)


class Awakes(NoMetrics):
    """A parameter that has no gradient in the first rounds."""

    def __init__(self, configure) -> None:
        super().__init__(configure)
        self.later = nn.Parameter(torch.ones(2))

    def training_step(self, batch, index):
        logits = self(batch[0])
        return F.cross_entropy(logits * self.later if self.current_epoch >= 2 else logits, batch[1])


@pytest.mark.parametrize("optimizer", ["momentum", "nadam", "rprop", "adagrad"])
def test_kept_states_of_parameters_that_are_used_later(optimizer):
    over_rounds(lit(lambda lit: OPTIMISERS[optimizer](lit.parameters()), kind=Awakes), None, None)
