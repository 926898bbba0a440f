from .adapted import adapted as adapted
from .comparison import compare as compare, loo as loo, waic as waic
from .contrasts import contrasts as contrasts
from .predict import predict as predict
from .ranef import ranef as ranef
