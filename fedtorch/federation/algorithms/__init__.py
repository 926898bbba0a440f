"""One algorithm, one file; `fedavg.py` is the one to read first."""
