"""Local solvers on clients' own loaders: whose batches a Trainer is given, or `gradient_descent` takes in turn."""
