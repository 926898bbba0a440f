"""Vertical federation: parties that hold different features of the same rows."""
