"""Formulas of regression models, `death ~ age + sex + (1 + age | hospital)`: parser, encoding, and rows.

`parsing` parses a formula, which is data and never code; `encoding` contains everything that rows of different clients
must share, levels of factors, knots, means and scales; `requirements` lists the parts that a formula needs; `design`
makes rows (x, y) from frames.
"""
