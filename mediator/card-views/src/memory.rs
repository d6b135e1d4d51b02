//! Converts the state of a card's memory.

use std::collections::BTreeMap;

use config::{CardMemory, CardSpec, VmMemory as MemorySettings};
use tenancy::MemoryView;
use vram::TenantId;

use super::{MIB, MS};

/// Returns the state of a card's memory. `view` is `None` while the card is not in use. `tenants` contains each
/// tenant's name and settings.
#[must_use]
pub fn memory(
    spec: &CardSpec,
    settings: CardMemory,
    view: Option<&MemoryView>,
    tenants: &BTreeMap<TenantId, (String, MemorySettings)>,
) -> api::CardMemory {
    let chunk_bytes = view.map_or(spec.chunk_kib << 10, |view| view.summary.chunk_bytes);
    let unused = MemoryView::default();
    let shown = view.unwrap_or(&unused);
    let summary = &shown.summary;
    let bytes = |chunks: u32| u64::from(chunks) * chunk_bytes;
    let name = |id: &TenantId| tenants.get(id).map(|(name, _)| name.clone());
    let turn = shown.turn.as_ref().and_then(|turn| {
        Some(api::Turn {
            holder: name(&turn.holder)?,
            members: turn.members.iter().filter_map(name).collect(),
            quantum_ms: turn.quantum_ns / MS,
        })
    });
    let holdings = |(id, (name, settings)): (&TenantId, &(String, MemorySettings))| {
        let account = summary.vms.get(id)?;
        Some(api::VmMemory {
            vm: name.clone(),
            settings: settings.clone(),
            advertised_bytes: bytes(account.advertised),
            on_card_bytes: bytes(account.placed),
            in_reserve_bytes: bytes(account.parked),
            in_host_bytes: bytes(account.host),
            unbacked_bytes: bytes(account.unbacked),
            moving_bytes: bytes(account.moving),
            guarantee_bytes: bytes(account.guarantee),
            quota_bytes: bytes(account.limits.quota.min(account.advertised)),
            entitled_bytes: bytes(shown.entitled.get(id).map_or(0, |entitled| entitled.ceil)),
            pinned_bytes: bytes(shown.pinned.get(id).copied().unwrap_or(0)),
            on_card_peak_bytes: bytes(account.peak),
            in_host_peak_bytes: bytes(account.host_peak),
            born_in_host_bytes: account.born_in_host * chunk_bytes,
            moved_out_bytes: account.moved_out * chunk_bytes,
            moved_in_bytes: account.moved_in * chunk_bytes,
            memory_waited_ns: shown.held_ns.get(id).copied().unwrap_or(0),
            ..api::VmMemory::default()
        })
    };
    let mut vms: Vec<api::VmMemory> = tenants.iter().filter_map(holdings).collect();
    vms.sort_by(|one, other| one.vm.cmp(&other.vm));
    api::CardMemory {
        card: spec.name.clone(),
        settings,
        chunk_bytes,
        card_bytes: spec.vram_mib * MIB,
        mediator_bytes: bytes(summary.mediator),
        spare_bytes: if view.is_some() { bytes(summary.spare()) } else { spec.shared_mib() * MIB },
        to_scrub_bytes: bytes(summary.to_scrub),
        quarantined_bytes: bytes(summary.quarantined + summary.host.quarantined),
        scrubbed_bytes: summary.scrubbed * chunk_bytes,
        reserve_used_bytes: bytes(summary.parked),
        host_budget_bytes: settings.host_mib * MIB,
        host_used_bytes: bytes(summary.host.used),
        windows_bytes: 0,
        moved_out_bytes: summary.moved_out * chunk_bytes,
        moved_in_bytes: summary.moved_in * chunk_bytes,
        turns: shown.quanta,
        copy_bytes_per_second: shown.bytes_per_second,
        turn,
        vms,
    }
}
