"""CUDA programs like those of users. Prints the times of each part and a hash of all results as one line of JSON.

Usage: programs.py torch|cupy|jax [REPEATS [turns]]. Results depend only on the program, so runs can be compared.
With `turns`, each repetition prints `turn` and waits for a line on standard input.
"""

import hashlib
import json
import os
import statistics
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")

REPEATS = int(sys.argv[2]) if len(sys.argv) > 2 else 5
TURNS = len(sys.argv) > 3


def take_turn():
    if TURNS:
        print("turn", flush=True)
        sys.stdin.readline()


def measure(finish, work, warm=1):
    """Returns the median and all times of `work` in milliseconds."""
    take_turn()
    for _ in range(warm):
        work()
    finish()
    times = []
    for _ in range(REPEATS):
        take_turn()
        start = time.perf_counter()
        work()
        finish()
        times.append((time.perf_counter() - start) * 1e3)
    return {"median_ms": statistics.median(times), "times_ms": [round(t, 4) for t in times]}


def with_torch():
    import torch

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda")
    finish = torch.cuda.synchronize
    digest, parts = hashlib.sha256(), {}

    def add(tensor):
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())

    ballast = torch.arange(128 << 20, dtype=torch.int32, device=device)
    layers = [m for _ in range(4) for m in (torch.nn.Linear(2048, 2048), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(512, 2048, device=device)
    targets = torch.randn(512, 2048, device=device)

    def train():
        for _ in range(50):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()

    parts["train"] = measure(finish, train)
    for parameter in model.parameters():
        add(parameter)

    half = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(6)]).to(device).half().eval()
    batch = torch.randn(1024, 4096, device=device).half()

    def infer():
        with torch.inference_mode():
            for _ in range(60):
                half(batch)

    parts["infer"] = measure(finish, infer)
    with torch.inference_mode():
        add(half(batch))

    state = torch.randn(1024, 1024, device=device) / 40
    weight = torch.randn(1024, 1024, device=device) / 40
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        for _ in range(3):
            torch.tanh(state @ weight)
    warm.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            state.copy_(torch.tanh(state @ weight + 0.01))

    def replay():
        for _ in range(100):
            graph.replay()

    parts["graph"] = measure(finish, replay)
    add(state)

    one = torch.zeros(1, device=device)

    def tiny():
        for _ in range(10000):
            one.add_(1)

    parts["tiny"] = measure(finish, tiny)
    add(one)

    host = torch.arange(16 << 20, dtype=torch.int32).pin_memory()
    back = torch.empty_like(host).pin_memory()
    card = torch.empty(16 << 20, dtype=torch.int32, device=device)

    def copies():
        for _ in range(20):
            card.copy_(host, non_blocking=True)
            back.copy_(card, non_blocking=True)

    parts["copies"] = measure(finish, copies)
    digest.update(back.numpy().tobytes())

    def churn():
        for n in range(200):
            torch.empty((1 + n % 7) << 20, device=device).fill_(n)
        torch.cuda.empty_cache()

    parts["churn"] = measure(finish, churn)
    assert bool((ballast == torch.arange(128 << 20, dtype=torch.int32, device=device)).all()), "the ballast has changed"
    free, total = torch.cuda.mem_get_info()
    return {"parts": parts, "hash": digest.hexdigest(), "free": free, "total": total}


def with_cupy():
    import cupy

    finish = cupy.cuda.Device().synchronize
    digest, parts = hashlib.sha256(), {}
    random = cupy.random.RandomState(1)
    a = random.standard_normal((4096, 4096), dtype=cupy.float32)
    b = random.standard_normal((4096, 4096), dtype=cupy.float32)

    def products():
        for _ in range(10):
            cupy.matmul(a, b)

    parts["products"] = measure(finish, products)
    digest.update(cupy.asnumpy(cupy.matmul(a, b)).tobytes())
    x = random.standard_normal(32 << 20, dtype=cupy.float32)

    def elements():
        for _ in range(20):
            cupy.sqrt(x * x + 1)

    parts["elements"] = measure(finish, elements)
    digest.update(cupy.asnumpy(cupy.sqrt(x * x + 1)).tobytes())
    keys = random.randint(0, 1 << 30, size=16 << 20, dtype=cupy.int32)
    parts["sort"] = measure(finish, lambda: cupy.sort(keys))
    digest.update(cupy.asnumpy(cupy.sort(keys)).tobytes())
    cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)

    def pool():
        for n in range(100):
            cupy.full((1 + n % 5) << 20, n, dtype=cupy.float32)

    parts["pool"] = measure(finish, pool)
    return {"parts": parts, "hash": digest.hexdigest()}


def with_jax():
    import jax
    import jax.numpy as jnp
    import numpy

    digest, parts = hashlib.sha256(), {}
    key = jax.random.PRNGKey(0)
    w = jax.random.normal(key, (2048, 2048)) / 45
    x = jax.random.normal(key, (1024, 2048))

    @jax.jit
    def step(w, x):
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * gradient

    box = [w]

    def train():
        v = box[0]
        for _ in range(100):
            v = step(v, x)
        box[0] = v
        v.block_until_ready()

    parts["train"] = measure(lambda: None, train)
    digest.update(numpy.asarray(box[0]).tobytes())
    return {"parts": parts, "hash": digest.hexdigest()}


if __name__ == "__main__":
    print(json.dumps({"torch": with_torch, "cupy": with_cupy, "jax": with_jax}[sys.argv[1]]()))
