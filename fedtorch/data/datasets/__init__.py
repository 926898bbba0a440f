"""Real data sets, small enough to try things on.

`digits`, `breast_cancer` and `diabetes` ship inside scikit-learn. The others are files, which
`fedtorch.data.cache` finds in `FEDTORCH_DATA_DIR` or downloads where their publisher offers them one by one;
`fedtorch.data.catalogue` says whose they are and under which licence. Data with natural clients come as
`FederatedData`, whose `names` are the clients' and whose `features` are those of the columns of x.

>>> from fedtorch.data import digits, dirichlet, partition
>>> partition(digits(), dirichlet(0.3), clients=100, seed=0)
FederatedData(100 clients, 1797 rows, ... per client, fields 0: float32 (64,), 1: int64 ())
"""

from fedtorch.data.datasets.education import school, student_performance
from fedtorch.data.datasets.embedded import breast_cancer, diabetes, digits
from fedtorch.data.datasets.engineering import battery, cmapss, cmapss_remaining_life
from fedtorch.data.datasets.genomics import fed_tcga_brca, tcga_brca_expression, tcpa_brca_rppa
from fedtorch.data.datasets.hearts import VerticalTable, heart_disease, heart_failure, heart_failure_frame
from fedtorch.data.datasets.images import mnist
from fedtorch.data.datasets.weather import fmi_coordinates, fmi_extremes, fmi_forecast, fmi_weather

__all__ = [
    "VerticalTable",
    "battery",
    "breast_cancer",
    "cmapss",
    "cmapss_remaining_life",
    "diabetes",
    "digits",
    "fed_tcga_brca",
    "fmi_coordinates",
    "fmi_extremes",
    "fmi_forecast",
    "fmi_weather",
    "heart_disease",
    "heart_failure",
    "heart_failure_frame",
    "mnist",
    "school",
    "student_performance",
    "tcga_brca_expression",
    "tcpa_brca_rppa",
]
