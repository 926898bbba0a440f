"""One algorithm per file; read `fedavg.py` first."""
