"""Agree on what rows of a formula depend on, levels, knots, means and scales, without rows that leave their site.

`disclosure` has a site's limits, `moments` and `histogram` what a site says of a column and how the server adds it up,
`site` a site's answers, `server` what is asked and made of them. Nothing here knows how questions travel: `agreed` goes
through the conversation in one process, `fedtorch.protocol.agreement` over ranks and streams.
"""
