"""Agree on what rows of a formula depend on, levels, knots, means and scales, without rows that leave their site.

`disclosure` has a site's limits, `histogram` what a site says of a column and what follows from those of all sites,
`site` a site's answers, `server` what is asked and made of them. Nothing here knows how questions travel: `agreed` goes
through the conversation in one process, `fedtorch.protocol.agreement` over ranks and streams.
"""
