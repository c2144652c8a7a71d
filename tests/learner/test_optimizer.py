"""AdamW as the paper runs it, against its formula as a float64 loop and against PyTorch's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.config import OptimizerConfig
from scalerl_jax.learner import optimizer
from scalerl_jax.model import DecoderConfig
from scalerl_jax.model.decoder import abstract_params

DECODER = DecoderConfig(vocab_size=11, hidden_size=8, layers=2, heads=2, kv_heads=1, head_dim=4, intermediate_size=12)
NORMS = ("attention_norm", "mlp_norm", "query_norm", "key_norm", "final_norm")
# Rates far from 0, so that every part of the formula shows within 20 steps.
CONFIG = OptimizerConfig(learning_rate=1e-2, warmup_steps=8, weight_decay=0.1)
STEPS = 20


def leaves(tree) -> dict[str, np.ndarray]:
    """Path -> array."""
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def draw(seed: int, scale=lambda rng: 1.0):
    """A tree like the decoder's parameters, normal with a scale of its own for each leaf."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: (scale(rng) * rng.normal(size=p.shape)).astype(np.float32), abstract_params(DECODER)
    )  # fmt: skip


def gradients():
    """As small as late in a run, too: a leaf's gradients may be 1e-10, where an epsilon of 1e-8 would hide them."""
    return [draw(100 + step, lambda rng: 10.0 ** rng.uniform(-10, 1)) for step in range(STEPS)]


def ours(config: OptimizerConfig) -> list[dict[str, np.ndarray]]:
    """The parameters after each step."""

    @jax.jit
    def step(params, state, grads, numbers):
        updates, state = optimizer.adamw(numbers).update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    params = draw(0)
    state, out = optimizer.init(params), []
    for done, grads in enumerate(gradients()):
        numbers = optimizer.numbers_of(config, optimizer.learning_rate(config, done))
        params, state = step(params, state, grads, numbers)
        out.append(leaves(params))
    return out


@pytest.mark.parametrize(("share", "wanted"), [(1.0, 1.0), (0.9, 1.0), (0.8, 1.0), (0.2, 0.5), (0.0, 0.0)])
def test_few_effective_completions_make_a_small_step(share, wanted):
    assert optimizer.step_scale(OptimizerConfig(ess_reference=0.8), share) == pytest.approx(wanted)
    assert optimizer.step_scale(OptimizerConfig(), share) == 1.0


def rate(config: OptimizerConfig, step: int) -> float:
    """Of the update with this number, from 1: linear over the warm-up's updates, then constant, or linear to 0."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    last = config.warmup_steps + config.decay_steps
    return config.learning_rate * (max(0, last + 1 - step) / config.decay_steps if config.decay_steps else 1)


def loop(config: OptimizerConfig) -> list[dict[str, np.ndarray]]:
    """Decoupled weight decay regularization (arXiv 1711.05101), algorithm 2, in float64."""
    params = {name: value.astype(np.float64) for name, value in leaves(draw(0)).items()}
    m, v, out = dict.fromkeys(params, 0.0), dict.fromkeys(params, 0.0), []
    for step, tree in enumerate(gradients(), 1):
        grads = {name: value.astype(np.float64) for name, value in leaves(tree).items()}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        shrink = min(1.0, config.max_grad_norm / norm) if config.max_grad_norm else 1.0
        for name in params:
            g = grads[name] * shrink
            m[name] = config.beta1 * m[name] + (1 - config.beta1) * g
            v[name] = config.beta2 * v[name] + (1 - config.beta2) * g**2
            direction = m[name] / (1 - config.beta1**step)
            direction /= np.sqrt(v[name] / (1 - config.beta2**step)) + config.epsilon
            decay = 0.0 if any(norm in name for norm in NORMS) else config.weight_decay
            params[name] = params[name] - rate(config, step) * (direction + decay * params[name])
        out.append({name: value.copy() for name, value in params.items()})
    return out


def torch_steps(config: OptimizerConfig) -> list[dict[str, np.ndarray]]:
    torch = pytest.importorskip("torch")
    params = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in leaves(draw(0)).items()}
    groups = [
        {"params": [p for name, p in params.items() if any(norm in name for norm in NORMS)], "weight_decay": 0.0},
        {"params": [p for name, p in params.items() if not any(norm in name for norm in NORMS)]},
    ]
    adamw = torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.epsilon,
        weight_decay=config.weight_decay,
    )  # fmt: skip
    warmup = torch.optim.lr_scheduler.LambdaLR(adamw, lambda done: rate(config, done + 1) / config.learning_rate)
    out = []
    for tree in gradients():
        for name, value in leaves(tree).items():
            params[name].grad = torch.tensor(value)
        if config.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(params.values(), config.max_grad_norm)
        adamw.step()
        warmup.step()
        out.append({name: p.detach().numpy().copy() for name, p in params.items()})
    return out


CONFIGS = {
    "warm-up": CONFIG,
    "constant": OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
    "clipped": OptimizerConfig(
        learning_rate=1e-2, warmup_steps=3, beta1=0.8, beta2=0.99, epsilon=1e-6, max_grad_norm=2.0
    ),
    "decay": OptimizerConfig(learning_rate=1e-2, warmup_steps=3, decay_steps=14),
}


@pytest.mark.parametrize("reference", [loop, torch_steps])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_equal_adamw_after_every_step(reference, config):
    expected = reference(config)
    got = ours(config)
    assert len(got) == len(expected) == STEPS
    moved = 0.0
    for step, (mine, theirs) in enumerate(zip(got, expected, strict=True), 1):
        assert mine.keys() == theirs.keys()
        for name in mine:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-6, atol=1e-6, err_msg=f"{name}, step {step}")
            moved = max(moved, np.abs(mine[name] - leaves(draw(0))[name]).max())
    assert moved > 0.05  # the tolerance is small beside what happens


def test_the_papers_numbers_are_the_defaults():
    config = OptimizerConfig()
    assert (config.learning_rate, config.warmup_steps, config.epsilon, config.weight_decay) == (5e-7, 100, 1e-15, 0.01)
    assert config.max_grad_norm == 0


def test_all_but_the_norms_scales_decay():
    """With no gradient only the decay moves a weight: by rate x decay x weight."""
    made = optimizer.adamw(optimizer.numbers_of(OptimizerConfig(weight_decay=0.5), 0.1))
    params = draw(0)
    updates, _ = jax.jit(made.update)(jax.tree.map(np.zeros_like, params), made.init(params), params)
    for name, update in leaves(updates).items():
        norm = any(norm in name for norm in NORMS)
        np.testing.assert_allclose(update, 0 * update if norm else -0.05 * leaves(params)[name], rtol=1e-6)
    assert sum(leaf.ndim <= 2 and "norm" in name for name, leaf in leaves(params).items()) == len(NORMS)


def test_vectors_of_any_size_get_all_of_their_updates():
    """1,000 updates at the paper's rate: float32 alone keeps them from weights of 5 and more."""
    sizes = np.repeat(np.float32([0.02, 1, 5, 8.5, 17]), 64)
    made = optimizer.adamw(optimizer.numbers_of(OptimizerConfig(weight_decay=0.0), 5e-7))
    start = {"embed": sizes, "final_norm": sizes, "layers": {"query": sizes, "query_bias": sizes}}

    @jax.jit
    def updates(params, key):
        def step(carry, key):
            params, state, lost = carry
            grad = 0.3 + jax.random.normal(key, sizes.shape)
            moves, state = made.update(jax.tree.map(lambda _: grad, params), state, params)
            params, lost = optimizer.apply_updates(params, moves, lost)
            return (params, state, lost), moves["embed"]

        lost = jax.tree.map(jnp.zeros_like, optimizer.vectors(params))
        (params, _, _), moves = jax.lax.scan(step, (params, made.init(params), lost), jax.random.split(key, 1000))
        return params, moves

    after, moves = updates(start, jax.random.key(0))
    wanted = np.asarray(moves, np.float64).sum(0).reshape(5, 64).mean(1)

    def arrived(leaf):
        return (np.asarray(leaf, np.float64) - sizes).reshape(5, 64).mean(1) / wanted

    for leaf in (after["final_norm"], after["layers"]["query_bias"]):
        np.testing.assert_allclose(arrived(leaf), 1, atol=5e-3)  # but for what is on its way
    for leaf in (after["embed"], after["layers"]["query"]):  # matrices, which have none
        assert (
            np.all(np.abs(arrived(leaf)[:2] - 1) < 0.05) and arrived(leaf)[2] < 0.8 and np.all(arrived(leaf)[3:] < 0.05)
        )
    plain = jax.tree.map(lambda leaf: leaf + np.float32(1e-8), start)
    lost = jax.tree.map(jnp.zeros_like, optimizer.vectors(start))
    first, lost = jax.jit(optimizer.apply_updates)(start, jax.tree.map(lambda x: 0 * x + np.float32(1e-8), start), lost)
    jax.tree.map(np.testing.assert_array_equal, first, plain)  # without what was lost before, bits are as they were
    assert np.all(leaves(lost)["['final_norm']"][64:] == np.float32(1e-8))


def test_moments_are_float32_and_two_copies_of_the_parameters():
    state = optimizer.init(draw(0))
    parameters = sum(leaf.size for leaf in leaves(draw(0)).values())
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert {leaf.dtype for leaf in arrays} == {jnp.dtype("float32")}
    assert sum(leaf.size for leaf in arrays) == 2 * parameters
