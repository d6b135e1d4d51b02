"""Measures a decode loop next to honest and hostile neighbours on a real card; writes one JSON file and prints a table.

`cargo xtask bench neighbours --json FILE` runs it. The neighbours are in `attacks.py`. With several builds, such as
before and after a change, each round measures all of them. `--table` prints tables from existing files.
"""

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from attacks import CHUNK_MIB, DECODE, LARGE, NEIGHBOURS, SMALL, Attack, Neighbour
from harness import LOST_CONNECTION, Build, CardMemory, Gone, Owner, OwnerSettings, Process, Rig, find_driver

CONTROL_S = 0.8
# Time in seconds for which the decode loop runs before and after the neighbour acts.
BEFORE_S, AFTER_S = 0.3, 1.2
WATCH_INTERVAL_S = 0.25
# Time limit for the decode loop to reply, in seconds. TIMEOUT: the longest known gap was 18 s.
ANSWER_S = 45
# Maximum duration of a case with its session, in seconds.
LONGEST_CASE_S = 32
FIGURES = ("share", "kept", "gap_longest_ms", "gap_p99_ms", "answer_longest_ms", "owner_longest_ms", "card_taken_mib",
           "charged_loop_ms", "charged_neighbour_ms", "start_s")


class Session:
    """An owner and a decode loop, or the loop alone without the library."""

    def __init__(self, rig: Rig, settings: OwnerSettings | None):
        self.rig, self.settings = rig, settings
        self.owner = Owner(rig, settings) if settings else None
        self.decode: Process | None = None
        self.checksum, self.parameters, self.start_s = "", 0, 0.0

    def start_decode(self) -> None:
        """Starts the decode loop and waits until it has decoded a sequence."""
        begin = time.monotonic()
        self.decode = self.rig.python(DECODE if self.settings else None, "decode.py")
        started = json.loads(self.decode.line(timeout_s=120))
        self.checksum, self.parameters = started["checksum"], started["parameters"]
        self.start_s = round(time.monotonic() - begin, 2)

    def begin(self) -> None:
        self.decode.say("begin")

    def finish(self) -> dict:
        self.decode.say("end")
        return json.loads(self.decode.line(ANSWER_S))

    def alone(self, seconds: float) -> dict:
        self.begin()
        time.sleep(seconds)
        return self.finish()

    def lost_connection(self, since: int) -> bool:
        said = self.decode.said()[since:]
        return any(text in said for text in LOST_CONNECTION)

    def settle(self) -> bool:
        """Waits until the decode loop is the owner's only program.

        Returns false if this does not happen. The session then cannot be used again.
        """
        if self.decode is None or not self.decode.is_alive():
            return False
        if self.owner is None:
            return True
        # TIMEOUT: exited programs disappear within a second; anything else was left behind by a neighbour.
        for _ in range(20):
            try:
                tenants = self.owner.accounts(timeout_s=2)["tenants"]
            except Gone:
                return False
            if all(tenant["programs"] == (name == DECODE) for name, tenant in tenants.items()):
                return True
            time.sleep(0.1)
        return False

    def end(self) -> None:
        for process in (self.decode, self.owner.process if self.owner else None):
            if process:
                process.end(timeout_s=5)


class Watch:
    """Samples the card's memory and the owner's reply times in a thread."""

    def __init__(self, owner: Owner | None, memory: CardMemory):
        self._owner, self._memory = owner, memory
        self.peak_mib, self.longest_ms = memory.used_mib(), 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(WATCH_INTERVAL_S):
            self.peak_mib = max(self.peak_mib, self._memory.used_mib())
            if self._owner is None:
                continue
            begin = time.perf_counter()
            try:
                self.longest_ms = max(self.longest_ms, self._owner.accounts(timeout_s=ANSWER_S)["answered_ms"])
            except Gone:
                self.longest_ms = max(self.longest_ms, (time.perf_counter() - begin) * 1e3)
                return

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def rate(measured: dict) -> float:
    return measured["tokens"] / measured["seconds"]


def difference(before: dict, after: dict) -> dict:
    """Returns the non-zero increases of each tenant's accounts."""
    found = {}
    for name, tenant in after["tenants"].items():
        earlier = before["tenants"][name]
        gained = {key: tenant.get(key, 0) - earlier.get(key, 0)
                  for key in ("charged_ns", "killed", "kill_failures", "moved_out", "moved_in")}
        gained["charged_ms"] = round(gained.pop("charged_ns") / 1e6)
        found[name] = {key: value for key, value in gained.items() if value} | {
            key: tenant[key] for key in ("programs", "chunks_on_card", "chunks_in_host")} | {
            key: tenant[key] for key in ("unaccounted", "kept_bytes", "over_quota_bytes") if tenant.get(key)}
    return found


def warnings(text: str) -> list[str]:
    """Returns the last warnings and errors of a log, without times and colours."""
    lines = [line for line in text.splitlines() if re.search(r"\b(WARN|ERROR)\b|panicked", line)]
    return [re.sub(r"^\S+\s+", "", line)[:240] for line in lines[-4:]]


def figures(neighbour: Neighbour, control: dict, measured: dict) -> dict:
    """Compares the decode loop's figures next to a neighbour with those alone."""
    share = rate(measured) / rate(control)
    return {"control": control, "measured": measured, "share": round(share, 4),
            "kept": round(share / neighbour.entitlement, 4),
            **{key: measured[key] for key in ("gap_longest_ms", "gap_p99_ms", "answer_longest_ms")},
            "right": measured["wrong_sequences"] == control["wrong_sequences"] == 0}


def owner_report(owner: Owner, before: dict, logged: int) -> dict:
    """Returns the owner's accounts and warnings since `before`, when its log had `logged` characters."""
    warned = {"owner_warns": warnings(owner.process.said()[logged:])}
    try:
        says = difference(before, owner.accounts())
    except Gone as error:
        return {"owner_says": {"fate": str(error)}, **warned}
    charged = {name: tenant.get("charged_ms", 0) for name, tenant in says.items()}
    return {"owner_says": says, "charged_loop_ms": charged.pop(DECODE), "charged_neighbour_ms": sum(charged.values()),
            **warned}


def next_to(session: Session, neighbour: Neighbour, memory: CardMemory) -> dict:
    """Measures the decode loop while a neighbour starts, acts and ends."""
    control, owner = session.alone(CONTROL_S), session.owner
    attack: Attack | None = neighbour.start(session.rig) if neighbour.start else None
    said, logged = len(session.decode.said()), len(owner.process.said()) if owner else 0
    before, used_before = owner.accounts() if owner else None, memory.used_mib()
    watch = Watch(owner, memory)
    session.begin()
    time.sleep(BEFORE_S)
    until = time.monotonic() + neighbour.seconds
    attack.act(until) if attack else time.sleep(neighbour.seconds)
    result: dict = {"neighbour_says": attack.end() if attack else {}}
    time.sleep(AFTER_S)
    try:
        result |= figures(neighbour, control, session.finish())
    except Gone as error:
        result["decode"] = str(error)
    watch.end()
    result |= {"card_taken_mib": watch.peak_mib - used_before, "card_left_mib": memory.used_mib() - used_before}
    if owner:
        result |= {"lost_connection": session.lost_connection(said), "owner_longest_ms": round(watch.longest_ms, 1),
                   **owner_report(owner, before, logged)}
    return result


def after(session: Session, neighbour: Neighbour) -> dict:
    """Measures a decode loop that starts while a neighbour is already working."""
    attack, owner = neighbour.start(session.rig), session.owner
    before, logged = owner.accounts(), len(owner.process.said())
    result: dict = {}
    try:
        session.start_decode()
        result["start_s"] = session.start_s
        measured = session.alone(neighbour.seconds)
        result["neighbour_says"] = attack.end()
        result |= figures(neighbour, session.alone(CONTROL_S), measured)
        result["lost_connection"] = session.lost_connection(0)
    except Gone as error:
        result |= {"decode": str(error), "neighbour_says": attack.end()}
    return result | owner_report(owner, before, logged)


class Bench:
    """Measures all neighbours in rounds."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path):
        self._driver = find_driver()
        self._memory = CardMemory(self._driver)
        self._rigs = [Rig(build, self._driver, scratch) for build in arguments.build]
        self._session: Session | None = None
        self._end = time.monotonic() + arguments.seconds
        self._neighbours = [each for each in NEIGHBOURS if re.search(arguments.only, each.name)]
        self._rounds, self._json = arguments.rounds, arguments.json
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        self.report = {
            "started": time.time(),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "smi": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
            "commit": arguments.commit.get(arguments.build[-1].name, "unknown"),
            "commits": {build.name: arguments.commit.get(build.name, "unknown") for build in arguments.build},
            "note": arguments.note, "processors": os.cpu_count(), "chunk_mib": CHUNK_MIB,
            "owner": {each.name: each.owner.arguments(known=" ".join(each.owner.if_known))
                      for each in self._neighbours if each.owner},
            "entitlements": {each.name: each.entitlement for each in self._neighbours},
            "rounds": []}

    def run(self) -> None:
        try:
            for number in range(self._rounds):
                self.report["rounds"].append({rig.build.name: {} for rig in self._rigs})
                # Measure the last build first, because time may run out before the others.
                for rig in reversed(self._rigs):
                    for neighbour in self._neighbours:
                        if neighbour.owner is None and rig is not self._rigs[-1]:
                            continue  # Without the library, all builds are equivalent.
                        if time.monotonic() + LONGEST_CASE_S < self._end:
                            self._run_case(number, neighbour, rig)
                    self._drop_session()
        finally:
            for rig in self._rigs:
                rig.end()

    def _ready_session(self, rig: Rig, settings: OwnerSettings | None) -> Session:
        if self._session is None or self._session.rig is not rig or self._session.settings != settings:
            self._drop_session()
            self._session = Session(rig, settings)
            self._session.start_decode()
            kind = f"{rig.build.name}, {'under the owner' if settings else 'without the library'}"
            self.report.setdefault("checksums", {})[kind] = self._session.checksum
            self.report["parameters"] = self._session.parameters
        return self._session

    def _drop_session(self) -> None:
        if self._session:
            self._session.end()
        self._session = None

    def _run_case(self, number: int, neighbour: Neighbour, rig: Rig) -> None:
        begin = time.monotonic()
        try:
            if neighbour.comes_first:
                self._drop_session()
                self._session = Session(rig, neighbour.owner)
                result = after(self._session, neighbour)
            else:
                result = next_to(self._ready_session(rig, neighbour.owner), neighbour, self._memory)
            if not self._session.settle():
                result["left_behind"] = True
                self._drop_session()
        except (Gone, KeyError, ValueError, OSError, subprocess.SubprocessError) as error:
            # A failing measurement does not stop the others.
            result = {"error": repr(error)}
            self._drop_session()
        result["case_s"] = round(time.monotonic() - begin, 1)
        self.report["rounds"][number][rig.build.name][neighbour.name] = result
        self.report["summary"] = summary(self.report)
        self._json.write_text(json.dumps(self.report, indent=1) + "\n")
        shown = {key: value for key, value in result.items() if key not in ("control", "measured")}
        print(f"{number} {rig.build.name}, {neighbour.name}: {json.dumps(shown)}", flush=True)


def results_of(report: dict, build: str, name: str) -> list[dict]:
    """Returns the results of a neighbour, in round order."""
    return [one[build][name] for one in report["rounds"] if name in one.get(build, {})]


def summary(report: dict) -> dict:
    """Returns the median, minimum and maximum of each figure over the rounds, by build and neighbour."""
    found: dict = {}
    for build in report["rounds"][0]:
        for name in dict.fromkeys(name for one in report["rounds"] for name in one[build]):
            results = results_of(report, build, name)
            figures = {key: [result[key] for result in results if key in result] for key in FIGURES}
            found.setdefault(build, {})[name] = {
                "rounds": len(results), "outcome": outcome(results),
                **{key: {"median": statistics.median(values), "least": min(values), "most": max(values)}
                   for key, values in figures.items() if values}}
    return found


def outcome(results: list[dict]) -> str:
    """Describes the outcome for the decode loop and its neighbour."""
    found = []
    if any(not result.get("right", True) for result in results):
        found.append("WRONG TOKENS")
    ends = {result.get("decode") or result.get("error") for result in results} - {None}
    found += sorted(f"decode loop: {end}" for end in ends)
    measured = [result["measured"] for result in results if "measured" in result]
    refused, asked = sum(each["refused"] for each in measured), sum(each["allocations"] for each in measured)
    found += [f"{refused} of {asked} requests refused"] if refused else []
    found += ["connection lost"] if any(result.get("lost_connection") for result in results) else []
    found += ["left something behind"] if any(result.get("left_behind") for result in results) else []
    for tenant in (DECODE, SMALL, LARGE):
        accounts = [result.get("owner_says", {}).get(tenant, {}) for result in results]
        if any(account.get("killed") for account in accounts):
            found.append("DECODE LOOP KILLED" if tenant == DECODE else "neighbour killed")
        if any(account.get("kill_failures") for account in accounts):
            found.append("neighbour given up")
    return "; ".join(found) or "kept"


def cell(spread: dict | None) -> str:
    """Returns the median of a figure over the rounds, and the minimum and maximum if they differ."""
    if spread is None:
        return "-"
    whole = all(float(value).is_integer() for value in spread.values())
    digits = 0 if whole or spread["most"] >= 100 else 3 if spread["most"] < 2 else 1
    middle, least, most = (f"{spread[key]:,.{digits}f}" for key in ("median", "least", "most"))
    return middle if least == most else f"{middle} ({least} to {most})"


def table(report: dict) -> str:
    """Returns the measurement's conditions and a Markdown table with a row for each neighbour and build."""
    columns = {"share": "share of its speed alone", "gap_longest_ms": "longest gap, ms",
               "gap_p99_ms": "99th percentile, ms",
               "answer_longest_ms": "longest answer, ms", "owner_longest_ms": "longest answer of the owner, ms",
               "card_taken_mib": "taken of the card, MiB", "charged_loop_ms": "charged to the loop, ms",
               "charged_neighbour_ms": "to the neighbour, ms"}
    card, driver, _ = report["smi"].split(", ")
    commits = ", ".join(f"*{build}* is {commit}" for build, commit in report["commits"].items())
    conditions = f"{card}, driver {driver}, {report['date']}, {len(report['rounds'])} rounds; {commits}."
    lines = [conditions, "", f"| next to | {' | '.join(columns.values())} | outcome |", f"|---|{'---|' * len(columns)}---|"]
    for name in dict.fromkeys(name for build in report["summary"].values() for name in build):
        for build, rows in report["summary"].items():
            if name in rows:
                cells = [cell(rows[name].get(key)) for key in columns]
                entitlement = report["entitlements"][name]
                cells[0] += f" of {entitlement}" if entitlement != 1 else ""
                outcome_cell = rows[name]["outcome"]
                if "start_s" in rows[name]:
                    outcome_cell += f"; loop started in {cell(rows[name]['start_s'])} s"
                shown = f"{name} (*{build}*)" if len(report["summary"]) > 1 else name
                lines.append(f"| {' | '.join([shown, *cells, outcome_cell])} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    def named(kind):
        def read(text: str):
            name, _, value = text.rpartition("=")
            return kind(name or "main", value)
        return read

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", action="append", default=[], metavar="[NAME=]FOLDER",
                        type=named(lambda name, folder: Build(name, Path(folder).resolve())))
    parser.add_argument("--commit", action="append", default=[], metavar="[NAME=]COMMIT",
                        type=named(lambda name, commit: (name, commit)), help="commit of a build, for the file")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1800, help="no neighbour begins after this time")
    parser.add_argument("--only", default="", metavar="PATTERN", help="neighbours whose names match")
    parser.add_argument("--note", default="", help="text for the file")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="print the tables of these files")
    arguments = parser.parse_args()
    arguments.commit = dict(arguments.commit)
    if not arguments.table and not (arguments.build and arguments.json):
        parser.error("--build and --json are needed")
    return arguments


def main() -> None:
    arguments = parse()
    for file in arguments.table or ():
        print(table(json.loads(file.read_text())))
    if arguments.table:
        return
    with tempfile.TemporaryDirectory(prefix="gpu-mediator-") as scratch:
        bench = Bench(arguments, Path(scratch))
        bench.run()
        print(table(bench.report))


if __name__ == "__main__":
    main()
