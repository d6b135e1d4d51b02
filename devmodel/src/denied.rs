//! Denied accesses: counts them per register and reason, and logs the first access of each pair.

use nvspec::regs;
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Number of separately counted (register, reason) pairs. All other pairs share a counter, which bounds the memory and
/// log lines that a guest can cause.
const DISTINCT: usize = 512;

/// Reason why an access was denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Reason {
    /// There is no known register at this offset.
    Unknown,
    /// The register is known, and its policy is `Deny`.
    Policy,
    /// The address is outside the guest's VRAM.
    OutsideVram,
    /// The target encoding selects a kind of memory that a vGPU does not have.
    Target,
    /// The channel does not exist.
    Channel,
    /// The vGPU may not bind more channels.
    ChannelLimit,
    /// The runlist is too long or not in memory.
    Runlist,
    /// The guest's page tables do not map the address.
    Unmapped,
    /// The vGPU does not support the feature.
    Unsupported,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "unknown register",
            Self::Policy => "register refused",
            Self::OutsideVram => "address outside of VRAM",
            Self::Target => "address target not available",
            Self::Channel => "no such channel",
            Self::ChannelLimit => "too many channels",
            Self::Runlist => "bad runlist",
            Self::Unmapped => "no mapping",
            Self::Unsupported => "feature not available",
        })
    }
}

/// Location of a denied access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Site {
    /// Byte offset in BAR0, a multiple of 4. For a window, the offset of the register that sets its location.
    Register(u32),
    /// BAR1.
    Bar1,
    /// BAR3.
    Bar3,
    /// All sites after the first few hundred distinct ones.
    Elsewhere,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Register(offset) => match regs::lookup(offset) {
                Some((block, reg, index)) if reg.count > 1 => write!(f, "{block}.{}[{index}]", reg.name),
                Some((block, reg, _)) => write!(f, "{block}.{}", reg.name),
                None => write!(f, "{offset:#08x}"),
            },
            Self::Bar1 => f.write_str("BAR1"),
            Self::Bar3 => f.write_str("BAR3"),
            Self::Elsewhere => f.write_str("elsewhere"),
        }
    }
}

/// Number of denied accesses for a site and a reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Count {
    /// Number of denied reads.
    pub reads: u64,
    /// Number of denied writes.
    pub writes: u64,
}

/// All denied accesses of a vGPU. Device resets preserve the counts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Denials {
    counts: BTreeMap<(Site, Reason), Count>,
    total: u64,
}

impl Denials {
    /// Counts a denied read.
    pub fn read(&mut self, site: Site, reason: Reason) {
        let count = self.count(site, reason, None);
        count.reads = count.reads.saturating_add(1);
    }

    /// Counts a denied write of `value`.
    pub fn write(&mut self, site: Site, reason: Reason, value: u64) {
        let count = self.count(site, reason, Some(value));
        count.writes = count.writes.saturating_add(1);
    }

    /// Returns the total number of denied accesses.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Iterates over all sites and reasons with their counts, in address order.
    pub fn iter(&self) -> impl Iterator<Item = (Site, Reason, Count)> + '_ {
        self.counts.iter().map(|(&(site, reason), &count)| (site, reason, count))
    }

    /// Validates saved data.
    pub(crate) fn check(&self) -> Result<(), Invalid> {
        let Self { counts, total: _ } = self;
        let sites = counts.keys().filter(|(site, _)| *site != Site::Elsewhere).count();
        Invalid::unless(sites <= DISTINCT, || "too many denied accesses are counted separately".into())
    }

    fn count(&mut self, site: Site, reason: Reason, written: Option<u64>) -> &mut Count {
        self.total = self.total.saturating_add(1);
        let mut key = (site, reason);
        if !self.counts.contains_key(&key) {
            if self.counts.len() >= DISTINCT {
                key.0 = Site::Elsewhere;
            } else {
                match written {
                    Some(value) => {
                        tracing::warn!(register = %site, value = %format_args!("{value:#x}"), %reason, "guest write denied")
                    }
                    None => tracing::warn!(register = %site, %reason, "guest read denied"),
                }
            }
        }
        self.counts.entry(key).or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denials_are_counted_by_register_and_reason() {
        let mut denials = Denials::default();
        denials.read(Site::Register(0x6000c), Reason::Unknown);
        denials.write(Site::Register(0x6000c), Reason::Unknown, 1);
        denials.write(Site::Register(0x1700), Reason::Target, 1);
        let all: Vec<_> = denials.iter().map(|(s, r, c)| (s.to_string(), r, c.reads, c.writes)).collect();
        assert_eq!(
            all,
            [("pbus.PRAMIN_WINDOW".to_string(), Reason::Target, 0, 1), ("0x06000c".to_string(), Reason::Unknown, 1, 1)]
        );
        assert_eq!(denials.total(), 3);
    }

    #[test]
    fn memory_stays_bounded_for_any_accesses() {
        let mut denials = Denials::default();
        for offset in (0..0x10_0000).step_by(4) {
            denials.read(Site::Register(offset), Reason::Unknown);
        }
        assert_eq!(denials.iter().count(), DISTINCT + 1);
        assert_eq!(denials.total(), 0x4_0000);
        let rest = denials.iter().find(|(site, ..)| *site == Site::Elsewhere).expect("remaining sites share a counter");
        assert_eq!(rest.2.reads, 0x4_0000 - DISTINCT as u64);
    }
}
