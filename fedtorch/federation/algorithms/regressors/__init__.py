r"""GTV minimisation for any models: a penalty on the differences of neighbours' predictions on shared inputs.

The nodes' hypotheses h_i minimise

.. math:: \sum_i L_i(h_i) + \alpha \sum_{\{i,j\} \in E} A_{ij} \frac1{m'} \sum_{r'} (h_i(x'_{r'}) - h_j(x'_{r'}))^2

one node at a time given the others (Algorithm 5.4 with the update 5.21). For node i the others are its neighbours' mean
prediction t on the shared inputs x', with the weight αd_i. Models are never sent, only predictions, so nodes may have
models of different kinds:

- any object with `fit(X, y, sample_weight)` and `predict(X)`, as scikit-learn's regressors have: L_i is its own
  criterion with weights 1/m_i, and t labels the shared inputs with weights αd_i/m';
- a local solver of a module, `ft.gradient_descent` of a LightningModule or of a module with its own loss: the coupling
  enters as a `Quadratic` that touches it at the node's present parameters and majorises it, for a module linear in its
  parameters: its gradient g there, and λ = 2αd_i ‖J‖²/m' around it, J being the derivative of the predictions. Where a
  node stops, the gradient of the sum above is zero for any solver; a solver of one step takes exactly the step that it
  would take on the sum.

For classifiers (`classes=`) predictions are probabilities, by `predict_proba` or the softmax of a module's outputs, and
the coupling is the cross-entropy of the neighbours' mean probabilities t: soft labels of the shared inputs.

The inputs may be given in each node's own features: then they are shared examples, and this is vertical federation
(section 6.5).

Corrected in print: (5.21) has α/2 where the minimiser over one node of GTVMin with α needs α; see `ft.gtv`.

Source: Jung, "Federated learning: from theory to practice", section 5.6 and equation (5.21).
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
