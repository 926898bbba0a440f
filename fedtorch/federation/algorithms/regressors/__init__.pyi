from .algorithm import fitted as fitted, gtv_regressors as gtv_regressors
