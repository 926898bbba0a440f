"""Real data sets, small enough to try things on.

`digits`, `breast_cancer` and `diabetes` ship inside scikit-learn. The others are files, which
`fedtorch.data.cache` finds in `FEDTORCH_DATA_DIR` or downloads where their publisher offers them one by one;
`fedtorch.data.catalogue` says whose they are and under which licence. Data with natural clients come as
`FederatedData`, whose `names` are the clients' and whose `features` are those of the columns of x.

>>> from fedtorch.data import digits, dirichlet, partition
>>> partition(digits(), dirichlet(0.3), clients=100, seed=0)
FederatedData(100 clients, 1797 rows, ... per client, fields 0: float32 (64,), 1: int64 ())
"""

from fedtorch.data.datasets.education import school as school, student_performance as student_performance
from fedtorch.data.datasets.embedded import breast_cancer as breast_cancer, diabetes as diabetes, digits as digits
from fedtorch.data.datasets.engineering import (
    battery as battery,
    cmapss as cmapss,
    cmapss_remaining_life as cmapss_remaining_life,
)
from fedtorch.data.datasets.genomics import (
    fed_tcga_brca as fed_tcga_brca,
    tcga_brca_expression as tcga_brca_expression,
    tcpa_brca_rppa as tcpa_brca_rppa,
)
from fedtorch.data.datasets.hearts import (
    VerticalTable as VerticalTable,
    heart_disease as heart_disease,
    heart_failure as heart_failure,
    heart_failure_frame as heart_failure_frame,
)
from fedtorch.data.datasets.images import mnist as mnist
from fedtorch.data.datasets.weather import (
    fmi_coordinates as fmi_coordinates,
    fmi_extremes as fmi_extremes,
    fmi_forecast as fmi_forecast,
    fmi_weather as fmi_weather,
)
