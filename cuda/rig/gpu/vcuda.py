"""Runs programs of virtual machines on a real card over the loopback transport, and natively under the library.

Usage: vcuda.py --build FOLDER --json FILE [--rounds N] [--seconds N] [--only PART,..]. FOLDER contains libcuda.so
(ours), libcuda_guest.so, cuda-owner, cuda-worker and cuda-loopback. `cargo xtask bench vcuda` runs it.

Each part runs natively and remotely in turn, on the same processors, including the worker. Every run prints its times
and a digest of its results; the digests of both kinds must be equal.
"""

import argparse
import ctypes
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

import driver as api
from harness import find_driver

HERE = Path(__file__).resolve().parent
# Processors for a run: for the program alone, or for the program and its worker.
PROCESSORS = sorted(os.sched_getaffinity(0))[:4]
# Time limit for a part, in seconds.
PART_TIMEOUT_S = 150


def measured(count, call):
    """Returns the mean duration of `count` calls in ns."""
    begin = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - begin) / count


class Raw:
    """The driver API without the CUDA runtime."""

    def __init__(self):
        begin = time.perf_counter_ns()
        self.cuda = api.Driver()
        self.cuda.make_context()
        self.start_ns = time.perf_counter_ns() - begin
        self.kernel = self.cuda.kernel()
        self.stream = self.cuda.stream()
        self.word = self.cuda.allocate(4096)
        self.cuda.call("cuMemsetD8_v2", c_uint64(self.word), c_uint(0), c_size_t(4096))
        values = [c_uint64(0), c_uint64(self.word)]
        self.keep = values
        pointers = (c_void_p * 2)(*(ctypes.addressof(value) for value in values))
        self.arguments = [c_void_p(self.kernel), *(c_uint(n) for n in (1, 1, 1, 32, 1, 1, 0)), c_void_p(self.stream),
                          pointers, c_void_p()]
        self.launch_function = self.cuda._library.cuLaunchKernel

    def launch(self):
        if code := self.launch_function(*self.arguments):
            raise api.CudaError("cuLaunchKernel", code)

    def finish(self):
        self.cuda.call("cuStreamSynchronize", c_void_p(self.stream))

    def read(self, at, size):
        buffer = ctypes.create_string_buffer(size)
        self.cuda.call("cuMemcpyDtoH_v2", buffer, c_uint64(at), c_size_t(size))
        return buffer.raw


def digest(*parts):
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def start(_):
    """Measures the start of a program."""
    raw = Raw()
    return {"start": raw.start_ns}, "0"


def launches(scale):
    """Measures a loop of launches, with a wait at the end."""
    raw = Raw()
    count = 20_000 // scale
    for _ in range(200):
        raw.launch()
    raw.finish()

    def loop():
        for _ in range(count):
            raw.launch()
        raw.finish()

    return {"launch": measured(1, loop) / count}, digest(raw.read(raw.word, 8))


def waits(scale):
    """Measures a loop of launches, with a wait after each."""
    raw = Raw()

    def one():
        raw.launch()
        raw.finish()

    one()
    return {"launch_and_wait": measured(3000 // scale, one)}, digest(raw.read(raw.word, 8))


def churn(scale):
    """Measures alternating allocations and frees."""
    raw, sizes, count = Raw(), [1 << 14, 3 << 20, 64 << 20], 600 // scale
    live = [raw.cuda.allocate(sizes[n % 3]) for n in range(6)]

    def one():
        raw.cuda.free(live.pop(0))
        live.append(raw.cuda.allocate(sizes[len(live) % 3]))

    one()
    return {"free_and_allocate": measured(count, one)}, "0"


def copies(scale):
    """Measures copies between the card and pinned or pageable memory."""
    raw, size = Raw(), 64 << 20
    at = raw.cuda.allocate(size)
    pinned = c_void_p()
    raw.cuda.call("cuMemHostAlloc", ctypes.byref(pinned), c_size_t(size), c_uint(0))
    pattern = bytes(range(256)) * (size >> 8)
    pageable, back = ctypes.create_string_buffer(pattern, size), ctypes.create_string_buffer(size)
    ctypes.memmove(pinned, pageable, size)
    stream, times, parts = c_void_p(raw.stream), {}, []

    def timed(name, call):
        call()
        best = min(measured(1, call) for _ in range(max(2, 10 // scale)))
        times[name] = best

    def move(name, *arguments):
        raw.cuda.call(name, *arguments, c_size_t(size), stream)
        raw.finish()

    timed("pageable_to_card", lambda: move("cuMemcpyHtoDAsync_v2", c_uint64(at), pageable))
    timed("pageable_from_card", lambda: move("cuMemcpyDtoHAsync_v2", back, c_uint64(at)))
    parts.append(back.raw)
    timed("pinned_to_card", lambda: move("cuMemcpyHtoDAsync_v2", c_uint64(at), pinned))
    ctypes.memset(pinned, 0, size)
    timed("pinned_from_card", lambda: move("cuMemcpyDtoHAsync_v2", pinned, c_uint64(at)))
    parts.append(ctypes.string_at(pinned, size))
    small = ctypes.create_string_buffer(b"12345678", 8)
    times["8_bytes_to_card"] = measured(
        2000 // scale, lambda: raw.cuda.call("cuMemcpyHtoDAsync_v2", c_uint64(at), small, c_size_t(8), stream))
    raw.finish()
    times["8_bytes_from_card"] = measured(500 // scale, lambda: raw.read(at, 8))
    assert parts[0] == pattern and parts[1] == pattern, "copies changed the bytes"
    return times, digest(*parts)


class Copy2d(ctypes.Structure):
    """`CUDA_MEMCPY2D`."""

    _fields_ = [(side + name, kind) for side in ("from_", "to_") for name, kind in
                (("x", c_size_t), ("y", c_size_t), ("kind", c_uint), ("host", c_void_p), ("card", c_uint64),
                 ("array", c_void_p), ("pitch", c_size_t))] + [("width", c_size_t), ("height", c_size_t)]


def rectangles(scale):
    """Measures copies between rows of pageable memory and rows on the card."""
    raw, width, height, pitch = Raw(), 4000, 4096, 4096
    at = raw.cuda.allocate(pitch * height)
    pattern = bytes(range(256)) * (width * height >> 8)
    here, back = ctypes.create_string_buffer(pattern, width * height), ctypes.create_string_buffer(width * height)
    host, card = 1, 2
    to_card = Copy2d(from_kind=host, from_host=ctypes.addressof(here), from_pitch=width, to_kind=card, to_card=at,
                     to_pitch=pitch, width=width, height=height)
    from_card = Copy2d(from_kind=card, from_card=at, from_pitch=pitch, to_kind=host, to_host=ctypes.addressof(back),
                       to_pitch=width, width=width, height=height)
    small = Copy2d(from_kind=host, from_host=ctypes.addressof(here), from_pitch=width, to_kind=card, to_card=at,
                   to_pitch=pitch, width=100, height=8)

    def move(copy):
        raw.cuda.call("cuMemcpy2DAsync_v2", ctypes.byref(copy), c_void_p(raw.stream))
        raw.finish()

    times = {}
    for name, copy in (("rectangle_to_card", to_card), ("rectangle_from_card", from_card), ("small_rectangle", small)):
        move(copy)
        times[name] = min(measured(1, lambda copy=copy: move(copy)) for _ in range(max(2, 10 // scale)))
    assert back.raw == pattern, "copies changed the bytes"
    return times, digest(back.raw)


def questions(scale):
    """Measures a loop of launches, each preceded by the queries that PyTorch, CuPy and Triton make."""
    raw = Raw()
    count = 5000 // scale
    state, blocks, pointer, limit = c_int(), c_int(), c_uint64(), c_size_t()
    library = raw.cuda._library
    asked = [
        (library.cuStreamIsCapturing, (c_void_p(raw.stream), ctypes.byref(state))),
        (library.cuPointerGetAttribute, (ctypes.byref(pointer), c_int(3), c_uint64(raw.word))),
        (library.cuOccupancyMaxActiveBlocksPerMultiprocessor,
         (ctypes.byref(blocks), c_void_p(raw.kernel), c_int(128), c_size_t(0))),
        (library.cuCtxGetLimit, (ctypes.byref(limit), c_int(0))),
    ]

    def one():
        for function, arguments in asked:
            if code := function(*arguments):
                raise api.CudaError(function.__name__, code)
        raw.launch()

    one()
    raw.finish()

    def loop():
        for _ in range(count):
            one()
        raw.finish()

    time_each = measured(1, loop) / count
    assert pointer.value == raw.word, "another address"
    return {"launch_with_questions": time_each}, digest(raw.read(raw.word, 8))


def facts(scale):
    """Measures calls that the guest library answers itself."""
    raw = Raw()
    device, context = c_int(), c_void_p()
    get_device, get_current = raw.cuda._library.cuCtxGetDevice, raw.cuda._library.cuCtxGetCurrent
    count = 50_000 // scale
    return {"get_device": measured(count, lambda: get_device(ctypes.byref(device))),
            "get_current": measured(count, lambda: get_current(ctypes.byref(context)))}, "0"


def weights_digest(module):
    return digest(*(value.detach().cpu().numpy().tobytes() for value in module.state_dict().values()))


def torch_of():
    import torch
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    return torch


def torch_small(scale):
    """Runs many small operations, which are limited by the CPU."""
    torch = torch_of()
    x = torch.zeros(64, device="cuda")
    count = 20_000 // scale
    for _ in range(500):
        x.add_(1)
    torch.cuda.synchronize()

    def loop():
        for _ in range(count):
            x.add_(1)
        torch.cuda.synchronize()

    return {"small_operation": measured(1, loop) / count}, digest(x.cpu().numpy().tobytes())


def torch_train(scale):
    """Trains a small network."""
    torch = torch_of()
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(),
                                torch.nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data, labels = torch.randn(64, 256).cuda(), torch.randint(0, 10, (64,)).cuda()

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data), labels).backward()
        optimizer.step()

    for _ in range(20):
        step()
    torch.cuda.synchronize()
    count = 1000 // scale

    def loop():
        for _ in range(count):
            step()
        torch.cuda.synchronize()

    return {"training_step": measured(1, loop) / count}, weights_digest(model)


def torch_convolution(scale):
    """Trains a convolutional network, and reads its loss in each step."""
    torch = torch_of()
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3, stride=2),
                                torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64 * 14 * 14, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    data, labels = torch.randn(64, 3, 32, 32).cuda(), torch.randint(0, 10, (64,)).cuda()
    losses = []

    def step():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(data), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    for _ in range(10):
        step()
    return {"convolution_step": measured(300 // scale, step)}, digest(json.dumps(losses).encode(), weights_digest(model).encode())


def torch_decode(scale):
    """Runs a transformer's decoding loop, and reads each token."""
    torch = torch_of()
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 6).cuda().eval()
    head, table = torch.nn.Linear(256, 1000).cuda(), torch.nn.Embedding(1000, 256).cuda()
    tokens = []
    with torch.no_grad():
        def token():
            recent = torch.tensor([tokens[-16:] or [1]], device="cuda")
            tokens.append(int(head(model(table(recent))[:, -1]).argmax()))

        for _ in range(20):
            token()
        nanoseconds = measured(300 // scale, token)
    return {"token": nanoseconds}, digest(json.dumps(tokens).encode())


def torch_graph(scale):
    """Replays a graph."""
    torch = torch_of()
    x = torch.zeros(1024, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            x.add_(1).mul_(1.0001)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            x.add_(1).mul_(1.0001)
    count = 2000 // scale

    def loop():
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()

    loop()
    return {"graph_replay": measured(1, loop) / count}, digest(x.cpu().numpy().tobytes())


def torch_allocate(scale):
    """Allocates without PyTorch's cache."""
    torch = torch_of()

    def one():
        x = torch.ones(4 << 20, device="cuda")
        del x
        torch.cuda.empty_cache()

    one()
    return {"allocate_and_free": measured(200 // scale, one)}, "0"


PARTS = {part.__name__: part for part in (start, launches, waits, churn, copies, rectangles, questions, facts,
                                          torch_small, torch_train, torch_convolution, torch_decode, torch_graph,
                                          torch_allocate)}


class Bench:
    """The owner, `cuda-loopback`, and the environments of both kinds of run."""

    def __init__(self, build, real):
        self.build, self.real = Path(build).resolve(), real
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-mediator-vcuda-"))
        self.socket, self.loopback = self.folder / "owner", self.folder / "loopback"
        for name, library in (("shim", "libcuda.so"), ("guest", "libcuda_guest.so")):
            (self.folder / name).mkdir()
            for file in ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so"):
                (self.folder / name / file).symlink_to(self.build / library)
        self.children = []

    def environment(self, kind):
        env = {name: value for name, value in os.environ.items() if not name.startswith("GPU_MEDIATOR_CUDA")}
        env["LD_LIBRARY_PATH"] = f"{self.folder / kind}:" + env.get("LD_LIBRARY_PATH", "")
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        if kind == "shim":
            env.update(GPU_MEDIATOR_CUDA_DRIVER=str(self.real), GPU_MEDIATOR_CUDA_SOCKET=str(self.socket),
                       GPU_MEDIATOR_CUDA_TENANT="a", GPU_MEDIATOR_CUDA_LOG="1")
        else:
            env["GPU_MEDIATOR_CUDA_LOOPBACK"] = str(self.loopback)
        return env

    def child(self, name, command, env, pinned):
        log = open(self.folder / f"{name}.log", "w")
        before = (lambda: os.sched_setaffinity(0, PROCESSORS)) if pinned else None
        child = subprocess.Popen([str(word) for word in command], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 stderr=log, text=True, preexec_fn=before)
        line = child.stdout.readline()
        if "ready" not in line:
            sys.exit(f"{name} does not start: {line}{(self.folder / f'{name}.log').read_text()[-600:]}")
        self.children.append(child)
        return child

    def start(self, card_mib):
        owner = [self.build / "cuda-owner", "--driver", self.real, "serve", "--socket", self.socket, "--card-mib", card_mib,
                 "--host-mib", 4096, "--tenant", f"a:{card_mib}"]
        self.child("owner", owner, dict(os.environ), False)
        loopback = [self.build / "cuda-loopback", "--socket", self.loopback, "--worker", self.build / "cuda-worker",
                    "--library", self.folder / "shim/libcuda.so.1"]
        self.child("loopback", loopback, self.environment("shim"), True)

    def run(self, kind, part, scale):
        command = [sys.executable, __file__, "--work", part, "--scale", scale]
        try:
            done = subprocess.run([str(word) for word in command], env=self.environment(kind), capture_output=True, text=True,
                                  timeout=PART_TIMEOUT_S, preexec_fn=lambda: os.sched_setaffinity(0, PROCESSORS))
        except subprocess.TimeoutExpired:
            return {"error": f"longer than {PART_TIMEOUT_S} s"}
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            return {"error": f"exited with {done.returncode}: {done.stderr[-1500:]}"}
        return json.loads(lines[-1])

    def said(self):
        return {log.stem: log.read_text(errors="replace")[-3000:] for log in self.folder.glob("*.log")}

    def end(self):
        for child in reversed(self.children):
            child.kill()
            child.wait()


def summary(runs):
    """Compares the medians of both kinds of run."""
    good = {kind: [run for run in runs if run["kind"] == kind and "error" not in run] for kind in ("shim", "guest")}
    figures = {}
    for name in (good["shim"][0]["ns"] if good["shim"] else {}):
        native = statistics.median(run["ns"][name] for run in good["shim"])
        remote = [run["ns"][name] for run in good["guest"] if name in run["ns"]]
        if remote:
            figures[name] = {"native_ns": round(native), "remote_ns": round(statistics.median(remote)),
                             "ratio": round(statistics.median(remote) / native, 3)}
    digests = {run["digest"] for kind in good.values() for run in kind}
    return {"figures": figures, "equal": len(digests) == 1 if all(good.values()) else None,
            "errors": [run["error"] for run in runs if "error" in run][:3]}


def compare(arguments):
    bench = Bench(arguments.build, Path(arguments.driver) if arguments.driver else find_driver())
    end = time.time() + arguments.seconds
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    smi = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() if shutil.which(query[0]) else ""
    report = {"processors": PROCESSORS, "commit": arguments.commit, "started": time.time(), "smi": smi, "parts": {}}
    bench.start(arguments.card_mib)
    wanted = arguments.only.split(",") if arguments.only else list(PARTS)
    runs = {part: [] for part in wanted}
    try:
        for number in range(arguments.rounds):
            for part in wanted:
                for kind in ("shim", "guest") if number % 2 == 0 else ("guest", "shim"):
                    if time.time() > end:
                        continue
                    run = bench.run(kind, part, arguments.scale)
                    runs[part].append({"kind": kind, **run})
                report["parts"][part] = {**summary(runs[part]), "runs": runs[part]}
                report["logs"] = bench.said()
                Path(arguments.json).write_text(json.dumps(report, indent=1))
    finally:
        bench.end()
    ratios = []
    for part, found in report["parts"].items():
        for name, figure in found["figures"].items():
            ratios.append(figure["ratio"])
            print(f"{part:18} {name:22} native {figure['native_ns']:>12} ns  remote {figure['remote_ns']:>12} ns  "
                  f"x{figure['ratio']:.3f}  equal {found['equal']}")
        for error in found["errors"]:
            print(f"{part:18} failed: {error.strip().splitlines()[-1] if error.strip() else error}")
    if ratios:
        print(f"geometric mean of ratios: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build")
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--only", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--card-mib", type=int, default=32768)
    parser.add_argument("--driver", help="NVIDIA's library; found by itself if omitted")
    parser.add_argument("--work")
    parser.add_argument("--scale", type=int, default=1)
    arguments = parser.parse_args()
    if not arguments.work:
        return compare(arguments)
    nanoseconds, result = PARTS[arguments.work](arguments.scale)
    print(json.dumps({"ns": nanoseconds, "digest": result}))


if __name__ == "__main__":
    main()
