"""Rows from data frames, and rows with missing cells."""
