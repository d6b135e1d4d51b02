//! Operator's view of a VM: its counters and denied accesses.

use super::device::Core;
use devmodel::denied::Site;
use std::collections::BTreeMap;
use vm_device::{DeniedAccess, DeviceStatus, InterruptKind};

impl Core {
    /// Returns the VM's status for operators, excluding the card manager's counters.
    pub(super) fn status(&self) -> DeviceStatus {
        let Core { gpu, backend, .. } = self;
        let (spaces, shadow_bytes) = backend.memory().usage();
        let (report, syncs) = backend.memory().report();
        let remap = backend.remap();
        let pv = backend.pv().zip(backend.memory().grants().tables());
        let pv = pv.map(|(pv, tables)| pv.counters(tables)).into_iter().flatten();
        let of_memory = [
            ("address_spaces", spaces as u64),
            ("shadow_bytes", shadow_bytes),
            ("aperture_pages", remap.pages() as u64),
            ("shadow_syncs", syncs),
            ("shadow_bytes_scanned", report.bytes_scanned),
            ("shadow_pages_scanned", report.pages),
            ("shadow_pages_deferred", report.deferred),
            ("shadow_entries_translated", report.translated),
            ("shadow_entries_written", report.entries_written),
            ("shadow_entries_denied", report.denied.total()),
        ];
        let counts = backend.counts().named().chain(remap.counts.named()).chain(of_memory).chain(pv);
        let counters: BTreeMap<String, u64> = counts.map(|(name, count)| (name.to_owned(), count)).collect();
        let denied = gpu.denials().iter().map(|(site, reason, count)| DeniedAccess {
            place: site.to_string(),
            offset: if let Site::Register(offset) = site { Some(offset) } else { None },
            reason: reason.to_string(),
            reads: count.reads,
            writes: count.writes,
        });
        let tables = shadow_pt::Denial::ALL.into_iter().filter(|&why| report.denied.count_of(why) != 0).map(|why| {
            DeniedAccess {
                place: "page table entry".to_owned(),
                offset: None,
                reason: why.name().to_owned(),
                reads: 0,
                writes: report.denied.count_of(why),
            }
        });
        let pci = gpu.pci();
        let config = gpu.config();
        DeviceStatus {
            vram_mib: u64::from(config.vram_mib()),
            channels_used: backend.work().all_bound().count() as u32,
            pci_id: (config.pci.vendor, config.pci.device),
            bus_master: pci.bus_master(),
            interrupts: if pci.msi_enabled() {
                InterruptKind::Msi
            } else if backend.link().interrupts().intx_attached() && !pci.intx_disabled() {
                InterruptKind::Intx
            } else {
                InterruptKind::Off
            },
            denied: denied.chain(tables).collect(),
            counters,
        }
    }
}
