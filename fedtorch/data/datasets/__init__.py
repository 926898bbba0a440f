"""Real data sets, small enough to try things on.

`digits`, `breast_cancer` and `diabetes` ship inside scikit-learn. The others are files, which
`fedtorch.data.cache` finds in `FEDTORCH_DATA_DIR` or downloads where their publisher offers them one by one;
`fedtorch.data.catalogue` says whose they are and under which licence. Data with natural clients come as
`FederatedData`, whose `names` are the clients' and whose `features` are those of the columns of x.

>>> from fedtorch.data import digits, dirichlet, partition
>>> partition(digits(), dirichlet(0.3), clients=100, seed=0)
FederatedData(100 clients, 1797 rows, ... per client, fields 0: float32 (64,), 1: int64 ())
"""
