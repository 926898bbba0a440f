from .halves import Half as Half, together as together
