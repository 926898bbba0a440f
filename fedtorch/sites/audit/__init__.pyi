from .audit import entries as entries
