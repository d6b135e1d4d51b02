"""Neighbours of the decode loop of `neighbours.py`: honest and hostile programs.

To add one, add an entry to `NEIGHBOURS`, and a program to `hostile.py` or a function that drives a raw client.
"""

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from harness import CAP_KILL, CAP_SYS_ADMIN, CAP_SYS_RESOURCE, Gone, Limits, OwnerSettings, Process, Raw, Rig

CHUNK_MIB = 2
# `decode` is the measured tenant. Programs that exceed a limit belong to `small`, and the others to `large`.
DECODE, SMALL, LARGE = "decode", "small", "large"
SMALL_MIB = 2048
OWNER = OwnerSettings(
    card_mib=76_800, host_mib=4096, chunk_mib=CHUNK_MIB,
    tenants=(f"{DECODE}:8192", f"{SMALL}:{SMALL_MIB}", f"{LARGE}:76800"),
    # Shorter than the defaults of 10 s, to keep rounds short.
    more=("--max-run-ms", "2000", "--patience-ms", "2000"),
    # Kill programs whose unaccounted memory exceeds their tenant's limit, instead of only reporting them.
    if_known=("--kill-strangers",))
# Like an earlier packaged unit: without permission to signal other users' programs.
OWNER_WITHOUT_KILL = replace(OWNER, limits=Limits(without_capabilities=(CAP_KILL,)))
# A card that `decode` and a hoarder fill, so every further chunk must be taken from the hoarder.
SMALL_CARD = replace(OWNER, card_mib=8192, tenants=(f"{DECODE}:8192", f"{LARGE}:8192"),
                     more=(*OWNER.more, "--quanta", "off"))
# For users without these capabilities, the kernel limits descriptors in flight to the limit on open files.
FEW_DESCRIPTORS = replace(OWNER, limits=Limits((CAP_SYS_ADMIN, CAP_SYS_RESOURCE), 4096))
OTHER_UID = 4242

SILENT = {"quiesce": "Silence", "redirect": "Silence", "stop": "Silence"}
HONEST = {"quiesce": "Honest", "redirect": "Honest", "stop": "Honest"}

# Acts until the given time of `time.monotonic`, and returns a report.
Scenario = Callable[[Raw, float], dict]


class Attack:
    """A started neighbour."""

    def act(self, until: float) -> None:
        """Acts, and returns no earlier than `until` (`time.monotonic`)."""
        raise NotImplementedError

    def end(self) -> dict:
        """Ends the neighbour and returns its report."""
        raise NotImplementedError


def sleep_until(until: float) -> None:
    time.sleep(max(0.0, until - time.monotonic()))


class CudaProgram(Attack):
    """A program of `hostile.py`."""

    def __init__(self, rig: Rig, tenant: str, program: str, *arguments: object):
        self.process: Process = rig.python(tenant, "hostile.py", program, *arguments)
        line = self.process.line(timeout_s=40)
        if line != "ready":
            raise Gone(f"{program} says {line!r}")

    def act(self, until: float) -> None:
        try:
            self.process.say("go")
        except Gone:
            pass  # Its report contains how it ended.
        sleep_until(until)

    def end(self) -> dict:
        self.process.close_input()
        try:
            report = json.loads(self.process.line(timeout_s=5))
        except Gone as error:
            report = {"fate": str(error)}
        self.process.end(timeout_s=5)
        return report


class StoppedProgram(CudaProgram):
    """A busy program that is stopped by a signal after a second."""

    def act(self, until: float) -> None:
        super().act(time.monotonic() + 1)
        if self.process.is_alive():
            self.process.child.send_signal(signal.SIGSTOP)
        sleep_until(until)

    def end(self) -> dict:
        if self.process.is_alive():
            self.process.child.send_signal(signal.SIGCONT)
        return super().end()


class RawClient(Attack):
    """A client without the library that executes a scenario."""

    def __init__(self, rig: Rig, scenario: Scenario, uid: int | None = None):
        self._raw, self._scenario, self._report = Raw.start(rig, uid), scenario, {}

    def act(self, until: float) -> None:
        try:
            self._report = self._scenario(self._raw, until)
        except Gone as error:
            self._report = {"fate": str(error)}
        sleep_until(until)

    def end(self) -> dict:
        self._raw.process.kill()
        return self._report


def names(messages: list) -> list[str]:
    """Returns the kinds of the first messages."""
    return [next(iter(message)) if isinstance(message, dict) else str(message) for message in messages[:6]]


def keep_turn(through: str) -> Scenario:
    """Waits for a turn, and does not reply to the order to end it."""

    def act(raw: Raw, until: float) -> dict:
        link = raw.connect(SILENT, through)
        raw.hello(link, LARGE)
        raw.send(link, {"Waiting": {"card": 0}})
        sleep_until(until - 0.5)
        messages, closed = raw.hear(link, 0, 0)
        return {"heard": names(messages), "closed": closed}

    return act


def allocate(raw: Raw, link: int, chunks: int, within_s: float = 5) -> list[int]:
    """Allocates chunks, and returns those that arrived in time."""
    raw.send(link, {"Allocate": {"request": 1, "card": 0, "chunks": chunks}})
    found: list[int] = []
    until = time.monotonic() + within_s
    while len(found) < chunks and time.monotonic() < until:
        messages, closed = raw.hear(link, 1, 0.2)
        for message in messages:
            if isinstance(message, dict) and "Granted" in message:
                found += [chunk["id"] for chunk in message["Granted"]["chunks"]]
            elif isinstance(message, dict) and "Refused" in message:
                return found
        if closed:
            break
    return found


def hoard(manner: dict[str, str]) -> Scenario:
    """Allocates most of the card, and never frees it."""

    def act(raw: Raw, until: float) -> dict:
        link = raw.connect(manner)
        raw.hello(link, LARGE)
        chunks = allocate(raw, link, 2800)
        sleep_until(until - 0.3)
        _, closed = raw.hear(link, 0, 0)
        return {"chunks": len(chunks), "closed": closed}

    return act


def keep_descriptors(raw: Raw, until: float) -> dict:
    """Frees chunks but keeps their descriptors, which keep the memory allocated."""
    link = raw.connect(HONEST)
    raw.hello(link, SMALL)
    freed = 0
    while freed * CHUNK_MIB < 8192 and time.monotonic() < until - 0.5:
        chunks = allocate(raw, link, 512, within_s=until - time.monotonic() - 0.5)
        for first in range(0, len(chunks), 64):
            raw.send(link, {"Free": {"chunks": chunks[first:first + 64]}})
        freed += len(chunks)
        if not chunks:
            break
    sleep_until(until - 0.2)
    _, closed = raw.hear(link, 0, 0)
    return {"freed_mib": freed * CHUNK_MIB, "closed": closed}


def share_chunks(raw: Raw, link: int, count: int, exports: int = 1) -> list[int]:
    """Allocates chunks and exports them `exports` times. Returns the last token."""
    chunks = allocate(raw, link, count)
    raw.send(link, {"Export": {"request": 2, "chunks": chunks[:count]}}, exports)
    return raw.wait_for(link, "Shared")["share"]


def flood_opens(raw: Raw, until: float) -> dict:
    """Opens a shared chunk up to 160,000 times. Closes the descriptors immediately, but leaves the chunk open."""
    link = raw.connect(HONEST)
    raw.hello(link, LARGE)
    share = share_chunks(raw, link, 1, exports=1600)
    opened, refused, closed = 0, 0, False
    # Send fewer messages than a queue holds without a reader, because the owner closes connections with a full queue.
    batch = 128
    while opened + refused < 160_000 and time.monotonic() < until - 0.5 and not closed:
        sent = raw.send(link, {"Open": {"request": 3, "share": share}}, batch)
        messages, closed = raw.hear(link, sent, 2)
        opened += sum("Granted" in message for message in messages)
        refused += sum("Refused" in message for message in messages)
        raw.drop_descriptors(link)
        if sent < batch:
            break
    return {"opens": opened, "refused": refused, "closed": closed}


def flood_fixed(raw: Raw, until: float) -> dict:
    """Repeatedly requests 70 GiB of fixed memory and returns it."""
    link = raw.connect(HONEST)
    raw.hello(link, LARGE)
    memory, rounds = {"card": 0, "kind": "Managed", "bytes": 70 << 30}, 0
    while time.monotonic() < until - 0.5:
        sent = raw.send(link, {"Fix": {"request": 1, **memory}}) + raw.send(link, {"Unfix": memory})
        rounds += 1
        if sent < 2:
            break
    _, closed = raw.hear(link, 0, 0)
    return {"rounds": rounds, "closed": closed}


def leave_unread(raw: Raw, until: float) -> dict:
    """Makes the owner send descriptors over connections that it never reads."""
    link = raw.connect(HONEST)
    raw.hello(link, LARGE)
    share = share_chunks(raw, link, 64)
    links, opens = 0, 0
    while links < 8 and time.monotonic() < until - 0.5:
        unread = raw.connect()
        raw.hello(unread, LARGE)
        opens += raw.send(unread, {"Open": {"request": 1, "share": share}}, 60)
        links += 1
    return {"connections": links, "opens_of_64": opens}


def connect_silently(raw: Raw, until: float) -> dict:
    """Opens 5,000 connections, and never sends a message over them."""
    made = 0
    while made < 5000 and time.monotonic() < until - 0.3:
        try:
            raw.connect()
        except Gone as error:
            return {"connections": made, "refused": str(error)}
        made += 1
    return {"connections": made}


@dataclass(frozen=True)
class Neighbour:
    """A row of the table."""

    name: str
    # Number in the list of hostile programs, or 0.
    number: int
    start: Callable[[Rig], Attack] | None
    owner: OwnerSettings | None = OWNER
    # Share of the card's time to which the decode loop is entitled next to it.
    entitlement: float = 1.0
    # Duration of its activity in seconds.
    seconds: float = 3.0
    # The decode loop starts when the neighbour is already working. The owner does not measure the work of a lone
    # program.
    comes_first: bool = False


def program(tenant: str, name: str, *arguments: object) -> Callable[[Rig], Attack]:
    return lambda rig: CudaProgram(rig, tenant, name, *arguments)


def raw(scenario: Scenario, uid: int | None = None) -> Callable[[Rig], Attack]:
    return lambda rig: RawClient(rig, scenario, uid)


NEIGHBOURS = (
    Neighbour("nobody, without the library", 0, None, owner=None),
    Neighbour("nobody", 0, None),
    Neighbour("a busy honest program", 0, program(LARGE, "busy"), entitlement=0.5),
    Neighbour("a connection made by a child that exited", 2, raw(keep_turn("Child")), seconds=5),
    Neighbour("a program stopped in its turn", 4, lambda rig: StoppedProgram(rig, LARGE, "busy"), entitlement=0.5,
              seconds=5),
    # A kernel of 60 s; the limit is 2 s.
    Neighbour("a kernel that does not end", 0, program(LARGE, "busy", "--kernel-us", 60_000_000), entitlement=0.5,
              seconds=5),
    Neighbour("memory freed, descriptors kept", 7, raw(keep_descriptors), seconds=4),
    Neighbour("compressible memory, mapped and released", 8, program(SMALL, "compressible", "--mib", 8192)),
    Neighbour("NVIDIA's driver called past the library", 9,
              lambda rig: CudaProgram(rig, SMALL, "direct", "--mib", 8192, "--driver", rig.driver), entitlement=0.5),
    # It does not allocate memory, so only the utilization reported by NVML reveals it.
    Neighbour("work past the library, without a turn", 9,
              lambda rig: CudaProgram(rig, SMALL, "direct", "--mib", 0, "--driver", rig.driver), entitlement=0.5,
              seconds=9),
    Neighbour("a flood of opens of a chunk exported 1,600 times", 13, raw(flood_opens), seconds=8),
    Neighbour("70 GiB fixed and given back, repeatedly", 14, raw(flood_fixed), seconds=4),
    Neighbour("96 threads that allocate at once", 17, program(SMALL, "threads", "--threads", 96)),
    Neighbour("a program of another user, owner without CAP_KILL", 3, raw(keep_turn("Itself"), OTHER_UID),
              OWNER_WITHOUT_KILL, seconds=5),
    Neighbour("a hoarder that is never quiescent", 5, raw(hoard({**HONEST, "quiesce": "Declined"})), SMALL_CARD,
              seconds=8),
    Neighbour("a hoarder that redirects nothing", 5, raw(hoard({**HONEST, "redirect": "Declined"})), SMALL_CARD,
              seconds=8),
    Neighbour("connections that read nothing", 15, raw(leave_unread), FEW_DESCRIPTORS, seconds=7),
    Neighbour("5,000 silent connections", 16, raw(connect_silently), FEW_DESCRIPTORS, seconds=5),
    Neighbour("a capture that never ends after 12 s of kernels", 1,
              program(LARGE, "capture", "--kernel-us", 2_000_000, "--kernels", 6), comes_first=True),
)
