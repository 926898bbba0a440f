from .bad_clients import BadClients as BadClients
from .cache import data_sets as data_sets, locate as locate
from .datasets.education import school as school, student_performance as student_performance
from .datasets.embedded import breast_cancer as breast_cancer, diabetes as diabetes, digits as digits
from .datasets.engineering import battery as battery, cmapss as cmapss
from .datasets.genomics import (
    fed_tcga_brca as fed_tcga_brca,
    tcga_brca_expression as tcga_brca_expression,
    tcpa_brca_rppa as tcpa_brca_rppa,
)
from .datasets.hearts import (
    VerticalTable as VerticalTable,
    heart_disease as heart_disease,
    heart_failure as heart_failure,
)
from .datasets.images import mnist as mnist
from .datasets.weather import (
    fmi_coordinates as fmi_coordinates,
    fmi_extremes as fmi_extremes,
    fmi_forecast as fmi_forecast,
    fmi_weather as fmi_weather,
)
from .federated import ClientData as ClientData, FederatedData as FederatedData
from .formulas.design import Design as Design
from .frames.reading import from_frame as from_frame
from .items import read as read
from .loaders import (
    FederatedLoaders as FederatedLoaders,
    from_datamodules as from_datamodules,
    from_loaders as from_loaders,
)
from .partition import (
    by_column as by_column,
    dirichlet as dirichlet,
    iid as iid,
    labels_per_client as labels_per_client,
    partition as partition,
    quantity_skew as quantity_skew,
    split_features as split_features,
)
from .sources import from_datasets as from_datasets, from_tensors as from_tensors
