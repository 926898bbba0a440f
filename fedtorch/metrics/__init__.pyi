from .stacked import (
    accuracy as accuracy,
    calibration_error as calibration_error,
    cross_entropy as cross_entropy,
    mean_of as mean_of,
    mean_squared_error as mean_squared_error,
)
