"""Parts of the package that trials need and no stub declares: correction of posteriors, and priors of variances."""

from fedtorch.federation.algorithms.ep.correction import Corrected as Corrected, corrected as corrected
from fedtorch.models.hierarchical.hyperpriors import half_cauchy as half_cauchy, non_informative as non_informative
