"""Tables of results: frames with methods for coefficients, written in Markdown, HTML and LaTeX."""
