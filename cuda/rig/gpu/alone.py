"""Tests the library alone on a real card: exported functions, costs, and results while chunks move. Writes one JSON
file.

Usage: alone.py FOLDER OUT.json [SECONDS]: FOLDER contains libcuda.so (ours), cuda-scripted-owner and symbols.txt.
"""

import ctypes
import glob
import json
import os
import statistics
import subprocess
import sys
import time

FOLDER, OUT = os.path.abspath(sys.argv[1]), sys.argv[2]
END = time.time() + float(sys.argv[3] if len(sys.argv) > 3 else 420)
HERE = os.path.dirname(os.path.abspath(__file__))
REPORT = {"started": time.time(), "facts": {}, "runs": [], "summary": {}}


def save():
    with open(OUT, "w") as file:
        json.dump(REPORT, file, indent=1)


def real_driver():
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    paths = [line.split("=>")[1].strip() for line in listed.splitlines() if "libcuda.so.1 " in line and "=>" in line]
    paths += glob.glob("/usr/local/nvidia/lib*/libcuda.so.1") + glob.glob("/usr/lib/x86_64-linux-gnu/libcuda.so.1")
    return next(path for path in paths if os.path.exists(path))


DRIVER = real_driver()
SOCKET = "/tmp/gpu-mediator-cuda.socket"


def facts():
    f = REPORT["facts"]
    f["driver"] = DRIVER
    f["glibc"] = os.confstr("CS_GNU_LIBC_VERSION")
    f["smi"] = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
                              capture_output=True, text=True).stdout.strip()
    ours = set(open(f"{FOLDER}/symbols.txt").read().split())
    nm = subprocess.run(["nm", "-D", "--defined-only", DRIVER], capture_output=True, text=True).stdout
    real = {line.split()[-1].split("@")[0] for line in nm.splitlines() if line.split()}
    real = {name for name in real if name.startswith("cu") and not name.startswith("cudbg")}
    f["exported"] = len(real)
    f["not_in_table"] = sorted(real - ours)
    f["not_in_driver"] = len(ours - real)
    # Functions for which cuGetProcAddress returns another address than the symbol's.
    cuda = ctypes.CDLL(DRIVER)
    cuda.cuInit(0)
    other = []
    for name in sorted(ours & real):
        found = ctypes.c_void_p()
        base, version = name, 13000
        for suffix in ("_ptsz", "_ptds", "_v2", "_v3", "_v4"):
            base = base.removesuffix(suffix)
        flags = 2 if name.endswith(("_ptsz", "_ptds")) else 1
        if cuda.cuGetProcAddress(base.encode(), ctypes.byref(found), version, ctypes.c_uint64(flags)) == 0 and found.value:
            addresses = {ctypes.cast(getattr(cuda, n), ctypes.c_void_p).value for n in ours & real if n.startswith(base)}
            if found.value not in addresses:
                other.append(name)
    f["answered_by_another_address"] = other
    save()


class Owner:
    def __init__(self, *arguments):
        if os.path.exists(SOCKET):
            os.remove(SOCKET)
        self.child = subprocess.Popen(
            [f"{FOLDER}/cuda-scripted-owner", "--socket", SOCKET, "--driver", DRIVER, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.child.stdout.readline().strip() == "ready"

    def counts(self):
        self.child.stdin.close()
        line = self.child.stdout.readline()
        self.child.wait(timeout=30)
        return json.loads(line)


def environment(mode):
    env = dict(os.environ)
    for name in [n for n in env if n.startswith("GPU_MEDIATOR_CUDA")]:
        del env[name]
    if mode != "plain":
        os.makedirs("/tmp/front", exist_ok=True)
        if not os.path.lexists("/tmp/front/libcuda.so.1"):
            os.symlink(f"{FOLDER}/libcuda.so", "/tmp/front/libcuda.so.1")
        env["LD_LIBRARY_PATH"] = "/tmp/front:" + env.get("LD_LIBRARY_PATH", "")
        env["GPU_MEDIATOR_CUDA_DRIVER"] = DRIVER
    if mode not in ("plain", "passed"):
        env["GPU_MEDIATOR_CUDA_SOCKET"] = SOCKET
        env["GPU_MEDIATOR_CUDA_LOG"] = "1"
    return env


def program(mode, name, repeats=5, limit=120, owner=()):
    """Runs a program once, and adds its result to the report."""
    if time.time() + 15 > END:
        return None
    served = Owner(*owner) if mode not in ("plain", "passed") else None
    start = time.time()
    run = {"mode": mode, "program": name, "owner": list(owner)}
    try:
        done = subprocess.run([sys.executable, f"{HERE}/programs.py", name, str(repeats)], env=environment(mode),
                              capture_output=True, text=True, timeout=min(limit, max(10, END - time.time())))
        run["code"] = done.returncode
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode == 0 and lines:
            run.update(json.loads(lines[-1]))
        run["error"] = done.stderr[-1500:]
    except subprocess.TimeoutExpired as error:
        run["code"], run["error"] = "timeout", str(error.stderr)[-1500:]
    run["wall_s"] = round(time.time() - start, 2)
    if served:
        try:
            run["counts"] = served.counts()
        except Exception as error:  # The report contains the error, and the next run continues.
            run["counts"] = repr(error)
            served.child.kill()
    REPORT["runs"].append(run)
    save()
    times = {k: round(v["median_ms"], 2) for k, v in run.get("parts", {}).items()}
    print(mode, name, run["code"], run["wall_s"], times, run.get("hash", "")[:12], run.get("counts", ""), flush=True)
    if run["code"] != 0:
        print(run["error"][-700:], flush=True)
    return run


def summarise():
    runs = [r for r in REPORT["runs"] if r["code"] == 0 and "moves" not in r["mode"]]
    for name in ("torch", "cupy", "jax"):
        plain = [r for r in runs if r["program"] == name and r["mode"] == "plain"]
        for mode in sorted({r["mode"] for r in runs} - {"plain"}):
            ours = [r for r in runs if r["program"] == name and r["mode"] == mode]
            for part in (plain[0]["parts"] if plain and ours else []):
                before = statistics.median(r["parts"][part]["median_ms"] for r in plain)
                after = statistics.median(r["parts"][part]["median_ms"] for r in ours)
                REPORT["summary"][f"{name}.{part}.{mode}"] = round(after / before, 4)
    hashes = {}
    for r in REPORT["runs"]:
        if r["code"] == 0:
            hashes.setdefault(r["program"], {}).setdefault(r["hash"][:16], []).append(r["mode"])
    REPORT["hashes"] = hashes
    save()


MEMORY = ("--quota-mib", 16384, "--device-mib", 16384)
facts()
print(json.dumps(REPORT["facts"])[:3000], flush=True)
for name in ("torch", "cupy", "jax"):
    program("plain", name)
    program("passed", name)
    program("chunks16", name, owner=(*MEMORY, "--chunk-mib", 16))
    program("moves2", name, owner=(*MEMORY, "--chunk-mib", 2, "--relocate-ms", 5, "--batch", 16))
    program("moves16bound", name,
            owner=(*MEMORY, "--chunk-mib", 16, "--relocate-ms", 5, "--batch", 4, "--run-ahead-us", 4000))
program("bound", "torch", owner=(*MEMORY, "--chunk-mib", 16, "--run-ahead-us", 4000))
program("chunks2", "torch", owner=(*MEMORY, "--chunk-mib", 2))
for _ in range(3):
    for name in ("torch", "cupy", "jax"):
        for mode in ("plain", "passed", "chunks16"):
            program(mode, name, owner=(*MEMORY, "--chunk-mib", 16))
summarise()
print(json.dumps(REPORT["summary"]), json.dumps(REPORT["hashes"]), flush=True)
