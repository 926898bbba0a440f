"""Tables of results: frames that know their coefficients, and how they are written in Markdown, HTML and LaTeX."""
