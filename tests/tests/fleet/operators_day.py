"""An operator's day with the generated client: lists, adds, limits and moves virtual machines, and watches the events.

Usage: operators_day.py SOCKET, of a daemon with two cards for virtual machines and the virtual machine `web` on `card0`.
Fails with an exception if an answer is not the expected one.
"""

import sys

import httpx
from gpu_mediator_client import Client
from gpu_mediator_client.api.cards import get_cards, get_memory, get_schedulers
from gpu_mediator_client.api.daemon import get_daemon, get_events
from gpu_mediator_client.api.tenants import get_tenants
from gpu_mediator_client.api.vms import (
    add_vm,
    change_vm_memory,
    get_vm,
    get_vms,
    move_vm,
    remove_vm,
)
from gpu_mediator_client.models import (
    Error,
    EventKind,
    MoveTo,
    Vm,
    VmMemoryPatch,
    VmSpec,
    VmState,
)


def main(socket: str) -> None:
    transport = httpx.HTTPTransport(uds=socket)
    client = Client(base_url="http://localhost", httpx_args={"transport": transport}, timeout=httpx.Timeout(60))

    version = get_daemon.sync(client=client).version
    cards = get_cards.sync(client=client).cards
    print(f"daemon {version}: " + ", ".join(f"{card.name} ({card.kind}, {card.vram_free_mib} MiB free)" for card in cards))
    assert {card.name for card in cards} >= {"card0", "card1"}, cards
    vms = get_vms.sync(client=client).vms
    assert [vm.name for vm in vms] == ["web"], vms
    assert isinstance(vms[0].state, VmState), vms[0]
    assert get_tenants.sync(client=client).tenants == []
    cursor = get_events.sync(client=client).next_

    added = add_vm.sync(client=client, body=VmSpec(name="build", card="card0", vram_mib=32))
    assert isinstance(added, Vm) and added.state == VmState.WAITING, added
    again = add_vm.sync_detailed(client=client, body=VmSpec(name="build", card="card0", vram_mib=32))
    assert again.status_code == 409 and isinstance(again.parsed, Error) and again.parsed.what_to_do, again
    mistake = add_vm.sync_detailed(client=client, body=VmSpec(name="large", card="card0", vram_mib=1 << 20))
    assert isinstance(mistake.parsed, Error), mistake
    print(f"refused: {mistake.parsed.error}")

    limited = change_vm_memory.sync("build", client=client, body=VmMemoryPatch(quota_mib=16))
    assert limited.quota_mib == 16, limited
    [shared] = [card for card in get_memory.sync(client=client).memories if card.card == "card0"]
    assert {vm.vm: vm.quota_bytes for vm in shared.vms}["build"] == 16 << 20, shared
    schedulers = {scheduler.card: scheduler for scheduler in get_schedulers.sync(client=client).schedulers}
    assert {vm.vm for vm in schedulers["card0"].vms} == {"web", "build"}, schedulers

    moved = move_vm.sync("build", client=client, body=MoveTo(card="card1"))
    assert not isinstance(moved, Error), moved
    assert get_vm.sync("build", client=client).card == "card1"

    assert remove_vm.sync_detailed("build", client=client).status_code in (200, 204)
    assert get_vm.sync_detailed("build", client=client).status_code == 404
    print("removed build")

    seen = [event for event in get_events.sync(client=client, after=cursor).events if event.subject.name == "build"]
    for event in seen:
        print(f"{event.at} {event.kind} {event.subject.name}: {event.text}")
    kinds = [event.kind for event in seen]
    for kind in (EventKind.ADDED, EventKind.CHANGED, EventKind.MOVED, EventKind.REMOVED):
        assert kind in kinds, kinds
    assert all(event.author.uid is not None for event in seen if event.kind != EventKind.MOVED), seen


main(sys.argv[1])
