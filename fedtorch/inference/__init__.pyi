from .adapted import adapted as adapted
from .comparison import compare as compare, loo as loo, waic as waic
from .contrasts import contrasts as contrasts
from .imputation import completed as completed, imputed as imputed
from .marginal_effects import marginal_effects as marginal_effects
from .pooling import pooled as pooled
from .predict import predict as predict
from .ranef import ranef as ranef
from .to_inferencedata import to_inferencedata as to_inferencedata
