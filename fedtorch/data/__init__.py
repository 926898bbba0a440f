"""Data that belongs to many clients: where it comes from, how it is split, how it is stacked."""

from fedtorch.data.datasets import breast_cancer, diabetes, digits, heart_disease, mnist
from fedtorch.data.federated import ClientData, FederatedData
from fedtorch.data.partition import (
    Partitioner,
    by_column,
    dirichlet,
    iid,
    labels_per_client,
    partition,
    quantity_skew,
    split_features,
)
from fedtorch.data.sources import from_datasets, from_frame, from_tensors

__all__ = [
    "ClientData",
    "FederatedData",
    "Partitioner",
    "breast_cancer",
    "by_column",
    "diabetes",
    "digits",
    "dirichlet",
    "from_datasets",
    "from_frame",
    "from_tensors",
    "heart_disease",
    "iid",
    "labels_per_client",
    "mnist",
    "partition",
    "quantity_skew",
    "split_features",
]
