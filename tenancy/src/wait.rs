//! Reasons why a tenant's work waits.

use crate::Residency;
use serde::{Deserialize, Serialize};
use vram::TenantId;

/// Reason why a tenant's work waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wait {
    /// The tenant is quarantined.
    Quarantine,
    /// The tenant's processes are stopped.
    Stopped,
    /// Another tenant holds the card's memory quantum.
    MemoryQuantum {
        /// Tenant that holds the quantum.
        holder: TenantId,
        /// Remaining time of the quantum in ns, or `None` while memory is moved for the quantum.
        left_ns: Option<u64>,
    },
    /// The tenant's own memory is being moved.
    Move,
    /// The tenant lacks memory that it has requested.
    Memory {
        /// Number of missing bytes, if known.
        bytes: Option<u64>,
    },
    /// The tenant waits for a slice of the card's time.
    Slice {
        /// Tenant that is using the card, if known.
        holder: Option<TenantId>,
    },
}

/// State of a tenant's work, as known to the executor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Standing {
    /// True if the tenant is quarantined.
    pub is_quarantined: bool,
    /// True if the tenant has unfinished work.
    pub has_work: bool,
    /// True if the tenant's work may run, because the tenant has the card or has work in flight.
    pub runs: bool,
    /// True if the tenant lacks memory that it has requested.
    pub lacks_memory: bool,
    /// Number of missing bytes, if known.
    pub missing_bytes: Option<u64>,
    /// Other tenant that is using the card, if known.
    pub holder: Option<TenantId>,
    /// True if the tenant's processes are stopped.
    pub is_stopped: bool,
}

impl Residency {
    /// Returns the first reason why a tenant waits, or `None` if it does not wait. A tenant without work waits only if
    /// it is quarantined, lacks memory, or is stopped. `is_moving` is true if the tenant has work and its memory is
    /// being moved.
    pub(crate) fn wait_reason(&self, tenant: TenantId, now: u64, is_moving: bool, standing: &Standing) -> Option<Wait> {
        let quantum = self.wait(tenant, now).filter(|_| standing.has_work);
        match (standing, quantum) {
            (Standing { is_quarantined: true, .. }, _) => Some(Wait::Quarantine),
            // The holder waits for its own memory to be moved.
            (_, Some((holder, _))) if holder == tenant => Some(Wait::Move),
            (_, Some((holder, left_ns))) => Some(Wait::MemoryQuantum { holder, left_ns }),
            _ if is_moving => Some(Wait::Move),
            (Standing { lacks_memory: true, missing_bytes, .. }, _) => Some(Wait::Memory { bytes: *missing_bytes }),
            (Standing { runs: true, .. }, _) => None,
            (Standing { has_work: true, holder, .. }, _) => Some(Wait::Slice { holder: *holder }),
            (Standing { is_stopped, .. }, _) => is_stopped.then_some(Wait::Stopped),
        }
    }
}

impl Wait {
    /// Describes the reason in words. `name` returns a tenant's name.
    #[must_use]
    pub fn in_words(&self, name: impl Fn(TenantId) -> String) -> String {
        match *self {
            Self::Quarantine => "its release from quarantine".to_owned(),
            Self::Stopped => "its stopped programs".to_owned(),
            Self::MemoryQuantum { holder, left_ns: None } => {
                format!("memory quantum of `{}`, whose memory is being moved", name(holder))
            }
            Self::MemoryQuantum { holder, left_ns: Some(left) } => {
                format!("memory quantum of `{}`, {:.1} s left", name(holder), left as f64 / 1e9)
            }
            Self::Move => "a move of its memory".to_owned(),
            Self::Memory { bytes: None } => "memory on the card".to_owned(),
            Self::Memory { bytes: Some(bytes) } => format!("memory, {} MiB missing", bytes >> 20),
            Self::Slice { holder: None } => "a slice".to_owned(),
            Self::Slice { holder: Some(holder) } => format!("slice of `{}`", name(holder)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Demand;
    use std::collections::BTreeMap;
    use vram::balance::Config;
    use vram::{ChunkTable, Contents, Limits, Mode, QuantaConfig};

    const ONE: TenantId = TenantId(1);
    const TWO: TenantId = TenantId(2);
    const MS: u64 = 1_000_000;

    #[test]
    fn first_obstacle_is_the_reason_of_a_wait() {
        let residency = Residency::new(Config::default(), QuantaConfig::default());
        let mut standing = Standing::default();
        let reason = |standing: &Standing| residency.wait_reason(ONE, 0, false, standing);
        assert_eq!(reason(&standing), None, "it has no work");
        standing.is_stopped = true;
        assert_eq!(reason(&standing), Some(Wait::Stopped));
        standing.has_work = true;
        assert_eq!(reason(&standing), Some(Wait::Slice { holder: None }));
        standing.holder = Some(TWO);
        assert_eq!(reason(&standing), Some(Wait::Slice { holder: Some(TWO) }));
        standing.runs = true;
        assert_eq!(reason(&standing), None);
        standing.lacks_memory = true;
        assert_eq!(reason(&standing), Some(Wait::Memory { bytes: None }), "running work may lack memory");
        assert_eq!(residency.wait_reason(ONE, 0, true, &standing), Some(Wait::Move));
        standing.is_quarantined = true;
        assert_eq!(reason(&standing), Some(Wait::Quarantine));
    }

    #[test]
    fn member_waits_for_the_holder_and_the_holder_for_its_memory() {
        let mut table = ChunkTable::new(64 << 20, 1 << 20, Contents::Zeroed).expect("the sizes are valid");
        table.set_host_budget(64);
        let quanta = QuantaConfig { mode: Mode::Forced, min_ns: 100 * MS, max_ns: 100 * MS, ..QuantaConfig::default() };
        let mut residency = Residency::new(Config::default(), quanta);
        for tenant in [ONE, TWO] {
            table.create_vm(tenant, 64 << 20, Limits::default()).expect("the VM fits");
            let address = table.guest_address(0);
            table.place(tenant, address).expect("a chunk is free");
            residency.worked(tenant, 0);
        }
        residency.tick(&table, 0, |_| 100, None);
        let _ = residency.plan(&table, 0, Demand::default());
        let working = Standing { has_work: true, ..Standing::default() };
        let reasons = |residency: &Residency, now| [ONE, TWO].map(|id| residency.wait_reason(id, now, false, &working));
        let waits = |left_ns| Some(Wait::MemoryQuantum { holder: ONE, left_ns });
        assert_eq!(reasons(&residency, 0), [Some(Wait::Move), waits(None)]);
        residency.is_still(&table, 0, None);
        assert_eq!(reasons(&residency, 40 * MS), [Some(Wait::Slice { holder: None }), waits(Some(60 * MS))]);
        assert_eq!(
            residency.wait_reason(TWO, 0, false, &Standing::default()),
            None,
            "without work it waits for nothing"
        );
    }

    #[test]
    fn reasons_name_the_other_tenant_and_the_amount() {
        let names = BTreeMap::from([(TWO, "two")]);
        let words = |wait: Wait| wait.in_words(|id| names[&id].to_owned());
        let quantum = Wait::MemoryQuantum { holder: TWO, left_ns: Some(1_460 * MS) };
        assert_eq!(words(quantum), "memory quantum of `two`, 1.5 s left");
        assert_eq!(words(Wait::Memory { bytes: Some(5 << 20) }), "memory, 5 MiB missing");
        assert_eq!(words(Wait::Slice { holder: Some(TWO) }), "slice of `two`");
    }
}
