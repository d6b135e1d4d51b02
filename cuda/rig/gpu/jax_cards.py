"""The workload of `collective.py` that uses both cards in one process with JAX."""

import hashlib
import os
import time

# The programs with and without the library are on the cards at the same time, and must compute the same.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LAYERS, WIDTH, BATCH, STEP = 6, 2048, 4096, 1e-3


def loss(weights: list[jax.Array], inputs: jax.Array, targets: jax.Array) -> jax.Array:
    state = inputs
    for weight in weights:
        state = jnp.tanh(state @ weight)
    return jnp.mean((state - targets) ** 2)


@jax.jit
def step(weights: list[jax.Array], inputs: jax.Array, targets: jax.Array) -> list[jax.Array]:
    """Makes a training step. XLA adds the gradients of both cards with an all-reduce operation."""
    gradients = jax.grad(loss)(weights, inputs, targets)
    return [weight - STEP * gradient for weight, gradient in zip(weights, gradients)]


class Training:
    """Training with the batch divided between the cards, and the weights on both."""

    def __init__(self, _place: object):
        devices = jax.devices("gpu")
        if len(devices) != 2:
            raise RuntimeError(f"JAX sees {len(devices)} cards, expected 2")
        mesh = Mesh(numpy.array(devices), ("cards",))
        on_both, divided = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("cards"))
        random = numpy.random.default_rng(7)

        def normal(rows: int, sharding: NamedSharding) -> jax.Array:
            values = random.standard_normal((rows, WIDTH), dtype=numpy.float32)
            return jax.device_put(values * WIDTH**-0.5, sharding)

        self._weights = [normal(WIDTH, on_both) for _ in range(LAYERS)]
        self._inputs, self._targets = normal(BATCH, divided), normal(BATCH, divided)
        self.train(1)

    def train(self, steps: int) -> dict:
        begin = time.perf_counter()
        for _ in range(steps):
            self._weights = step(self._weights, self._inputs, self._targets)
        jax.block_until_ready(self._weights)
        return {"ms": round((time.perf_counter() - begin) * 1e3, 3)}

    def weights(self) -> dict:
        """Returns a checksum of the weights on each card, which must be equal."""
        found = set()
        for number in range(2):
            digest = hashlib.sha256()
            for weight in self._weights:
                digest.update(numpy.asarray(weight.addressable_shards[number].data).tobytes())
            found.add(digest.hexdigest()[:16])
        return {"checksum": " ".join(sorted(found)), "version": jax.__version__}
