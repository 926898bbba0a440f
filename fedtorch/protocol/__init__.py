"""Conversations between two ends: halves that send and receive, and what drives them in one process or over ranks."""
