"""Benchmarks tenants that share a real card. Each figure has its baseline next to it. Writes one JSON file.

Usage: bench.py FOLDER[,FOLDER] OUT.json [SECONDS [PATTERN [ROUNDS]]]: only parts whose names match PATTERN run. FOLDER
contains libcuda.so (ours), cuda-owner and cuda-scripted-owner. `cargo xtask bench cuda` runs it. With several folders,
such as before and after a change, each part runs with each of them in turn, and all parts run ROUNDS times, if time
permits.
"""

import array
import glob
import json
import math
import os
import re
import select
import subprocess
import sys
import tempfile
import time

import lockstep

FOLDERS, OUT = [os.path.abspath(folder) for folder in sys.argv[1].split(",")], sys.argv[2]
FOLDER = FOLDERS[0]
END = time.time() + float(sys.argv[3] if len(sys.argv) > 3 else 900)
PATTERN = sys.argv[4] if len(sys.argv) > 4 else ""
ROUNDS = int(sys.argv[5]) if len(sys.argv) > 5 else 1
HERE = os.path.dirname(os.path.abspath(__file__))
REPORT = {"started": time.time(), "parts": {}}
SOCKET = "/tmp/gpu-mediator-cuda.socket"
SECONDS = 4
# The 99th percentile of events every 50 ms needs at least this time.
WAIT_SECONDS = 12
LOGS = os.environ.get("GPU_MEDIATOR_BENCH_LOGS") or tempfile.mkdtemp(prefix="gpu-mediator-")


def save():
    with open(OUT, "w") as file:
        json.dump(REPORT, file, indent=1)


def real_driver():
    paths = glob.glob("/usr/local/nvidia/lib*/libcuda.so.1") + glob.glob("/usr/lib/x86_64-linux-gnu/libcuda.so.1")
    path = next((path for path in paths if os.path.exists(path)), None)
    if path is None:
        sys.exit("no libcuda.so.1 of NVIDIA's: this benchmark needs a GPU with its driver, and a python3 with torch")
    return path


DRIVER = real_driver()


class Owner:
    count = 0

    def __init__(self, *arguments, scripted=False):
        self.arguments, self.scripted = list(map(str, arguments)), scripted
        self.begin()

    def begin(self):
        if os.path.exists(SOCKET):
            os.remove(SOCKET)
        program = "cuda-scripted-owner" if self.scripted else "cuda-owner"
        verb = [] if self.scripted else ["serve"]
        command = [f"{FOLDER}/{program}", "--driver", DRIVER, *verb, "--socket", SOCKET, *self.arguments]
        Owner.count += 1
        self.log = f"{LOGS}/owner-{Owner.count}.log"
        with open(self.log, "w") as log:
            self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        line = self.child.stdout.readline()
        assert "ready" in line, self.said()

    def said(self):
        with open(self.log) as log:
            return log.read()[-500:]

    def kill(self):
        self.child.kill()
        self.child.wait()

    def end(self):
        try:
            out, _ = self.child.communicate(timeout=30)
            lines = [line for line in out.splitlines() if line.startswith("{")]
            return json.loads(lines[-1]) if lines else {"error": self.said()}
        except Exception as error:
            self.child.kill()
            return {"error": repr(error)}


def environment(tenant):
    env = {n: v for n, v in os.environ.items() if not n.startswith("GPU_MEDIATOR_CUDA")}
    if tenant:
        front = f"/tmp/front-{os.path.basename(FOLDER)}"
        os.makedirs(front, exist_ok=True)
        for name in ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so"):
            if os.path.lexists(f"{front}/{name}"):
                os.remove(f"{front}/{name}")
            os.symlink(f"{FOLDER}/libcuda.so", f"{front}/{name}")
        env["LD_LIBRARY_PATH"] = f"{front}:" + env.get("LD_LIBRARY_PATH", "")
        env.update(GPU_MEDIATOR_CUDA_DRIVER=DRIVER, GPU_MEDIATOR_CUDA_SOCKET=SOCKET,
                   GPU_MEDIATOR_CUDA_TENANT=tenant, GPU_MEDIATOR_CUDA_LOG="1")
    return env


def start(tenant, *command, errors=subprocess.PIPE, first=None, **more):
    return subprocess.Popen([sys.executable, *map(str, command)], env={**environment(tenant), **more},
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=first)


def job(tenant, *command):
    return start(tenant, f"{HERE}/jobs.py", *command)


def go(children, limit=40):
    """Waits until all are ready, and makes them begin at the same time. Returns that time."""
    until = min(END, time.time() + limit)
    for child in children:
        # Each child has printed only one line, so no further data is in the reader's buffer.
        if not select.select([child.stdout], [], [], max(0.1, until - time.time()))[0]:
            continue
        child.stdout.readline()
    begin = time.time() + 0.3
    for child in children:
        try:
            child.stdin.write(f"{begin}\n")
            child.stdin.flush()
        except OSError:  # `finish` reports the failure.
            pass
    return begin


def finish(child, limit):
    try:
        out, error = child.communicate(timeout=max(1, min(limit, END - time.time())))
    except subprocess.TimeoutExpired:
        child.kill()
        out, error = child.communicate()
        return {"code": "timeout", "error": error[-600:]}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    answer = json.loads(lines[-1]) if lines else {}
    answer["code"] = child.returncode
    if child.returncode or "gpu-mediator" in error.replace("the driver is", ""):
        answer["error"] = error[-600:]
    return answer


def run(name, work, ours):
    # All shares are relative to the rate of a lone program.
    wanted = name == "alone" and "share" in PATTERN or re.search(PATTERN, name)
    if time.time() + 20 > END or not wanted:
        return
    begin = time.time()
    try:
        result = work()
    except Exception as error:  # A failing part must not stop the others.
        result = {"error": repr(error)}
    result["part_s"] = round(time.time() - begin, 1)
    if ours and len(FOLDERS) > 1:
        name = f"{name} ({os.path.basename(FOLDER)})"
    REPORT["parts"].setdefault(name, []).append(result) if ROUNDS > 1 else REPORT["parts"].update({name: result})
    save()
    print(name, json.dumps(result)[:500], flush=True)


PARTS = []


def part(name, work, ours=True):
    """Adds a part. Parts that are not `ours` run without the library and the owner."""
    PARTS.append((name, work, ours))


def run_all():
    global FOLDER
    for count in range(ROUNDS):
        for name, work, ours in PARTS:
            if ours or count == 0:
                for FOLDER in FOLDERS if ours else FOLDERS[:1]:
                    run(name, work, ours)


# Bursts of about 0.06, 0.08, 1, 4.5, 9 and 21 ms of card time.
SHORT, SHORTISH, MIDDLE, LONGISH, LONG, LONGEST = (1024, 1), (1408, 1), (2048, 3), (4864, 1), (6144, 1), (8192, 1)
ALONE = {}


def alone():
    sizes = [f"{n}:{many}" for n, many in (SHORT, SHORTISH, MIDDLE, LONGISH, LONG, LONGEST)]
    child = job(None, "alone", 2, *sizes)
    go([child])
    answer = finish(child, 60)
    for size, rate in answer.get("per_s", {}).items():
        ALONE[tuple(map(int, size.split(":")))] = rate
    return answer


def loops(owner, jobs, idle=None):
    """Runs jobs, given as (tenant, size). Shares are relative to a lone job, by the programs' own counts."""
    served = Owner(*owner) if owner else None
    children = [job(tenant if owner else None, "loop", *size, SECONDS) for tenant, size in jobs]
    beside = [job(idle, "idle", SECONDS)] if idle else []
    go(children + beside)
    answers = [finish(child, 60) for child in children]
    for child in beside:
        finish(child, 60)
    for answer, (_, size) in zip(answers, jobs):
        if size in ALONE and "count" in answer:
            answer["share"] = round(answer["count"] / SECONDS / ALONE[size], 4)
    result = {"shares": [a.get("share") for a in answers], "sum": round(sum(a.get("share", 0) for a in answers), 4),
              "answers": answers}
    if served:
        result["owner"] = served.end()
    return result


def switches(owner):
    """Measures the gaps between kernels of one tenant and between those of two, in microseconds of the card's clock."""
    served = Owner(*owner) if owner else None
    paths = [f"{LOGS}/spin-{name}" for name in "ab"]
    children = [job(name if owner else None, "spin", SECONDS, path) for name, path in zip("ab", paths)]
    go(children)
    answers = [finish(child, 60) for child in children]
    owner_says = served.end() if served else None
    times = []
    for who, path in enumerate(paths):
        words = array.array("Q")
        with open(path, "rb") as file:
            words.frombytes(file.read())
        times += [(begin, end, who) for begin, end in zip(words[::2], words[1::2])]
        os.remove(path)
    times.sort()
    gaps = {"within": [], "between": []}
    for (_, end, who), (begin, _, next_who) in zip(times, times[1:]):
        gaps["within" if who == next_who else "between"].append((begin - end) / 1000)
    # The first program's share of the kernels that completed in each window of 500 ms.
    windows = {}
    for begin, end, who in times:
        windows.setdefault((end - times[0][0]) // 500_000_000, [0, 0])[who] += 1
    parts = [first / (first + second) for first, second in list(windows.values())[:-1]]
    lengths = sorted((end - begin) / 1000 for begin, end, _ in times)
    result = {"kernels": len(times), "longest_kernel_us": lengths[-1], "span_us": (times[-1][1] - times[0][0]) / 1000,
              "parts_of_500_ms": [round(part, 4) for part in parts]}
    result["busy"] = len(times) * 250 / result["span_us"]
    for name, of in gaps.items():
        of.sort()
        result[name] = {"count": len(of), "sum_us": sum(of), "min_us": of[0], "p50_us": of[len(of) // 2],
                        "p90_us": of[len(of) * 9 // 10], "max_us": of[-1]}
    return {**result, "answers": answers, "owner": owner_says}


def latency(owner):
    served = Owner(*owner) if owner else None
    children = [job("a" if owner else None, "periodic", WAIT_SECONDS),
                job("b" if owner else None, "loop", *MIDDLE, WAIT_SECONDS)]
    go(children)
    answers = [finish(child, 60) for child in children]
    return {"answers": answers, "owner": served.end() if served else None}


CARD = ("--card-mib", 20480, "--chunk-mib", 16)


def tenants(*weights):
    return [a for name, weight in zip("abc", weights) for a in ("--tenant", f"{name}:20480:{weight}")]


def fill(owner, jobs, serial=False):
    """Runs jobs, given as (tenant, GiB, rounds, pause). Returns the seconds from the common start to the last result
    and to the exit of the last process, without Python's start. Only the second value is comparable between both ways
    of running: an exiting process delays the next one's memory, in turns as well as in series."""
    served = Owner(*owner) if owner else None
    if served:
        time.sleep(3)  # Until the owner has pinned its stock of host memory, which blocks the driver.
    total, ended, answers = 0, 0, []
    groups = [[j] for j in jobs] if serial else [jobs]
    for group in groups:
        children = [job(t if owner else None, "fill", g, r, p) for t, g, r, p in group]
        begin = go(children)
        got = [finish(child, 90) for child in children]
        ends = [a.get("end", 0) for a in got]
        total += max(ends) - begin
        ended += time.time() - begin
        answers += got
    result = {"seconds": round(total, 3), "ended_s": round(ended, 3), "ends_s": [round(end - begin, 3) for end in ends], "answers": answers}
    if served:
        result["owner"] = served.end()
    return result


def pauses(card_mib):
    """Measures the gaps between a small tenant's bursts while 20 GiB of an idle tenant are evicted for a third one,
    which allocates as much, and the same on a card on which everything fits."""
    served = Owner("--card-mib", card_mib, "--host-mib", 26624, "--host-ready-mib", 22528, "--chunk-mib", 16,
                   "--tenant", "a:22528", "--tenant", "b:22528", "--tenant", "c:4096")
    time.sleep(6)  # Until the owner has pinned its stock of host memory.
    idle, comes, small = job("a", "fill", 20, 2, 9), job("b", "fill", 20, 20, 0.05), job("c", "watch", 7)
    go([idle])
    time.sleep(1.5)
    go([small])
    time.sleep(2.5)
    go([comes])
    answers = [finish(child, 60) for child in (idle, comes, small)]
    owner, (held, other, watched) = served.end(), answers
    if any(answer["code"] for answer in answers):
        return {"error": "a program failed", "answers": answers, "owner": owner}
    begin, ends = watched.pop("begin"), watched.pop("ends_ms")
    from_ms = (other["begin"] - begin) * 1e3
    until_ms = from_ms + other["fill_s"] * 1e3
    gaps = {"before": [], "while it fills": [], "while it works": []}
    for end, after in zip(ends, ends[1:]):
        when = "before" if after < from_ms else "while it fills" if end < until_ms else "while it works"
        gaps[when].append(after - end)
    shown = {}
    for when, of in gaps.items():
        of.sort()
        if of:
            shown[when] = {"count": len(of), "p50_ms": of[len(of) // 2], "p99_ms": of[len(of) * 99 // 100],
                           "longest_ms": [round(gap, 2) for gap in of[-5:]]}
    return {"gaps": shown, "fill_s": other["fill_s"], "answers": answers, "owner": owner}


def takeover():
    """Kills the owner while a program works, and starts another one."""
    plain = job(None, "fill", 4, 300, 0.01)
    go([plain])
    right = finish(plain, 40)
    served = Owner(*CARD, *tenants(100, 100), "--journal", "/tmp/gpu-mediator-cuda.journal")
    child = job("a", "fill", 4, 300, 0.01)
    go([child])
    time.sleep(1.5)
    served.kill()
    time.sleep(0.5)
    served.begin()
    answer = finish(child, 60)
    return {"plain": right, "answer": answer, "equal": answer.get("hash") == right.get("hash"), "owner": served.end()}


def twice():
    served = Owner(*CARD, *tenants(100, 100))
    children = [start(t, f"{HERE}/programs.py", "torch", 3) for t in "ab"]
    answers = [finish(child, 60) for child in children]
    plain = finish(start(None, f"{HERE}/programs.py", "torch", 3), 60)
    for a in [*answers, plain]:
        a["parts"] = {k: round(v["median_ms"], 2) for k, v in a.get("parts", {}).items()}
    return {"answers": answers, "plain": plain, "equal": all(a.get("hash") == plain.get("hash") for a in answers),
            "owner": served.end()}


def paired(name, pairs, repeats):
    """Compares a lone program under the owner with one without the library, in pairs of processes that take turns."""
    def begin(tenant):
        return lambda: start(tenant, f"{HERE}/programs.py", name, repeats, "turns", errors=subprocess.DEVNULL,
                             first=lockstep.settle, PYTHONHASHSEED="0")

    found, noise, hashes = [], [], set()
    # Every third pair, from the second on, runs both without the library.
    for number in range(pairs + (pairs + 1) // 2):
        if time.time() + 35 > END:
            break
        served = Owner(*CARD, *tenants(100)) if number % 3 != 1 else None
        plain, ours = lockstep.pair(begin(None), begin("a" if served else None))
        if served:
            served.end()
        hashes |= {plain["hash"], ours["hash"]}
        (found if served else noise).append(lockstep.ratios(plain, ours))
    parts = lockstep.gather(found)
    mean = math.exp(sum(math.log(part["ratio"]) for part in parts.values()) / len(parts)) if parts else None
    return {"parts": parts, "geometric_mean": mean, "both_without": lockstep.gather(noise), "equal": len(hashes) == 1}


def calls(rounds=5):
    """Measures single calls in ns: the lowest mean of several alternating runs with and without the library."""
    best = {"plain": {}, "ours": {}}
    for number in range(2 * rounds):
        mode = ("plain", "ours")[number % 2]
        served = Owner(*CARD, *tenants(100)) if mode == "ours" else None
        done = subprocess.run([f"{FOLDER}/cuda-program", "calls"], env=environment("a" if served else None),
                              capture_output=True, text=True, timeout=60, preexec_fn=lockstep.settle)
        if served:
            served.end()
        if done.returncode:
            return {"error": done.stderr[-500:]}
        for key, ns in json.loads(done.stdout).items():
            best[mode][key] = min(best[mode].get(key, 1e12), ns)
    return best


def suspended():
    """Suspends an unresponsive tenant through NVIDIA's checkpoint, because another one needs its memory."""
    served = Owner(*SMALL, "--suspend", "--patience-ms", 2000)
    mute = subprocess.Popen([f"{FOLDER}/cuda-program", "stall", "--mib", "9216"], env=environment("a"),
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    said = [mute.stdout.readline().strip()]
    mute.stdin.write("stall\n")
    mute.stdin.flush()
    said.append(mute.stdout.readline().strip())
    other = job("b", "fill", 8, 50, 0)
    go([other])
    answer = finish(other, 60)
    there = mute.poll() is None
    mute.kill()
    mute.wait()
    return {"mute": said, "process_there": there, "other": answer, "owner": served.end(), "log": served.said()}


SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def moving(name, more):
    """Compares results while 16 chunks of 2 MiB move every 5 ms."""
    plain = finish(start(None, f"{HERE}/programs.py", name, 2, **more), 60)
    served = Owner("--quota-mib", 16384, "--device-mib", 16384, "--chunk-mib", 2, "--relocate-ms", 5, "--batch", 16,
                   scripted=True)
    ours = finish(start("a", f"{HERE}/programs.py", name, 2, **more), 90)
    return {"equal": plain.get("hash") == ours.get("hash"), "code": ours["code"], "owner": served.end()}


def told():
    """Returns the memory that nvidia-smi reports to a tenant, without a program and with one that uses 4 GiB."""
    ask = ["nvidia-smi", "--query-gpu=memory.total,memory.used,memory.free", "--format=csv,noheader,nounits"]

    def says(tenant, command):
        done = subprocess.run(command, env=environment(tenant), capture_output=True, text=True, timeout=30)
        return {"code": done.returncode, "out": done.stdout.strip()[-2500:], "error": done.stderr.strip()[-500:]}

    result = {"without": says(None, ask)}
    served = Owner(*CARD, "--tenant", "a:10240")
    result["tenant"] = says("a", ask)
    child = job("a", "fill", 4, 200, 0.02)
    go([child])
    time.sleep(1)
    result["tenant with a program"] = says("a", ask)
    result["all of it"] = says("a", ["nvidia-smi"])
    result["program"] = finish(child, 40)
    result["owner"] = served.end()
    return result


def shared():
    """Runs processes that share memory, with each of PyTorch's allocators, while another tenant needs the card."""
    result = {}
    for title, more in (("plain", {}), ("expandable segments", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})):
        without = finish(start(None, f"{HERE}/shared.py", **more), 60)
        served = Owner(*SMALL)
        other = job("b", "fill", 8, 400, 0)
        go([other])
        ours = finish(start("a", f"{HERE}/shared.py", **more), 90)
        result[title] = {"without": without, "ours": ours, "other": finish(other, 60), "owner": served.end()}
    return result


def measure(*more, gib=20):
    done = subprocess.run([f"{FOLDER}/cuda-owner", "--driver", DRIVER, "measure", "--gib", str(gib), "--chunk-mib", "16",
                           "--patience-s", "40", *more], capture_output=True, text=True, timeout=90)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-500:]}


REPORT["commit"] = os.environ.get("GPU_MEDIATOR_COMMIT") or subprocess.run(
    ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()
REPORT["smi"] = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
                               capture_output=True, text=True).stdout.strip()
BOTH = ["--tenant", "a:10240", "--tenant", "b:10240"]
SMALL = ("--card-mib", 10240, "--host-mib", 16384, "--host-ready-mib", 12288, "--chunk-mib", 16, *BOTH)
BIG = [("a", 8, 500, 0), ("b", 8, 500, 0)]
SHORT_JOBS = [("a", 8, 100, 0), ("b", 8, 100, 0)]
LASTING = [("a", 8, 2200, 0), ("b", 8, 2200, 0)]
THREE = [(name, 8, 1000, 0) for name in "abc"]
SMALL_FOR_THREE = ("--card-mib", 10240, "--host-mib", 24576, "--host-ready-mib", 20480, "--chunk-mib", 16, *BOTH,
                   "--tenant", "c:10240")
MIXED = [("a", 8, 120, 0.03), ("b", 8, 120, 0.03)]
MIXED_LASTING = [("a", 8, 450, 0.03), ("b", 8, 450, 0.03)]
FITTING = [("a", 4, 250, 0.015), ("b", 4, 250, 0.015)]

part("alone", alone, ours=False)
part("share: hardware, equal", lambda: loops(None, [("a", MIDDLE), ("b", MIDDLE)]), ours=False)
for slice_ms in (10, 15, 20, 50):
    part(f"share: weights 1:1, turns of {slice_ms} ms",
         lambda slice_ms=slice_ms: loops((*CARD, *tenants(100, 100), "--slice-ms", slice_ms),
                                         [("a", MIDDLE), ("b", MIDDLE)]))
for early_us in (100, 600):
    part(f"share: weights 1:1, end told {early_us} us before",
         lambda early_us=early_us: loops((*CARD, *tenants(100, 100), "--idle-us", early_us), [("a", MIDDLE), ("b", MIDDLE)]))
part("switches: hardware", lambda: switches(None), ours=False)
for slice_ms in (10, 15, 20):
    part(f"switches: turns of {slice_ms} ms",
         lambda slice_ms=slice_ms: switches((*CARD, *tenants(100, 100), "--slice-ms", slice_ms)))
part("share: alone, owned", lambda: loops((*CARD, *tenants(100, 100)), [("a", MIDDLE)]))
part("share: beside one that is idle", lambda: loops((*CARD, *tenants(100, 100)), [("a", MIDDLE)], idle="b"))
part("share: weights 3:1", lambda: loops((*CARD, *tenants(300, 100)), [("a", MIDDLE), ("b", MIDDLE)]))
part("share: weights 1:2:4", lambda: loops((*CARD, *tenants(100, 200, 400)), [(t, MIDDLE) for t in "abc"]))
part("share: hardware, short and long", lambda: loops(None, [("a", SHORT), ("b", LONG)]), ours=False)
part("share: weights 1:1, short and long", lambda: loops((*CARD, *tenants(100, 100)), [("a", SHORT), ("b", LONG)]))
part("share: hardware, 0.08 and 4.5 ms", lambda: loops(None, [("a", SHORTISH), ("b", LONGISH)]), ours=False)
part("share: weights 1:1, 0.08 and 4.5 ms", lambda: loops((*CARD, *tenants(100, 100)), [("a", SHORTISH), ("b", LONGISH)]))
part("share: weights 1:1, short and longest", lambda: loops((*CARD, *tenants(100, 100)), [("a", SHORT), ("b", LONGEST)]))
part("wait: hardware", lambda: latency(None), ours=False)
for who in ("normal", "interactive"):
    part(f"wait: class {who}",
         lambda who=who: latency((*CARD, "--tenant", f"a:20480:100:{who}", "--tenant", "b:20480:100:normal")))
part("more than fits, one after the other", lambda: fill(SMALL, BIG, serial=True))
part("more than fits, at once", lambda: fill(SMALL, BIG))
part("more than fits, jobs that last, one after the other", lambda: fill(SMALL, LASTING, serial=True))
part("more than fits, jobs that last, at once", lambda: fill(SMALL, LASTING))
part("three, more than fits, one after the other", lambda: fill(SMALL_FOR_THREE, THREE, serial=True))
part("three, more than fits, at once", lambda: fill(SMALL_FOR_THREE, THREE))
for least in (1000, 4000, 15000):
    part(f"more than fits, at once, turns of {least} ms",
         lambda least=least: fill((*SMALL, "--quanta", "forced", "--quantum-min-ms", least, "--quantum-max-ms", least), BIG))
for least in (2000, 5000, 10000, 20000):
    part(f"more than fits, jobs that last, turns of {least} ms",
         lambda least=least: fill((*SMALL, "--quanta", "forced", "--quantum-min-ms", least, "--quantum-max-ms", least),
                                  LASTING))
part("more than fits, jobs that last, idle for 20 ms", lambda: fill((*SMALL, "--idle-us", 20000), LASTING))
part("takeover", takeover)
part("pause of others, 20 GiB fit", lambda: pauses(45056))
part("pause of others, 20 GiB evicted", lambda: pauses(24576))
part("evict 20 GiB", measure)
part("link", lambda: measure("--no-checkpoint", gib=8))
for name, pairs, repeats in (("torch", 8, 12), ("cupy", 6, 31), ("jax", 3, 31)):
    part(f"alone: {name}", lambda name=name, pairs=pairs, repeats=repeats: paired(name, pairs, repeats))
part("calls", calls)
part("suspended", suspended)
for title, name, more in (("torch", "torch", {}), ("torch, expandable segments", "torch", SEGMENTS),
                          ("cupy", "cupy", {}), ("jax", "jax", {})):
    part(f"moving chunks: {title}", lambda name=name, more=more: moving(name, more))
part("told by NVML", told)
part("shared between processes", shared)
part("program twice", twice)
part("mixed, fits, hardware", lambda: fill(None, FITTING), ours=False)
part("mixed, fits", lambda: fill(SMALL, FITTING))
part("mixed, more than fits, one after the other", lambda: fill(SMALL, MIXED, serial=True))
part("mixed, more than fits, at once", lambda: fill(SMALL, MIXED))
for least in (1000, 4000, 15000):
    part(f"mixed, more than fits, at once, turns of {least} ms",
         lambda least=least: fill((*SMALL, "--quanta", "forced", "--quantum-min-ms", least, "--quantum-max-ms", least),
                                  MIXED))
part("mixed, jobs that last, one after the other", lambda: fill(SMALL, MIXED_LASTING, serial=True))
part("mixed, jobs that last, at once", lambda: fill(SMALL, MIXED_LASTING))
part("short jobs, more than fits, one after the other", lambda: fill(SMALL, SHORT_JOBS, serial=True))
part("short jobs, more than fits, at once", lambda: fill(SMALL, SHORT_JOBS))
part("short jobs, more than fits, at once, without turns", lambda: fill((*SMALL, "--quanta", "off"), SHORT_JOBS))
run_all()
save()
