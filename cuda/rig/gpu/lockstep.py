"""Runs two processes of the same program in turn, one with the library and one without, on the same processors.

Variations over time and between processors affect both equally. Variations between processes
show in the spread between pairs, and in pairs in which both run without the library.
"""

import ctypes
import json
import os
import select
import statistics
import sys

CPUS = {2, 3, 4, 5}


def settle():
    """Selects the processors for both programs, and disables address randomization."""
    os.sched_setaffinity(0, CPUS & os.sched_getaffinity(0) or os.sched_getaffinity(0))
    ctypes.CDLL(None).personality(0x0040000)


class Program:
    def __init__(self, child):
        self.child, self.answer = child, None

    def wait(self, limit=90):
        """Waits until the program is ready for its turn or has exited. Returns true if it is ready."""
        if not select.select([self.child.stdout], [], [], limit)[0]:
            self.child.kill()
            raise TimeoutError("a program did not come to its turn")
        while line := self.child.stdout.readline():
            if line.startswith("{"):
                self.answer = json.loads(line)
                return False
            if line.startswith("turn"):
                return True
        return False

    def go(self):
        self.child.stdin.write("go\n")
        self.child.stdin.flush()


def pair(start_first, start_second):
    """Runs two programs in turn. Returns the replies of both."""
    both = [Program(start_first()), Program(start_second())]
    try:
        ready = [one.wait() for one in both]
        count = 0
        while all(ready):
            for at in (0, 1) if count % 2 == 0 else (1, 0):
                both[at].go()
                ready[at] = both[at].wait()
            count += 1
        for one in both:
            one.child.communicate(timeout=30)
        return [one.answer for one in both]
    finally:
        for one in both:
            one.child.kill()


def ratios(first, second):
    """Returns, for each part, the median ratio of the second program's times to the first one's, turn by turn."""
    result = {}
    for name in first["parts"]:
        times = zip(first["parts"][name]["times_ms"], second["parts"][name]["times_ms"])
        result[name] = statistics.median(b / a for a, b in times)
    return result


def gather(pairs):
    """Returns each part's ratios for all pairs, and their median."""
    names = pairs[0].keys() if pairs else ()
    each = {name: sorted(round(pair[name], 4) for pair in pairs) for name in names}
    return {name: {"ratio": round(statistics.median(of), 4), "pairs": of} for name, of in each.items()}


if __name__ == "__main__":
    sys.exit("this is a part of bench.py")
