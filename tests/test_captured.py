"""Captured steps give what the steps give, for any tensors of their shapes; what depends on its number is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedtorch.captured import CapturedStep, IndexUsed, capture, recorded


def gradient(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor | None, ...]]:
    """A loss, a log and its gradients, of which the second is none."""
    own = [leaf.detach().requires_grad_() for leaf in (x, y)]
    with torch.enable_grad():
        loss = own[0].sin().square().sum()
    return loss.detach(), {"cosine": x.cos()}, torch.autograd.grad(loss, own, allow_unused=True)


class Seen(TorchDispatchMode):
    """Takes down the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_replay_is_the_step() -> None:
    captured = CapturedStep()
    for shift in range(3):
        for size in (2, 5):
            tensors = torch.linspace(0, 1, size, dtype=torch.float64) + shift, torch.ones(3)
            torch.testing.assert_close(captured(gradient, *tensors), gradient(0, *tensors), rtol=0, atol=0)
    assert len(captured.graphs) == 2


def test_a_replay_runs_no_python() -> None:
    calls = []

    def step(index: int, x: Tensor) -> Tensor:
        calls.append(index)
        return x + 1

    captured = CapturedStep()
    for _ in range(3):
        assert captured(step, torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(calls) == 1


def test_the_oldest_graph_goes_first() -> None:
    captured = CapturedStep(most=2)
    for size in (1, 2, 3, 1):
        captured(gradient, torch.ones(size), torch.ones(1))
        assert len(captured.graphs) <= 2
    assert [shapes[0][0][0] for shapes in captured.graphs] == [3, 1]


def test_products_are_handed_out_in_the_order_of_their_parameters() -> None:
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 4, 5), (3, 4), (3, 7, 5)))

    def step(index: int, weight: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        own = [leaf.detach().requires_grad_() for leaf in (weight, bias)]
        with torch.enable_grad():
            losses = torch.vmap(lambda w, b, x: torch.nn.functional.linear(x, w, b).relu().square().sum())(*own, x)
        return torch.autograd.grad(losses, own, torch.ones_like(losses))

    wanted, found = step(0, weight, bias, x), capture(step, weight, bias, x)(weight, bias, x)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    assert not wanted[0].is_contiguous()  # so it was worth it
    assert all(gradient.is_contiguous() for gradient in found)


def test_equal_operations_are_computed_once_unless_they_draw_or_change_in_place() -> None:
    drawn = capture(lambda index, x: (torch.rand_like(x) + 0, torch.rand_like(x) + 0), torch.ones(20))
    assert not torch.equal(*drawn(torch.ones(20)))

    def changed(index: int, x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = x.clone(), x.clone()
        return one.add_(1), other

    assert [part.tolist() for part in capture(changed, torch.ones(1))(torch.ones(1))] == [[2.0], [1.0]]
    replay = capture(lambda index, x: x.sin() * 2 + x.sin() * 3, torch.ones(3))
    with Seen() as seen:
        replay(torch.ones(3))
    assert seen.operations.count("aten.sin.default") == 1


def test_what_is_handed_out_has_memory_of_its_own() -> None:
    x = torch.ones(2, 3)
    results = capture(lambda index, x: ((x * 1).view(3, 2).detach(), x.detach()), x)(x)
    for result in results:
        result.zero_()
    assert x.sum() == 6


@pytest.mark.parametrize(
    "use", [lambda i: i % 2, lambda i: i == 0, bool, lambda i: i + 1, lambda i: len(f"{i}"), float, lambda i: 2.0**i]
)
def test_steps_that_depend_on_their_number_are_refused(use: object) -> None:
    with pytest.raises(IndexUsed, match="Expected steps that do not depend on batch_idx"):
        capture(lambda index, x: x * use(index), torch.ones(2))  # type: ignore[operator]
    with pytest.raises(IndexUsed):
        capture(lambda index, x: x * 2 if use(index) else x, torch.ones(2))  # type: ignore[operator]


def test_errors_of_the_step_pass() -> None:
    def step(index: int, x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        capture(step, torch.ones(2))


def test_why_a_step_is_no_cuda_graph():
    step = lambda index, x: {"x": 2 * x}
    captured = CapturedStep()
    assert captured(step, torch.ones(2))["x"].tolist() == [2.0, 2.0]
    assert captured.one_by_one == "the tensors are on cpu"
    assert recorded(step) == (step, "the tensors are on no device")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_give_the_same_numbers_and_results_of_their_own():
    step = lambda index, x, y: ({"both": x @ y, "none": None}, x.sin().sum(0))
    captured = CapturedStep()
    tensors = [[torch.randn(3, 4, device="cuda"), torch.randn(4, 2, device="cuda")] for _ in range(3)]
    found = [captured(step, *pair) for pair in tensors]
    assert captured.one_by_one is None
    for (x, y), (products, sums) in zip(tensors, found):
        assert torch.equal(products["both"], x @ y)
        assert torch.equal(sums, x.sin().sum(0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_that_wait_for_the_host_are_replayed_one_by_one():
    step = lambda x: x.nonzero()  # whose size the host must know
    graph, reason = recorded(step, torch.ones(3, device="cuda"))
    assert graph is step
    assert reason
