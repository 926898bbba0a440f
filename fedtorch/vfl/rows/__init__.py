"""Rows that several parties hold: tables of parties, private alignment, label leakage."""
