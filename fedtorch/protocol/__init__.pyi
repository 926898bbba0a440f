from .halves import Half as Half, together as together
from .overheard import disclosure as disclosure
