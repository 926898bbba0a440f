"""Records of who asked what of whom, and what was answered: signed, chained, and verified by anybody."""
