"""Summarizes the cases of `together.py`, and compares them with the targets."""

import statistics


def rate(result: dict) -> float:
    """Returns a program's tokens or steps per second."""
    return result.get("tokens", result.get("steps", 0)) / result["seconds"]


def median(values) -> float | None:
    values = list(values)
    return round(statistics.median(values), 4) if values else None


def rates_of(results: list[dict]) -> dict:
    """Returns each program's median rate and its share of the sum in each round, and the token times."""
    names = list(results[0]["programs"])
    rates = {name: median(rate(result["programs"][name]) for result in results) for name in names}
    totals = [sum(map(rate, result["programs"].values())) for result in results]
    shares = [[round(rate(one) / total, 4) if total else 0.0 for one in result["programs"].values()]
              for result, total in zip(results, totals)]
    loops = [one for result in results for one in result["programs"].values() if "tokens" in one]
    worst = [max(one["gap_p99_ms"] for one in result["programs"].values() if "tokens" in one)
             for result in results if any("tokens" in one for one in result["programs"].values())]
    found = {"rates": rates, "total": median(totals), "totals": [round(total, 1) for total in totals], "shares": shares}
    if loops:
        found |= {"p50_ms": median(one["gap_p50_ms"] for one in loops), "p99_ms": median(worst), "p99s_ms": worst,
                  "longest_ms": max(one["gap_longest_ms"] for one in loops),
                  "wrong": sum(one["wrong_sequences"] for one in loops)}
    modes = [result["modes"] for result in results if "modes" in result]
    return found | ({"modes": modes} if modes else {})


def memory_of(results: list[dict]) -> dict:
    """Returns the time of concurrent jobs relative to the same jobs in series, and true if all results were equal."""
    ratios = [result["concurrent"]["seconds"] / sum(one["seconds"] for one in result["serial"]) for result in results]
    checksums = [{one["checksum"] for run in (*result["serial"], result["concurrent"]) for one in run["results"]}
                 for result in results]
    return {"of_serial": median(ratios), "ratios": [round(ratio, 4) for ratio in ratios],
            "equal_results": all(len(one) == 1 for one in checksums)}


def summarise(rounds: list[dict]) -> dict:
    """Returns a summary of each case with results."""
    names = list(dict.fromkeys(name for one in rounds for name in one))
    found: dict[str, dict] = {}
    for name in names:
        results = [one[name] for one in rounds if name in one and "error" not in one[name]]
        if results:
            found[name] = memory_of(results) if "concurrent" in results[0] else rates_of(results)
    return found


class Verdicts:
    """Compares values with targets. Skips comparisons for which a case is missing."""

    def __init__(self, summary: dict):
        self._summary = summary
        self.found: list[dict] = []

    def get(self, case: str, key: str):
        return self._summary.get(case, {}).get(key)

    def _add(self, what: str, value, target: str, met: bool | None) -> None:
        if met is not None:
            self.found.append({"what": what, "value": value if isinstance(value, (bool, str)) else round(value, 4),
                               "target": target, "met": met})

    def at_least(self, what: str, value: float | None, target: float) -> None:
        self._add(what, value, f">= {target}", None if value is None else value >= target)

    def at_most(self, what: str, value: float | None, target: float) -> None:
        self._add(what, value, f"<= {target}", None if value is None else value <= target)

    def share(self, what: str, case: str, members: int, due: float, off: float) -> None:
        """Checks the share of a case's first `members` programs in each round."""
        for shares in self.get(case, "shares") or []:
            value = sum(shares[:members])
            self._add(what, value, f"{due} within {off:.0%}", abs(value / due - 1) <= off)

    def ratio(self, case: str, other: str, key: str) -> float | None:
        one, two = self.get(case, key), self.get(other, key)
        return one / two if one and two else None

    def next_to_job(self, kind: str, way: str) -> None:
        """Checks a loop's token times next to a job, and the job's use of the time that the loop leaves."""
        case = f"jobs, {kind} and job, {way}"
        alone, job = "jobs, loop alone, without the library", "jobs, one, without the library"
        self.at_most(f"{case}: p99 of a token, of alone", self.ratio(case, alone, "p99_ms"), 2.5)
        rates, loop_alone, job_alone = self.get(case, "rates"), self.get(alone, "total"), self.get(job, "total")
        if rates and loop_alone and job_alone:
            loop = next(rate for name, rate in rates.items() if "loop" in name)
            trained = next(rate for name, rate in rates.items() if "job" in name)
            rest = 1 - loop / loop_alone
            self.at_least(f"{case}: steps, of the rest", trained / job_alone / rest if rest > 0 else None, 0.9)

    def auto(self, kind: str) -> None:
        """Checks that the mode chosen after 3 s is the faster one for the same programs, or within 2 % of it."""
        case = f"{kind}, two, auto"
        together = self.get(f"{kind}, two, one group", "total")
        turns = self.get(f"{kind}, two, turns", "total")
        for modes in self.get(case, "modes") or []:
            chosen = [mode for at, mode in modes if at <= 3.0][-1:]
            if not together or not turns or not chosen:
                continue
            best = max(together, turns)
            met = (together if chosen[0] else turns) >= 0.98 * best and not any(at > 3.0 for at, _ in modes)
            self._add(f"{case}: mode after 3 s", "together" if chosen[0] else "turns",
                      f"together {together}, turns {turns}; no change later", met)


def verdicts(summary: dict) -> list[dict]:
    """Returns each target with the measured value and the verdict."""
    found = Verdicts(summary)
    for count in ("two", "four"):
        ours, mps = f"loops, {count}, one group", f"loops, {count}, MPS"
        found.at_least(f"{ours}: tokens, of MPS", found.ratio(ours, mps, "total"), 0.97)
        found.at_most(f"{ours}: p99, of MPS", found.ratio(ours, mps, "p99_ms"), 1.3)
    found.share("loops, two, one group, weights 3:1: share", "loops, two, one group, weights 3:1", 1, 0.75, 0.05)
    alone = "loops, one, without the library"
    found.at_least("loops, two, turns: tokens, of one loop", found.ratio("loops, two, turns", alone, "total"), 0.94)
    found.at_most("loops, two, turns: p99 in ms", found.get("loops, two, turns", "p99_ms"), 6.5)
    found.share("two groups of two loops: share", "loops, two groups of two", 2, 0.5, 0.02)
    found.share("two groups of two loops, 3:1: share", "loops, two groups of two, weights 3:1", 2, 0.75, 0.02)
    for way in ("turns", "one group"):
        found.share(f"guarantee of half next to three jobs, {way}: share", f"jobs, four, {way}, guarantee of half", 1,
                    0.5, 0.03)
    found.at_least("two jobs, turns: steps, of one job", found.ratio("jobs, two, turns", "jobs, one, turns", "total"),
                   0.99)
    for kind in ("loop", "paced loop"):
        for way in ("hardware time slices", "MPS", "MPS with priorities", "turns", "one group", "two groups"):
            found.next_to_job(kind, way)
    for kind in ("loops", "jobs"):
        found.auto(kind)
    memory = "jobs, two, group larger than the memory"
    found.at_most(f"{memory}: time, of serial", found.get(memory, "of_serial"), 1.03)
    if (equal := found.get(memory, "equal_results")) is not None:
        found._add(f"{memory}: results are equal", equal, "equal", equal)
    wrong = [case for case, one in summary.items() if one.get("wrong")]
    if summary:
        found._add("every sequence has the right tokens", ", ".join(wrong) or "all", "all", not wrong)
    return found.found
