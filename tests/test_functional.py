"""Modules as functions: copies, splits by name, and swapping tensors in and out without a trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from fedtorch import functional


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 3, bias=False)
        self.decoder = nn.Linear(3, 3, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_parameters_are_copies_of_what_trains() -> None:
    module = net()
    module[2].bias.requires_grad_(False)
    found = functional.parameters(module)
    assert list(found) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    found["0.weight"].zero_()
    assert bool(module[0].weight.any())
    assert not any(tensor.requires_grad for tensor in found.values())
    states = functional.buffers(module)
    assert list(states) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    states["1.running_mean"].add_(1)
    assert float(module[1].running_mean.abs().sum()) == 0


def test_tied_parameters_are_one() -> None:
    assert list(functional.parameters(Tied())) == ["encoder.weight"]


def test_split_by_patterns() -> None:
    tensors = functional.parameters(net())
    matching, rest = functional.split(tensors, ["2.*", "*.bias"])
    assert list(matching) == ["0.bias", "1.bias", "2.weight", "2.bias"]
    assert list(rest) == ["0.weight", "1.weight"]
    assert functional.split(tensors, []) == ({}, tensors)
    assert functional.split(tensors, "*") == (tensors, {})
    assert matching["2.bias"] is tensors["2.bias"]


@pytest.mark.parametrize("patterns", ["head.*", ["0.*", "head.*"], "weight", "0"])
def test_patterns_without_a_match_are_refused(patterns: str | list[str]) -> None:
    with pytest.raises(ValueError, match=r"matches one of \['0.bias', .*\], but got '(head.\*|weight|0)'"):
        functional.split(functional.parameters(net()), patterns)


def test_load_gives_a_module_of_its_own() -> None:
    module = net().double()
    values = {
        "0.weight": torch.ones(3, 4, dtype=torch.float64),
        "1.running_mean": torch.full((3,), 2.0).double(),
    }
    loaded = functional.load(module, values)
    assert torch.equal(loaded[0].weight, values["0.weight"])
    assert torch.equal(loaded[1].running_mean, values["1.running_mean"])
    assert torch.equal(loaded[2].weight, module[2].weight)
    assert isinstance(loaded[0].weight, nn.Parameter)
    assert loaded[0].weight.requires_grad
    values["0.weight"].zero_()
    loaded[2].weight.data.zero_()
    assert bool((loaded[0].weight == 1).all())  # neither tensors nor modules are shared
    assert bool(module[2].weight.any())
    tied = functional.load(Tied(), {"encoder.weight": torch.eye(3)})
    assert tied.decoder.weight is tied.encoder.weight
    assert torch.equal(tied.decoder.weight, torch.eye(3))


def test_load_refuses_what_does_not_fit() -> None:
    with pytest.raises(KeyError, match="Expected a parameter or buffer of Sequential, but got 'head'"):
        functional.load(net(), {"head": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"Expected shape \(3, 4\) for '0.weight', but got \(5, 3, 4\)"):
        functional.load(net(), {"0.weight": torch.zeros(5, 3, 4)})


def test_swap_does_what_functional_call_does() -> None:
    module = net().double()
    names = ["2.weight", "0.bias", "1.running_mean"]
    values = [
        torch.randn(*shape, generator=torch.Generator().manual_seed(1)).double() for shape in ((2, 3), (3,), (3,))
    ]
    x = torch.ones(5, 4, dtype=torch.float64)
    module.eval()
    before, state = module(x), {name: t.clone() for name, t in module.state_dict().items()}
    swap = functional.Swap(module, names)
    with swap(values):
        inside = module(x)
        assert swap.current()[0] is values[0]
    assert torch.equal(inside, torch.func.functional_call(module, dict(zip(names, values)), (x,)))
    assert torch.equal(module(x), before)
    assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items())
    assert swap.current()[0] is module[2].weight
    assert isinstance(module[2].weight, nn.Parameter)


@pytest.mark.parametrize("name", ["encoder.weight", "decoder.weight"])
def test_swap_replaces_tied_tensors_together(name: str) -> None:
    module = Tied()
    original = module.encoder.weight
    with functional.Swap(module, [name])([2 * torch.eye(3)]):
        assert torch.equal(module(torch.ones(1, 3)), torch.full((1, 3), 4.0))
    assert module.encoder.weight is original
    assert module.decoder.weight is original


def test_swap_restores_after_an_exception() -> None:
    module = net()
    originals = dict(module.named_parameters())
    swap = functional.Swap(module, list(originals))
    zeros = [torch.zeros_like(p) for p in originals.values()]
    with pytest.raises(RuntimeError, match="boom"), swap(zeros):
        raise RuntimeError("boom")
    with pytest.raises(ValueError, match="Expected 6 tensors, but got 5"), swap(zeros[:-1]):
        pass
    assert all(p is originals[name] for name, p in module.named_parameters())


def test_swap_takes_changed_buffers_out_again() -> None:
    module = net()
    names = ["1.running_mean", "1.num_batches_tracked"]
    swap = functional.Swap(module, names)
    values = [torch.zeros(3), torch.tensor(4)]
    with swap(values):
        module(torch.arange(8.0).reshape(2, 4))
        assert int(swap.current()[1]) == 5
    assert int(module[1].num_batches_tracked) == 0
    assert float(module[1].running_mean.abs().sum()) == 0


def test_swap_refuses_unknown_names() -> None:
    with pytest.raises(KeyError, match=r"Expected a parameter or buffer of Sequential, but got '3\.weight'"):
        functional.Swap(net(), ["0.weight", "3.weight"])


class Penalised(nn.Module):
    """A hook on its weight is its own method."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(2)), 3.0
        self.weight.register_hook(self.scaled)
        self.weight.group = "head"  # type: ignore[attr-defined]

    def scaled(self, gradient: Tensor) -> Tensor:
        return self.scale * gradient


def test_a_copy_keeps_hooks_and_attributes_of_parameters() -> None:
    module = Penalised()
    other = functional.copied(module)
    other.scale = 5.0  # the hook is the copy's own method
    for each, gradient in ((other, 5.0), (module, 3.0)):
        each.weight.sum().backward()
        assert each.weight.grad.tolist() == [gradient] * 2
    assert other.weight.group == "head"
    assert other.weight is not module.weight


def test_a_copy_keeps_ties_and_hooks_after_accumulation() -> None:
    module, calls = Tied(), []
    module.encoder.weight.register_post_accumulate_grad_hook(calls.append)
    other = functional.copied(module)
    assert other.encoder.weight is other.decoder.weight
    other(torch.ones(1, 3)).sum().backward()
    assert [parameter is other.encoder.weight for parameter in calls] == [True]


def with_weight_norm() -> nn.Module:
    layer = nn.Linear(2, 1)
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(layer)


def pruned() -> nn.Module:
    layer = nn.Linear(2, 1)
    prune.l1_unstructured(layer, "weight", 1)
    layer(torch.ones(1, 2))
    return layer


@pytest.mark.parametrize("make", [with_weight_norm, pruned])
def test_modules_with_computed_tensors_are_refused_with_what_to_do(make: object) -> None:
    with pytest.raises(RuntimeError, match=r"Linear keep tensors that were computed from others.*parametrizations"):
        functional.copied(make())  # type: ignore[operator]


def test_scripted_modules_are_refused_with_what_to_do() -> None:
    class Scripted(torch.jit.ScriptModule): ...

    module = nn.Module()
    module.inner = Scripted()
    with pytest.raises(TypeError, match=r"inner of Module is scripted.*before torch\.jit\.script"):
        functional.copied(module)


def test_parameters_of_one_memory_are_refused_and_tied_ones_are_not() -> None:
    functional.refuse_shared_memory(Tied())
    functional.refuse_shared_memory(nn.LSTM(2, 3))
    module, whole = nn.Module(), torch.zeros(4)
    module.one, module.other = nn.Parameter(whole[:2]), nn.Parameter(whole[2:])
    with pytest.raises(TypeError, match="one and other of Module share one; tie them"):
        functional.refuse_shared_memory(module)
    module.other = nn.Parameter(whole[2:].clone())
    functional.refuse_shared_memory(module)
