"""Account for privacy: releases, their epsilon, ledgers and audits."""
