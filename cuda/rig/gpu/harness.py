"""Runs owners, tenant programs and raw clients as processes, for measurements on a real card."""

import argparse
import ctypes
import datetime
import glob
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PR_CAPBSET_DROP = 24
CAP_KILL, CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 5, 21, 24
LIBC = ctypes.CDLL(None, use_errno=True)
# Maximum number of descriptors that a hostile client keeps open.
CLIENT_OPEN_FILES = 400_000
# Messages of the library about the loss of its connection to the owner.
LOST_CONNECTION = ("connection to the owner ended", "owner refuses", "owner cannot be reached")


class Gone(Exception):
    """A process has exited or does not reply."""


def find_driver() -> Path:
    """Returns the path of NVIDIA's library."""
    for pattern in ("/usr/local/nvidia/lib*/libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"):
        for path in glob.glob(pattern):
            return Path(path)
    sys.exit("no libcuda.so.1 of NVIDIA: this measurement needs a GPU, its driver, and a python3 with PyTorch")


def options(description: str, seconds: int) -> argparse.ArgumentParser:
    """Returns a parser for the options that `cargo xtask bench` passes to measurements."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=seconds, help="time after which no case starts")
    parser.add_argument("--only", default="", help="regular expression that selects cases by name")
    parser.add_argument("--commit", default="unknown")
    return parser


def parse_arguments(description: str, seconds: int, more: Callable[[argparse.ArgumentParser], object] | None = None
                    ) -> argparse.Namespace:
    """Parses the options that `cargo xtask bench` passes to measurements, and those that `more` adds."""
    parser = options(description, seconds)
    if more is not None:
        more(parser)
    return parser.parse_args()


def conditions(commit: str) -> dict:
    """Returns the header of a report: the time, the card, the commit, and the processors."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return {"started": time.time(),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "smi": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
            "commit": commit, "processors": os.cpu_count()}


@dataclass(frozen=True)
class Limits:
    """Restrictions of a process."""

    without_capabilities: tuple[int, ...] = ()
    open_files: int | None = None

    def apply(self) -> None:
        """Restricts the calling process. The dropped capabilities take effect at `exec`."""
        for capability in self.without_capabilities:
            if LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")
        if self.open_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files, self.open_files))


def raise_open_files() -> None:
    """Raises the calling process's limit on open files to `CLIENT_OPEN_FILES`, or to the permitted maximum."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (CLIENT_OPEN_FILES, max(most, CLIENT_OPEN_FILES)))
    except (OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Process:
    """A process that is controlled through lines on its standard input and output."""

    def __init__(self, command: Sequence[object], environment: Mapping[str, str], log: Path,
                 before: Callable[[], None] | None = None):
        self.log = log
        with log.open("w") as errors:
            self.child = subprocess.Popen([str(word) for word in command], env=dict(environment), stdin=subprocess.PIPE,
                                          stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=before)
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.child.stdout:
            self._lines.put(line.strip())
        self._lines.put(None)

    def say(self, line: str) -> None:
        """Writes a line.

        Raises `Gone` if the process has ended.
        """
        try:
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()
        except OSError as error:
            raise Gone(self.fate()) from error

    def line(self, timeout_s: float) -> str:
        """Returns the next line.

        Raises `Gone` if the process exits, or does not print a line within `timeout_s`.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise Gone(f"no answer within {timeout_s:.0f} s: {self.said()[-200:]}") from None
        if line is None:
            self._lines.put(None)
            raise Gone(self.fate())
        return line

    def is_alive(self) -> bool:
        return self.child.poll() is None

    def fate(self) -> str:
        """Describes how the process ended."""
        try:
            code = self.child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its output"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}: {self.said()[-400:]}"

    def said(self) -> str:
        """Returns its standard error."""
        return self.log.read_text(errors="replace")

    def close_input(self) -> None:
        """Closes its standard input, which requests it to exit."""
        try:
            self.child.stdin.close()
        except OSError:
            pass

    def end(self, timeout_s: float = 10) -> None:
        """Closes its standard input and waits for its exit. Kills it after `timeout_s`."""
        self.close_input()
        try:
            self.child.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        if self.is_alive():
            self.child.kill()
        self.child.wait()


@dataclass(frozen=True)
class Build:
    """A folder with `libcuda.so`, `cuda-owner` and `cuda-raw` from one build."""

    name: str
    folder: Path


@dataclass(frozen=True)
class OwnerSettings:
    """Arguments and restrictions of an owner."""

    card_mib: int
    host_mib: int
    chunk_mib: int
    tenants: tuple[str, ...]
    more: tuple[str, ...] = ()
    # Options that the owner of an earlier build may lack when two builds are compared.
    if_known: tuple[str, ...] = ()
    limits: Limits = Limits()

    def arguments(self, known: str) -> list[str]:
        """Returns the arguments, and those of `if_known` that the text `known` contains."""
        sizes = {"--card-mib": self.card_mib, "--host-mib": self.host_mib, "--chunk-mib": self.chunk_mib}
        words = [word for option, value in sizes.items() for word in (option, str(value))]
        return [*words, *(word for tenant in self.tenants for word in ("--tenant", tenant)), *self.more,
                *(option for option in self.if_known if option in known)]


class Rig:
    """Starts processes of one build on one card. Files are in `folder`."""

    def __init__(self, build: Build, driver: Path, folder: Path):
        self.build, self.driver, self.folder = build, driver, folder
        self.socket = folder / "socket"
        self._started: list[Process] = []
        # Allow other users' clients to reach the socket.
        folder.chmod(0o711)
        self._front = folder / f"front-{build.name}"
        self._front.mkdir(exist_ok=True)
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            (self._front / name).unlink(missing_ok=True)
            (self._front / name).symlink_to(build.folder / "libcuda.so")

    def environment(self, tenant: str | None) -> dict[str, str]:
        """Returns the environment of a program, as a tenant or without the library."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("GPU_MEDIATOR_CUDA")}
        variables["PYTHONUNBUFFERED"] = "1"
        if tenant is not None:
            variables["LD_LIBRARY_PATH"] = f"{self._front}:{variables.get('LD_LIBRARY_PATH', '')}"
            variables |= {"GPU_MEDIATOR_CUDA_DRIVER": str(self.driver), "GPU_MEDIATOR_CUDA_SOCKET": str(self.socket),
                          "GPU_MEDIATOR_CUDA_TENANT": tenant, "GPU_MEDIATOR_CUDA_LOG": "1"}
        return variables

    def start(self, command: Sequence[object], tenant: str | None, before: Callable[[], None] | None = None,
              variables: Mapping[str, str] | None = None) -> Process:
        """Starts a process with additional environment variables. `end` kills it if it still runs."""
        log = self.folder / f"{self.build.name}-{len(self._started)}-{Path(str(command[0])).name}.log"
        process = Process(command, self.environment(tenant) | dict(variables or {}), log, before)
        self._started.append(process)
        return process

    def python(self, tenant: str | None, script: str, *arguments: object,
               variables: Mapping[str, str] | None = None) -> Process:
        """Starts a Python program from this folder."""
        return self.start([sys.executable, HERE / script, *arguments], tenant, variables=variables)

    def end(self) -> None:
        """Kills all processes that still run."""
        for process in self._started:
            if process.is_alive():
                process.child.send_signal(signal.SIGCONT)
                process.kill()


class Owner:
    """A running owner."""

    def __init__(self, rig: Rig, settings: OwnerSettings):
        rig.socket.unlink(missing_ok=True)
        program = rig.build.folder / "cuda-owner"
        known = subprocess.run([program, "serve", "--help"], capture_output=True, text=True, check=True).stdout
        command = [program, "--driver", rig.driver, "serve", "--socket", rig.socket, *settings.arguments(known)]
        self.process = rig.start(command, None, settings.limits.apply)
        self.process.line(timeout_s=30)
        rig.socket.chmod(0o666)

    def accounts(self, timeout_s: float = 20) -> dict:
        """Returns the accounts, with the tenants by name, and the time until the owner replied."""
        begin = time.perf_counter()
        accounts = self._ask("accounts", timeout_s)
        accounts["answered_ms"] = round((time.perf_counter() - begin) * 1e3, 3)
        accounts["tenants"] = {tenant["name"]: tenant for tenant in accounts["tenants"]}
        return accounts

    def change(self, tenant: str, settings: Mapping[str, object]) -> None:
        """Changes a tenant's settings: `weight`, `guarantee_permille`, `class` and `sharing`."""
        self._ask(json.dumps({"tenant": tenant, **settings}), 20)

    def _ask(self, line: str, timeout_s: float) -> dict:
        self.process.say(line)
        answer = json.loads(self.process.line(timeout_s))
        if "error" in answer:
            raise ValueError(f"the owner refuses {line}: {answer['error']}")
        return answer


@dataclass
class Raw:
    """A client that speaks the owner's protocol without the library: `cuda-raw`."""

    process: Process
    _versions: int = field(default=3, repr=False)

    @classmethod
    def start(cls, rig: Rig, uid: int | None = None) -> "Raw":
        command = [rig.build.folder / "cuda-raw", "--socket", rig.socket, *([] if uid is None else ["--uid", uid])]
        return cls(rig.start(command, None, raise_open_files))

    def ask(self, command: dict | str, timeout_s: float = 60) -> dict | str:
        """Sends a command of `cuda_rig::raw`, and returns the reply."""
        self.process.say(json.dumps(command))
        answer = json.loads(self.process.line(timeout_s))
        if isinstance(answer, dict) and "Failed" in answer:
            raise Gone(f"the raw client failed: {answer['Failed']}")
        return answer

    def connect(self, manner: dict[str, str] | None = None, through: str = "Itself") -> int:
        """Connects. Without a manner, no thread reads the connection."""
        return self.ask({"Connect": {"through": through, "manner": manner}})["Link"]

    def send(self, link: int, message: dict, times: int = 1) -> int:
        """Sends a message `times` times. Returns the number of successful sends."""
        return self.ask({"Say": {"link": link, "message": message, "times": times}})["Sent"]

    def hello(self, link: int, tenant: str) -> None:
        """Sends a program's first message."""
        hello = {"version": self._versions, "pid": self.process.child.pid, "instance": link + 1, "tenant": tenant,
                 "program": "hostile", "adopts": False}
        self.send(link, {"Hello": hello})

    def hear(self, link: int, count: int, within_s: float) -> tuple[list, bool]:
        """Waits for `count` messages. Returns them, and true if the owner has closed the connection."""
        command = {"Hear": {"link": link, "count": count, "within_ms": int(within_s * 1e3)}}
        heard = self.ask(command, within_s + 30)["Heard"]
        return heard["messages"], heard["closed"]

    def wait_for(self, link: int, kind: str, within_s: float = 10) -> dict:
        """Waits for a message of a kind, and drops earlier ones."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            messages, closed = self.hear(link, 1, 0.5)
            for message in messages:
                if isinstance(message, dict) and kind in message:
                    return message[kind]
            if closed:
                raise Gone(f"the owner closed the connection before `{kind}`: {messages}")
        raise Gone(f"the owner sent no `{kind}` within {within_s:.0f} s")

    def drop_descriptors(self, link: int) -> None:
        """Closes the descriptors received over a connection."""
        self.ask({"DropDescriptors": {"link": link}})


class CardMemory:
    """The card's used memory, from NVML."""

    class _Memory(ctypes.Structure):
        _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]

    def __init__(self, driver: Path):
        self._library = ctypes.CDLL(str(driver.with_name("libnvidia-ml.so.1")))
        self._device = ctypes.c_void_p()
        self._check(self._library.nvmlInit_v2())
        self._check(self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(self._device)))

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise OSError(f"NVML failed with {code}")

    def used_mib(self) -> int:
        memory = self._Memory()
        self._check(self._library.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(memory)))
        return memory.used >> 20
