from .concordance import concordance_index as concordance_index
from .stacked import (
    accuracy as accuracy,
    calibration_error as calibration_error,
    cross_entropy as cross_entropy,
    mean_of as mean_of,
    mean_squared_error as mean_squared_error,
)
