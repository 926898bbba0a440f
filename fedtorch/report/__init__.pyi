from .comparison import baseline as baseline, compare as compare
from .folder import write as write
