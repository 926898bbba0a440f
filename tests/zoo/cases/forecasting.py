"""Forecasting with the data sets, networks and LightningModules of pytorch-forecasting, as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch

from zoo.case import Case


def series(count: int) -> Any:
    """A data set of theirs with so many windows of six days that forecast two."""
    from pytorch_forecasting import TimeSeriesDataSet
    from pytorch_forecasting.data import EncoderNormalizer

    days = np.arange(count + 7)
    frame = pd.DataFrame({"day": days, "sales": 5 + np.sin(days / 3), "shop": "a"})
    return TimeSeriesDataSet(
        frame, time_idx="day", target="sales", group_ids=["shop"], time_varying_unknown_reals=["sales"],
        max_encoder_length=6, min_encoder_length=6, max_prediction_length=2, target_normalizer=EncoderNormalizer(),
    )  # fmt: skip


def windows(n: int) -> Any:
    """Their loader, of batches (a dict of tensors, (targets, no weights))."""
    return series(n).to_dataloader(train=False, batch_size=2)


def transformer() -> Any:
    from pytorch_forecasting import TemporalFusionTransformer
    from pytorch_forecasting.metrics import QuantileLoss

    sizes = {"hidden_size": 4, "attention_head_size": 1, "hidden_continuous_size": 4, "dropout": 0.0}
    return TemporalFusionTransformer.from_dataset(
        series(20), learning_rate=0.01, optimizer="sgd", loss=QuantileLoss(), log_interval=-1, **sizes
    )


def beats() -> Any:
    from pytorch_forecasting import NBeats

    return NBeats.from_dataset(
        series(20),
        learning_rate=0.01,
        optimizer="sgd",
        log_interval=-1,
        widths=[8, 8],
        backcast_loss_ratio=0.1,
        dropout=0.0,
    )


def hits() -> Any:
    from pytorch_forecasting import NHiTS

    return NHiTS.from_dataset(series(20), learning_rate=0.01, optimizer="sgd", log_interval=-1, hidden_size=8)


HOOKS = ("on_after_backward", "on_fit_end", "on_train_epoch_end")
AS_IS: dict[str, Any] = {
    "loader": True,
    "ignores": HOOKS, "dtype": torch.float32, "ways": ("lightning_fit",), "remark": "a plateau schedule for each client"
}  # fmt: skip

CASES = [
    Case("Temporal fusion transformer", "pytorch_forecasting/pytorch-forecasting", transformer, windows, **AS_IS),
    Case("N-BEATS", "pytorch_forecasting/pytorch-forecasting", beats, windows, **AS_IS),
    Case("N-HiTS", "pytorch_forecasting/pytorch-forecasting", hits, windows, **AS_IS),
]
