from .stacked import (
    PerExample as PerExample,
    StackedMetric as StackedMetric,
    accuracy as accuracy,
    as_stacked as as_stacked,
    calibration_error as calibration_error,
    cross_entropy as cross_entropy,
    from_torchmetrics as from_torchmetrics,
    mean_loss as mean_loss,
    mean_of as mean_of,
    mean_squared_error as mean_squared_error,
)
