"""A language model that decodes token by token: the tenant that `neighbours.py` measures.

The model is a transformer of about 950 million parameters in bf16 with random weights. It decodes with batch size 1,
and each token is one CUDA graph. After `SEQUENCE_TOKENS` tokens it restarts the same sequence, so every sequence
must have the same tokens as the first. Meanwhile, a thread allocates `PROBE_BYTES` every `PROBE_INTERVAL_S`.

Standard input controls it: `begin` starts a measurement, `end` ends it and prints it as one line of JSON, and the end
of standard input ends the program. `begin MS` decodes at most one token each MS milliseconds; a gap is then the time
from the start of a token to its end.
"""

import hashlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from driver import CudaError, Driver

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

LAYERS, WIDTH, HEADS, INNER, VOCABULARY = 16, 2048, 16, 5632, 32000
SEQUENCE_TOKENS = 256
FIRST_TOKEN = 1
PROBE_BYTES = 8 << 20
PROBE_INTERVAL_S = 0.1


@dataclass
class Answers:
    """Latencies of the probe's calls: allocations, and queries of the free memory."""

    allocations_ms: list[float] = field(default_factory=list)
    questions_ms: list[float] = field(default_factory=list)
    refused: int = 0
    # Time since the start of the pending call.
    pending_ms: float = 0.0


@dataclass
class Measurement:
    """Results between `begin` and `end`."""

    seconds: float
    tokens: int
    gap_p50_ms: float
    gap_p99_ms: float
    gap_longest_ms: float
    sequences: int
    wrong_sequences: int
    allocation_p50_ms: float
    answer_longest_ms: float
    allocations: int
    refused: int


class Probe:
    """Allocates memory in a separate thread."""

    def __init__(self, driver: Driver, context: int):
        self._driver, self._context = driver, context
        self._answers: Answers | None = None
        self._since: float | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self) -> None:
        with self._lock:
            self._answers = Answers()

    def end(self) -> Answers:
        with self._lock:
            answers, self._answers = self._answers, None
            if self._since is not None:
                answers.pending_ms = (time.perf_counter() - self._since) * 1e3
        return answers

    def _timed(self, answers: Answers, times_ms: list[float], call: Callable[[], object]) -> object:
        with self._lock:
            self._since = begin = time.perf_counter()
        try:
            return call()
        except CudaError:
            answers.refused += 1
            return None
        finally:
            with self._lock:
                self._since = None
            times_ms.append((time.perf_counter() - begin) * 1e3)

    def _run(self) -> None:
        self._driver.enter_context(self._context)
        held: list[object] = []
        while True:
            time.sleep(PROBE_INTERVAL_S)
            answers = self._answers
            if answers is None:
                while held:
                    self._driver.free(held.pop())
                continue
            self._timed(answers, answers.questions_ms, self._driver.memory)
            address = self._timed(answers, answers.allocations_ms, lambda: self._driver.allocate(PROBE_BYTES))
            if address is not None:
                held.append(address)


class TorchDecoder:
    """The model in PyTorch."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.manual_seed(0)
        device, dtype = torch.device("cuda"), torch.bfloat16

        def weight(rows: int, columns: int):
            return torch.empty(rows, columns, device=device, dtype=dtype).normal_(std=columns**-0.5)

        self._embedding, self._output = weight(VOCABULARY, WIDTH), weight(VOCABULARY, WIDTH)
        self._layers = [(weight(3 * WIDTH, WIDTH), weight(WIDTH, WIDTH), weight(2 * INNER, WIDTH), weight(WIDTH, INNER))
                        for _ in range(LAYERS)]
        weights = [self._embedding, self._output, *(matrix for layer in self._layers for matrix in layer)]
        self.parameters = sum(matrix.numel() for matrix in weights)
        shape = (1, HEADS, SEQUENCE_TOKENS, WIDTH // HEADS)
        self._caches = [(torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype))
                        for _ in range(LAYERS)]
        self._token = torch.full((1,), FIRST_TOKEN, device=device, dtype=torch.int64)
        self._position = torch.zeros(1, device=device, dtype=torch.int64)
        self._positions = torch.arange(SEQUENCE_TOKENS, device=device)
        half = WIDTH // HEADS // 2
        angles = self._positions[:, None] / 10000 ** (torch.arange(half, device=device) / half)
        self._cosines, self._sines = angles.cos().to(dtype), angles.sin().to(dtype)
        self._on_host = torch.zeros(1, dtype=torch.int64).pin_memory()
        self._graph = self._capture()
        self.restart()

    def _rotate(self, rows, cosine, sine):
        first, second = rows.chunk(2, dim=-1)
        return self._torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)

    def _step(self) -> None:
        functional = self._torch.nn.functional
        state = self._embedding[self._token]
        cosine, sine = self._cosines[self._position], self._sines[self._position]
        visible = (self._positions <= self._position)[None, None, None, :]
        for (attention, merge, widen, narrow), (keys, values) in zip(self._layers, self._caches):
            normed = functional.rms_norm(state, (WIDTH,))
            heads = functional.linear(normed, attention).view(3, HEADS, 1, WIDTH // HEADS)
            query, key = self._rotate(heads[0], cosine, sine), self._rotate(heads[1], cosine, sine)
            keys.index_copy_(2, self._position, key[None])
            values.index_copy_(2, self._position, heads[2][None])
            attended = functional.scaled_dot_product_attention(query[None], keys, values, attn_mask=visible)
            state = state + functional.linear(attended.reshape(1, WIDTH), merge)
            gate, up = functional.linear(functional.rms_norm(state, (WIDTH,)), widen).chunk(2, dim=-1)
            state = state + functional.linear(functional.silu(gate) * up, narrow)
        logits = functional.linear(functional.rms_norm(state, (WIDTH,)), self._output)
        self._token.copy_(logits.argmax(dim=-1))
        self._position.add_(1)
        self._on_host.copy_(self._token, non_blocking=True)

    def _capture(self):
        torch = self._torch
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            self._step()
        return graph

    def restart(self) -> None:
        """Returns to the first token of the sequence."""
        self._token.fill_(FIRST_TOKEN)
        self._position.zero_()

    def decode(self) -> int:
        """Decodes one token."""
        self._graph.replay()
        self._torch.cuda.current_stream().synchronize()
        return int(self._on_host)


def quantile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else 0.0


def checksum(tokens: list[int]) -> str:
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:16]


class Loop:
    """Decodes sequences, and compares each of them with the first."""

    def __init__(self, decoder, probe: Probe):
        self._decoder, self._probe = decoder, probe
        self._tokens: list[int] = []
        self.expected = self._sequence()

    def _sequence(self) -> str:
        self._decoder.restart()
        return checksum([self._decoder.decode() for _ in range(SEQUENCE_TOKENS)])

    def measure(self, commands: "queue.Queue[str | None]", pace_s: float = 0) -> Measurement:
        """Decodes until the next command, at most one token every `pace_s` seconds."""
        tokens, gaps, sequences, wrong = [], [], 0, 0
        self._probe.begin()
        # Include the first call, which waits for a turn.
        begin = last = due = time.perf_counter()
        self._decoder.restart()
        while commands.empty():
            if pace_s:
                time.sleep(max(0, due - time.perf_counter()))
                last = time.perf_counter()
                due = max(due, last - pace_s) + pace_s
            tokens.append(self._decoder.decode())
            now = time.perf_counter()
            gaps.append((now - last) * 1e3)
            last = now
            if len(tokens) == SEQUENCE_TOKENS:
                sequences += 1
                wrong += checksum(tokens) != self.expected
                tokens.clear()
                self._decoder.restart()
        seconds = time.perf_counter() - begin
        answers = self._probe.end()
        gaps.sort()
        allocations = sorted(answers.allocations_ms)
        longest = max([answers.pending_ms, *allocations, *answers.questions_ms])
        return Measurement(
            seconds=round(seconds, 4), tokens=len(gaps), gap_p50_ms=round(quantile(gaps, 0.5), 3),
            gap_p99_ms=round(quantile(gaps, 0.99), 3), gap_longest_ms=round(gaps[-1], 3) if gaps else seconds * 1e3,
            sequences=sequences, wrong_sequences=wrong, allocation_p50_ms=round(quantile(allocations, 0.5), 3),
            answer_longest_ms=round(longest, 3), allocations=len(allocations), refused=answers.refused)


def read_commands() -> "queue.Queue[str | None]":
    commands: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(line.strip())
        commands.put(None)

    threading.Thread(target=read, daemon=True).start()
    return commands


def serve(decoder) -> None:
    commands = read_commands()
    driver = Driver()
    loop = Loop(decoder, Probe(driver, driver.current_context()))
    print(json.dumps({"parameters": decoder.parameters, "checksum": loop.expected}), flush=True)
    while (command := commands.get()) is not None:
        word, *pace_ms = command.split()
        if word == "begin":
            print(json.dumps(asdict(loop.measure(commands, float(pace_ms[0]) / 1e3 if pace_ms else 0))), flush=True)


if __name__ == "__main__":
    serve(TorchDecoder())
