"""Measures tenants with several cards next to the same programs without the library; writes one JSON file.

Usage: cards.py --build FOLDER --json FILE [--rounds N] [--seconds N] [--only CASES] [--smoke] [--logs FOLDER]. FOLDER
contains mediatord, mediatorctl, cuda-owner and libcuda.so (ours). `cargo xtask bench cards` builds and runs it. It
needs two cards and a `python3` with PyTorch. `--smoke` runs one round of a few cases. `--logs` keeps the logs of all
processes.

Each case starts a daemon with two cards and the programs of `collective.py`, with and without the library. If one
program works at a time, both are measured in turn, in pairs whose order alternates.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from daemon import Cards, Daemon, Program, Session, Tenant, check_build, plain_environment
from harness import Gone, conditions, find_driver, options

CARDS = (0, 1)
# Required free memory per card. All cases use less than this.
NEEDED_MIB = 65536
MEMORY_MIB, HOST_MIB = 49152, 2048
QUOTA_MIB = 24576
# TIMEOUT: a measurement takes a few seconds. NCCL aborts an operation after 60 s.
ANSWER_S = 45
# TIMEOUT: if the memory does not fit, a tenant waits for its quantum.
FULL_ANSWER_S = 90
# Maximum duration of a case in seconds, if nothing hangs.
LONGEST_CASE_S = 50
SIZES = tuple(8**power for power in range(1, 11))
# Duration of a measurement, and time after which all programs have work in flight.
WINDOW_S, SETTLING_S = 4.0, 0.7
LARGE_BYTES = 2 << 20
# JAX would reserve most of the memory of all cards.
JAX_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class NotRun(Exception):
    """A case that this machine cannot run."""


@dataclass(frozen=True)
class Target:
    """A target for a figure."""

    limit: float
    at_least: bool = False

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


RATIO_OF_TIME = Target(1.02)
RATIO_OF_BANDWIDTH = Target(0.97, at_least=True)
OFF_SHARE = Target(0.02)
LOST = Target(0.03)


@dataclass
class Run:
    """A case in progress."""

    session: Session
    build: Path
    driver: Path
    result: dict = field(default_factory=dict)

    def daemon(self, tenants: tuple[Tenant, ...], cards: Cards = Cards(len(CARDS), MEMORY_MIB, HOST_MIB)) -> Daemon:
        return self.session.start_daemon(self.build, self.driver, cards, tenants)

    def pair(self, workload: str, devices: tuple[int, ...] = CARDS) -> tuple[Program, Program]:
        """Starts the same program without the library and as the only tenant."""
        native = self.session.start("native", workload, devices, None)
        self.daemon((Tenant("a", CARDS, QUOTA_MIB),))
        tenant = self.session.start("tenant", workload, devices, "a")
        self.session.await_ready()
        self.result["ready"] = {one.name: one.ready for one in (native, tenant)}
        return native, tenant


def alternate(native: Program, tenant: Program, command: dict, pairs: int) -> tuple[list[list[dict]], list[list[dict]]]:
    """Sends both programs the same command in turn. Returns the replies of all processes for each pair."""
    found: dict[str, list[list[dict]]] = {native.name: [], tenant.name: []}
    for number in range(pairs):
        for program in (native, tenant) if number % 2 == 0 else (tenant, native):
            found[program.name].append(program.ask(command, ANSWER_S))
    return found[native.name], found[tenant.name]


def slowest(answers: list[list[dict]], key: str) -> list[float]:
    """Returns, for each command, the longest time of its processes."""
    return [max(answer[key] for answer in one) for one in answers]


def ratio(of: list[float], to: list[float]) -> float:
    """Returns the median of the pairs' ratios."""
    return round(statistics.median(one / other for one, other in zip(of, to)), 4)


def same(*answers: list[list[dict]]) -> bool:
    """Returns true if all checksums are equal, between processes and between programs."""
    return len({answer["checksum"] for one in answers for processes in one for answer in processes}) == 1


def size_name(size: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << shift:
            return f"{size >> shift} {unit}"
    return f"{size} B"


def all_reduce(run: Run, workload: str, devices: tuple[int, ...]) -> None:
    """Compares the times of all-reduce operations of each size."""
    native, tenant = run.pair(workload, devices)
    sizes = run.result["sizes"] = {}
    for size in SIZES:
        count = max(4, min(1000, (4 << 30) // size))
        command = {"do": "measure", "size": size, "count": count, "waited": min(count, 40)}
        with_library_off, with_library = alternate(native, tenant, command, pairs=6)
        times = {"native": with_library_off, "tenant": with_library}
        sizes[size_name(size)] = {
            "bytes": size,
            "bandwidth_ratio": ratio(slowest(with_library_off, "us"), slowest(with_library, "us")),
            "waited_ratio": ratio(slowest(with_library, "waited_us"), slowest(with_library_off, "waited_us")),
            **{name: {"us": (us := statistics.median(slowest(answers, "us"))),
                      "waited_us": statistics.median(slowest(answers, "waited_us")),
                      # With two processes, each byte crosses the bus once in each direction.
                      "bus_gb_s": round(size / us / 1e3, 3)} for name, answers in times.items()},
            "right": all(answer["right"] for answers in times.values() for one in answers for answer in one)}
        # If a case fails at a size, the results of smaller sizes are kept.
        large = [one["bandwidth_ratio"] for one in sizes.values() if one["bytes"] >= LARGE_BYTES]
        run.result["figures"] = {"bandwidth_ratio": min(one["bandwidth_ratio"] for one in sizes.values())}
        run.result["figures"] |= {"bandwidth_ratio_from_2_mib": min(large)} if large else {}
    run.result["right"] = all(one["right"] for one in sizes.values())


def all_reduce_of_processes(run: Run) -> None:
    all_reduce(run, "all-reduce", CARDS)


def all_reduce_in_one_process(run: Run) -> None:
    all_reduce(run, "all-reduce-in-one", CARDS[:1])


def training(run: Run, workload: str = "training", devices: tuple[int, ...] = CARDS) -> None:
    """Compares the time of training steps, and the weights after all of them."""
    native, tenant = run.pair(workload, devices)
    alternate(native, tenant, {"do": "train", "steps": 5}, pairs=1)
    times = [slowest(answers, "ms") for answers in alternate(native, tenant, {"do": "train", "steps": 30}, pairs=6)]
    run.result |= {"native_ms": times[0], "tenant_ms": times[1]}
    run.result["figures"] = {"time_ratio": ratio(times[1], times[0])}
    run.result["right"] = same(*alternate(native, tenant, {"do": "weights"}, pairs=1))


def sharded_training(run: Run) -> None:
    training(run, "training-sharded")


def training_with_jax(run: Run) -> None:
    """The same with JAX, which uses both cards in one process."""
    program = "import jax; print(len(jax.devices('gpu')))"
    found = subprocess.run([sys.executable, "-c", program], env={**run.session.environment, **JAX_ENVIRONMENT},
                           capture_output=True, text=True, timeout=ANSWER_S)
    if found.returncode or found.stdout.split()[-1:] != [str(len(CARDS))]:
        said = (found.stderr.strip().splitlines() or [found.stdout])[-1]
        raise NotRun(f"`python3` has no `jax` package that sees {len(CARDS)} cards: {said[:300]}")
    training(run, "training-jax", CARDS[:1])


def decoding(run: Run, workload: str) -> None:
    """Compares the decoding times and all tokens."""
    native, tenant = run.pair(workload)
    alternate(native, tenant, {"do": "decode", "sequences": 1}, pairs=1)
    answers = alternate(native, tenant, {"do": "decode", "sequences": 4}, pairs=5)
    times = [slowest(one, "ms") for one in answers]
    run.result |= {name: {"ms": ms, **{key: statistics.median(slowest(one, key)) for key in ("p50_ms", "p99_ms")}}
                   for name, ms, one in zip(("native", "tenant"), times, answers)}
    run.result["tokens"] = answers[0][0][0]["tokens"]
    run.result["different_tokens"] = answers[0][0][0]["different_tokens"]
    run.result["figures"] = {"time_ratio": ratio(times[1], times[0])}
    run.result["right"] = same(*answers)


def decoding_without_graphs(run: Run) -> None:
    decoding(run, "decoding")


def decoding_with_graphs(run: Run) -> None:
    decoding(run, "decoding-graphs")


def peers(run: Run) -> None:
    """Compares the phases of a process that uses both cards."""
    native, tenant = run.pair("peers", CARDS[:1])
    run.result["peer_access"] = {one.name: one.ask({"do": "look"}, ANSWER_S)[0]["peer_access"]
                                 for one in (native, tenant)}
    run.result["figures"], rights = {}, [len(set(run.result["peer_access"].values())) == 1]
    for part in ("copies", "kernels", "pipeline"):
        command = {"do": "part", "name": part}
        alternate(native, tenant, command, pairs=1)
        answers = alternate(native, tenant, command, pairs=4)
        times = [slowest(one, "ms") for one in answers]
        run.result[part] = {"native_ms": times[0], "tenant_ms": times[1], "right": same(*answers)}
        run.result["figures"][f"{part}_time_ratio"] = ratio(times[1], times[0])
        rights.append(run.result[part]["right"])
    run.result["right"] = all(rights)


def rates(programs: list[Program], window_s: float = WINDOW_S) -> list[float]:
    """Runs programs concurrently. Returns each one's work per second in the window in which all are working.

    All processes of a program count the same blocks.
    """
    begin = time.monotonic() + 0.3
    start, end = begin + SETTLING_S, begin + SETTLING_S + window_s
    for program in programs:
        program.say({"do": "run", "begin": begin, "until": end + 0.2})
    found = []
    for program in programs:
        answers = program.answers(ANSWER_S)
        if len({len(answer["ends"]) for answer in answers}) != 1:
            raise Gone(f"{program.name}: its processes have not executed the same number of blocks")
        found.append(work_between(answers[0]["ends"], start, end) * answers[0]["units"] / window_s)
    return found


def work_between(ends: list[float], start: float, end: float) -> float:
    """Returns the number of blocks completed between two times, including fractions of blocks."""
    def done(at: float) -> float:
        count = sum(one <= at for one in ends)
        if count == 0 or count == len(ends):
            return float(count)
        return count + (at - ends[count - 1]) / (ends[count] - ends[count - 1])

    return done(end) - done(start)


def card_states(daemon: Daemon) -> dict[str, list[dict]]:
    """Returns the state of each tenant on each of its cards."""
    return {name: shown.get("card_states") or [{"card": shown["card"], "used_ns": shown["used_ns"]}]
            for name, shown in daemon.show_all().items()}


def gained(before: dict[str, list[dict]], after: dict[str, list[dict]]) -> dict:
    """Returns the differences of the counters between two results of `card_states`."""
    counters = ("used_ns", "turns", "cancelled", "gather_ns", "rest_ns")
    return {name: {late["card"]: {key: late[key] - early[key] for key in counters if key in late}
                   | ({"longest_gather_ns": late["longest_gather_ns"]} if "longest_gather_ns" in late else {})
                   for early, late in zip(before[name], states)} for name, states in after.items()}


def two_gangs(run: Run, weights: tuple[int, int]) -> None:
    """Compares the shares of two programs that saturate both cards with the tenants' weights."""
    names = ("a", "b")
    natives = [run.session.start(f"native-{name}", "saturating", CARDS, None) for name in names]
    daemon = run.daemon(tuple(Tenant(name, CARDS, QUOTA_MIB, weight) for name, weight in zip(names, weights)))
    tenants = [run.session.start(f"tenant-{name}", "saturating", CARDS, name) for name in names]
    run.session.await_ready()
    run.result["native"] = shares(natives)
    run.result["tenant"] = shares(tenants, daemon)
    entitled = weights[0] / sum(weights)
    run.result["figures"] = {"off_share": round(abs(run.result["tenant"]["share"] - entitled), 4),
                             "lost": run.result["tenant"]["lost"], "native_lost": run.result["native"]["lost"],
                             "alone_ratio": round(run.result["tenant"]["alone"] / run.result["native"]["alone"], 4)}


def shares(programs: list[Program], daemon: Daemon | None = None) -> dict:
    """Returns the rates of two equal concurrent programs, relative to that of the first alone.

    With a daemon, also returns the owners' counters for the concurrent phase.
    """
    alone, = rates(programs[:1], window_s=2.0)
    before = card_states(daemon) if daemon else {}
    together = rates(programs)
    return {**({"owners_say": gained(before, card_states(daemon))} if daemon else {}),
            "alone": round(alone, 2), "together": [round(rate, 2) for rate in together],
            "share": round(together[0] / sum(together), 4), "lost": round(1 - sum(together) / alone, 4)}


def two_gangs_with_equal_weights(run: Run) -> None:
    two_gangs(run, (100, 100))


def two_gangs_with_weights_3_to_1(run: Run) -> None:
    two_gangs(run, (300, 100))


def gang_next_to_singles(run: Run) -> None:
    """Compares the share of a program on both cards with those of two programs on one card each."""
    placed = {"gang": CARDS, "first": CARDS[:1], "second": CARDS[1:]}
    natives = [run.session.start(f"native-{name}", "saturating", cards, None) for name, cards in placed.items()]
    daemon = run.daemon(tuple(Tenant(name, cards, QUOTA_MIB) for name, cards in placed.items()))
    # A tenant with one card sees it as device 0.
    tenants = [run.session.start(f"tenant-{name}", "saturating", cards if len(cards) > 1 else (0,), name)
               for name, cards in placed.items()]
    run.session.await_ready()
    for kind, programs in (("native", natives), ("tenant", tenants)):
        before = card_states(daemon)
        alone = [rates([program], window_s=1.5)[0] for program in programs[:2]]
        gang, first, second = rates(programs)
        run.result[kind] = {"alone": {"gang": round(alone[0], 2), "single": round(alone[1], 2)},
                            "shares": {"gang": round(gang / alone[0], 4), "first": round(first / alone[1], 4),
                                       "second": round(second / alone[1], 4)}}
        run.result["owners_say"] = gained(before, card_states(daemon))
    found = {kind: run.result[kind]["shares"] for kind in ("native", "tenant")}
    lost = {kind: 1 - of["gang"] - min(of["first"], of["second"]) for kind, of in found.items()}
    run.result["figures"] = {
        "gang_share": found["tenant"]["gang"], "lost": round(lost["tenant"], 4),
        "native_lost": round(lost["native"], 4),
        "off_share": round(max(abs(found["tenant"]["gang"] / (found["tenant"]["gang"] + found["tenant"][single]) - 0.5)
                               for single in ("first", "second")), 4)}


def more_than_fits(run: Run) -> None:
    """Compares running two programs, whose memory does not fit together, concurrently and in series."""
    each_mib, passes, card_mib = 6144, 12, 9216
    native = run.session.start("native", "filling", CARDS, None)
    daemon = run.daemon((Tenant("a", CARDS, 8192), Tenant("b", CARDS, 8192)), Cards(len(CARDS), card_mib, 8192))
    tenants = [run.session.start(f"tenant-{name}", "filling", CARDS, name) for name in ("a", "b")]
    run.session.await_ready()
    work = {"do": "work", "passes": passes}

    def work_alone(program: Program) -> float:
        return max(answer["s"] for answer in program.ask(work, FULL_ANSWER_S))

    fill = {"do": "fill", "mib": each_mib}
    native.ask(fill, FULL_ANSWER_S)
    native_s = work_alone(native)
    expected = native.ask({"do": "sums"}, ANSWER_S)
    tenants[0].ask(fill, FULL_ANSWER_S)
    alone_s = work_alone(tenants[0])
    found = [tenants[0].ask({"do": "sums"}, FULL_ANSWER_S)]
    before = card_states(daemon)
    begin = time.monotonic()
    for program in tenants:
        program.say(fill)
    for program in tenants:
        program.answers(FULL_ANSWER_S)
        program.say(work)
    both_s = [max(answer["s"] for answer in program.answers(FULL_ANSWER_S)) for program in tenants]
    together_s = time.monotonic() - begin
    found += [program.ask({"do": "sums"}, FULL_ANSWER_S) for program in tenants]
    run.result |= {"native_s": native_s, "alone_s": alone_s, "both_s": both_s, "together_s": round(together_s, 3),
                   "owners_say": gained(before, card_states(daemon)),
                   "in_host_mib": {name: shown["in_host_bytes"] >> 20 for name, shown in daemon.show_all().items()}}
    run.result["figures"] = {"time_ratio_alone": round(alone_s / native_s, 4),
                             "time_ratio_to_serial": round(max(both_s) / (2 * alone_s), 4)}
    run.result["right"] = all(one == expected for one in found)


def spread_programs(run: Run) -> None:
    """Compares the work of four programs on one card with that of two programs on each of two cards."""
    on_first, moved = ("p0", "p1", "p2", "p3"), ("q2", "q3")
    natives = [run.session.start(f"native-{name}", "saturating", CARDS[:1], None) for name in on_first]
    natives += [run.session.start(f"native-{name}", "saturating", CARDS[1:], None) for name in moved]
    run.daemon(tuple(Tenant(name, CARDS[:1], 8192) for name in on_first)
               + tuple(Tenant(name, CARDS[1:], 8192) for name in moved))
    tenants = [run.session.start(f"tenant-{name}", "saturating", (0,), name) for name in (*on_first, *moved)]
    run.session.await_ready()
    for kind, programs in (("native", natives), ("tenant", tenants)):
        alone, = rates(programs[:1], window_s=1.5)
        before, after = rates(programs[:4], 3.0), rates([*programs[:2], *programs[4:]], 3.0)
        run.result[kind] = {"alone": round(alone, 2), "before": [round(rate / alone, 4) for rate in before],
                            "after": [round(rate / alone, 4) for rate in after]}
    run.result["figures"] = {f"{prefix}{when}": round(sum(run.result[kind][when]), 4)
                             for kind, prefix in (("tenant", ""), ("native", "native_"))
                             for when in ("before", "after")}


@dataclass(frozen=True)
class Case:
    """A measurement with its targets."""

    name: str
    measure: Callable[[Run], None]
    targets: dict[str, Target] = field(default_factory=dict)
    # Set if `--smoke` runs it.
    is_smoke: bool = False


CASES = (
    Case("all-reduce, two processes", all_reduce_of_processes, {"bandwidth_ratio": RATIO_OF_BANDWIDTH}, is_smoke=True),
    Case("training", training, {"time_ratio": RATIO_OF_TIME}, is_smoke=True),
    Case("one process, two cards", peers, {f"{part}_time_ratio": RATIO_OF_TIME
                                           for part in ("copies", "kernels", "pipeline")}, is_smoke=True),
    Case("two gangs, weights 1:1", two_gangs_with_equal_weights, {"off_share": OFF_SHARE, "lost": LOST}, is_smoke=True),
    Case("training, FSDP", sharded_training, {"time_ratio": RATIO_OF_TIME}),
    Case("training, JAX", training_with_jax, {"time_ratio": RATIO_OF_TIME}),
    Case("decoding", decoding_without_graphs, {"time_ratio": RATIO_OF_TIME}),
    Case("decoding, CUDA graphs", decoding_with_graphs, {"time_ratio": RATIO_OF_TIME}),
    Case("two gangs, weights 3:1", two_gangs_with_weights_3_to_1, {"off_share": OFF_SHARE, "lost": LOST}),
    Case("a gang next to a tenant on each card", gang_next_to_singles, {"off_share": OFF_SHARE, "lost": LOST}),
    Case("all-reduce, one process", all_reduce_in_one_process, {"bandwidth_ratio": RATIO_OF_BANDWIDTH}),
    Case("two gangs, more memory than fits", more_than_fits, {"time_ratio_alone": RATIO_OF_TIME}),
    Case("four programs on one card, then on two", spread_programs),
)


class Bench:
    """Runs all cases in rounds."""

    def __init__(self, arguments: argparse.Namespace, logs: Path):
        self._build, self._driver, self._logs = arguments.build.resolve(), find_driver(), logs.resolve()
        self._json, self._rounds = arguments.json, 1 if arguments.smoke else arguments.rounds
        self._cases = [case for case in CASES
                       if re.search(arguments.only, case.name) and (case.is_smoke or not arguments.smoke)]
        self._end = time.monotonic() + arguments.seconds
        self._environment = plain_environment()
        self.report: dict = {**conditions(arguments.commit), "cards": card_facts(), "rounds": []}

    def run(self) -> None:
        self.report["first_start_s"] = self._warm_up()
        for number in range(self._rounds):
            self.report["rounds"].append({})
            for case in self._cases:
                if time.monotonic() + LONGEST_CASE_S > self._end:
                    self.report.setdefault("omitted", []).append(f"{number} {case.name}")
                    continue
                result = self._measure(case, number)
                self.report["rounds"][-1][case.name] = result
                self.report["summary"] = summary(self.report["rounds"])
                self._json.write_text(json.dumps(self.report, indent=1) + "\n")
                print(f"{number} {case.name}: {json.dumps(shown(result))}", flush=True)
        self._json.write_text(json.dumps(self.report, indent=1) + "\n")

    def _warm_up(self) -> float:
        """Starts PyTorch once, so that its files are in the page cache."""
        begin = time.monotonic()
        program = "import torch, torch.distributed; print(torch.ones(1, device='cuda').item())"
        found = subprocess.run([sys.executable, "-c", program], env=self._environment, capture_output=True, text=True)
        if found.returncode:
            sys.exit(f"PyTorch does not work without the library: {found.stderr[-800:]}")
        return round(time.monotonic() - begin, 1)

    def _measure(self, case: Case, number: int) -> dict:
        begin = time.monotonic()
        logs = self._logs / f"{number}-{re.sub('[^a-z0-9]+', '-', case.name)}"
        logs.mkdir(parents=True, exist_ok=True)
        # Socket paths are limited in length.
        with tempfile.TemporaryDirectory(dir="/tmp", prefix="c") as name:
            session = Session(Path(name), logs, self._environment)
            run = Run(session, self._build, self._driver)
            try:
                case.measure(run)
            except NotRun as error:
                run.result["not_run"] = str(error)
            except Exception as error:  # A case that cannot be measured does not stop the others.
                run.result["error"] = f"{type(error).__name__}: {error}"[:1200]
                run.result["diagnosis"] = attempt(session.diagnosis)
            finally:
                try:
                    run.result["warnings"] = attempt(session.warnings)
                finally:
                    session.end()
        missed = [name for name, target in case.targets.items()
                  if name in run.result.get("figures", {}) and not target.is_met(run.result["figures"][name])]
        return run.result | {"missed": missed, "case_s": round(time.monotonic() - begin, 1)}


def attempt(look: Callable[[], dict]) -> dict:
    """Returns a description, or the error of obtaining it."""
    try:
        return look()
    except Exception as error:  # The original failure matters more.
        return {"error": repr(error)[:300]}


def shown(result: dict) -> dict:
    """Returns the part of a result that is printed."""
    keys = ("figures", "right", "missed", "error", "not_run", "case_s")
    return {key: result[key] for key in keys if result.get(key) not in (None, [])}


def card_facts() -> list[str]:
    """Returns the links between the cards. Exits if the machine has too few cards or too little free memory."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    free = [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]
    if len(free) < len(CARDS) or min(free[: len(CARDS)]) < NEEDED_MIB:
        sys.exit(f"this measurement needs {len(CARDS)} cards with {NEEDED_MIB} MiB of free memory each, and the cards "
                 f"here have {free}")
    links = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout
    return [line.rstrip() for line in links.splitlines()[: len(CARDS) + 1]]


def summary(rounds: list[dict]) -> dict:
    """Returns the median, minimum and maximum of each figure over the rounds, and the missed targets."""
    found: dict = {}
    for case in CASES:
        results = [one[case.name] for one in rounds if case.name in one]
        if not results:
            continue
        names = dict.fromkeys(name for result in results for name in result.get("figures", {}))
        row: dict = {"rounds": len(results), "errors": sum("error" in result for result in results),
                     "wrong": sum(result.get("right") is False for result in results),
                     **({"not_run": reasons} if (reasons := [one["not_run"] for one in results if "not_run" in one])
                        else {})}
        for name in names:
            values = [result["figures"][name] for result in results if name in result.get("figures", {})]
            row[name] = {"median": round(statistics.median(values), 4), "least": min(values), "most": max(values)}
            if name in case.targets:
                row[name] |= {"target": case.targets[name].limit, "met": case.targets[name].is_met(row[name]["median"])}
        found[case.name] = row
    return found


def main() -> None:
    parser = options(__doc__.splitlines()[0], seconds=560)
    parser.add_argument("--smoke", action="store_true", help="one round of a few cases")
    parser.add_argument("--logs", type=Path, help="folder in which the logs of all processes are kept")
    arguments = parser.parse_args()
    check_build(arguments.build)
    with tempfile.TemporaryDirectory(prefix="gpu-mediator-") as scratch:
        Bench(arguments, arguments.logs or Path(scratch)).run()


if __name__ == "__main__":
    main()
