"""Models of vertical federation: predictors, likelihoods, the augmented and the power model."""
