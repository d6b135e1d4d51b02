"""Jobs for the benchmark. Each prepares, reports that it is ready, and begins at the time that it reads from a line.

Usage: jobs.py loop SIZE MANY SECONDS | alone SECONDS SIZE:MANY... | fill GIB ROUNDS PAUSE | periodic SECONDS |
       spin SECONDS FILE | idle SECONDS | watch SECONDS
"""

import hashlib
import json
import sys
import time

import torch

KIND, ARGS = sys.argv[1], sys.argv[2:]


def ready():
    torch.cuda.synchronize()
    print("ready", flush=True)
    begin = float(sys.stdin.readline())
    while time.time() < begin:
        time.sleep(0.0005)
    return begin


def bursts(n, many):
    a, b = torch.randn(n, n, device="cuda"), torch.randn(n, n, device="cuda")
    c = torch.empty_like(a)

    def burst():
        for _ in range(many):
            torch.matmul(a, b, out=c)

    for _ in range(3):
        burst()
    torch.cuda.synchronize()
    return burst


def count(burst, end):
    """Runs bursts until `end`, two in flight. Returns their number, and the longest gap between completions."""
    events, done, longest, last = [], 0, 0, time.time()
    while time.time() < end:
        burst()
        event = torch.cuda.Event()
        event.record()
        events.append(event)
        if len(events) > 2:
            events.pop(0).synchronize()
            now = time.time()
            done, longest, last = done + 1, max(longest, now - last), now
    torch.cuda.synchronize()
    return done, longest


def loop(n, many, seconds):
    burst = bursts(int(n), int(many))
    begin = ready()
    late = time.time() - begin
    done, longest = count(burst, begin + float(seconds))
    return {"count": done, "late_s": late, "longest_gap_s": longest}


def alone(seconds, *sizes):
    counts = {}
    works = {size: bursts(*map(int, size.split(":"))) for size in sizes}
    ready()
    for size, burst in works.items():
        counts[size] = count(burst, time.time() + float(seconds))[0] / float(seconds)
    return {"per_s": counts}


def periodic(seconds):
    """Submits about 1 ms of work every 50 ms. Returns its latencies, also relative to a lone program."""
    burst = bursts(2048, 3)

    def timed():
        start = time.perf_counter()
        burst()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    own = sorted(timed() for _ in range(20))[10]
    begin = ready()
    took = []
    while time.time() < begin + float(seconds):
        took.append(timed())
        time.sleep(0.05)
    took.sort()
    p50, p99 = took[len(took) // 2], took[int(len(took) * 0.99)]
    return {"count": len(took), "own_ms": own, "p50_ms": p50, "p99_ms": p99, "most_ms": took[-1],
            "wait_p50_ms": p50 - own, "wait_p99_ms": p99 - own}


SPIN = r"""
extern "C" __global__ void spin(unsigned long long *times, unsigned long long ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < ns);
    if (blockIdx.x == 0) {
        times[0] = begin;
        times[1] = now;
    }
}
"""


def spin(seconds, path):
    """Runs kernels of 0.25 ms on the whole card. Each records its start and end in time of the card's clock."""
    import cupy

    kernel = cupy.RawKernel(SPIN, "spin")
    most = int(float(seconds) * 8000)
    times = cupy.zeros((most, 2), dtype=cupy.uint64)
    kernel((132,), (32,), (times, cupy.uint64(250_000)))
    cupy.cuda.Device().synchronize()
    begin = ready()
    events, at = [], 0
    while time.time() < begin + float(seconds) and at + 4 <= most:
        for _ in range(4):
            kernel((132,), (32,), (times[at], cupy.uint64(250_000)))
            at += 1
        event = cupy.cuda.Event(disable_timing=True)
        event.record()
        events.append(event)
        if len(events) > 2:
            events.pop(0).synchronize()
    cupy.cuda.Device().synchronize()
    cupy.asnumpy(times[:at]).tofile(path)
    return {"count": at}


def idle(seconds):
    """Stays connected, and does nothing."""
    begin = ready()
    time.sleep(max(0, begin + float(seconds) - time.time()))
    return {}


def watch(seconds):
    """Works in bursts of about 1 ms. Returns their completion times after the start, in ms of the host's clock."""
    burst = bursts(2048, 3)
    begin = ready()
    ends = []
    while time.time() < begin + float(seconds):
        burst()
        torch.cuda.synchronize()
        ends.append(round((time.time() - begin) * 1e3, 2))
    return {"begin": begin, "ends_ms": ends}


def fill(gib, rounds, pause):
    """Fills memory, and repeatedly works on all of it."""
    begin = ready()
    parts = [torch.arange(64 << 20, dtype=torch.int32, device="cuda") for _ in range(int(float(gib) * 4))]
    torch.cuda.synchronize()
    filled = time.time()
    for r in range(int(rounds)):
        for p in parts:
            p.mul_(3).add_(r)
        torch.cuda.synchronize()
        if float(pause):
            time.sleep(float(pause))
    worked = time.time()
    h = hashlib.sha256()
    for p in parts:
        h.update(p.sum(dtype=torch.int64).cpu().numpy().tobytes() + p[::4097].cpu().numpy().tobytes())
    end = time.time()
    return {"begin": begin, "seconds": end - begin, "fill_s": filled - begin, "work_s": worked - filled, "hash": h.hexdigest()[:16],
            "end": end}


JOBS = {"loop": loop, "alone": alone, "fill": fill, "periodic": periodic, "spin": spin, "idle": idle, "watch": watch}
print(json.dumps(JOBS[KIND](*ARGS)), flush=True)
