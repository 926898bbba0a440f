from .contrasts import contrasts as contrasts
