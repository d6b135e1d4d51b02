"""Measures decode loops that share a card in time and in space; writes one JSON file.

Usage: together.py --build FOLDER --json FILE [--rounds N] [--seconds N] [--only CASES]. FOLDER has libcuda.so (ours) and
cuda-owner. `cargo xtask bench together` runs it.

Each case starts the loops of `decode.py` anew and measures them at the same time: without the library with the
hardware's time slices, without the library as clients of NVIDIA's MPS, as tenants that take turns, and as the members
of one share group whose MPS server the owner of the card starts. Every loop checks its tokens.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness import Build, Gone, Owner, OwnerSettings, Process, Rig, conditions, find_driver, parse_arguments

CONTROL = shutil.which("nvidia-cuda-mps-control") or "/usr/bin/nvidia-cuda-mps-control"
# TIMEOUT: PyTorch starts in 10 s, four at once in 30 s.
START_S = 120
# TIMEOUT: only a loop that hangs does not answer within this time.
ANSWER_S = 30
MEASURED_S = 4
# Time that a case takes at most, with the start of its loops.
LONGEST_CASE_S = 45
MEMORY_MIB = 16384
GROUP = "decoders"


@dataclass(frozen=True)
class Case:
    """Loops at the same time, in one way."""

    name: str
    # "hardware", "mps", "turns" or "group".
    way: str
    weights: tuple[int, ...]


CASES = (
    Case("one, without the library", "hardware", (100,)),
    Case("one, as an MPS client", "mps", (100,)),
    Case("two, hardware time slices", "hardware", (100, 100)),
    Case("two, MPS", "mps", (100, 100)),
    Case("two, turns", "turns", (100, 100)),
    Case("two, one group", "group", (100, 100)),
    Case("two, one group, weights 3:1", "group", (300, 100)),
    Case("four, MPS", "mps", (100,) * 4),
    Case("four, one group", "group", (100,) * 4),
)


@contextmanager
def mps_server(folder: Path):
    """Runs NVIDIA's control daemon, and returns the environment of its clients."""
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipes"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in variables.values():
        Path(path).mkdir(parents=True)
    daemon = subprocess.Popen([CONTROL, "-f"], env=os.environ | variables, stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield {"CUDA_MPS_PIPE_DIRECTORY": variables["CUDA_MPS_PIPE_DIRECTORY"]}
    finally:
        subprocess.run([CONTROL], env=os.environ | variables, input="quit -t 5\n", text=True, timeout=20, check=False)
        daemon.kill()
        daemon.wait()


class Loops:
    """Decode loops that run at the same time."""

    def __init__(self, rig: Rig, tenants: list[str | None], variables: dict[str, str]):
        os.environ.update(variables)
        try:
            self._loops: list[Process] = [rig.python(tenant, "decode.py") for tenant in tenants]
        finally:
            for name in variables:
                del os.environ[name]
        self.checksums = {json.loads(loop.line(START_S))["checksum"] for loop in self._loops}

    def measure(self) -> list[dict]:
        for loop in self._loops:
            loop.say("begin")
        time.sleep(MEASURED_S)
        for loop in self._loops:
            loop.say("end")
        return [json.loads(loop.line(ANSWER_S)) for loop in self._loops]

    def end(self) -> None:
        for loop in self._loops:
            loop.end(timeout_s=10)


def without_library(rig: Rig, case: Case, variables: dict[str, str]) -> dict:
    loops = Loops(rig, [None] * len(case.weights), variables)
    try:
        return {"loops": loops.measure(), "checksums": sorted(loops.checksums)}
    finally:
        loops.end()


def with_owner(rig: Rig, case: Case, folder: Path) -> dict:
    """Measures tenants of an owner, with the owner's accounts of the measured time."""
    suffix = f":normal:{GROUP}" if case.way == "group" else ""
    names = [f"tenant{number}" for number in range(len(case.weights))]
    tenants = tuple(f"{name}:{MEMORY_MIB}:{weight}{suffix}" for name, weight in zip(names, case.weights))
    more = ("--mps-control", CONTROL, "--mps-folder", str(folder)) if case.way == "group" else ()
    owner = Owner(rig, OwnerSettings(MEMORY_MIB * len(names), 4096, 2, tenants, more))
    pipes = folder / GROUP / "pipes"
    try:
        variables = {}
        if case.way == "group":
            # TIMEOUT: the daemon starts within seconds.
            until = time.monotonic() + 30
            while not (pipes / "control").exists() and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(0.5)
            variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
        loops = Loops(rig, list(names), variables)
        try:
            before = owner.accounts()
            measured = loops.measure()
            after = owner.accounts()
        finally:
            loops.end()
        charged = {name: round((after["tenants"][name]["charged_ns"] - before["tenants"][name]["charged_ns"]) / 1e6)
                   for name in names}
        return {"loops": measured, "checksums": sorted(loops.checksums), "charged_ms": charged,
                "owner_says": owner.process.said()[-1500:]}
    finally:
        owner.process.end(timeout_s=20)


class Bench:
    """All cases in rounds."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path):
        self._rig = Rig(Build("this", arguments.build.resolve()), find_driver(), scratch)
        self._scratch, self._json, self._rounds = scratch, arguments.json, arguments.rounds
        self._only, self._end = arguments.only, time.monotonic() + arguments.seconds
        self.report = {**conditions(arguments.commit), "rounds": []}

    def _measure(self, case: Case) -> dict:
        # Paths of sockets are short.
        with tempfile.TemporaryDirectory(dir="/tmp") as name:
            folder = Path(name)
            folder.chmod(0o755)
            if case.way == "hardware":
                return without_library(self._rig, case, {})
            if case.way == "mps":
                with mps_server(folder) as variables:
                    return without_library(self._rig, case, variables)
            return with_owner(self._rig, case, folder)

    def run(self) -> None:
        try:
            for _ in range(self._rounds):
                self.report["rounds"].append({})
                for case in CASES:
                    if not re.search(self._only, case.name) or time.monotonic() + LONGEST_CASE_S > self._end:
                        continue
                    try:
                        result = self._measure(case)
                    except (Gone, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
                        result = {"error": repr(error)}
                    self.report["rounds"][-1][case.name] = result
                    self.report["summary"] = summary(self.report["rounds"])
                    self._json.write_text(json.dumps(self.report, indent=1) + "\n")
                    shown = result if "error" in result else self.report["summary"][case.name]
                    print(f"{case.name}: {json.dumps(shown)}", flush=True)
        finally:
            self._rig.end()


def rate(loop: dict) -> float:
    return loop["tokens"] / loop["seconds"]


def summary(rounds: list[dict]) -> dict:
    """Returns for each case the tokens per second of all loops, the longest of their p99, and each loop's share."""
    found: dict[str, dict] = {}
    for case in CASES:
        results = [one[case.name] for one in rounds if "loops" in one.get(case.name, {})]
        if not results:
            continue
        totals = [sum(map(rate, result["loops"])) for result in results]
        shares = [[round(rate(loop) / total, 4) for loop in result["loops"]] for result, total in zip(results, totals)]
        worst = [max(loop["gap_p99_ms"] for loop in result["loops"]) for result in results]
        found[case.name] = {
            "tokens_per_s": {"median": round(statistics.median(totals), 1), "least": round(min(totals), 1),
                             "most": round(max(totals), 1)},
            "p50_ms": round(statistics.median(loop["gap_p50_ms"] for result in results for loop in result["loops"]), 3),
            "p99_ms": {"median": statistics.median(worst), "least": min(worst), "most": max(worst)},
            "shares": shares,
            "wrong": sum(loop["wrong_sequences"] for result in results for loop in result["loops"])}
    return found


def main() -> None:
    arguments = parse_arguments(__doc__.splitlines()[0], seconds=580)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        Bench(arguments, Path(scratch)).run()


if __name__ == "__main__":
    main()
