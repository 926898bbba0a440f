"""Small real data sets.

`digits`, `breast_cancer` and `diabetes` ship inside scikit-learn. The others are files, which `fedtorch.data.cache`
finds in `FEDTORCH_DATA_DIR` or downloads if their publisher offers them one by one; `fedtorch.data.catalogue` lists
their owners and licences. Data with natural clients are `FederatedData` with the clients' `names` and the columns'
`features`.

>>> from fedtorch.data import digits, dirichlet, partition
>>> partition(digits(), dirichlet(0.3), clients=100, seed=0)
FederatedData(100 clients, 1797 rows, ... per client, fields 0: float32 (64,), 1: int64 ())
"""
