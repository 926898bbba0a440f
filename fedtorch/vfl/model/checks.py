"""Checks that data fit a vertical model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtorch.vfl.model.likelihoods import ResponseLikelihood
from fedtorch.vfl.model.predictors import Predictor
from fedtorch.vfl.model.split_nn import NetworkPredictor
from fedtorch.vfl.model.vertical import VerticalModel
from fedtorch.vfl.rows.data import VerticalData

_CHECKED = 2**16  # rows checked at a time, so that the memory of a check does not grow with the rows


def check_features(model: VerticalModel, data: VerticalData, names: Sequence[str]) -> None:
    """Raise `ValueError` unless all parties have finite features of their shapes, one row for each of the response."""
    data.check_known()
    if len(data.features) != len(model.predictors):
        raise ValueError(f"Expected features of {len(model.predictors)} parties, but got {len(data.features)}")
    for predictor, x, name in zip(model.predictors, data.features, names):
        check_rows(predictor, x, data.response.shape[-1], name)


def check_rows(predictor: Predictor | NetworkPredictor, x: Tensor, rows: int, name: str) -> None:
    """Raise `ValueError` unless one party's features are finite and of the shape `(rows, ...)` or `(B, rows, ...)`."""
    dims, width = predictor.row_dims, predictor.width
    fits = x.ndim in (dims + 1, dims + 2) and x.shape[-1 - dims] == rows
    if not fits or (width is not None and x.shape[-1] != width):
        expected = f"{rows} rows of {dims} dimensions" if width is None else f"features ({rows}, {width})"
        raise ValueError(f"Expected {expected} of {name!r}, but got shape {tuple(x.shape)}; align the rows")
    if not all(bool(part.isfinite().all()) for part in x.split(_CHECKED, -1 - dims)):
        raise ValueError(f"Expected finite features of {name!r}, but got NaN or Inf; impute them first")


def check_response(likelihood: ResponseLikelihood, data: VerticalData) -> None:
    """Raise `ValueError` unless the likelihood accepts the response of every row whose weight is not 0."""
    y = data.response
    if data.weight is not None:
        y, weight = torch.broadcast_tensors(y, data.weight.to(y.device))
        first = (weight > 0).long().argmax(-1, keepdim=True)  # its response replaces those of rows with weight 0
        y = torch.where(weight > 0, y, y.gather(-1, first))
    likelihood.check(y)


def prepared(model: VerticalModel, data: VerticalData) -> VerticalData:
    """Check the data against the model and return them, all in the features' dtype.

    Raises:
        ValueError: parties, rows, widths or dtypes that do not fit, values that are not finite, negative weights, or a
            response that the likelihood does not accept.
    """
    check_features(model, data, [f"party {j}" for j in range(len(model.predictors))])
    if data.present is not None and not bool(data.present.all()):
        raise ValueError("Expected rows that all parties have, but got absent ones; align with all parties required")
    dtype = data.features[0].dtype
    if not dtype.is_floating_point or any(x.dtype != dtype for x in data.features):
        raise ValueError(
            f"Expected features of one floating-point dtype, but got {[str(x.dtype) for x in data.features]}; "
            "convert them with .to(torch.float64)"
        )
    check_response(model.likelihood, data)
    return data.to_dtype(dtype)._replace(present=None, weight_total=data.total)
