"""The scaling law of a run: pass rate against compute.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)          0 <= A <= 1, B > 0
         = R0 + (A - R0) * sigmoid(B * (ln C - ln C_mid))

A      asymptote: the score with unlimited compute
B      exponent: how fast it gets there; the slope of the straightened form
C_mid  midpoint: the compute at which half of the gain A - R0 is reached
R0     the score before any compute

For large C it is the power law A - D / C^B with D = (A - R0) * C_mid^B, which is here for comparison.
Every function is elementwise jnp and computes in the precision of its inputs. Compute may be in any unit.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sigmoid:
    """The parameters of one curve, in the unit its compute was given in."""

    asymptote: float
    exponent: float
    midpoint: float
    initial_reward: float

    @property
    def parameters(self) -> dict[str, float]:
        """The parameters as keyword arguments of the functions below."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Sigmoid)}


def sigmoid_law(compute, *, asymptote, exponent, midpoint, initial_reward):
    """R(C), of the broadcast shape; R0 at compute 0."""
    rise = jax.nn.sigmoid(exponent * (jnp.log(compute) - jnp.log(midpoint)))
    return initial_reward + (asymptote - initial_reward) * rise


def power_law(compute, *, asymptote, coefficient, exponent):
    """A - D / C^B, meant for C above some C_0 only: it falls without bound towards C = 0."""
    return asymptote - coefficient * jnp.power(compute, -exponent)


def straighten(reward, *, asymptote, midpoint, exponent, initial_reward):
    """F(R) = C_mid^B / ((A - R0) / (R - R0) - 1), which is C^B on the curve: ln F against ln C has slope B.

    NaN where a score is not strictly between R0 and A.
    """
    inside, odds = _odds(reward, asymptote, initial_reward)
    return jnp.where(inside, jnp.power(midpoint, exponent) * odds, jnp.nan)


def compute_to_reach(target, *, asymptote, exponent, midpoint, initial_reward):
    """The compute at which the curve is at `target`: 0 at or below R0, infinity at or above A."""
    inside, odds = _odds(target, asymptote, initial_reward)
    reached = jnp.where(target <= initial_reward, 0.0, jnp.inf)
    return jnp.where(inside, midpoint * jnp.power(odds, 1 / exponent), reached)


def _odds(reward, asymptote, initial_reward):
    """Whether a score is strictly between R0 and A, and if so the ratio of gain so far to gain left."""
    share = (reward - initial_reward) / (asymptote - initial_reward)
    inside = (share > 0) & (share < 1)
    return inside, jnp.where(inside, share, 0.5) / (1 - jnp.where(inside, share, 0.5))


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Within it, jax computes in float64 on this process's first CPU device."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield
