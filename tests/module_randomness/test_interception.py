"""Random operations of modules: stacked, chunked and alone agree, the global generator stays as it is."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedtorch import random
from fedtorch.module_randomness.interception import KeyedRandomness

K, B, D = 3, 3, 4  # clients and batch of one size, so that a wrong dimension would not show in the shape


@pytest.fixture(autouse=True)
def _untouched_generator():
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def keys() -> Tensor:
    return random.fold_in(random.key(11), torch.arange(K))


@pytest.fixture
def inputs() -> Tensor:
    return random.uniform(random.key(12), (K, B, D))


def stacked(function, keys, *inputs, in_dims=0):
    with KeyedRandomness(keys):
        return vmap(function, in_dims=in_dims, randomness="different")(*inputs)


def alone(function, keys, *inputs):
    results = []
    for k in range(len(keys)):
        with KeyedRandomness(keys[k]):
            results.append(function(*(x[k] for x in inputs)))
    return torch.stack(results)


def attention(x: Tensor) -> Tensor:
    heads = x.expand(2, *x.shape)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)


OPERATIONS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout_inplace": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    "dropout2d": lambda x: F.dropout2d(x[..., None, None], 0.4),
    "dropout3d": lambda x: F.dropout3d(x[..., None, None, None], 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "dropout_of_transposed": lambda x: F.dropout(x.mT, 0.4),
    "dropout_of_product": lambda x: F.dropout(x.mT @ x, 0.4),
    "dropout_twice": lambda x: F.dropout(F.dropout(x, 0.4), 0.4),
    "dropout_of_shared": lambda x: x * F.dropout(torch.ones(B, D), 0.4),
    "attention": attention,
    "rand": lambda x: x + torch.rand(D),
    "rand_like": lambda x: x + torch.rand_like(x),
    "rand_like_shared": lambda x: x + torch.rand_like(torch.ones(D)),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "randn": lambda x: x + torch.randn(B, D),
    "randn_like": lambda x: x + torch.randn_like(x),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "normal": lambda x: x + torch.normal(0.0, 1.0, (D,)),
    "normal_of_mean": lambda x: torch.normal(x),
    "normal_of_std": lambda x: torch.normal(1.0, x),
    "normal_of_both": lambda x: torch.normal(x, x),
    "bernoulli": torch.bernoulli,
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_default": lambda x: torch.empty_like(x).bernoulli_(),
    "bernoulli_tensor": lambda x: torch.empty_like(x).bernoulli_(x),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.5),
    "randint": lambda x: x + torch.randint(5, (D,)),
    "randint_low": lambda x: x + torch.randint(2, 5, (D,)),
    "randint_like": lambda x: torch.randint_like(x, 2, 5),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "multinomial_vector": lambda x: torch.multinomial(x[0], 2),
    "multinomial_replacement": lambda x: torch.multinomial(x, 6, replacement=True),
    "categorical": lambda x: torch.distributions.Categorical(x, validate_args=False).sample((2,)),
}
each_operation = pytest.mark.parametrize("function", OPERATIONS.values(), ids=OPERATIONS.keys())


PRODUCTS = {OPERATIONS[name] for name in ("dropout_of_product", "attention")}


def assert_same(function, first, second):
    """The same draws: zeros in the same places, and the same bits but for stacked matrix products, which processors
    may sum in another order than single ones: those agree up to the rounding of float32."""
    assert torch.equal(first == 0, second == 0)
    if function in PRODUCTS:
        torch.testing.assert_close(first, second)
    else:
        assert torch.equal(first, second)


@each_operation
def test_stacked_chunked_and_alone_agree(function, keys, inputs):
    together = stacked(function, keys, inputs)
    assert_same(function, together, alone(function, keys, inputs))
    parts = [stacked(function, keys[rows], inputs[rows]) for rows in (slice(2), slice(2, 3))]
    assert_same(function, together, torch.cat(parts))
    assert torch.equal(together, stacked(function, keys, inputs))
    # clients of equal inputs draw different numbers
    same = stacked(function, random.fold_in(keys[0], torch.arange(20)), inputs[:1].expand(20, B, D))
    assert not torch.equal(same, same[:1].expand_as(same))


@each_operation
def test_clients_in_another_dimension(function, keys, inputs):
    elsewhere = stacked(function, keys, inputs.movedim(0, 1), in_dims=1)
    assert_same(function, elsewhere, stacked(function, keys, inputs))


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "categorical" and "multi" not in name])
def test_no_clients(name, keys, inputs):
    # vmap itself reshapes what multinomial returns and cannot for no clients.
    function = OPERATIONS[name]
    result = stacked(function, keys[:0], inputs[:0])
    assert result.shape == (0, *stacked(function, keys, inputs).shape[1:])


@pytest.mark.parametrize(
    "name", ["dropout", "dropout_twice", "rand_like", "randn_like", "bernoulli_tensor", "exponential_"]
)
def test_examples_under_a_further_vmap(name, keys, inputs):
    function = OPERATIONS[name]
    per_example = vmap(function, randomness="different")
    assert torch.equal(stacked(per_example, keys, inputs), stacked(function, keys, inputs))
    assert torch.equal(alone(per_example, keys, inputs), alone(function, keys, inputs))


@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial_under_a_further_vmap(keys, inputs, replacement):
    function = lambda x: torch.multinomial(x, 2, replacement)
    assert torch.equal(stacked(vmap(function, randomness="different"), keys, inputs), alone(function, keys, inputs))


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "dropout" in name or name.startswith("bern")])
def test_decisions_do_not_depend_on_the_dtype(name, keys, inputs):
    function = OPERATIONS[name]
    single = stacked(function, keys, inputs)
    torch.testing.assert_close(stacked(function, keys, inputs.double()).float(), single)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True)
        self.drop = nn.Dropout(0.5)
        for i, parameter in enumerate(self.parameters()):
            parameter.data = random.normal(random.key(i), parameter.shape) / 2

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x)).square().mean()


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_of_a_transformer(keys, inside):
    with torch.random.fork_rng():
        module = Transformer()
    inputs = random.normal(random.key(1), (K, 2, 5, 4))
    parameters = {name: p.detach().repeat(K, *(1,) * p.ndim).requires_grad_() for name, p in module.named_parameters()}
    drawn = KeyedRandomness(keys)
    with drawn:
        losses = vmap(lambda p, x: functional_call(module, p, (x,)), randomness="different")(parameters, inputs)
        if inside:
            losses.sum().backward()
    if not inside:
        losses.sum().backward()
    assert drawn.calls == 5
    for k in range(K):
        module.zero_grad()
        with KeyedRandomness(keys[k]):
            loss = module(inputs[k])
        loss.backward()
        torch.testing.assert_close(losses[k], loss)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameters[name].grad[k], parameter.grad, rtol=1e-4, atol=1e-5)


def test_gradients_by_functional_transforms(keys, inputs):
    function = lambda x: (F.dropout(x, 0.4) ** 2).sum()
    masks = stacked(OPERATIONS["dropout"], keys, torch.ones_like(inputs))
    torch.testing.assert_close(stacked(grad(function), keys, inputs), 2 * inputs * masks**2)


def test_native_dropout_equals_dropout_and_has_its_gradient(keys, inputs):
    inputs = inputs.requires_grad_()
    for p in (0.0, 0.4, 1.0):
        native = stacked(lambda x, p=p: torch.native_dropout(x, p, True)[0], keys, inputs)
        assert torch.equal(native, stacked(lambda x, p=p: F.dropout(x, p), keys, inputs))
        (slope,) = torch.autograd.grad(native.sum(), inputs)
        torch.testing.assert_close(slope * inputs, native)


def test_moments():
    n = 20_000
    row = torch.empty(n)
    samples = {
        "dropout": (lambda x: F.dropout(torch.ones_like(x), 0.4), 1.0, 0.4 / 0.6),
        "uniform": (lambda x: x.uniform_(-1, 2), 0.5, 9 / 12),
        "normal": (lambda x: x.normal_(1, 2), 1.0, 4.0),
        "exponential": (lambda x: x.exponential_(2.0), 0.5, 0.25),
        "randint": (lambda x: torch.randint(2, 5, (n,)), 3.0, 2 / 3),
        "bernoulli": (lambda x: x.bernoulli_(0.3), 0.3, 0.21),
        "multinomial": (
            lambda x: torch.multinomial(torch.tensor([0.0, 1.0, 3.0, 0.0]), n, True),
            1.75,
            3 / 16,
        ),
        "once": (lambda x: torch.multinomial(torch.tensor([0.0, 1.0, 3.0]).expand(n, 3), 1), 1.75, 3 / 16),
    }
    for draw, mean, variance in samples.values():
        with KeyedRandomness(random.key(0)):
            sample = draw(row).double()
        assert abs(float(sample.mean()) - mean) < 4 * math.sqrt(variance / n)


def test_counts_calls_and_leaves_the_rest_alone(keys, inputs):
    module = nn.Sequential(*(nn.Dropout(0.1) for _ in range(12)))
    drawn = KeyedRandomness(keys)
    with drawn:
        vmap(module.eval(), randomness="different")(inputs)
        vmap(lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]))(inputs)
        assert drawn.calls == 0
        vmap(module.train(), randomness="different")(inputs)
    assert drawn.calls == 12


def test_inference_mode(keys, inputs):
    expected = stacked(OPERATIONS["dropout"], keys, inputs)
    with torch.inference_mode():
        assert torch.equal(alone(OPERATIONS["dropout"], keys, inputs), expected)
        assert torch.equal(stacked(OPERATIONS["dropout"], keys, inputs), expected)


def test_attention_kernels_are_restored(keys):
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    drawn = KeyedRandomness(keys[0])
    with drawn:
        assert not torch.backends.cuda.flash_sdp_enabled()
    with pytest.raises(RuntimeError, match="explicit generator"), drawn:
        torch.rand(3, generator=torch.default_generator)
    assert before == (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )


WITHOUT_A_RULE = [
    ("poisson", torch.poisson),
    ("random_", lambda x: x.random_(3)),
    ("_standard_gamma", torch._standard_gamma),
    ("_sample_dirichlet", lambda x: torch._sample_dirichlet(x)),
    ("geometric_", lambda x: x.geometric_(0.5)),
]


@pytest.mark.parametrize("function", [function for _, function in WITHOUT_A_RULE])
def test_what_has_no_rule_is_drawn_by_torch_for_one_client(function, keys):
    def draw(key):
        with KeyedRandomness(key):
            return function(torch.full((40,), 3.0)), function(torch.full((40,), 3.0))

    before = torch.get_rng_state()
    first, second = draw(keys[0])
    assert not torch.equal(first, second)
    assert torch.equal(torch.stack(draw(keys[0])), torch.stack([first, second]))
    assert not torch.equal(draw(keys[1])[0], first)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_in_between_is_refused(keys):
    before = torch.get_rng_state()
    with KeyedRandomness(keys[0]):
        torch.manual_seed(1)
        with pytest.raises(NotImplementedError, match=r"calls torch\.manual_seed"):
            torch.rand(2)
    torch.set_rng_state(before)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        *WITHOUT_A_RULE,
        ("rand.out", lambda x: torch.rand(4, out=x)),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, function, keys):
    refusal = rf"{name}.* is not supported on stacked clients.*bernoulli.*lightning_fit"
    with pytest.raises(RuntimeError, match=refusal), KeyedRandomness(keys):
        function(torch.ones(4))


def test_a_generator_of_one_client_is_what_it_draws_from(keys):
    own = torch.Generator().manual_seed(1)
    with KeyedRandomness(keys[0]) as drawn:
        several = torch.rand(3, generator=own), torch.rand(2, generator=own)
    whole = torch.rand(5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.cat(several), whole)
    assert drawn.calls == 0
    state = torch.get_rng_state()
    for shared, key in ((torch.default_generator, keys[0]), (torch.Generator(), keys)):
        refusal = r"without an explicit generator.*ft\.lightning_fit"
        with pytest.raises(NotImplementedError, match=refusal), KeyedRandomness(key):
            torch.rand(3, generator=shared)
    assert torch.equal(torch.get_rng_state(), state)


def test_clients_must_be_in_front(keys, inputs):
    with pytest.raises(RuntimeError, match=r"Expected .*clients \(3,\) in front, but got \(2, 3, 4\)"):
        stacked(OPERATIONS["dropout"], keys, inputs[:2])
    with pytest.raises(RuntimeError, match=r"clients \(3,\) in front, but got \(4, 5\)"), KeyedRandomness(keys):
        torch.rand(4, 5)
    with pytest.raises(RuntimeError, match=r"clients \(3,\) in front, but got \(3,\)"), KeyedRandomness(keys):
        torch.multinomial(torch.ones(3), 2)
