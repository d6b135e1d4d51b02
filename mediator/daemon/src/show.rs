//! Status of a virtual machine, as shown to operators.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use config::check;
use config::{RamSpec, VmSpec};
use vmm_glue::Link;

use crate::backend::BackendStatus;
use crate::vm::Running;
use crate::{Life, memory};

/// Copy of a virtual machine's table entry.
pub(super) struct Found {
    pub spec: VmSpec,
    pub life: Life,
    pub ram: RamSpec,
}

/// Returns the status of a virtual machine's lent RAM.
fn lent(running: Option<&Arc<Running>>, ram: &RamSpec) -> api::Ram {
    let lends = running.map(|running| running.link.memory());
    let touches = lends.map(|memory| memory.first_touches());
    api::Ram {
        lent_bytes: lends.map_or(0, |memory| memory.snapshot().mapped_bytes()),
        quota_bytes: memory::bytes(ram.quota_mib),
        guarantee_bytes: memory::bytes(ram.guarantee_mib),
        touched_bytes: touches.map_or(0, vmm_glue::memory::FirstTouches::bytes),
        touch_limit_bytes: ram.touch_mib.map(|mib| memory::bytes(Some(mib))),
        touches_refused: touches.map_or(0, vmm_glue::memory::FirstTouches::refused),
    }
}

/// Returns a virtual machine's status.
pub(super) fn show(Found { spec, life, ram }: Found) -> api::Vm {
    let (state, running) = match &life {
        Life::Starting => (api::VmState::Starting, None),
        Life::Running(running) => {
            let state = match () {
                () if running.seen.failed.lock().is_some() => api::VmState::Failed,
                () if running.link.client().is_some() => api::VmState::Connected,
                () => api::VmState::Waiting,
            };
            (state, Some(running))
        }
        Life::Stopping(running) => (api::VmState::Stopping, Some(running)),
    };
    let BackendStatus { vram_mib, channels_used, driver, denied, mut counters, programs } =
        running.map(|running| running.backend.status()).unwrap_or_default();
    let seen = running.map(|running| &*running.seen);
    let withdrawn = |running: &Arc<Running>| {
        running.link.memory().snapshot().regions().iter().any(vmm_glue::DmaRegion::is_withdrawn)
    };
    if let Some(seen) = seen {
        counters.insert("resets".to_owned(), seen.resets.load(Ordering::Relaxed));
    }
    let denials = |denied: &api::Denied| denied.reads.saturating_add(denied.writes);
    api::Vm {
        name: spec.name.clone(),
        card: spec.card.clone(),
        profile: spec.profile.clone(),
        mode: match () {
            () if spec.cuda.is_some() => api::VmMode::Cuda,
            () if spec.passthrough => api::VmMode::Passthrough,
            () => api::VmMode::Mediated,
        },
        state,
        error: seen.and_then(|seen| seen.failed.lock().clone()),
        socket: running.and_then(|running| running.socket.clone()),
        xen_domain: spec.xen_domain.clone(),
        client: running.and_then(|running| running.link.client()).map(|client| api::Client {
            pid: client.pid,
            uid: client.uid,
            domain: client.domain,
        }),
        vram_mib: spec.vram_mib.unwrap_or(vram_mib),
        channels_limit: match () {
            () if spec.cuda.is_some() => 0,
            () if spec.passthrough => check::MAX_CHANNELS,
            () => spec.channels(),
        },
        channels_used,
        memory_not_shared: seen.is_some_and(|seen| seen.memory_not_shared.load(Ordering::Relaxed)),
        memory_withdrawn: running.is_some_and(withdrawn),
        ram: lent(running, &ram),
        driver,
        denied_total: denied.iter().map(denials).fold(0, u64::saturating_add),
        denied,
        counters,
        programs,
        transport: running.map(|running| transport(&running.link)).unwrap_or_default(),
        labels: spec.labels.clone(),
    }
}

/// Returns a connection's counters as a flat map. Message counters have the prefix `messages_`.
fn transport(link: &Link) -> BTreeMap<String, u64> {
    let Ok(serde_json::Value::Object(counts)) = serde_json::to_value(link.counters().snapshot()) else {
        return BTreeMap::new();
    };
    let mut flat = BTreeMap::new();
    for (name, value) in counts {
        match value {
            serde_json::Value::Object(messages) => {
                let messages = messages.into_iter().filter_map(|(name, count)| Some((name, count.as_u64()?)));
                flat.extend(messages.map(|(name, count)| (format!("messages_{}", name.to_lowercase()), count)));
            }
            value => flat.extend(value.as_u64().map(|count| (name, count))),
        }
    }
    flat
}
