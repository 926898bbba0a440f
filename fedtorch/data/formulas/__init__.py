"""Formulas of regression models, `death ~ age + sex + (1 + age | hospital)`: read, encoded, and made into rows.

`parsing` reads a formula, which is data and never code; `encoding` has everything that rows of different clients must
agree on, levels of factors, knots, means and scales; `requirements` says what of it a formula needs; `design` makes
rows (x, y) from frames.
"""
