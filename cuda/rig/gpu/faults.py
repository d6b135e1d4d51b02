"""Measures the effect of one member's faults on its share group, on another group and on a tenant without a group.

Usage: faults.py --build FOLDER --json FILE [--rounds N] [--seconds N] [--only CASES] [--without-library]. FOLDER has
libcuda.so (ours) and cuda-owner. Each case has an owner with an MPS server for each of two groups. Four *watchers* run
short kernels and check their results: two members of the group `one`, a member of the group `two`, and a tenant without
a group. A fifth program, also in the group `one`, works and then has the fault. At the end, a further program of that
group starts.

With `--without-library`, the groups are two MPS servers without an owner. The endless kernel is then ended by a kill of
its program, as the owner does at the limit. The build is not used.
"""

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from driver import CudaError, Driver
from harness import Build, Gone, Owner, OwnerSettings, Process, Rig, conditions, find_driver, parse_arguments
from together import CONTROL, mps_server, quit_server

# TIMEOUT: a program that uses the driver's API alone starts within seconds.
START_S = 40
# TIMEOUT: a watcher whose gate stays closed does not answer `end`; its last report stands.
ANSWER_S = 10
BEFORE_S, AFTER_S = 1.5, 1.5
LONGEST_CASE_S = 60
MAX_RUN_MS = 2000
TENANT_MIB = 2048
KERNEL_US, KERNEL_BLOCKS = 1000, 8
ENDLESS_US = 600_000_000
# An address that no program has.
BAD_ADDRESS = 16
GROUPS = ("one", "two")
FAULTY = "one-faulty"
WATCHERS = ("one-first", "one-second", "two-first", "turn-first")
MIB = 1 << 20


class Work:
    """Short kernels that add to a word."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.driver.make_context()
        self.kernel, self.stream = self.driver.kernel(), self.driver.stream()
        self.word = self.driver.allocate(4096)
        self.first, self.kernels = self.driver.read_word(self.word), 0

    def run(self) -> bool:
        """Runs a kernel. Returns true if the word has the right value."""
        self.driver.spin(self.kernel, KERNEL_US, self.word, self.stream, KERNEL_BLOCKS)
        self.kernels += 1
        return self.driver.read_word(self.word) == self.first + self.kernels * KERNEL_US


def watch() -> None:
    """Runs kernels, and prints a line for each line of standard input: the kernels since the last one."""
    work, lock = Work(), threading.Lock()
    state = {"kernels": 0, "longest_ms": 0.0, "wrong": 0, "error": None}
    last = time.monotonic()

    def answer() -> None:
        nonlocal last
        for _ in sys.stdin:
            with lock:
                waits = (time.monotonic() - last) * 1e3
                print(json.dumps(state | {"waits_ms": round(waits, 1)}), flush=True)
                state.update(kernels=0, longest_ms=0.0, wrong=0)
        os._exit(0)

    print("ready", flush=True)
    threading.Thread(target=answer, daemon=True).start()
    while True:
        try:
            is_right = work.run()
        except CudaError as error:
            with lock:
                state["error"] = str(error)
            threading.Event().wait()
        with lock:
            now = time.monotonic()
            state["longest_ms"] = round(max(state["longest_ms"], (now - last) * 1e3), 1)
            state["kernels"] += 1
            state["wrong"] += not is_right
            last = now


def misbehave(fault: str) -> None:
    """Works until a line comes, and then has a fault. Prints how it ended."""
    work, commands = Work(), []
    threading.Thread(target=lambda: commands.append(sys.stdin.readline()), daemon=True).start()
    print("ready", flush=True)
    while not commands:
        work.run()
    report: dict = {}
    try:
        if fault == "illegal":
            work.driver.spin(work.kernel, KERNEL_US, BAD_ADDRESS, work.stream)
            work.driver.read_word(work.word)
        elif fault == "endless":
            work.driver.spin(work.kernel, ENDLESS_US, work.word, work.stream)
            work.driver.read_word(work.word)
        elif fault == "memory":
            while True:
                work.driver.allocate(64 * MIB)
                report["mib"] = report.get("mib", 0) + 64
        else:
            while True:
                work.run()
    except CudaError as error:
        report["error"] = str(error)
    print(json.dumps(report), flush=True)
    threading.Event().wait()


@dataclass(frozen=True)
class Case:
    """A fault: how the program has it, and for how long the watchers are measured."""

    name: str
    program: str
    seconds: float
    # Signals to the program, with the time after the beginning.
    signals: tuple[tuple[float, signal.Signals], ...] = ()


CASES = (
    Case("no fault", "work", 2),
    Case("illegal access", "illegal", 3),
    Case("endless kernel", "endless", 5),
    Case("out of memory", "memory", 3),
    Case("kill -9", "work", 3, ((0.2, signal.SIGKILL),)),
    Case("SIGSTOP for 2 s", "work", 4, ((0.2, signal.SIGSTOP), (2.2, signal.SIGCONT))),
)


class Session:
    """An owner with two groups, the watchers and the program with the fault."""

    def __init__(self, rig: Rig, folder: Path, case: Case, is_served: bool, stack: ExitStack):
        self._rig, self._folder = rig, folder
        self.owner = self._serve(stack) if is_served else None
        if not is_served:
            for group in GROUPS:
                stack.enter_context(mps_server(folder / group))
            time.sleep(1)
        self.watchers = {name: self.start(name, "watch") for name in WATCHERS}
        self.faulty = self.start(FAULTY, case.program)
        for process in (*self.watchers.values(), self.faulty):
            process.line(START_S)

    def _serve(self, stack: ExitStack) -> Owner:
        rig, folder = self._rig, self._folder
        words = [f"{name}:{TENANT_MIB}:100:normal{suffix(name)}" for name in (*WATCHERS, FAULTY, "one-later")]
        more = ("--mps-control", CONTROL, "--mps-folder", str(folder), "--max-run-ms", str(MAX_RUN_MS))
        for group in GROUPS:
            stack.callback(quit_server, folder / group / "pipes", folder / group / "log")
        owner = Owner(rig, OwnerSettings(TENANT_MIB * len(words), 1024, 2, tuple(words), more))
        stack.callback(lambda: owner.process.end(timeout_s=20))
        # TIMEOUT: the daemons start within seconds.
        until = time.monotonic() + 30
        while time.monotonic() < until and any(not (folder / group / "pipes" / "control").exists() for group in GROUPS):
            time.sleep(0.05)
        time.sleep(0.5)
        return owner

    def start(self, tenant: str, program: str) -> Process:
        group = tenant.split("-")[0]
        variables = {"CUDA_MPS_PIPE_DIRECTORY": str(self._folder / group / "pipes")} if group in GROUPS else None
        return self._rig.python(tenant if self.owner else None, "faults.py", "--program", program, variables=variables)

    def reports(self, seconds: float) -> dict[str, dict]:
        """Returns each watcher's kernels since the last call, which was `seconds` ago."""
        found = {}
        for name, process in self.watchers.items():
            try:
                process.say("report")
                report = json.loads(process.line(ANSWER_S))
            except Gone as error:
                found[name] = {"fate": str(error)}
                continue
            found[name] = report | {"per_s": round(report["kernels"] / seconds, 1)}
        return found

    def joined(self) -> dict[str, bool]:
        """Returns for each member of a group whether it uses the card together with the others."""
        tenants = self.owner.accounts()["tenants"] if self.owner else {}
        return {name: bool((tenants[name]["group"] or {}).get("joined")) for name in tenants if tenants[name]["group"]}

    def end_failed(self, reports: dict[str, dict]) -> None:
        """Ends the program with the fault, and the watchers that failed."""
        self.faulty.kill()
        for name, process in self.watchers.items():
            if reports[name].get("error") or "fate" in reports[name]:
                process.kill()

    def later(self) -> dict:
        """Starts a further program of the group, and returns whether it works."""
        begin = time.monotonic()
        process = self.start("one-later", "watch")
        try:
            process.line(START_S)
            time.sleep(0.5)
            process.say("report")
            report = json.loads(process.line(ANSWER_S))
        except Gone as error:
            return {"fate": str(error)}
        return {"works": report["error"] is None and report["kernels"] > 0, "error": report["error"],
                "wrong": report["wrong"], "seconds": round(time.monotonic() - begin, 2)}


def suffix(tenant: str) -> str:
    group = tenant.split("-")[0]
    return f":{group}" if group in GROUPS else ""


def measure(case: Case, rig: Rig, folder: Path, is_served: bool) -> dict:
    with ExitStack() as stack:
        stack.callback(rig.end)
        session = Session(rig, folder, case, is_served, stack)
        session.reports(1)
        time.sleep(BEFORE_S)
        result = {"before": session.reports(BEFORE_S), "joined": session.joined()}
        begin = time.monotonic()
        session.faulty.say("go")
        kills = ((MAX_RUN_MS / 1e3, signal.SIGKILL),) if case.program == "endless" and not is_served else ()
        for at, number in (*case.signals, *kills):
            time.sleep(max(0.0, begin + at - time.monotonic()))
            session.faulty.child.send_signal(number)
        time.sleep(max(0.0, begin + case.seconds - time.monotonic()))
        result["during"] = session.reports(time.monotonic() - begin)
        time.sleep(AFTER_S)
        result["after"] = session.reports(AFTER_S)
        result["program"] = fate(session.faulty)
        session.end_failed(result["after"])
        result["later"] = session.later()
        lines = session.owner.process.said().splitlines() if session.owner else []
        return result | {"owner": [line for line in lines if " WARN" in line or "ERROR" in line]}


def fate(process: Process) -> str:
    if not process.is_alive():
        return process.fate()
    try:
        return process.line(0.1)
    except Gone:
        return "runs"


def library_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--without-library", action="store_true", help="use two MPS servers without an owner")


def run(arguments: argparse.Namespace) -> None:
    is_served = not arguments.without_library
    report = {**conditions(arguments.commit), "library": is_served, "max_run_ms": MAX_RUN_MS, "rounds": []}
    end = time.monotonic() + arguments.seconds
    for _ in range(arguments.rounds):
        report["rounds"].append({})
        for case in CASES:
            if not re.search(arguments.only, case.name):
                continue
            if time.monotonic() + LONGEST_CASE_S > end:
                break
            with (tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as scratch,
                  tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder):
                Path(folder).chmod(0o755)
                rig = Rig(Build("this", arguments.build.resolve()), find_driver(), Path(scratch))
                try:
                    result = measure(case, rig, Path(folder), is_served)
                except (Gone, OSError, ValueError, KeyError) as error:
                    result = {"error": repr(error)}
            report["rounds"][-1][case.name] = result
            print(f"{case.name}: {json.dumps(result)}", flush=True)
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        watch() if sys.argv[2] == "watch" else misbehave(sys.argv[2])
    else:
        run(parse_arguments(__doc__.splitlines()[0], seconds=400, more=library_option))
