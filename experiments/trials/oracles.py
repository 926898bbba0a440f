"""Parts of the package that trials measure and that no stub declares."""

from fedtorch.federation.algorithms.ep.correction import Corrected as Corrected, corrected as corrected
