"""Shows which memory a program can import after the driver has restored it on another card; prints one line per step.

Usage: restore.py. It needs two cards of one model, NVIDIA's driver 580 or later, and root. It does not use this
project's libraries. For each case, a program with a context on its first card is checkpointed, restored with the named
pairs of cards, and imports memory that processes on the first card (`dev0`, `host0`) and on the second card (`dev1`,
`host1`) have exported. Prints the results of each import, of reserve, map, access, memset and synchronisation, and of
the release.
"""

import ctypes as c
import json
import os
import socket
import subprocess
import sys
import time

DRIVER = c.CDLL("libcuda.so.1")
BYTES = 32 << 20
# TIMEOUT: the driver checkpoints an empty context in less than a second.
ANSWER_S = 40
LOCK_MS = 5000
# Name, visible cards (`None`: variable unset), pairs of cards, and true to import before the checkpoint.
CASES = (
    ("same card, one visible", (0,), (), True),
    ("same card, no import before", (0,), (), False),
    ("swap, one visible", (0,), ((0, 1), (1, 0)), True),
    ("swap, no import before", (0,), ((0, 1), (1, 0)), False),
    ("swap, both visible", (0, 1), ((0, 1), (1, 0)), True),
    ("swap, no variable", None, ((0, 1), (1, 0)), True),
    ("swap, only one pair", (0,), ((0, 1),), True),
    ("swap, other order", (1, 0), ((0, 1), (1, 0)), True),
)


class Location(c.Structure):
    _fields_ = [("type", c.c_int), ("id", c.c_int)]


class Properties(c.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = [("type", c.c_int), ("handle_types", c.c_int), ("location", Location), ("metadata", c.c_void_p),
                ("flags", c.c_ubyte * 8)]


class Access(c.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = [("location", Location), ("flags", c.c_int)]


class LockArguments(c.Structure):
    _fields_ = [("timeout_ms", c.c_uint), ("reserved", c.c_uint), ("more", c.c_uint64 * 7)]


class RestoreArguments(c.Structure):
    _fields_ = [("pairs", c.c_void_p), ("count", c.c_uint), ("reserved", c.c_char * 52), ("more", c.c_uint64)]


def uuid(device: int) -> str:
    found = (c.c_ubyte * 16)()
    code = DRIVER.cuDeviceGetUuid_v2(found, c.c_int(device))
    return bytes(found).hex() if code == 0 else f"error {code}"


def enter_card() -> list[int]:
    """Makes the first device's primary context current. Returns the results of the calls."""
    context = c.c_void_p()
    codes = [DRIVER.cuInit(0), DRIVER.cuDevicePrimaryCtxRetain(c.byref(context), 0)]
    return [*codes, DRIVER.cuCtxSetCurrent(context)]


def create(on_host: bool) -> tuple[int, c.c_uint64]:
    """Allocates memory on the first device, or on the host's first NUMA node."""
    handle, wanted = c.c_uint64(), Properties(type=1, handle_types=1, location=Location(3 if on_host else 1, 0))
    return DRIVER.cuMemCreate(c.byref(handle), c.c_size_t(BYTES), c.byref(wanted), c.c_uint64(0)), handle


def use(handle: c.c_uint64) -> list[list[int]]:
    """Maps memory, writes it, and releases it. Returns the results of the calls."""
    at, size = c.c_uint64(), c.c_size_t(BYTES)
    codes = [DRIVER.cuMemAddressReserve(c.byref(at), size, c.c_size_t(0), c.c_uint64(0), c.c_uint64(0)),
             DRIVER.cuMemMap(at, size, c.c_size_t(0), handle, c.c_uint64(0)),
             DRIVER.cuMemSetAccess(at, size, c.byref(Access(Location(1, 0), 3)), c.c_size_t(1))]
    if codes[-1] == 0:
        codes += [DRIVER.cuMemsetD8_v2(at, c.c_ubyte(7), size), DRIVER.cuCtxSynchronize()]
    return [codes, [DRIVER.cuMemUnmap(at, size), DRIVER.cuMemAddressFree(at, size), DRIVER.cuMemRelease(handle)]]


def serve_exporter(link: socket.socket) -> None:
    """Exports card and host memory, and keeps it until the connection is closed."""
    result, files = {"start": enter_card(), "uuid": uuid(0)}, []
    for on_host in (False, True):
        code, handle = create(on_host)
        file = c.c_int(-1)
        result[f"host {on_host}"] = [code, DRIVER.cuMemExportToShareableHandle(c.byref(file), handle, 1, c.c_uint64(0))]
        files.append(file.value)
    socket.send_fds(link, [json.dumps(result).encode()], files)
    link.recv(1)


def serve_program(link: socket.socket) -> None:
    """Imports memory received over the connection until the connection is closed."""
    link.send(json.dumps({"start": enter_card(), "uuid": uuid(0)}).encode())
    while True:
        message, files, _, _ = socket.recv_fds(link, 4096, 8)
        if not message:
            return
        result: dict[str, object] = {}
        for name, file in zip(("dev0", "host0", "dev1", "host1"), files):
            handle = c.c_uint64()
            code = DRIVER.cuMemImportFromShareableHandle(c.byref(handle), c.c_void_p(file), 1)
            result[name] = [code, *(use(handle) if code == 0 else [])]
            os.close(file)
        count = c.c_int()
        DRIVER.cuDeviceGetCount(c.byref(count))
        result["uuids"] = [uuid(device) for device in range(count.value)]
        link.send(json.dumps(result).encode())


def start(role: str, visible: str | None) -> tuple[subprocess.Popen, socket.socket]:
    ours, theirs = socket.socketpair()
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {}
    process = subprocess.Popen([sys.executable, __file__, role, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                               env=environment)
    theirs.close()
    ours.settimeout(ANSWER_S)
    return process, ours


def move(pid: int, pairs: bytes, count: int) -> dict:
    """Checkpoints and restores a process, with pairs of card UUIDs."""
    begin, none, named = time.monotonic(), (c.c_uint64 * 8)(), c.create_string_buffer(pairs, max(1, len(pairs)))
    to = RestoreArguments(c.cast(named, c.c_void_p) if count else None, count)
    codes = [DRIVER.cuCheckpointProcessLock(pid, c.byref(LockArguments(LOCK_MS))),
             DRIVER.cuCheckpointProcessCheckpoint(pid, c.byref(none)),
             DRIVER.cuCheckpointProcessRestore(pid, c.byref(to)), DRIVER.cuCheckpointProcessUnlock(pid, c.byref(none))]
    return {"lock, checkpoint, restore, unlock": codes, "s": round(time.monotonic() - begin, 2)}


def main() -> None:
    DRIVER.cuInit(0)
    cards = [uuid(0), uuid(1)]
    names = [f"GPU-{card[:8]}-{card[8:12]}-{card[12:16]}-{card[16:20]}-{card[20:]}" for card in cards]
    exporters = [start("exporter", name) for name in names]
    files: list[int] = []
    for _, link in exporters:
        message, received, _, _ = socket.recv_fds(link, 4096, 8)
        files += received
        print("exporter", message.decode(), flush=True)
    for name, visible, pairs, imports_before in CASES:
        shown = None if visible is None else ",".join(names[card] for card in visible)
        process, link = start("program", shown)
        print(f"== {name}\n  ", link.recv(4096).decode(), flush=True)
        try:
            if imports_before:
                socket.send_fds(link, [b"import"], files)
                print("   before", link.recv(65536).decode(), flush=True)
            words = b"".join(bytes.fromhex(cards[card]) for pair in pairs for card in pair)
            print("  ", json.dumps(move(process.pid, words, len(pairs))), flush=True)
            socket.send_fds(link, [b"import"], files)
            print("   after", link.recv(65536).decode(), flush=True)
        except OSError as error:
            print("   the program does not answer:", error, flush=True)
        process.kill()
        process.wait()
    for process, _ in exporters:
        process.kill()
        process.wait()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        {"exporter": serve_exporter, "program": serve_program}[sys.argv[1]](socket.socket(fileno=int(sys.argv[2])))
    else:
        main()
