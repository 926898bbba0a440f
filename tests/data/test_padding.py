"""Batches of several clients as stacks: which are alike, and how ragged ones are filled up."""

from __future__ import annotations

import pytest
import torch

from fedtorch.data.padding import alike


def test_batches_of_one_shape_are_stacked_and_others_apart() -> None:
    batches = [(torch.ones(2, 3), None), (torch.ones(1, 3), None), (torch.zeros(2, 3), None)]
    (first, together), (second, alone) = alike(batches, None)
    assert (first, second) == ([0, 2], [1])
    assert together[0].shape == (2, 2, 3)
    assert together[1] is alone[1] is None


def test_rows_are_filled_up_to_the_longest_of_their_own_batch() -> None:
    ragged = [torch.ones(4, 1), torch.ones(2, 7)]
    batches = [{"image": torch.ones(2, 4, 7)}, {"image": ragged}, {"image": torch.ones(2, 9, 9)}]
    (first, rows), (second, alone) = alike(batches, {"image": -1}, {"mask": "image"})
    assert (first, second) == ([0, 1], [2])
    assert rows["image"].shape == rows["mask"].shape == (2, 2, 4, 7)
    assert torch.equal(rows["image"] == 1, rows["mask"])
    assert rows["mask"].flatten(2).sum(2).tolist() == [[28, 28], [4, 14]]
    assert alone["image"].shape == alone["mask"].shape == (1, 2, 9, 9)


@pytest.mark.parametrize(
    ("batch", "pad", "mask", "said"),
    [
        ({"x": ["a"]}, None, {}, "got str in 'x.0'; give pad="),
        ({"x": torch.ones(1)}, {"y": 0}, {}, "Expected 'y' in a batch, as pad= says"),
        ({"x": torch.ones(1), "y": torch.ones(1)}, {"x": 0}, {}, r"every entry of a batch, but got none for \['y'\]"),
        ({"x": {"a": torch.ones(1), "b": ["s"]}}, {"x": {"a": 0}}, {}, r"but got none for \['x.b'\]"),
        ((torch.ones(1),), (0, 0), {}, "Expected a tuple of 2 in 'a batch', as pad= says, but got tuple"),
        ({"x": ["a", "b"]}, {"x": 0}, {}, "Expected a tensor for each row in 'x', as pad= says, but got list"),
        ({"x": torch.ones(1)}, {"x": 0}, {"mask": "z"}, "Expected 'z' in a batch, as mask= says"),
    ],
)
def test_what_cannot_be_filled_up_is_named(batch: object, pad: object, mask: dict[str, str], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        alike([batch], pad, mask)
