"""Hostile CUDA programs next to which `neighbours.py` measures a decode loop. They use only the driver API.

Each program prints `ready`, acts after the line `go` until standard input ends, and prints a report as
one line of JSON.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from driver import CudaError, Driver

MIB = 1 << 20
KERNELS_IN_FLIGHT = 2
# Time after which a rejected request is repeated, in seconds.
RETRY_S = 0.05


class Work:
    """A stream of spinning kernels, with few in flight."""

    def __init__(self, driver: Driver, kernel_us: int):
        self._driver, self._us = driver, kernel_us
        self._kernel, self._stream = driver.kernel(), driver.stream()
        self._word = driver.allocate(4096)
        self._events: list[int] = []
        self.kernels = 0

    def launch(self) -> None:
        """Launches a kernel without waiting for it."""
        self._driver.spin(self._kernel, self._us, self._word, self._stream)
        self.kernels += 1

    def run(self) -> None:
        """Launches a kernel, and waits for an earlier one."""
        self.launch()
        event = self._driver.event() if len(self._events) < KERNELS_IN_FLIGHT else self._events.pop(0)
        self._driver.record(event, self._stream)
        self._events.append(event)
        if len(self._events) == KERNELS_IN_FLIGHT:
            self._driver.wait_for(self._events[0])


# A hostile program is a generator. It prepares until its first `yield`, and then yields its current report after each
# step.
Steps = Iterator[dict[str, object]]


def busy(driver: Driver, arguments: argparse.Namespace) -> Steps:
    """Keeps the card busy, like an honest program."""
    work = Work(driver, arguments.kernel_us)
    work.run()
    yield {}
    while True:
        work.run()
        yield {"kernels": work.kernels}


def capture(driver: Driver, arguments: argparse.Namespace) -> Steps:
    """Launches long kernels while it is alone, and then begins a capture that it never ends."""
    work = Work(driver, arguments.kernel_us)
    captured = driver.stream()
    for _ in range(arguments.kernels):
        work.launch()
    driver.begin_capture(captured)
    while True:
        yield {"kernels": work.kernels}
        time.sleep(RETRY_S)


def compressible(driver: Driver, arguments: argparse.Namespace) -> Steps:
    """Creates compressible memory, maps it and releases the handle. The mapping keeps the memory allocated."""
    step = 32 * MIB
    begin = driver.reserve(arguments.mib * MIB)
    mapped, refused, code = 0, 0, 0
    yield {}
    while True:
        if mapped < arguments.mib * MIB:
            try:
                handle = driver.create_compressible(step)
                driver.map(begin + mapped, step, handle)
                driver.release(handle)
                mapped += step
            except CudaError as error:
                refused, code = refused + 1, error.code
                time.sleep(RETRY_S)
        else:
            time.sleep(RETRY_S)
        yield {"mapped_mib": mapped // MIB, "refused": refused, "code": code}


def direct(driver: Driver, arguments: argparse.Namespace) -> Steps:
    """Connects through the library, and then calls NVIDIA's driver directly, to allocate memory and submit work."""
    nvidia = Driver(arguments.driver)
    work = Work(driver, arguments.kernel_us)
    work.run()
    yield {}
    work, held, code = Work(nvidia, arguments.kernel_us), 0, 0
    while True:
        if held < arguments.mib and not code:
            try:
                nvidia.allocate(512 * MIB)
                held += 512
            except CudaError as error:
                code = error.code
        work.run()
        yield {"mib_past_the_library": held, "kernels_past_the_library": work.kernels, "code": code}


def threads(driver: Driver, arguments: argparse.Namespace) -> Steps:
    """Allocates in many threads concurrently, like programs with per-thread allocators."""
    context, count = driver.current_context(), arguments.threads
    barrier = threading.Barrier(count + 1)
    longest, refused = [0.0] * count, [0] * count

    def work(number: int) -> None:
        driver.enter_context(context)
        while True:
            barrier.wait()
            begin = time.perf_counter()
            try:
                address = driver.allocate(8 * MIB)
            except CudaError:
                address = None
                refused[number] += 1
            longest[number] = max(longest[number], time.perf_counter() - begin)
            barrier.wait()
            if address is not None:
                driver.free(address)

    for number in range(count):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    rounds, begun = 0, 0.0
    yield {}
    while True:
        begun = time.perf_counter()
        barrier.wait()
        while barrier.n_waiting < count:
            pending = time.perf_counter() - begun
            yield {"rounds": rounds, "longest_ms": max(pending, *longest) * 1e3, "refused": sum(refused)}
            time.sleep(0.005)
        barrier.wait()
        rounds += 1


PROGRAMS: dict[str, Callable[[Driver, argparse.Namespace], Steps]] = {
    "busy": busy, "capture": capture, "compressible": compressible, "direct": direct, "threads": threads}


def serve(steps: Steps) -> None:
    latest = [next(steps)]
    print("ready", flush=True)
    sys.stdin.readline()

    def report_at_end() -> None:
        # Do not wait for the current step, because it may never return.
        sys.stdin.read()
        print(json.dumps(latest[0]), flush=True)
        os._exit(0)

    threading.Thread(target=report_at_end, daemon=True).start()
    try:
        for report in steps:
            latest[0] = report
    except CudaError as error:
        latest[0] = {**latest[0], "error": str(error)}
    threading.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--kernel-us", type=int, default=1000, help="length of a kernel in microseconds")
    parser.add_argument("--kernels", type=int, default=4, help="kernels of `capture`")
    parser.add_argument("--mib", type=int, default=8192, help="memory to take")
    parser.add_argument("--threads", type=int, default=96)
    parser.add_argument("--driver", help="path of NVIDIA's library, for `direct`")
    arguments = parser.parse_args()
    driver = Driver()
    driver.make_context()
    serve(PROGRAMS[arguments.program](driver, arguments))


if __name__ == "__main__":
    main()
