"""Formulas over sites: frames that stay there, and the agreement on a design by which rows are made of them."""
