"""Trees: structure is kept, names are paths, arithmetic is leaf by leaf, trees that differ are refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from fedtorch import tree


class Pair(NamedTuple):
    first: Any
    second: Any


class Other(NamedTuple):
    value: Any
    weight: Any


def example(offset: float = 0.0) -> Pair:
    base = torch.arange(6, dtype=torch.float64).reshape(2, 3) + offset
    return Pair({"a.b": base, "c": (base[0], None)}, base.to(torch.float32)[:, 0])


def test_structure_and_order_are_kept() -> None:
    value = example()
    doubled = tree.map(lambda leaf: 2 * leaf, value)
    assert type(doubled) is Pair
    assert list(doubled.first) == ["a.b", "c"]
    assert doubled.first["c"][1] is None
    assert torch.equal(doubled.second, 2 * value.second)
    assert [name for name, _ in tree.items(value)] == ["first.a.b", "first.c.0", "second"]


def test_flatten_and_unflatten_are_inverse() -> None:
    value = example()
    flat = tree.flatten(value, "state")
    assert sorted(flat) == ["state.first.a.b", "state.first.c.0", "state.second"]
    back = tree.unflatten({**flat, "another": torch.zeros(1)}, like=example(5.0), prefix="state")
    assert type(back) is Pair
    assert all(a is b for a, b in zip(tree.leaves(back), tree.leaves(value)))
    bare = tree.unflatten(tree.flatten(torch.ones(2), "x"), like=torch.zeros(2), prefix="x")
    assert torch.equal(bare, torch.ones(2))


def test_paths_that_hide_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two leaves are called 'a\.b'"):
        tree.flatten({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)})
    with pytest.raises(KeyError, match="'b'"):
        tree.unflatten({"a": torch.zeros(1)}, like={"a": torch.zeros(1), "b": torch.zeros(1)})


def test_refill_takes_the_order_of_leaves() -> None:
    value = example()
    filled = tree.refill(value, [leaf + 1 for leaf in tree.leaves(value)])
    assert all(torch.equal(a, b + 1) for a, b in zip(tree.leaves(filled), tree.leaves(value)))


def test_dicts_match_by_key_whatever_their_order() -> None:
    one = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
    two = {"b": torch.tensor(20.0), "a": torch.tensor(10.0)}
    assert {name: float(leaf) for name, leaf in tree.add(one, two).items()} == {"a": 11.0, "b": 22.0}


@pytest.mark.parametrize(
    "pair",
    [
        ({"a": torch.zeros(1)}, {"b": torch.zeros(1)}),
        ({"a": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.zeros(1)}),
        ({"a": torch.zeros(1)}, (torch.zeros(1),)),
        ((torch.zeros(1),), (torch.zeros(1), torch.zeros(1))),
        ((torch.zeros(1),), {"0": torch.zeros(1)}),
        (Pair(torch.zeros(1), torch.zeros(1)), Other(torch.zeros(1), torch.zeros(1))),
        (Pair(torch.zeros(1), torch.zeros(1)), (torch.zeros(1), torch.zeros(1))),
        ({"a": None}, {"a": torch.zeros(1)}),
        ({"a": torch.zeros(1)}, {"a": None}),
        (torch.zeros(1), {"a": torch.zeros(1)}),
        (None, torch.zeros(1)),
    ],
    ids=str,
)
def test_different_structures_are_refused(pair: tuple[Any, Any]) -> None:
    for first, second in (pair, pair[::-1]):
        with pytest.raises(ValueError, match="Expected trees of one structure"):
            tree.add(first, second)


def test_what_is_not_a_tree_is_refused() -> None:
    for bad in ([torch.zeros(1)], {"a": 1.0}, ({"a": [torch.zeros(1)]},)):
        with pytest.raises(TypeError, match="Expected a tree of tensors"):
            tree.leaves(bad)
        with pytest.raises(TypeError, match="Expected a tree of tensors"):
            tree.map(torch.clone, bad)


def test_other_leaves_on_request() -> None:
    value = {"x": Other(torch.ones(2), torch.zeros(2)), "y": None}
    assert tree.map(lambda node: type(node).__name__, value, is_leaf=Other) == {"x": "Other", "y": None}
    both = tree.map(lambda a, b: a.value + b.value, value, value, is_leaf=(Other, Pair))
    assert torch.equal(both["x"], torch.full((2,), 2.0))


def test_arithmetic_is_leaf_by_leaf() -> None:
    one, two = example(), example(1.0)
    assert torch.equal(tree.add(one, two).first["a.b"], one.first["a.b"] + two.first["a.b"])
    assert all(float(leaf.abs().max()) == 1.0 for leaf in tree.leaves(tree.subtract(one, two)))
    assert all(torch.equal(a, 3.0 * b) for a, b in zip(tree.leaves(tree.scale(one, 3.0)), tree.leaves(one)))
    assert all(float(leaf.abs().max()) == 0 for leaf in tree.leaves(tree.zeros_like(one)))
    dtypes = [leaf.dtype for leaf in tree.leaves(one)]
    assert [leaf.dtype for leaf in tree.leaves(tree.zeros_like(one))] == dtypes


def test_scale_row_by_row_keeps_dtypes() -> None:
    stacked = tree.stack([example(), example(), example()])
    factor = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    scaled = tree.scale(stacked, factor)
    for k in range(3):
        expected = tree.scale(example(), float(factor[k]))
        row = tree.take(scaled, torch.tensor([k]))
        assert all(torch.equal(a[0], b) for a, b in zip(tree.leaves(row), tree.leaves(expected)))
    assert [leaf.dtype for leaf in tree.leaves(scaled)] == [leaf.dtype for leaf in tree.leaves(stacked)]
    one = tree.scale(example(), torch.tensor(2.0))  # a factor without clients
    assert torch.equal(one.second, 2 * example().second)


def test_add_scaled_computes_in_the_wider_dtype() -> None:
    start = {"w": torch.ones(1, dtype=torch.float32)}
    tiny = {"w": torch.full((1,), 2.0**-24, dtype=torch.float64)}
    moved = tree.add_scaled(start, tiny, 3.0)  # 1 + 3·2⁻²⁴ is between two float32; rounded once, up to 1 + 2⁻²²
    assert moved["w"].dtype == torch.float32
    assert float(moved["w"]) == 1 + 2.0**-22


def test_stack_concatenate_take_expand() -> None:
    values = [example(float(k)) for k in range(3)]
    stacked = tree.stack(values)
    assert stacked.first["a.b"].shape == (3, 2, 3)
    twice = tree.concatenate([stacked, stacked])
    rows = tree.take(twice, torch.tensor([4, 0]))
    assert torch.equal(rows.first["a.b"], torch.stack([values[1].first["a.b"], values[0].first["a.b"]]))
    view = tree.take(stacked, slice(1, 3))
    assert view.second.untyped_storage().data_ptr() == stacked.second.untyped_storage().data_ptr()
    many = tree.expand(values[0], 1000)
    assert many.first["a.b"].shape == (1000, 2, 3)
    assert many.first["a.b"].untyped_storage().nbytes() == values[0].first["a.b"].untyped_storage().nbytes()
    assert tree.expand({"s": torch.tensor(2.0)}, 0)["s"].shape == (0,)
    assert tree.take(stacked, torch.zeros(0, dtype=torch.int64)).first["a.b"].shape == (0, 2, 3)


def test_to_and_nbytes() -> None:
    value = example()
    assert {leaf.dtype for leaf in tree.leaves(tree.to(value, torch.float32))} == {torch.float32}
    assert tree.nbytes(value) == 6 * 8 + 3 * 8 + 2 * 4
    assert tree.nbytes({}) == 0
    assert tree.nbytes(tree.expand(value, 10)) == 10 * tree.nbytes(value)  # elements, not memory
