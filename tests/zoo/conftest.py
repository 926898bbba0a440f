"""The package of the zoo comes before whatever imports torchvision."""

import zoo as zoo
