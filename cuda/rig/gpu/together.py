"""Measures decode loops and training jobs that share a card in time and in space; writes one JSON file.

Usage: together.py --build FOLDER --json FILE [--rounds N] [--seconds N] [--only CASES] [--card N]. FOLDER contains
libcuda.so (ours) and cuda-owner. `cargo xtask bench together` runs it.

All programs of the selected cases start together, and sleep until a case uses them: without the library with the
hardware's time slices, without the library as clients of NVIDIA's MPS, as tenants that take turns, as members of one
share group, and as members of two. A case changes the tenants' weights, guarantees and classes while they run. The
cases whose names begin with `loops` are independent of those that begin with `jobs`, so two runs with
different `--card` can take half of the cases each. `targets.py` contains the targets.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness import Build, Gone, Owner, OwnerSettings, Process, Rig, conditions, find_driver, parse_arguments
from targets import summarise, verdicts

CONTROL = shutil.which("nvidia-cuda-mps-control") or "/usr/bin/nvidia-cuda-mps-control"
# TIMEOUT: PyTorch starts in 10 s, and thirty processes on 16 processors start in a minute.
START_S = 240
# TIMEOUT: only a hung program does not reply within this time.
ANSWER_S = 60
MEASURED_S = 4
# Duration in seconds; the mode `auto` must decide within half of it.
AUTO_S = 6
POLL_S = 0.05
# Maximum duration of a case in seconds.
LONGEST_CASE_S = 45
TENANT_MIB = 5120
# Memory for two jobs of 3 GiB each.
SMALL_CARD_MIB, SMALL_HOST_MIB = 4096, 8192
# Chunks of the card with little memory have the default size. Elsewhere, each chunk is small and never moves.
CHUNK_MIB, SMALL_CHUNK_MIB = 2, 16
SMALL_JOB_S = 7
PACE_MS = 6
GROUPS = ("one", "two", "small")
# Clients of MPS with `below normal` priority: the card prefers the thread blocks of the other clients.
LOW = {"CUDA_MPS_CLIENT_PRIORITY": "1"}
DEFAULTS = {"weight": 100, "guarantee_permille": 0, "class": "normal"}
INTERACTIVE = {"class": "interactive"}


@dataclass(frozen=True)
class Case:
    """Programs that work concurrently. The prefix of a name before `-` selects how the program is run."""

    name: str
    programs: tuple[str, ...]
    # Tenants' settings that differ from `DEFAULTS`.
    settings: dict[str, dict] = field(default_factory=dict)
    # Minimum interval between a loop's tokens.
    pace_ms: float = 0
    # "rates", "auto" or "memory".
    kind: str = "rates"


def named(way: str, kind: str, count: int) -> tuple[str, ...]:
    return tuple(f"{way}-{kind}{number}" for number in range(count))


def next_to_job(what: str, pace_ms: float) -> tuple[Case, ...]:
    """Returns the cases with a loop next to a job."""
    def case(way: str, loop: str, job: str) -> Case:
        settings = {} if loop.startswith(("hw", "mps")) else {loop: INTERACTIVE}
        return Case(f"jobs, {what} and job, {way}", (loop, job), settings, pace_ms)

    return (case("hardware time slices", "hw-loop0", "hw-job0"), case("MPS", "mps-loop0", "mps-job0"),
            case("MPS with priorities", "mps-loop0", "mpslow-job0"), case("turns", "turn-loop0", "turn-job0"),
            case("one group", "one-loop0", "one-job0"), case("two groups", "two-loop0", "one-job0"))


GUARANTEED = {"guarantee_permille": 500}
CASES = (
    Case("loops, one, without the library", ("hw-loop0",)),
    Case("loops, one, as an MPS client", ("mps-loop0",)),
    Case("loops, two, hardware time slices", named("hw", "loop", 2)),
    Case("loops, two, MPS", named("mps", "loop", 2)),
    Case("loops, two, turns", named("turn", "loop", 2)),
    Case("loops, two, one group", named("one", "loop", 2)),
    Case("loops, two, one group, weights 3:1", named("one", "loop", 2), {"one-loop0": {"weight": 300}}),
    Case("loops, four, MPS", named("mps", "loop", 4)),
    Case("loops, four, one group", named("one", "loop", 4)),
    Case("loops, two groups of two", (*named("one", "loop", 2), *named("two", "loop", 2))),
    Case("loops, two groups of two, weights 3:1", (*named("one", "loop", 2), *named("two", "loop", 2)),
         {name: {"weight": 300} for name in named("one", "loop", 2)}),
    Case("loops, two, auto", named("one", "loop", 2), kind="auto"),
    Case("jobs, loop alone, without the library", ("hw-loop0",)),
    Case("jobs, one, without the library", ("hw-job0",)),
    Case("jobs, one, turns", ("turn-job0",)),
    Case("jobs, one, one group", ("one-job0",)),
    Case("jobs, two, hardware time slices", named("hw", "job", 2)),
    Case("jobs, two, MPS", named("mps", "job", 2)),
    Case("jobs, two, turns", named("turn", "job", 2)),
    Case("jobs, two, one group", named("one", "job", 2)),
    Case("jobs, two, auto", named("one", "job", 2), kind="auto"),
    Case("jobs, four, turns, guarantee of half", named("turn", "job", 4), {"turn-job0": GUARANTEED}),
    Case("jobs, four, one group, guarantee of half", named("one", "job", 4), {"one-job0": GUARANTEED}),
    *next_to_job("loop", 0),
    *next_to_job("paced loop", PACE_MS),
    Case("jobs, two, group larger than the memory", named("small", "job", 2), kind="memory"),
)


def quit_server(pipes: Path, logs: Path) -> None:
    """Ends the control daemon and the server in these folders. An owner leaves both to the next owner."""
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    subprocess.run([CONTROL], env=os.environ | variables, input="quit -t 5\n", text=True, timeout=20, check=False,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def mps_server(folder: Path):
    """Runs NVIDIA's control daemon, and yields the environment of its clients."""
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipes"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in variables.values():
        Path(path).mkdir(parents=True)
    daemon = subprocess.Popen([CONTROL, "-f"], env=os.environ | variables, stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield {"CUDA_MPS_PIPE_DIRECTORY": variables["CUDA_MPS_PIPE_DIRECTORY"]}
    finally:
        quit_server(folder / "pipes", folder / "log")
        daemon.kill()
        daemon.wait()


def way_of(program: str) -> str:
    return program.split("-")[0]


class Programs:
    """Programs of all cases. They sleep until a case uses them."""

    def __init__(self, rig: Rig, small_rig: Rig, mps_folder: Path, names: list[str], stack: ExitStack):
        self._settings: dict[str, dict] = {}
        self._owners: dict[str, Owner] = {}
        variables: dict[str, dict[str, str]] = {}
        if any(way_of(name) == "mps" for name in names):
            variables["mps"] = stack.enter_context(mps_server(mps_folder / "bare"))
        for owner_rig, ways in ((rig, ("turn", "one", "two")), (small_rig, ("small",))):
            tenants = [name for name in names if way_of(name) in ways]
            if tenants:
                owner = self._serve(owner_rig, tenants, mps_folder, stack)
                self._owners |= dict.fromkeys(tenants, owner)
        for group in sorted({way_of(name) for name in names} & set(GROUPS)):
            variables[group] = {"CUDA_MPS_PIPE_DIRECTORY": str(mps_folder / group / "pipes")}
        variables["mpslow"] = variables.get("mps", {}) | LOW
        self._processes = {}
        for name in names:
            tenant = name if name in self._owners else None
            script = "decode.py" if "loop" in name else "train.py"
            of = small_rig if way_of(name) == "small" else rig
            self._processes[name] = of.python(tenant, script, variables=variables.get(way_of(name)))
        stack.callback(self._end)
        # A program that does not start fails only its own cases.
        self.started = {name: self._first_line(name) for name in names}

    def _serve(self, rig: Rig, tenants: list[str], mps_folder: Path, stack: ExitStack) -> Owner:
        groups = {way_of(name) for name in tenants} & set(GROUPS)
        suffix = {name: f":normal:{way_of(name)}" if way_of(name) in GROUPS else "" for name in tenants}
        words = tuple(f"{name}:{TENANT_MIB}:100{suffix[name]}" for name in tenants)
        sizes = (TENANT_MIB * len(tenants), 4096, CHUNK_MIB)
        if groups == {"small"}:
            sizes = (SMALL_CARD_MIB, SMALL_HOST_MIB, SMALL_CHUNK_MIB)
        more = ("--mps-control", CONTROL, "--mps-folder", str(mps_folder)) if groups else ()
        for group in groups:
            stack.callback(quit_server, mps_folder / group / "pipes", mps_folder / group / "log")
        owner = Owner(rig, OwnerSettings(*sizes, words, more))
        stack.callback(lambda: owner.process.end(timeout_s=20))
        # TIMEOUT: the daemons start within seconds.
        until = time.monotonic() + 30
        while time.monotonic() < until and any(not (mps_folder / group / "pipes" / "control").exists()
                                               for group in groups):
            time.sleep(0.05)
        time.sleep(0.5 if groups else 0)
        return owner

    def _first_line(self, name: str) -> dict:
        try:
            return json.loads(self._processes[name].line(START_S))
        except (Gone, ValueError) as error:
            print(f"{name}: {error!r}", flush=True)
            return {"error": repr(error)}

    def _end(self) -> None:
        for process in self._processes.values():
            process.close_input()
        for process in self._processes.values():
            process.end(timeout_s=10)

    def of(self, name: str) -> Process:
        if "error" in self.started[name]:
            raise Gone(f"{name} did not start: {self.started[name]['error']}")
        return self._processes[name]

    def change(self, settings: dict[str, dict], automatic: set[str]) -> None:
        """Applies all tenants' settings that have changed. Groups in `automatic` use the mode `auto`."""
        for name, owner in self._owners.items():
            sharing = {"sharing": "auto" if way_of(name) in automatic else "together"}
            wanted = DEFAULTS | settings.get(name, {}) | (sharing if way_of(name) in GROUPS else {})
            if self._settings.get(name) != wanted:
                owner.change(name, wanted)
                self._settings[name] = wanted

    def accounts(self, names: Iterable[str]) -> dict[str, dict]:
        """Returns the accounts of those programs that are tenants."""
        owners = {id(self._owners[name]): self._owners[name] for name in names if name in self._owners}
        found = {}
        for owner in owners.values():
            found |= owner.accounts()["tenants"]
        return {name: found[name] for name in names if name in found}


class Bench:
    """Runs all cases in rounds."""

    def __init__(self, arguments: argparse.Namespace):
        self._arguments, self._end = arguments, time.monotonic() + arguments.seconds
        self._cases = [case for case in CASES if re.search(arguments.only, case.name)]
        self.report = {**conditions(arguments.commit), "card": arguments.card, "rounds": []}

    def _rates(self, programs: Programs, case: Case, seconds: float) -> dict:
        """Runs a case's programs. Returns their results, and the changes of the owner's accounts."""
        processes = {name: programs.of(name) for name in case.programs}
        before, begin = programs.accounts(case.programs), time.monotonic()
        for name, process in processes.items():
            process.say(f"begin {case.pace_ms}" if case.pace_ms and "loop" in name else "begin")
        modes: list[list] = []
        while (lasted := time.monotonic() - begin) < seconds:
            if case.kind != "auto":
                time.sleep(seconds - lasted)
                continue
            group = programs.accounts(case.programs[:1])[case.programs[0]]["group"] or {}
            if not modes or modes[-1][1] != group.get("together"):
                modes.append([round(time.monotonic() - begin, 2), group.get("together")])
            time.sleep(POLL_S)
        after = programs.accounts(case.programs)
        for process in processes.values():
            process.say("end")
        result = {"programs": {name: json.loads(process.line(ANSWER_S)) for name, process in processes.items()}}
        keys = ("charged_ns", "busy_ns", "launches")
        result["accounts"] = {name: {key: after[name][key] - before[name][key] for key in keys} for name in after}
        return result | ({"modes": modes} if modes else {})

    def _memory(self, programs: Programs, case: Case) -> dict:
        """Trains jobs in series, and then concurrently with less memory than they need together."""
        calibration = self._rates(programs, Case(case.name, case.programs[:1]), 1.5)["programs"][case.programs[0]]
        steps = max(20, round(SMALL_JOB_S * calibration["steps"] / calibration["seconds"]))
        jobs = [programs.of(name) for name in case.programs]

        def run(some: list[Process]) -> dict:
            begin = time.monotonic()
            for job in some:
                job.say(f"steps {steps}")
            results = [json.loads(job.line(ANSWER_S)) for job in some]
            return {"seconds": round(time.monotonic() - begin, 3), "results": results}

        serial = [run([job]) for job in jobs]
        before = programs.accounts(case.programs)
        concurrent = run(jobs)
        after = programs.accounts(case.programs)
        moved = {name: {key: after[name][key] - before[name][key] for key in ("moved_in", "moved_out", "charged_ns")}
                 for name in after}
        return {"steps": steps, "serial": serial, "concurrent": concurrent, "moved": moved}

    def _measure(self, programs: Programs, case: Case) -> dict:
        programs.change(case.settings, set(map(way_of, case.programs)) if case.kind == "auto" else set())
        if case.kind == "memory":
            return self._memory(programs, case)
        return self._rates(programs, case, AUTO_S if case.kind == "auto" else MEASURED_S)

    def run(self) -> None:
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            # Socket paths are limited in length.
            mps_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
            mps_folder.chmod(0o755)
            build, driver = Build("this", self._arguments.build.resolve()), find_driver()
            (scratch / "small").mkdir()
            rig, small_rig = Rig(build, driver, scratch), Rig(build, driver, scratch / "small")
            stack.callback(rig.end)
            stack.callback(small_rig.end)
            names = list(dict.fromkeys(name for case in self._cases for name in case.programs))
            begin = time.monotonic()
            programs = Programs(rig, small_rig, mps_folder, names, stack)
            self.report["started_in_s"] = round(time.monotonic() - begin, 1)
            print(f"{len(names)} programs started in {self.report['started_in_s']} s", flush=True)
            for _ in range(self._arguments.rounds):
                self.report["rounds"].append({})
                for case in self._cases:
                    if time.monotonic() + LONGEST_CASE_S < self._end:
                        self._take(programs, case)
        self._save()

    def _take(self, programs: Programs, case: Case) -> None:
        try:
            result = self._measure(programs, case)
        except (Gone, OSError, ValueError, KeyError, IndexError, subprocess.SubprocessError) as error:
            result = {"error": repr(error)}
        self.report["rounds"][-1][case.name] = result
        self._save()
        shown = result if "error" in result else self.report["summary"][case.name]
        print(f"{case.name}: {json.dumps(shown)}", flush=True)

    def _save(self) -> None:
        self.report["summary"] = summarise(self.report["rounds"])
        self.report["verdicts"] = verdicts(self.report["summary"])
        self._arguments.json.write_text(json.dumps(self.report, indent=1) + "\n")


def card_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--card", type=int, help="index of the card; by default the first visible one")


def main() -> None:
    arguments = parse_arguments(__doc__.splitlines()[0], seconds=580, more=card_option)
    if arguments.card is not None:
        # The UUID is the same for an MPS server, which renumbers its cards, and for its clients.
        query = ["nvidia-smi", f"--id={arguments.card}", "--query-gpu=uuid", "--format=csv,noheader"]
        os.environ["CUDA_VISIBLE_DEVICES"] = subprocess.run(query, capture_output=True, text=True,
                                                            check=True).stdout.strip()
    bench = Bench(arguments)
    bench.run()
    for verdict in bench.report["verdicts"]:
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
