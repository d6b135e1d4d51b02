"""The workloads of `cards.py`: a program that uses two cards, with one process per card or with one process.

Usage: collective.py WORKLOAD --device NUMBER [--rank NUMBER --ranks COUNT --rendezvous FILE]. Each line of standard
input is a JSON object: `do` names a method of the workload, and the other keys are its arguments. The program replies
with one line of JSON. It exits at the end of standard input, and prints its threads' stacks on SIGUSR1.

The results depend only on the arguments, so that runs with and without the library can be compared.
"""

import argparse
import datetime
import faulthandler
import hashlib
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import TextIO

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch.nn import functional

# TIMEOUT: only a collective operation whose peer has exited takes this long.
COLLECTIVE_S = 60
# Size of the largest all-reduce in bytes.
LARGEST_BYTES = 1 << 30
MAX_OPERATION = 2  # `ncclMax`


def card(number: int) -> torch.device:
    return torch.device("cuda", number)


def finish() -> None:
    """Waits until both cards have completed this process's work."""
    for number in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(number):
            torch.cuda.synchronize(number)


def digest(tensors: list[torch.Tensor]) -> str:
    """Returns a checksum of the exact values."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


class Place:
    """The card of this process, and its rank within the program."""

    def __init__(self, device: int, rank: int, ranks: int, rendezvous: str):
        self.rank, self.ranks = rank, ranks
        self.card = card(device)
        torch.cuda.set_device(self.card)
        torch.zeros(1, device=self.card)
        if ranks > 1:
            self.join(rendezvous)

    def join(self, rendezvous: str) -> None:
        """Connects the processes. The first operation makes NCCL connect the cards."""
        dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=self.rank, world_size=self.ranks,
                                timeout=datetime.timedelta(seconds=COLLECTIVE_S), device_id=self.card)
        self.meet()

    def meet(self) -> None:
        """Waits until all processes have called this."""
        if self.ranks > 1:
            dist.all_reduce(torch.ones(1, device=self.card))
        self.wait()

    def wait(self) -> None:
        """Waits until the card has completed this process's work."""
        torch.cuda.synchronize(self.card)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(device=self.card).manual_seed(seed)

    def normal(self, rows: int, columns: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Returns a random matrix that approximately preserves the length of vectors."""
        matrix = torch.empty(rows, columns, device=self.card, dtype=dtype)
        return matrix.normal_(std=columns**-0.5, generator=self.generator(seed))

    def leave(self) -> None:
        if self.ranks > 1:
            dist.destroy_process_group()


class AllReduce:
    """All-reduce operations between two processes."""

    def __init__(self, place: Place):
        self._place = place
        self._words = torch.empty(LARGEST_BYTES // 4, device=place.card)

    def measure(self, size: int, count: int, waited: int) -> dict:
        """Checks one operation of `size` bytes. Measures `count` operations in a row, and `waited` synchronous ones."""
        words = self._words[: size // 4]
        words.fill_(self._place.rank + 1)
        dist.all_reduce(words)
        right = bool((words == self._place.ranks * (self._place.ranks + 1) // 2).all())
        words.uniform_(generator=self._place.generator(self._place.rank))
        # The maximum keeps the values finite, and costs as much as a sum.
        times = timed(lambda: dist.all_reduce(words, op=dist.ReduceOp.MAX), self._place.meet, self._place.wait, count,
                      waited)
        return {**times, "right": right}


class AllReduceInOneProcess:
    """All-reduce operations in one process that uses both cards."""

    def __init__(self, place: Place):
        self._cards = [card(number) for number in range(2)]
        self._words = [torch.empty(LARGEST_BYTES // 4, device=one) for one in self._cards]

    def measure(self, size: int, count: int, waited: int) -> dict:
        from torch.cuda import nccl

        words = [one[: size // 4] for one in self._words]
        for number, one in enumerate(words):
            one.fill_(number + 1)
        nccl.all_reduce(words)
        right = all(bool((one == 3).all()) for one in words)
        for one in words:
            one.uniform_()

        def wait() -> None:
            for one in self._cards:
                torch.cuda.synchronize(one)

        return {**timed(lambda: nccl.all_reduce(words, op=MAX_OPERATION), wait, wait, count, waited), "right": right}


def timed(operation: Callable[[], object], meet: Callable[[], None], wait: Callable[[], None], count: int,
          waited: int) -> dict:
    """Returns the time per operation in microseconds: in a row, and synchronously."""
    for _ in range(5):
        operation()
    meet()
    begin = time.perf_counter()
    for _ in range(count):
        operation()
    wait()
    in_a_row = (time.perf_counter() - begin) / count
    meet()
    single = []
    for _ in range(waited):
        begin = time.perf_counter()
        operation()
        wait()
        single.append(time.perf_counter() - begin)
    return {"us": round(in_a_row * 1e6, 2), "waited_us": round(statistics.median(single) * 1e6, 2)}


class Block(torch.nn.Module):
    """A transformer layer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self._heads = heads
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attention, self.merge = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.widen, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        batch, length, width = state.shape
        heads = self.attention(self.first(state)).view(batch, length, 3, self._heads, width // self._heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        # Not fused, because fused kernels may add in any order.
        weights = (query @ key.transpose(-1, -2) * (width // self._heads) ** -0.5).softmax(dim=-1)
        state = state + self.merge((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return state + self.narrow(functional.gelu(self.widen(self.second(state))))


class Training:
    """Trains a transformer with DistributedDataParallel."""

    LAYERS, WIDTH, HEADS, BATCH, LENGTH = 6, 1024, 16, 8, 256

    def __init__(self, place: Place):
        self._place = place
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(1)
        layers = [Block(self.WIDTH, self.HEADS) for _ in range(self.LAYERS)]
        self._model = torch.nn.Sequential(*layers).to(place.card)
        self._parallel = self._parallel_model()
        self._optimizer = torch.optim.AdamW(self._parallel.parameters(), lr=1e-4)
        shape = (self.BATCH, self.LENGTH, self.WIDTH)
        generator = place.generator(2 + place.rank)
        self._inputs = torch.randn(shape, device=place.card, generator=generator)
        self._targets = torch.randn(shape, device=place.card, generator=generator)

    def _parallel_model(self) -> torch.nn.Module:
        devices = [self._place.card.index] if self._place.card.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(self._model, device_ids=devices)

    def train(self, steps: int) -> dict:
        self._place.meet()
        begin = time.perf_counter()
        for _ in range(steps):
            self._optimizer.zero_grad()
            functional.mse_loss(self._parallel(self._inputs), self._targets).backward()
            self._optimizer.step()
        self._place.wait()
        return {"ms": round((time.perf_counter() - begin) * 1e3, 3)}

    def weights(self) -> dict:
        """Returns a checksum of the weights."""
        return {"checksum": digest(list(self._model.parameters()))}


class ShardedTraining(Training):
    """The same training with FullyShardedDataParallel: each process has a part of the weights, and all of one layer."""

    def _parallel_model(self) -> torch.nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(self._model, auto_wrap_policy=ModuleWrapPolicy({Block}),
                                        device_id=self._place.card, use_orig_params=True)

    def weights(self) -> dict:
        """Returns a checksum of all weights, which each process gathers."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(self._parallel, writeback=False):
            return {"checksum": digest(list(self._parallel.parameters()))}


class Decoding:
    """Decodes token by token with a language model whose layers are split between the cards."""

    LAYERS, WIDTH, HEADS, INNER, VOCABULARY, TOKENS = 12, 2048, 16, 5632, 8192, 64
    GRAPH = False

    def __init__(self, place: Place):
        self._place, own = place, 1000 * (place.rank + 1)
        self._size = self.WIDTH // self.HEADS
        self._heads, inner = self.HEADS // place.ranks, self.INNER // place.ranks
        width = self._heads * self._size
        self._embedding = place.normal(self.VOCABULARY, self.WIDTH, seed=1)
        self._output = place.normal(self.VOCABULARY, self.WIDTH, seed=2)
        self._layers = [(place.normal(3 * width, self.WIDTH, own + 4 * layer),
                         place.normal(self.WIDTH, width, own + 4 * layer + 1),
                         place.normal(2 * inner, self.WIDTH, own + 4 * layer + 2),
                         place.normal(self.WIDTH, inner, own + 4 * layer + 3)) for layer in range(self.LAYERS)]
        shape = (1, self._heads, self.TOKENS, self._size)
        self._caches = [tuple(torch.zeros(shape, device=place.card, dtype=torch.bfloat16) for _ in range(2))
                        for _ in range(self.LAYERS)]
        self._token = torch.zeros(1, device=place.card, dtype=torch.int64)
        self._position = torch.zeros(1, device=place.card, dtype=torch.int64)
        self._positions = torch.arange(self.TOKENS, device=place.card)
        self._on_host = torch.zeros(1, dtype=torch.int64, pin_memory=place.card.type == "cuda")
        self._advance = self._captured() if self.GRAPH else self._step

    def _step(self) -> None:
        state = self._embedding[self._token]
        visible = (self._positions <= self._position)[None, None, None, :]
        for (attention, merge, widen, narrow), (keys, values) in zip(self._layers, self._caches):
            normed = functional.rms_norm(state, (self.WIDTH,))
            query, key, value = functional.linear(normed, attention).view(3, 1, self._heads, 1, self._size)
            keys.index_copy_(2, self._position, key)
            values.index_copy_(2, self._position, value)
            attended = functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible)
            part = functional.linear(attended.reshape(1, -1), merge)
            dist.all_reduce(part)
            state = state + part
            gate, up = functional.linear(functional.rms_norm(state, (self.WIDTH,)), widen).chunk(2, dim=-1)
            part = functional.linear(functional.silu(gate) * up, narrow)
            dist.all_reduce(part)
            state = state + part
        logits = functional.linear(functional.rms_norm(state, (self.WIDTH,)), self._output)
        self._token.copy_(logits.argmax(dim=-1))
        self._position.add_(1)
        self._on_host.copy_(self._token, non_blocking=True)

    def _captured(self) -> Callable[[], None]:
        """Captures the step. Returns a function that replays it as a graph."""
        # A new stream does not wait for the stream that initialized the weights.
        self._place.wait()
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's threads may call the driver during the capture.
        with torch.inference_mode(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._step()
        return graph.replay

    @torch.inference_mode()
    def decode(self, sequences: int) -> dict:
        """Decodes sequences. Returns the times and a checksum of all tokens."""
        self._place.meet()
        tokens, gaps = [], []
        begin = last = time.perf_counter()
        for number in range(sequences):
            self._token.fill_(1 + number)
            self._position.zero_()
            for _ in range(self.TOKENS):
                self._advance()
                self._place.wait()
                tokens.append(int(self._on_host))
                now = time.perf_counter()
                gaps.append((now - last) * 1e3)
                last = now
        gaps.sort()
        return {"ms": round((last - begin) * 1e3, 3), "tokens": len(tokens),
                "p50_ms": round(gaps[len(gaps) // 2], 3), "p99_ms": round(gaps[len(gaps) * 99 // 100], 3),
                "checksum": hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:16],
                "different_tokens": len(set(tokens))}


class DecodingWithGraphs(Decoding):
    """The same, with one CUDA graph for each token."""

    GRAPH = True


class Saturating:
    """Keeps the cards busy with matrix products and, with several processes, all-reduce operations."""

    SIDE, REDUCED_BYTES, UNITS = 8192, 64 << 20, 4

    def __init__(self, place: Place):
        self._place = place
        self._first = place.normal(self.SIDE, self.SIDE, seed=1)
        self._second = place.normal(self.SIDE, self.SIDE, seed=2)
        self._product = torch.empty_like(self._first)
        self._gradient = torch.rand(self.REDUCED_BYTES // 4, device=place.card, generator=place.generator(place.rank))
        self._flag = torch.zeros(1, device=place.card)
        pinned = place.card.type == "cuda"
        self._flags = [torch.zeros(1, pin_memory=pinned) for _ in range(2)]
        self._submit(0, 0.0).synchronize()

    def _submit(self, number: int, ends: float) -> torch.cuda.Event:
        """Submits a block. Its flag becomes 1 if any of the processes wants to stop."""
        for _ in range(self.UNITS):
            torch.mm(self._first, self._second, out=self._product)
            if self._place.ranks > 1:
                dist.all_reduce(self._gradient, op=dist.ReduceOp.MAX)
        self._flag.fill_(ends)
        if self._place.ranks > 1:
            dist.all_reduce(self._flag, op=dist.ReduceOp.MAX)
        self._flags[number % 2].copy_(self._flag, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return event

    def run(self, begin: float, until: float) -> dict:
        """Works between two times of the monotonic clock. Returns the completion times of the blocks."""
        self._place.meet()
        while time.monotonic() < begin:
            time.sleep(0.0005)
        ends: list[float] = []
        events = [self._submit(0, 0.0)]
        # All processes see the flag in the same block, so they submit the same number of blocks.
        while True:
            number = len(events)
            events.append(self._submit(number, float(time.monotonic() >= until)))
            events[number - 1].synchronize()
            ends.append(round(time.monotonic(), 6))
            if self._flags[(number - 1) % 2].item():
                break
        self._place.wait()
        return {"ends": ends, "units": self.UNITS, "checksum": digest([self._product])}


class Filling:
    """Integer operations on several GiB on each card, with an all-reduce of a part."""

    BYTES, REPEATS, REDUCED_WORDS = 128 << 20, 40, 4 << 20

    def __init__(self, place: Place):
        self._place = place
        self._tensors: list[torch.Tensor] = []

    def fill(self, mib: int) -> dict:
        """Allocates memory, with the same values each time."""
        words = self.BYTES // 4
        self._tensors.clear()
        self._tensors = [torch.arange(number, number + words, device=self._place.card, dtype=torch.int32)
                         for number in range(mib * (1 << 20) // self.BYTES)]
        self._place.meet()
        return {"tensors": len(self._tensors)}

    def work(self, passes: int) -> dict:
        self._place.meet()
        begin = time.perf_counter()
        for _ in range(passes):
            for tensor in self._tensors:
                for _ in range(self.REPEATS):
                    tensor.mul_(3).add_(self._place.rank + 1)
                dist.all_reduce(tensor[: self.REDUCED_WORDS])
        self._place.wait()
        return {"s": round(time.perf_counter() - begin, 3)}

    def sums(self) -> dict:
        """Returns a checksum of all memory."""
        all_sums = [int(tensor.sum(dtype=torch.int64)) for tensor in self._tensors]
        return {"checksum": hashlib.sha256(json.dumps(all_sums).encode()).hexdigest()[:16]}


class Moving:
    """Integer operations on several GiB of one card, whose result is known."""

    BYTES = 256 << 20

    def __init__(self, place: Place):
        self._card = place.card
        self._tensors: list[torch.Tensor] = []
        self._passes = 0

    def _values(self, number: int) -> torch.Tensor:
        return torch.arange(number, number + self.BYTES // 4, device=self._card, dtype=torch.int32)

    def fill(self, mib: int) -> dict:
        """Allocates memory."""
        self._tensors = [self._values(number) for number in range(mib * (1 << 20) // self.BYTES)]
        finish()
        return {"bytes": len(self._tensors) * self.BYTES}

    def link(self) -> dict:
        """Returns the rates of pinned copies in bytes per second, to host memory and back."""
        there, here = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True), torch.empty(1 << 30, dtype=torch.uint8,
                                                                                           device=self._card)
        rates = {}
        for name, to, of in (("out", there, here), ("in", here, there)):
            to.copy_(of, non_blocking=True)
            finish()
            begin = time.perf_counter()
            for _ in range(4):
                to.copy_(of, non_blocking=True)
            finish()
            rates[name] = round(4 * (1 << 30) / (time.perf_counter() - begin))
        return rates

    def run(self, seconds: float) -> dict:
        """Computes for a time. Returns the longest gap between the ends of two operations."""
        until, longest, last = time.perf_counter() + seconds, 0.0, time.perf_counter()
        passes = self._passes
        while time.perf_counter() < until:
            for tensor in self._tensors:
                tensor.mul_(3).add_(1)
                finish()
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
            self._passes += 1
        return {"passes": self._passes - passes, "longest_gap_ms": round(longest * 1e3, 1)}

    def check(self) -> dict:
        """Compares all memory with the expected values."""
        wrong = 0
        for number, tensor in enumerate(self._tensors):
            expected = self._values(number)
            for _ in range(self._passes):
                expected.mul_(3).add_(1)
            wrong += int((expected != tensor).sum())
        return {"wrong_words": wrong, "uuid": str(torch.cuda.get_device_properties(self._card).uuid)}


class Peers:
    """Copies and kernels in one process that use both cards' memory."""

    BYTES, SIDE, STEPS = 256 << 20, 4096, 40

    def __init__(self, place: Place):
        first, second = self._cards = [card(number) for number in range(2)]
        self.access = torch.cuda.can_device_access_peer(0, 1) and torch.cuda.can_device_access_peer(1, 0)
        self._source = torch.arange(self.BYTES // 4, device=first, dtype=torch.int32)
        self._target = torch.zeros_like(self._source, device=second)
        self._wide = torch.arange(self.SIDE * self.SIDE, device=first, dtype=torch.float32).view(self.SIDE, self.SIDE)
        self._turned = torch.zeros_like(self._wide, device=second)
        self._weights = [torch.empty(self.SIDE, self.SIDE, device=one, dtype=torch.bfloat16).normal_(
            std=self.SIDE**-0.5, generator=torch.Generator(device=one).manual_seed(5)) for one in self._cards]

    def look(self) -> dict:
        return {"peer_access": self.access}

    def _copies(self) -> list[torch.Tensor]:
        for _ in range(10):
            self._target.copy_(self._source)
            self._source.copy_(self._target)
        return [self._source, self._target]

    def _kernels(self) -> list[torch.Tensor]:
        """Copies a transposed matrix: with peer access, one card's kernel writes to the other card's memory."""
        for _ in range(20):
            self._turned.copy_(self._wide.t())
            self._wide.copy_(self._turned.t())
        return [self._wide, self._turned]

    def _pipeline(self) -> list[torch.Tensor]:
        """Computes alternately on both cards, each time from the other card's result."""
        first, second = self._cards
        state = torch.ones(self.SIDE, self.SIDE, device=first, dtype=torch.bfloat16)
        for _ in range(self.STEPS):
            state = torch.tanh(state @ self._weights[0]).to(second)
            state = torch.tanh(state @ self._weights[1]).to(first)
        return [state]

    def part(self, name: str) -> dict:
        """Runs one of the phases `copies`, `kernels` and `pipeline`."""
        work = {"copies": self._copies, "kernels": self._kernels, "pipeline": self._pipeline}[name]
        finish()
        begin = time.perf_counter()
        results = work()
        finish()
        return {"ms": round((time.perf_counter() - begin) * 1e3, 3), "checksum": digest(results)}


def jax_training(place: Place) -> object:
    """Returns the workload of JAX, which not every machine has."""
    import jax_cards

    return jax_cards.Training(place)


WORKLOADS = {"all-reduce": AllReduce, "all-reduce-in-one": AllReduceInOneProcess, "training": Training,
             "training-sharded": ShardedTraining, "training-jax": jax_training, "decoding": Decoding,
             "decoding-graphs": DecodingWithGraphs, "saturating": Saturating, "filling": Filling, "moving": Moving,
             "peers": Peers}


def serve(workload: object, answers: TextIO) -> None:
    """Executes commands until standard input ends."""
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(workload, command.pop("do"))(**command)), file=answers, flush=True)


def take_processors(rank: int, ranks: int) -> None:
    """Restricts this process to its part of the processors, so that runs with and without the library use the same."""
    processors = sorted(os.sched_getaffinity(0))
    each = max(1, len(processors) // ranks)
    os.sched_setaffinity(0, processors[rank * each:(rank + 1) * each] or processors)


def main() -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Libraries such as NCCL print to standard output, so redirect it to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--device", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rendezvous", default="")
    arguments = parser.parse_args()
    take_processors(arguments.rank, arguments.ranks)
    try:
        begin = time.perf_counter()
        place = Place(arguments.device, arguments.rank, arguments.ranks, arguments.rendezvous)
        workload = WORKLOADS[arguments.workload](place)
        finish()
        ready = {"ready_s": round(time.perf_counter() - begin, 2), "devices": torch.cuda.device_count(),
                 "name": torch.cuda.get_device_name(place.card), "torch": torch.__version__}
        print(json.dumps(ready), file=answers, flush=True)
        serve(workload, answers)
        place.leave()
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:600]}), file=answers, flush=True)
        # Destructors of a broken communicator may wait for the other process indefinitely.
        os._exit(1)


if __name__ == "__main__":
    main()
