"""Layers under `torch.vmap` that torch cannot batch: each client gets what it gets alone."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fedtorch import random
from fedtorch.module_randomness.interception import KeyedRandomness
from fedtorch.stacked_layers import StackedOperations, WithoutReading, by_branches
from fedtorch.stacked_layers._mode import HOMES

CLIENTS, ROWS, STEPS, SIZE = 3, 2, 4, 3


def vmap(function, *dims, **settings):
    """torch.vmap in the mode."""

    def call(*arguments):
        with WithoutReading():
            return torch.vmap(function, *dims, **settings)(*arguments)

    return call


def drawn(number, *shape, dtype=torch.float64):
    return random.normal(random.key(number), shape, dtype)


def clients_of(module):
    """Other parameters for each client."""
    named = module.named_parameters()
    return {n: drawn(i, CLIENTS, *p.shape, dtype=p.dtype).mul_(0.4).requires_grad_() for i, (n, p) in enumerate(named)}


def at(tensors, k):
    return {name: tensor[k] for name, tensor in tensors.items()}


def gradients(outputs, leaves):
    weighted = [(o * drawn(50 + i, *o.shape, dtype=o.dtype)).sum() for i, o in enumerate(outputs)]
    return torch.autograd.grad(sum(weighted), leaves)


def recurrent(kind, dtype, **options):
    """(a run of it, clients' tensors, inputs and states)"""
    module = kind(SIZE, 5, dtype=dtype, **options)
    order = (ROWS, STEPS) if module.batch_first else (STEPS, ROWS)
    sides = module.num_layers * (1 + module.bidirectional)
    states = [drawn(31 + i, CLIENTS, sides, ROWS, 5, dtype=dtype).requires_grad_() for i in range(2)]
    inputs = drawn(30, CLIENTS, *order, SIZE, dtype=dtype).requires_grad_()

    def run(tensors, x, *states):
        states = states if kind is nn.LSTM else states[0]
        outputs, last = functional_call(module, tensors, (x, states))
        return outputs, *(last if kind is nn.LSTM else (last,))

    return run, clients_of(module), [inputs, *states[: 1 + (kind is nn.LSTM)]]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        (nn.GRU, {"bias": False}),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        (nn.LSTM, {"bias": False}),
        (nn.RNN, {"batch_first": True}),
        (nn.RNN, {"bias": False, "nonlinearity": "relu"}),
    ],
)
def test_recurrent_layers_and_their_gradients(kind, options, dtype, tolerance):
    run, tensors, arguments = recurrent(kind, dtype, **options)
    together = vmap(run)(tensors, *arguments)
    alone = [torch.stack(each) for each in zip(*(run(at(tensors, k), *(a[k] for a in arguments)) for k in range(3)))]
    leaves = [*tensors.values(), *arguments]
    # In float32 torch's own kernels for one client and ours differ by the order of their sums.
    compared = [*together, *gradients(together, leaves)], [*alone, *gradients(alone, leaves)]
    torch.testing.assert_close(*compared, rtol=tolerance, atol=tolerance)


def test_sequences_of_shared_weights_and_of_examples_inside():
    run, tensors, (inputs, state) = recurrent(nn.GRU, torch.float64, batch_first=True)
    shared = at(tensors, 0)
    expected = torch.stack([run(shared, inputs[k], state[k])[0] for k in range(CLIENTS)])
    torch.testing.assert_close(vmap(lambda x, h: run(shared, x, h)[0])(inputs, state), expected)

    def by_example(tensors, rows):
        return vmap(lambda row: run(tensors, row[None], rows.new_zeros(1, 1, 5))[0][0])(rows)

    nested = vmap(by_example)(tensors, inputs)
    zeros = torch.zeros_like(state)
    torch.testing.assert_close(nested, vmap(run)(tensors, inputs, zeros)[0])


def test_blocks_of_clients_whose_weights_fit_a_cache(monkeypatch):
    run, tensors, arguments = recurrent(nn.LSTM, torch.float64, batch_first=True)
    together = vmap(run)(tensors, *arguments)
    monkeypatch.setattr("fedtorch.stacked_layers._cells._CACHED", 0)
    blocks = vmap(run)(tensors, *arguments)
    leaves = [*tensors.values(), *arguments]
    compared = [*blocks, *gradients(blocks, leaves)], [*together, *gradients(together, leaves)]
    torch.testing.assert_close(*compared, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_dropout_between_layers_is_drawn_from_each_client_s_key(kind):
    run, tensors, arguments = recurrent(kind, torch.float64, num_layers=3, batch_first=True, dropout=0.5)
    keys = random.fold_in(random.key(1), torch.arange(CLIENTS))
    with KeyedRandomness(keys):
        together = vmap(run, randomness="different")(tensors, *arguments)
    for k in range(CLIENTS):
        with KeyedRandomness(keys[k]):
            alone = run(at(tensors, k), *(a[k] for a in arguments))
        torch.testing.assert_close(tuple(result[k] for result in together), alone)


def test_projections_are_refused_by_name():
    module = nn.LSTM(SIZE, 5, proj_size=2, dtype=torch.float64)
    inputs = drawn(1, CLIENTS, STEPS, ROWS, SIZE)
    with pytest.raises(NotImplementedError, match="proj_size is not supported on stacked clients; use batched=False"):
        vmap(lambda tensors, x: functional_call(module, tensors, (x,))[0])(clients_of(module), inputs)


MASKS = {
    "none": {},
    "causal": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(STEPS, dtype=torch.float64)},
    "bools": {"attn_mask": torch.ones(STEPS, STEPS, dtype=torch.bool).triu(1)},
    "padding": {"key_padding_mask": torch.tensor([[False] * STEPS, [False] * 3 + [True]])},
    "both": {
        "attn_mask": torch.ones(STEPS, STEPS, dtype=torch.bool).triu(1),
        "key_padding_mask": torch.tensor([[False] * STEPS, [False] * 3 + [True]]),
    },
    "weights": {"need_weights": True},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_attention_and_its_gradients(masks):
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    tensors, inputs = clients_of(module), drawn(1, CLIENTS, ROWS, STEPS, 8).requires_grad_()
    options = {"need_weights": False, **masks}

    def run(net):
        return lambda tensors, x: functional_call(net, tensors, (x, x, x), options)[0]

    with warnings.catch_warnings(action="error"):  # such as that of client by client
        together = vmap(run(module))(tensors, inputs)
    alone = torch.stack([run(module)(at(tensors, k), inputs[k]) for k in range(CLIENTS)])
    leaves = [*tensors.values(), inputs]
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(gradients([together], leaves), gradients([alone], leaves))


def test_fused_attention_of_gradients_inside():
    """Those of each client's own, as private training takes them."""
    q = drawn(1, CLIENTS, ROWS, 2, STEPS, 3)
    slope = torch.func.grad(lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos()).square().sum())
    torch.testing.assert_close(vmap(slope)(q), torch.stack([slope(each) for each in q]))


def test_a_mask_that_is_trained_has_its_gradient():
    """Relative positions are added to the scores, and the CPU's fused attention has no gradient of what is added."""
    x, bias = drawn(80, CLIENTS, ROWS, 2, STEPS, SIZE), drawn(81, CLIENTS, 2, STEPS, STEPS).requires_grad_()
    outputs = vmap(lambda x, bias: F.scaled_dot_product_attention(x, x, x, bias[None]))(x, bias)
    alone = torch.stack([F.scaled_dot_product_attention(x[k], x[k], x[k], bias[k][None]) for k in range(CLIENTS)])
    torch.testing.assert_close(outputs, alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(gradients([o], [bias]) for o in (outputs, alone)), rtol=1e-12, atol=1e-12)


READERS = {
    "bool": lambda x: 2 * x if (x > 0).all() else x,
    "float_as_bool": lambda x: x if x.sum() else x + 1,
    "int": lambda x: x * int(x.sum().long()),
    "bool_as_int": lambda x: x * int((x > 0).all()),
    "index": lambda x: [x, 2 * x, 3 * x, 4 * x][x[0].long()],
    "item": lambda x: x * x.argmax().item(),
    "one": lambda x: x * x.argmax()[None].item(),
    "tolist": lambda x: x * sum(x.long().tolist()),
    "equal": lambda x: x if torch.equal(x, x.flip(0)) else x + 5,
    "twice": lambda x: (x if x[0] > x[1] else -x) if (x > 0).all() else 3 * x,
    "of_all": lambda x: x if torch.ones(2).all() else -x,
}


@pytest.mark.parametrize("name", READERS)
def test_clients_take_the_branches_that_they_take_alone(name):
    x = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.0, 0.0], [2.0, 2.0], [1.0, 2.0]])
    groups = []

    def evaluate(at):
        some = x if at is None else x[at]
        with StackedOperations():
            result = vmap(READERS[name])(some)
        groups.append(len(some))
        return result

    result = by_branches(evaluate, lambda parts, places: torch.cat(parts)[places])
    assert torch.equal(result, torch.stack([READERS[name](row) for row in x]))
    assert sum(groups) == len(x)  # and nobody more than once


@pytest.mark.parametrize(
    "reads", [lambda x: x * x.sum().item(), lambda x: x if vmap(lambda v: v * bool(v > 0))(x).all() else -x]
)
def test_numbers_of_floats_and_values_of_examples_stay_refused(reads):
    with StackedOperations(), pytest.raises(RuntimeError, match="vmap"):
        vmap(reads)(torch.ones(2, 3))


@pytest.mark.parametrize("weighed", [False, True])
def test_integers_are_counted_for_each_client(weighed):
    values = random.randint(random.key(0), 5, (CLIENTS, 2, 9))
    weights = drawn(1, CLIENTS, 2, 9) if weighed else None
    run = lambda x, w: torch.bincount(x, w, minlength=6)
    dims = (0, 0 if weighed else None)
    counts = vmap(vmap(run, dims), dims)(values, weights)
    for k in range(CLIENTS):
        for row in range(2):
            alone = run(values[k, row], weights[k, row] if weighed else None)
            assert torch.equal(counts[k, row], alone)


@pytest.mark.parametrize(("values", "said"), [([[0, 5]], "0 to 5"), ([[-1, 0]], "-1 to 0")])
def test_counts_of_several_lengths_are_refused(values, said):
    with pytest.raises(RuntimeError, match=f"minlength=5, for all rows' counts have one length, but got {said}"):
        vmap(lambda x: torch.bincount(x, minlength=5))(torch.tensor(values))


def between(low, high, number, *shape):
    return low + (high - low) * random.uniform(random.key(number), shape, torch.float64)


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.GRUCell(3, 4), [(ROWS, 3), (ROWS, 4)]),
        (nn.RNNCell(3, 4), [(ROWS, 3), (ROWS, 4)]),
        (nn.RNNCell(3, 4, nonlinearity="relu"), [(3,)]),
        (nn.LSTMCell(3, 4, bias=False), [(ROWS, 3)]),
        (nn.Bilinear(3, 2, 4), [(5, ROWS, 3), (5, ROWS, 2)]),
        (nn.Bilinear(3, 2, 4, bias=False), [(3,), (2,)]),
        (nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 2)), [(ROWS, 3, 6)]),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 4), dim=1), [(ROWS, 3)]),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 4), dim=None), [(ROWS, 3)]),
        (nn.KLDivLoss(reduction="batchmean"), [(ROWS, 3), (ROWS, 3)]),
        (nn.KLDivLoss(reduction="sum", log_target=True), [(ROWS, 3), (ROWS, 3)]),
        (nn.PoissonNLLLoss(full=True), [(ROWS, 3), (ROWS, 3)]),
        (nn.MarginRankingLoss(0.2), [(ROWS,), (ROWS,), (ROWS,)]),
        (nn.TripletMarginLoss(), [(ROWS, 3), (ROWS, 3), (ROWS, 3)]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_operations_made_of_others(module, inputs):
    """At the speed of their parts, with the value and the gradients of each client alone."""
    module = module.double()
    tensors = clients_of(module)
    rows = [between(0.5, 2, 60 + i, CLIENTS, *shape).requires_grad_() for i, shape in enumerate(inputs)]

    def run(tensors, *rows):
        result = functional_call(module, tensors, rows)
        return result if isinstance(result, tuple) else (result,)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "There is a performance drop")
        together = vmap(run)(tensors, *rows)
    alone = [run(at(tensors, k), *(each[k] for each in rows)) for k in range(CLIENTS)]
    alone = [torch.stack(each) for each in zip(*alone)]
    leaves = [*tensors.values(), *rows]
    for one, other in zip([*together, *gradients(together, leaves)], [*alone, *gradients(alone, leaves)]):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_masks_are_filled_by_assignment():
    """`x[mask] = number` as attention that people write by hand has it."""

    def attended(scores, mask):
        scores = scores * 2
        scores[mask] = -torch.inf
        rest = torch.zeros_like(scores)
        rest[mask.any(-1)] = torch.tensor(3.0)
        return scores.softmax(-1) + rest

    scores, mask = drawn(80, CLIENTS, 4, 5).requires_grad_(), drawn(81, CLIENTS, 4, 5) > 0.8
    with StackedOperations():
        together = vmap(attended)(scores, mask)
    alone = torch.stack([attended(scores[k], mask[k]) for k in range(CLIENTS)])
    assert torch.equal(together, alone)
    for one, other in zip(gradients([together], [scores]), gradients([alone], [scores])):
        torch.testing.assert_close(one, other)


def test_group_normalisation_of_channels_that_are_last_in_memory():
    module = nn.GroupNorm(2, 4, dtype=torch.float64)
    channels_last = drawn(60, CLIENTS, ROWS, STEPS, STEPS, 4).permute(0, 1, 4, 2, 3)
    alone = torch.stack([module(x) for x in channels_last])
    torch.testing.assert_close(vmap(module)(channels_last), alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("settings", [(2,), (3, 2, 1), (3, 1, 0, 2), ((2, 3), (1, 2), (1, 0)), (2, 2, 0, 1, True)])
def test_max_pooling_of_ties_infinities_and_numbers_that_are_none(settings, dtype):
    x = drawn(5, CLIENTS, 2, 3, 8, 7).mul_(2).round_().to(dtype)
    x[0, 0, 0, :4] = -torch.inf
    x[0, 0, 1, 2:5, ::3] = torch.nan
    x[1, 0, 2] = torch.inf
    for planes in (x.clone(), x.transpose(0, 1).contiguous().transpose(0, 1), x[:, :1].clone()):
        planes.requires_grad_()
        together = vmap(lambda x: F.max_pool2d(x, *settings))(planes)
        alone = torch.stack([F.max_pool2d(each, *settings) for each in planes])
        torch.testing.assert_close(together, alone, rtol=0, atol=0, equal_nan=True)
        slopes = [torch.autograd.grad(o, planes, drawn(6, *alone.shape).to(dtype))[0] for o in (together, alone)]
        torch.testing.assert_close(*slopes, rtol=0, atol=1e-6 if dtype != torch.bfloat16 else 0.05)


def test_writes_and_orders_in_memory_of_other_tensors_are_torch_s():
    x, mask = torch.arange(6).view(1, 1, 2, 3), torch.tensor([[[[True, False, True], [False] * 3]]])
    with WithoutReading():
        last = x.float().contiguous(memory_format=torch.channels_last)
        x[mask] = 9
    assert x.flatten().tolist() == [9, 1, 9, 3, 4, 5]
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_the_mode_knows_what_the_modules_of_its_folder_replace() -> None:
    for home, functions in HOMES.items():
        replaced = importlib.import_module(f"fedtorch.stacked_layers.{home}").REPLACED
        assert set(functions) == set(replaced), home
