"""Measures how another process's way of zeroing card memory delays decode loops; writes one JSON file.

Usage: zeroing.py --json FILE [--seconds N]. Four decode loops run as clients of MPS, then two without MPS, and then
one. Meanwhile, another process without MPS zeroes a piece of memory 40 times per second, as a card's owner does for new
chunks: with the driver's memset, with a copy from zeroed card memory, with a copy from zeroed pinned host memory, or it
only creates, maps and unmaps memory. Two ways zero pinned host memory: with the driver's memset, and with a copy between host memory.
"""

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from ctypes import c_size_t, c_ubyte, c_uint64, c_void_p
from pathlib import Path

from driver import Driver
from harness import Build, Process, Rig, conditions, find_driver
from together import ANSWER_S, START_S, mps_server

RATE_PER_S = 40
MIB = 1 << 20
WAYS = ("memset", "card copy", "host copy", "mapping only", "memset of host", "copy in host")
SIZES_MIB = (2, 16)


class Zeroer:
    """Zeroes a piece of card memory in one way."""

    def __init__(self, way: str, size: int):
        self._driver, self._way, self._size = Driver(), way, size
        self._driver.make_context()
        self._stream = self._driver.stream()
        self._piece, self._zeros = self._driver.allocate(size), self._driver.allocate(size)
        self._driver.call("cuMemsetD8_v2", c_uint64(self._zeros), c_ubyte(0), c_size_t(size))
        self._host, self._host_piece = self._pinned(), self._pinned()
        self._range = self._driver.reserve(size)

    def _pinned(self) -> int:
        address = self._driver.reserve(self._size)
        self._driver.map(address, self._size, self._driver.create_host(self._size))
        self._driver.call("cuMemsetD8_v2", c_uint64(address), c_ubyte(0), c_size_t(self._size))
        return address

    def step(self) -> float:
        """Zeroes the piece, and returns the time in ms."""
        begin = time.perf_counter()
        call, size, stream = self._driver.call, c_size_t(self._size), c_void_p(self._stream)
        if self._way == "memset":
            call("cuMemsetD8Async", c_uint64(self._piece), c_ubyte(0), size, stream)
        elif self._way == "card copy":
            call("cuMemcpyDtoDAsync_v2", c_uint64(self._piece), c_uint64(self._zeros), size, stream)
        elif self._way == "host copy":
            call("cuMemcpyAsync", c_uint64(self._piece), c_uint64(self._host), size, stream)
        elif self._way == "memset of host":
            call("cuMemsetD8Async", c_uint64(self._host_piece), c_ubyte(0), size, stream)
        elif self._way == "copy in host":
            call("cuMemcpyAsync", c_uint64(self._host_piece), c_uint64(self._host), size, stream)
        else:
            handle = self._driver.create_compressible(self._size)
            self._driver.map(self._range, self._size, handle)
            call("cuMemUnmap", c_uint64(self._range), size)
            self._driver.release(handle)
        call("cuStreamSynchronize", stream)
        return (time.perf_counter() - begin) * 1e3


def zero_repeatedly(way: str, size: int) -> None:
    """Zeroes for the number of seconds that a line of standard input contains, and prints the times."""
    zeroer, times = Zeroer(way, size), []
    print("ready", flush=True)
    stop = time.monotonic() + float(sys.stdin.readline())
    while time.monotonic() < stop:
        times.append(zeroer.step())
        time.sleep(1 / RATE_PER_S)
    times.sort()
    pick = lambda part: round(times[min(len(times) - 1, int(len(times) * part))], 3)
    print(json.dumps({"count": len(times), "p50_ms": pick(0.5), "p99_ms": pick(0.99)}), flush=True)


def measure(rig: Rig, loops: dict[str, Process], way: str | None, size_mib: int, seconds: float) -> dict:
    """Returns the loops' token times while another process zeroes memory, and that process's times."""
    child = None
    if way is not None:
        child = rig.python(None, "zeroing.py", "--way", way, "--size", size_mib * MIB)
        child.line(START_S)
    for process in loops.values():
        process.say("begin")
    time.sleep(0.2)
    if child:
        child.say(str(seconds - 0.4))
    time.sleep(seconds - 0.2)
    for process in loops.values():
        process.say("end")
    tokens = [json.loads(process.line(ANSWER_S)) for process in loops.values()]
    zeroed = json.loads(child.line(ANSWER_S)) if child else None
    if child:
        child.end(timeout_s=20)
    return {"way": way, "mib": size_mib, "zeroing": zeroed,
            "tokens_per_s": round(sum(one["tokens"] / one["seconds"] for one in tokens), 1),
            "p50_ms": [one["gap_p50_ms"] for one in tokens], "p99_ms": [one["gap_p99_ms"] for one in tokens],
            "longest_ms": [one["gap_longest_ms"] for one in tokens]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way")
    parser.add_argument("--size", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--seconds", type=float, default=2.5, help="duration of each measurement")
    arguments = parser.parse_args()
    if arguments.way:
        return zero_repeatedly(arguments.way, arguments.size)
    report = {**conditions(arguments.commit), "rows": []}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        variables = stack.enter_context(mps_server(scratch / "mps"))
        rig = Rig(Build("none", scratch), find_driver(), scratch)
        stack.callback(rig.end)
        mps = {f"mps{number}": rig.python(None, "decode.py", variables=variables) for number in range(4)}
        plain = {f"hw{number}": rig.python(None, "decode.py") for number in range(2)}
        for process in (mps | plain).values():
            process.line(START_S)
        for name, loops in (("four MPS clients", mps), ("two programs without MPS", plain),
                            ("one program without MPS", dict([*plain.items()][:1]))):
            for size in SIZES_MIB:
                for way in ((None, *WAYS) if size == SIZES_MIB[0] else (*WAYS[:3], *WAYS[4:])):
                    row = {"programs": name, **measure(rig, loops, way, size, arguments.seconds)}
                    report["rows"].append(row)
                    print(json.dumps(row), flush=True)
                    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        for process in (mps | plain).values():
            process.close_input()
        for process in (mps | plain).values():
            process.end(timeout_s=10)


if __name__ == "__main__":
    main()
