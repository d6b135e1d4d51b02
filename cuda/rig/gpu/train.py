"""A training job that saturates the card: the neighbour of the decode loops in `together.py`.

Usage: train.py [LAYERS]. The model has `LAYERS` square layers of `WIDTH` in bf16 with momentum. A step multiplies
`BATCH` rows by each layer forwards and backwards, so its kernels use the whole card. The host runs two steps ahead.

Standard input controls it: `begin` starts a measurement, `end` ends it and prints it as one line of JSON, `steps N`
trains N steps from the initial state and prints their time and a checksum of the weights, and the end of standard input
ends the program.
"""

import hashlib
import json
import os
import sys
import time

from decode import quantile, read_commands

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

WIDTH, BATCH, LAYERS = 4096, 4096, 16
IN_FLIGHT = 2
CHECKED_STEPS = 3


class Job:
    """The model, its optimizer and its data."""

    def __init__(self, layers: int):
        import torch

        self._torch = torch
        torch.manual_seed(0)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self._first = [torch.empty(WIDTH, WIDTH, **options).normal_(std=0.3 * WIDTH**-0.5) for _ in range(2)]
        self._weights = [torch.empty(WIDTH, WIDTH, **options).requires_grad_() for _ in range(layers)]
        self._input, self._target = (torch.randn(BATCH, WIDTH, **options) for _ in range(2))
        self.parameters = sum(weight.numel() for weight in self._weights)
        self.restart()

    def restart(self) -> None:
        """Restores the state before the first step."""
        with self._torch.no_grad():
            for number, weight in enumerate(self._weights):
                weight.copy_(self._first[number % 2])
        self._optimizer = self._torch.optim.SGD(self._weights, lr=2e-4, momentum=0.9)

    def step(self):
        """Submits a step. Returns an event recorded after it."""
        functional = self._torch.nn.functional
        state = self._input
        for weight in self._weights:
            state = state + functional.gelu(functional.linear(state, weight))
        # Summing keeps the gradients large enough for bf16 weights.
        (functional.mse_loss(state, self._target, reduction="sum") / BATCH).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        event = self._torch.cuda.Event()
        event.record()
        return event

    def train(self, goes_on) -> list[float]:
        """Trains while `goes_on(steps)` returns true. Returns the completion times of the steps, in order."""
        events, ends, submitted = [], [], 0
        while goes_on(submitted):
            events.append(self.step())
            submitted += 1
            if len(events) > IN_FLIGHT:
                events.pop(0).synchronize()
                ends.append(time.perf_counter())
        for event in events:
            event.synchronize()
            ends.append(time.perf_counter())
        return ends

    def checksum(self) -> str:
        digest = hashlib.sha256()
        for weight in self._weights:
            digest.update(weight.detach().view(self._torch.int16).cpu().numpy().tobytes())
        return digest.hexdigest()[:16]


def measured(job: Job, goes_on) -> dict:
    begin = time.perf_counter()
    ends = job.train(goes_on)
    gaps = sorted((end - before) * 1e3 for before, end in zip([begin, *ends], ends))
    return {"seconds": round((ends[-1] if ends else time.perf_counter()) - begin, 4), "steps": len(ends),
            "step_p50_ms": round(quantile(gaps, 0.5), 3), "step_longest_ms": round(gaps[-1], 3) if gaps else 0.0}


def serve(job: Job) -> None:
    commands = read_commands()
    job.train(lambda steps: steps < CHECKED_STEPS)
    print(json.dumps({"parameters": job.parameters, "checksum": job.checksum()}), flush=True)
    while (command := commands.get()) is not None:
        word, *count = command.split()
        if word == "begin":
            print(json.dumps(measured(job, lambda _: commands.empty())), flush=True)
        elif word == "steps":
            job.restart()
            result = measured(job, lambda steps, most=int(count[0]): steps < most)
            print(json.dumps(result | {"checksum": job.checksum()}), flush=True)


if __name__ == "__main__":
    serve(Job(int(sys.argv[1]) if len(sys.argv) > 1 else LAYERS))
