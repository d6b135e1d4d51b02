"""Runs `mediatord` with several cards, and programs with one process per card, for measurements on real cards."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import HERE, LIBC, Gone, Process

PR_SET_PDEATHSIG = 1
FILES = ("mediatord", "mediatorctl", "cuda-owner", "libcuda.so")
LIBRARY_NAMES = ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so")
# TIMEOUT: the driver initializes a card within several seconds.
DAEMON_START_S = 90
# TIMEOUT: PyTorch and NCCL start in 20 s, and twelve concurrent processes in a minute.
START_S = 120
# TIMEOUT: a request to the daemon takes milliseconds.
CONTROL_S = 30
# TIMEOUT: programs exit within a second. After a failure, some of them may wait for others forever.
END_S = 8
LOG_TAIL = 1500
# NVLink multicast is off, even without the library: not every machine has it, and the library rejects it. Processes
# connect over the loopback interface.
VARIABLES = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
             "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "OMP_NUM_THREADS": "2",
             "PYTHONUNBUFFERED": "1"}


def check_build(folder: Path) -> None:
    """Exits if the folder lacks a file."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        sys.exit(f"{folder} has no {', '.join(missing)}: build with `cargo build --release -p mediatord -p mediatorctl "
                 "-p cuda-owner -p cuda-shim`, and name the folder in --build")


def die_with_parent() -> None:
    """Makes the kernel kill the calling process when its parent exits."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def plain_environment() -> dict[str, str]:
    """Returns the environment of programs without the library."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GPU_MEDIATOR_CUDA")}
    # Users may request more messages from NCCL.
    return {"NCCL_DEBUG": "WARN"} | variables | VARIABLES


def tail(text: str, length: int = LOG_TAIL) -> str:
    return text if len(text) <= length else "..." + text[-length:]


@dataclass(frozen=True)
class Tenant:
    """A tenant with one or more cards."""

    name: str
    cards: tuple[int, ...]
    quota_mib: int
    weight: int = 100

    def table(self) -> str:
        names = [f'"gpu{card}"' for card in self.cards]
        place = f"cards = [{', '.join(names)}]" if len(names) > 1 else f"card = {names[0]}"
        return (f'[[tenant]]\nname = "{self.name}"\n{place}\nvram_mib = {self.quota_mib}\n'
                f"time.weight = {self.weight}\n")


@dataclass(frozen=True)
class Cards:
    """Settings of the cards: memory and host memory per card, in MiB."""

    count: int
    card_mib: int
    host_mib: int
    # Additional lines in each card's table.
    more: str = ""

    def tables(self, driver: Path) -> str:
        return "".join(f'[[card]]\nname = "gpu{card}"\nkind = "cuda"\nvram_mib = {self.card_mib}\n'
                       f'memory.host_mib = {self.host_mib}\ncuda.driver = "{driver}"\ncuda.device = "{card}"\n'
                       f"{self.more}" for card in range(self.count))


class Daemon:
    """A running daemon. Its sockets are in `folder`, whose path must be short, and its log is in `logs`."""

    def __init__(self, build: Path, driver: Path, folder: Path, logs: Path, cards: Cards, tenants: Sequence[Tenant],
                 environment: Mapping[str, str]):
        self._build, self._driver, self._folder = build, driver, folder
        self._environment, self._tenants = dict(environment), tenants
        self.log = logs / "daemon.log"
        self._library = folder / "shim"
        self._library.mkdir()
        for name in LIBRARY_NAMES:
            (self._library / name).symlink_to(build / "libcuda.so")
        configuration = folder / "m.toml"
        configuration.write_text(
            f'[daemon]\nadmin_socket = "{folder}/admin.sock"\nsocket_dir = "{folder}"\nstate_dir = "{folder}/state"\n'
            + cards.tables(driver) + "".join(tenant.table() for tenant in tenants))
        (logs / "m.toml").write_text(configuration.read_text())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(str(folder / "notify"))
            command = [build / "mediatord", "--config", configuration]
            variables = self._environment | {"NOTIFY_SOCKET": str(folder / "notify")}
            self.process = Process(command, variables, self.log, die_with_parent)
            try:
                self._await_ready(ready)
                self._await_served()
            except BaseException:
                self.end()
                raise

    def _await_ready(self, ready: socket.socket) -> None:
        ready.settimeout(0.2)
        until = time.monotonic() + DAEMON_START_S
        while time.monotonic() < until:
            try:
                if ready.recv(256).startswith(b"READY=1"):
                    return
            except TimeoutError:
                if not self.process.is_alive():
                    raise Gone(f"mediatord {self.process.fate()}") from None
        raise Gone(f"mediatord was not ready within {DAEMON_START_S} s: {tail(self.process.said())}")

    def _await_served(self) -> None:
        """Waits until the owners serve all tenants and the owners of a gang's cards are connected."""
        until = time.monotonic() + CONTROL_S
        while True:
            shown = [self.show(tenant.name) for tenant in self._tenants]
            waiting = [one["name"] for one in shown if not is_served(one)]
            if not waiting:
                return
            if time.monotonic() > until:
                raise Gone(f"tenants {', '.join(waiting)} are not served: {tail(self.process.said())}")
            time.sleep(0.1)

    def _control(self, *arguments: str) -> list[str]:
        return [str(self._build / "mediatorctl"), "--socket", str(self._folder / "admin.sock"), *arguments]

    def control(self, *arguments: str) -> str:
        """Runs `mediatorctl` and returns its output. Raises `Gone` if the command fails."""
        found = subprocess.run(self._control(*arguments), capture_output=True, text=True, timeout=CONTROL_S,
                               env=self._environment)
        if found.returncode:
            raise Gone(f"mediatorctl {' '.join(arguments)}: {tail(found.stderr)}")
        return found.stdout

    def show(self, tenant: str) -> dict:
        return json.loads(self.control("--json", "tenant", "show", tenant))

    def show_all(self) -> dict[str, dict]:
        return {tenant.name: self.show(tenant.name) for tenant in self._tenants}

    def command(self, tenant: str, program: Sequence[object]) -> list[object]:
        """Returns the command that starts a tenant's program."""
        return [*self._control("run", "--tenant", tenant, "--library", str(self._library)), "--", *program]

    def environment(self) -> dict[str, str]:
        """Returns the environment of a tenant's programs."""
        return self._environment | {"GPU_MEDIATOR_CUDA_DRIVER": str(self._driver), "GPU_MEDIATOR_CUDA_LOG": "1"}

    def end(self) -> None:
        """Ends the daemon and its owners."""
        if self.process.is_alive():
            self.process.child.terminate()
        self.process.end(timeout_s=15)


def is_served(tenant: dict) -> bool:
    states = tenant.get("card_states", [])
    return tenant["served"] and all(state["served"] and not state.get("unreachable") for state in states)


class Program:
    """A program's processes, which execute the same commands."""

    def __init__(self, name: str, processes: list[Process], tenant: str | None):
        self.name, self.processes, self.tenant = name, processes, tenant
        self.ready: list[dict] = []

    def say(self, command: dict) -> None:
        for process in self.processes:
            process.say(json.dumps(command))

    def answers(self, timeout_s: float) -> list[dict]:
        """Returns the reply of each process. Raises `Gone` as soon as one of them fails."""
        pool = concurrent.futures.ThreadPoolExecutor(len(self.processes))
        try:
            found = [pool.submit(answer, process, timeout_s) for process in self.processes]
            for done in concurrent.futures.as_completed(found):
                done.result()
            return [one.result() for one in found]
        except Gone as error:
            raise Gone(f"{self.name}: {error}") from None
        finally:
            # Threads that are still waiting end when the processes are killed.
            pool.shutdown(wait=False)

    def ask(self, command: dict, timeout_s: float) -> list[dict]:
        self.say(command)
        return self.answers(timeout_s)

    def await_ready(self) -> None:
        self.ready = self.answers(START_S)

    def close(self) -> None:
        for process in self.processes:
            process.close_input()

    def state(self) -> dict:
        """Makes each process print its threads' stacks. Returns the processes' states."""
        for process in self.processes:
            if process.is_alive():
                process.child.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        return {f"{self.name}-{rank}": {"state": "runs" if process.is_alive() else process.fate()[:100],
                                        "threads": threads(process.child.pid), "log": tail(process.said())}
                for rank, process in enumerate(self.processes)}


def answer(process: Process, timeout_s: float) -> dict:
    found = json.loads(process.line(timeout_s))
    if "error" in found:
        raise Gone(found["error"])
    return found


def threads(pid: int) -> list[str]:
    """Returns the name, state and kernel wait channel of each thread of a process that is not idle."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            name = (task / "comm").read_text().strip()
            status = (task / "stat").read_text().rpartition(")")[2].split()[0]
            wait = (task / "wchan").read_text().strip() or "-"
        except OSError:
            continue
        found.append(f"{name} {status} {wait}")
    return found[:40]


class Session:
    """The daemon and programs of one case. Raises `Gone` if one of them exits or does not reply."""

    def __init__(self, folder: Path, logs: Path, environment: Mapping[str, str], script: Path = HERE / "collective.py"):
        self._folder, self._logs, self._script = folder, logs, script
        self.environment = self._environment = dict(environment)
        self.daemon: Daemon | None = None
        self.programs: list[Program] = []

    def start_daemon(self, build: Path, driver: Path, cards: Cards, tenants: Sequence[Tenant]) -> Daemon:
        folder = self._folder / "d"
        folder.mkdir(mode=0o700)
        self.daemon = Daemon(build, driver, folder, self._logs, cards, tenants, self._environment)
        return self.daemon

    def start(self, name: str, workload: str, devices: Sequence[int], tenant: str | None) -> Program:
        """Starts a program with one process per device, as a tenant or without the library."""
        rendezvous = self._folder / f"{name}.meet"
        processes = []
        for rank, device in enumerate(devices):
            command: list[object] = [sys.executable, self._script, workload, "--device", device, "--rank", rank,
                                     "--ranks", len(devices), "--rendezvous", rendezvous]
            environment = self._environment
            if tenant is not None:
                if self.daemon is None:
                    raise Gone("no daemon was started for the tenants of this case")
                command, environment = self.daemon.command(tenant, command), self.daemon.environment()
            processes.append(Process(command, environment, self._logs / f"{name}-{rank}.log", die_with_parent))
        self.programs.append(Program(name, processes, tenant))
        return self.programs[-1]

    def await_ready(self) -> None:
        for program in self.programs:
            program.await_ready()

    def diagnosis(self) -> dict:
        """Returns the state of all processes after a failure."""
        found: dict = {}
        for program in self.programs:
            found |= program.state()
        if self.daemon is not None:
            found["daemon"] = tail(self.daemon.process.said(), 2 * LOG_TAIL)
            try:
                found["tenants"] = {name: brief(shown) for name, shown in self.daemon.show_all().items()}
                found["events"] = tail(self.daemon.control("events", "-n", "20"))
            except (Gone, OSError, ValueError, subprocess.SubprocessError) as error:
                found["tenants"] = repr(error)[:300]
        return found

    def warnings(self) -> dict:
        """Returns the ends of non-empty logs, and only the warnings and errors of the daemon's log."""
        logs = {process.log.stem: process.said() for program in self.programs for process in program.processes}
        # The daemon reports programs without the library, because it does not manage them.
        known = tuple(f" pid={process.child.pid} " for program in self.programs if program.tenant is None
                      for process in program.processes)
        if self.daemon is not None:
            logs["daemon"] = "\n".join(line for line in self.daemon.process.said().splitlines()
                                       if (" WARN " in line or " ERROR " in line or "panicked" in line)
                                       and not any(pid in line for pid in known))
        return {name: tail(text, 400) for name, text in logs.items() if text.strip()}

    def end(self) -> None:
        # End all of them concurrently, because the processes of a program wait for each other.
        for program in self.programs:
            program.close()
        until = time.monotonic() + END_S
        for process in (process for program in self.programs for process in program.processes):
            process.end(max(until - time.monotonic(), 0.1))
        if self.daemon is not None:
            self.daemon.end()


def brief(tenant: dict) -> dict:
    """Returns the part of a tenant's description that shows its progress."""
    keys = ("served", "programs", "on_card_bytes", "in_host_bytes", "used_ns", "launches", "state", "waits_for",
            "wait_reason", "killed", "kill_failures", "given_up", "unaccounted", "strikes", "card_states")
    return {key: tenant[key] for key in keys if tenant.get(key)}
