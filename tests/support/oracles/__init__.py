"""Closed forms, independent programs and statistical checks that results are compared with."""
