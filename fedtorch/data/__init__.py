"""Data that belongs to many clients: where it comes from, how it is split, how it is stacked.

>>> import fedtorch as ft
>>> data = ft.data.partition(ft.data.digits(), ft.data.dirichlet(0.3, minimum=10), clients=20, seed=0)
>>> training, validation = data.split(0.7, seed=0)
>>> len(training), int(data.counts.sum())
(20, 1797)
"""

from fedtorch.data.bad_clients import BadClients as BadClients
from fedtorch.data.cache import locate as locate
from fedtorch.data.catalogue import DataSet as DataSet, File as File, data_sets as data_sets, describe as describe
from fedtorch.data.datasets import (
    VerticalTable as VerticalTable,
    battery as battery,
    breast_cancer as breast_cancer,
    cmapss as cmapss,
    cmapss_remaining_life as cmapss_remaining_life,
    diabetes as diabetes,
    digits as digits,
    fed_tcga_brca as fed_tcga_brca,
    fmi_coordinates as fmi_coordinates,
    fmi_extremes as fmi_extremes,
    fmi_forecast as fmi_forecast,
    fmi_weather as fmi_weather,
    heart_disease as heart_disease,
    heart_failure as heart_failure,
    heart_failure_frame as heart_failure_frame,
    mnist as mnist,
    school as school,
    student_performance as student_performance,
    tcga_brca_expression as tcga_brca_expression,
    tcpa_brca_rppa as tcpa_brca_rppa,
)
from fedtorch.data.federated import (
    ClientData as ClientData,
    FederatedData as FederatedData,
    described_rows as described_rows,
)
from fedtorch.data.items import read as read
from fedtorch.data.partition import (
    Partitioner as Partitioner,
    by_column as by_column,
    dirichlet as dirichlet,
    iid as iid,
    labels_per_client as labels_per_client,
    partition as partition,
    quantity_skew as quantity_skew,
    split_features as split_features,
)
from fedtorch.data.sources import from_datasets as from_datasets, from_frame as from_frame, from_tensors as from_tensors
