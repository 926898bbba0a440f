from .comparison import compare as compare, loo as loo, waic as waic
from .contrasts import contrasts as contrasts
