"""Measures `gdev-crypt` on a real card: on the CPU and on the card by request size, and next to a busy program.

Usage: disk.py --build FOLDER --json FILE [--rounds N] [--seconds N] [--only CASES]. FOLDER contains libcuda.so (ours),
cuda-owner and gdev-crypt. `cargo xtask bench disk` runs it.

A client writes and reads a file in memory over NBD, one request at a time. The first part uses the sizes of Gdev's
figures 8 and 9; the second repeats figure 10: writes while another program keeps the card busy, without the library, as
tenants of equal weight, and with the latency class `interactive`. After each case the client reads everything through
a server without a card, which must return the written bytes.
"""

import argparse
import hashlib
import json
import os
import re
import socket
import statistics
import struct
import tempfile
import time
from pathlib import Path

from attacks import CudaProgram
from harness import Build, Gone, Owner, OwnerSettings, Process, Rig, conditions, find_driver, parse_arguments

VOLUME_BYTES = 64 << 20
REQUEST_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
# Size of the requests next to another program: Gdev's file system encrypts eight pages per request.
BUSY_BYTES = (128 << 10, 1 << 20)
# Duration of the writes and of the reads of each size, in seconds.
MEASURED_S = 0.6
BUSY_MEASURED_S = 1.5
# Durations of the other program's kernels in microseconds.
KERNELS_US = (200, 2000)
CRYPT, SEARCH = "crypt", "search"
# TIMEOUT: a request may wait for the other program's turn, which lasts less than a second.
REPLY_TIMEOUT_S = 30

READ, WRITE, DISCONNECT = 0, 1, 2
REQUEST_MAGIC, REPLY_MAGIC = 0x25609513, 0x67446698
FIXED_NEWSTYLE_NO_ZEROES = 3
EXPORT_NAME = 1


class Client:
    """An NBD client with one request in flight."""

    def __init__(self, path: Path):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(REPLY_TIMEOUT_S)
        self._socket.connect(str(path))
        greeting = self._receive(18)
        if greeting[:16] != b"NBDMAGICIHAVEOPT":
            raise Gone(f"the server greets with {greeting!r}")
        self._socket.sendall(struct.pack(">I8sII", FIXED_NEWSTYLE_NO_ZEROES, b"IHAVEOPT", EXPORT_NAME, 0))
        self.bytes, _ = struct.unpack(">QH", self._receive(10))

    def _receive(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise Gone("the server closed the connection")
            view = view[received:]
        return data

    def _request(self, command: int, offset: int, count: int, data: bytes = b"") -> bytearray:
        self._socket.sendall(struct.pack(">IHHQQI", REQUEST_MAGIC, 0, command, offset, offset, count))
        if data:
            self._socket.sendall(data)
        magic, error, cookie = struct.unpack(">IIQ", self._receive(16))
        if (magic, error, cookie) != (REPLY_MAGIC, 0, offset):
            raise Gone(f"the server answers with magic {magic:#x}, error {error}, cookie {cookie}")
        return self._receive(count) if command == READ else bytearray()

    def write(self, offset: int, data: bytes) -> None:
        self._request(WRITE, offset, len(data), data)

    def read(self, offset: int, count: int) -> bytearray:
        return self._request(READ, offset, count)

    def end(self) -> None:
        self._socket.sendall(struct.pack(">IHHQQI", REQUEST_MAGIC, 0, DISCONNECT, 0, 0, 0))
        self._socket.close()


class Server:
    """A `gdev-crypt` whose file is in memory, and a client."""

    def __init__(self, rig: Rig, folder: Path, device: bool, tenant: str | None):
        path = folder / "volume"
        if not path.exists():
            with path.open("wb") as volume:
                volume.truncate(VOLUME_BYTES)
            (folder / "key").write_bytes(bytes(range(64)))
            (folder / "key").chmod(0o600)
        command = [rig.build.folder / "gdev-crypt", "--file", path, "--key-file", folder / "key",
                   "--socket", folder / "disk.sock"]
        if device:
            # Process all requests on the card, so that each size shows the card's speed.
            command += ["--device", "cuda", "--device-min-bytes", "512"]
        self.process: Process = rig.start(command, tenant)
        line = self.process.line(timeout_s=60)
        if not line.startswith("listening"):
            raise Gone(f"gdev-crypt says {line!r}")
        self.client = Client(folder / "disk.sock")

    def end(self) -> None:
        self.client.end()
        said = self.process.said()
        # The server does not exit by itself.
        self.process.kill()
        if "the card failed" in said:
            raise Gone(said[-400:])


def pattern(offset: int, count: int) -> bytes:
    """Returns the bytes to write at an offset."""
    block = hashlib.sha256(str(offset).encode()).digest()
    return block * (count // len(block))


def rate(client: Client, command: int, size: int, seconds: float) -> dict:
    """Returns the throughput of requests of a given size in MiB/s, and the longest latency in ms."""
    data = {offset: pattern(offset, size) for offset in range(0, VOLUME_BYTES, size)} if command == WRITE else {}
    offsets, done, longest = range(0, VOLUME_BYTES, size), 0, 0.0
    begin = before = time.perf_counter()
    while before - begin < seconds:
        offset = offsets[done % len(offsets)]
        if command == WRITE:
            client.write(offset, data[offset])
        else:
            client.read(offset, size)
        done, now = done + 1, time.perf_counter()
        longest, before = max(longest, now - before), now
    return {"mib_per_s": round(done * size / (1 << 20) / (before - begin), 2), "longest_ms": round(longest * 1e3, 3),
            "requests": done}


def check(rig: Rig, folder: Path, writer: Client, size: int, device: bool, tenant: str | None) -> None:
    """Writes the whole volume once, and compares it with the data read by a server without a card."""
    for offset in range(0, VOLUME_BYTES, size):
        writer.write(offset, pattern(offset, size))
    reader = Server(rig, folder_with(folder, "reader"), False, None)
    try:
        for offset in range(0, VOLUME_BYTES, size):
            if reader.client.read(offset, size) != pattern(offset, size):
                raise ValueError(f"offset {offset}: the bytes differ (card {device}, tenant {tenant})")
    finally:
        reader.end()


def folder_with(folder: Path, name: str) -> Path:
    """Returns a folder for another server with the same volume."""
    other = folder / name
    other.mkdir(exist_ok=True)
    for file in ("volume", "key"):
        if not (other / file).exists():
            os.link(folder / file, other / file)
    return other


def by_size(rig: Rig, folder: Path, device: bool, tenant: str | None) -> dict:
    """Measures writes and reads of all sizes."""
    server = Server(rig, folder, device, tenant)
    try:
        found = {}
        for size in REQUEST_BYTES:
            found[size] = {name: rate(server.client, command, size, MEASURED_S)
                           for name, command in (("write", WRITE), ("read", READ))}
        check(rig, folder, server.client, 1 << 20, device, tenant)
        return found
    finally:
        server.end()


def beside(rig: Rig, folder: Path, device: bool, tenants: tuple[str | None, str | None], kernel_us: int) -> dict:
    """Measures writes while another program keeps the card busy."""
    server = Server(rig, folder, device, tenants[0])
    search = None
    try:
        alone = {size: rate(server.client, WRITE, size, BUSY_MEASURED_S / 2) for size in BUSY_BYTES}
        search = CudaProgram(rig, tenants[1], "busy", "--kernel-us", str(kernel_us))
        search.act(time.monotonic() + 0.3)
        found = {size: rate(server.client, WRITE, size, BUSY_MEASURED_S) | {"alone": alone[size]["mib_per_s"]}
                 for size in BUSY_BYTES}
        report = search.end()
        search = None
        if "error" in report or "fate" in report:
            raise Gone(f"the other program: {report}")
        return {"sizes": found, "kernels": report.get("kernels")}
    finally:
        if search:
            search.end()
        server.end()


# Name, use of the card, the server's tenant, and its class; a tenant of None means without the library.
WAYS = (("cpu", False, None, None), ("hardware", True, None, None), ("equal", True, CRYPT, "normal"),
        ("interactive", True, CRYPT, "interactive"))


class Bench:
    """Runs all cases in rounds."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path):
        self._rig = Rig(Build("this", arguments.build.resolve()), find_driver(), scratch)
        self._scratch, self._json, self._rounds = scratch, arguments.json, arguments.rounds
        self._only, self._end = arguments.only, time.monotonic() + arguments.seconds
        self.report = {**conditions(arguments.commit), "rounds": []}

    def _case(self, name: str, measure, tenant_class: str | None) -> None:
        if not re.search(self._only, name) or time.monotonic() > self._end:
            return
        owner = None
        try:
            if tenant_class:
                tenants = (f"{CRYPT}:8192:100:{tenant_class}", f"{SEARCH}:8192:100:normal")
                owner = Owner(self._rig, OwnerSettings(20480, 4096, 2, tenants))
            folder = self._scratch / f"case-{len(self.report['rounds'])}-{len(self.report['rounds'][-1])}"
            folder.mkdir()
            before = owner.accounts() if owner else {"tenants": {}}
            result = measure(folder)
            result["charged_ms"] = {
                tenant: round((account["charged_ns"] - before["tenants"][tenant]["charged_ns"]) / 1e6)
                for tenant, account in (owner.accounts()["tenants"].items() if owner else ())}
            if owner and not result["charged_ms"][CRYPT]:
                raise ValueError("gdev-crypt was not a program of its tenant")
        except (Gone, OSError, ValueError, KeyError) as error:
            result = {"error": repr(error)}
        finally:
            if owner:
                owner.process.end(timeout_s=5)
        self.report["rounds"][-1][name] = result
        self.report["summary"] = summary(self.report["rounds"])
        self._json.write_text(json.dumps(self.report, indent=1) + "\n")
        print(f"{name}: {json.dumps(result)}", flush=True)

    def run(self) -> None:
        try:
            for _ in range(self._rounds):
                self.report["rounds"].append({})
                for name, device, tenant, tenant_class in WAYS:
                    if name != "equal":  # The class has no effect on a lone program.
                        self._case(f"{name}, by size", lambda folder: by_size(self._rig, folder, device, tenant),
                                   tenant_class)
                for kernel_us in KERNELS_US:
                    for name, device, tenant, tenant_class in WAYS:
                        tenants = (tenant, SEARCH if tenant_class else None)
                        self._case(f"{name}, next to kernels of {kernel_us} us",
                                   lambda folder: beside(self._rig, folder, device, tenants, kernel_us), tenant_class)
        finally:
            self._rig.end()


def summary(rounds: list[dict]) -> dict:
    """Returns the median, minimum and maximum of each throughput over the rounds, in MiB/s."""
    samples: dict[str, list[float]] = {}
    for one in rounds:
        for name, result in one.items():
            if "sizes" in result:
                for size, found in result["sizes"].items():
                    samples.setdefault(f"{name}, writes of {size} bytes", []).append(found["mib_per_s"])
            elif "error" not in result:
                for size, found in ((key, value) for key, value in result.items() if key != "charged_ms"):
                    for direction in ("write", "read"):
                        key = f"{name}, {direction}s of {size} bytes"
                        samples.setdefault(key, []).append(found[direction]["mib_per_s"])
    return {name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
            for name, values in samples.items()}


def main() -> None:
    arguments = parse_arguments(__doc__.splitlines()[0], seconds=500)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        Bench(arguments, Path(scratch)).run()


if __name__ == "__main__":
    main()
