"""Agreement on the encoding of a formula (levels, knots, means and scales) without rows that leave their site.

`disclosure` has a site's limits, `histogram` a site's summary of a column and quantities derived from those of all
sites, `site` a site's answers, `server` the server's questions and the design from the answers. These modules do not
depend on the transport: `agreed` runs the conversation in one process, `fedtorch.protocol.agreement` over ranks and
streams.
"""
