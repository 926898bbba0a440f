"""Who computes what, who hears whom, and where it runs."""

import lazy_loader

__getattr__, __dir__, _ = lazy_loader.attach(__name__, submodules=["recipes"])
