"""Measures the time that a card loses at each change between two programs; writes one JSON file.

Usage: gaps.py --build FOLDER --json FILE [--rounds N] [--only CASES]. FOLDER contains libcuda.so (ours) and cuda-owner.
`cargo xtask bench gaps` runs it. `python3` needs CuPy.

Two programs submit kernels that use all multiprocessors for a set time and record when they begin and end, by the
card's own clock. Each case runs twice: with the hardware's time slices, without the library, and as tenants that take
turns. The sorted times of both programs show the gaps between kernels of one program, the gaps at a change of programs,
and how much kernels of both overlap.
"""

import json
import re
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from decode import quantile, read_commands
from harness import Build, Gone, Owner, OwnerSettings, Rig, conditions, find_driver, parse_arguments

# TIMEOUT: CuPy starts in a few seconds.
START_S, ANSWER_S = 120, 60
MEASURED_S = 2
MAX_KERNELS = 1 << 18
CODE = r"""
extern "C" __global__ void spin(unsigned long long *times, long long index, unsigned long long ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < ns);
    if (threadIdx.x == 0) {
        atomicMin(times + 2 * index, begin);
        atomicMax(times + 2 * index + 1, now);
    }
}
"""
# Name, length of a kernel in us, kernels in flight, and kernels after which the program waits (0: never).
CASES = (("kernels of 50 us, 64 in flight", 50, 64, 0), ("kernels of 250 us, 8 in flight", 250, 8, 0),
         ("kernels of 1.4 ms, waiting for each", 1400, 1, 1), ("28 kernels of 50 us, then waiting", 50, 64, 28))


def client() -> None:
    """Runs the kernels of the cases that standard input names, and prints their times."""
    import cupy

    kernel = cupy.RawModule(code=CODE).get_function("spin")
    blocks = cupy.cuda.Device().attributes["MultiProcessorCount"] * 2
    times = cupy.empty(2 * MAX_KERNELS, dtype=cupy.uint64)
    commands = read_commands()
    print("ready", flush=True)
    while (command := commands.get()) is not None:
        us, ahead, group = (int(word) for word in command.split())
        times[0::2].fill((1 << 64) - 1)
        times[1::2].fill(0)
        cupy.cuda.Device().synchronize()
        events, count = [], 0
        while commands.empty() and count < MAX_KERNELS:
            kernel((blocks,), (1024,), (times, count, us * 1000))
            count += 1
            if group and count % group == 0:
                cupy.cuda.get_current_stream().synchronize()
                events.clear()
                continue
            event = cupy.cuda.Event(block=False, disable_timing=True)
            event.record()
            events.append(event)
            if len(events) >= ahead:
                events.pop(0).synchronize()
        cupy.cuda.Device().synchronize()
        commands.get()
        Path(sys.argv[2]).write_text(json.dumps([int(value) for value in times[:2 * count].get()]))
        print(count, flush=True)


def spread(values: list[float]) -> dict:
    """Returns the count, the sum in ms and quantiles in us of values in us."""
    values = sorted(values)
    quantiles = {f"p{round(part * 100)}_us": round(quantile(values, part), 1) for part in (0.1, 0.5, 0.9, 0.99)}
    return {"count": len(values), "sum_ms": round(sum(values) / 1e3, 2), **(quantiles if values else {})}


def gaps_of(first: list[int], second: list[int]) -> dict:
    """Returns the gaps between the kernels of two programs, in the time in which both ran."""
    kernels = [(begin, end, program) for program, times in enumerate((first, second))
               for begin, end in zip(times[0::2], times[1::2])]
    since = max(first[0], second[0])
    until = min(max(first[1::2]), max(second[1::2]))
    kernels = sorted(kernel for kernel in kernels if since <= kernel[0] and kernel[1] <= until)
    own, change, runs, busy_until, run = [], [], [], 0, 0
    for (begin, end, program), (next_begin, next_end, next_program) in zip(kernels, kernels[1:]):
        busy_until = max(busy_until, end)
        gap = (next_begin - busy_until) / 1e3
        (own if program == next_program else change).append(gap)
        run += 1
        if program != next_program:
            runs.append(run)
            run = 0
    return {"seconds": (until - since) / 1e9, "own": spread(own), "change": spread(change),
            "kernels_of_a_turn": round(statistics.mean(runs), 1) if runs else None,
            "kernels": [sum(kernel[2] == program for kernel in kernels) for program in (0, 1)]}


def main() -> None:
    arguments = parse_arguments(__doc__.splitlines()[0], seconds=300)
    report = {**conditions(arguments.commit), "rounds": []}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        rig = Rig(Build("this", arguments.build.resolve()), find_driver(), scratch)
        stack.callback(rig.end)
        owner = Owner(rig, OwnerSettings(4096, 1024, 2, ("a:1024:100", "b:1024:100")))
        stack.callback(lambda: owner.process.end(timeout_s=20))
        programs = {}
        for way, tenants in (("hardware time slices", (None, None)), ("turns", ("a", "b"))):
            programs[way] = [(scratch / f"{way}-{at}", tenant) for at, tenant in enumerate(tenants)]
            programs[way] = [(file, rig.python(tenant, "gaps.py", "client", file)) for file, tenant in programs[way]]
        for _, process in (one for pair in programs.values() for one in pair):
            process.line(START_S)
        for _ in range(arguments.rounds):
            report["rounds"].append({})
            for name, us, ahead, group in [case for case in CASES if re.search(arguments.only, case[0])]:
                for way, pair in programs.items():
                    for _, process in pair:
                        process.say(f"{us} {ahead} {group}")
                    time.sleep(MEASURED_S)
                    for _, process in pair:
                        process.say("end")
                    try:
                        for _, process in pair:
                            process.line(ANSWER_S)
                        result = gaps_of(*(json.loads(file.read_text()) for file, _ in pair))
                    except (Gone, IndexError) as error:
                        result = {"error": repr(error)}
                    report["rounds"][-1][f"{name}, {way}"] = result
                    print(f"{name}, {way}: {json.dumps(result)}", flush=True)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    client() if sys.argv[1:2] == ["client"] else main()
