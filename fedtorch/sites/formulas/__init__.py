"""Formulas over sites: frames that stay there, and the agreement on a design by which their rows are made."""
