//! Counts denied accesses by location and reason, and logs the first access of each combination.

use nvspec::regs;
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Maximum number of combinations of location and reason that are counted separately. All other combinations share a
/// counter. This bounds the memory and the log messages that a guest can cause.
const DISTINCT: usize = 512;

/// Reason why an access was denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Reason {
    /// There is no known register at the offset.
    Unknown,
    /// The register's policy is `Deny`.
    Policy,
    /// The address is outside the guest's VRAM.
    OutsideVram,
    /// The address refers to a kind of memory that the vGPU does not have.
    Target,
    /// The channel does not exist.
    Channel,
    /// The guest has bound the maximum number of channels.
    ChannelLimit,
    /// The runlist is too long, or outside the guest's memory.
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
            Self::Policy => "register denied",
            Self::OutsideVram => "address outside VRAM",
            Self::Target => "unsupported address target",
            Self::Channel => "no such channel",
            Self::ChannelLimit => "too many channels",
            Self::Runlist => "invalid runlist",
            Self::Unmapped => "no mapping",
            Self::Unsupported => "unsupported feature",
        })
    }
}

/// Location of a denied access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Site {
    /// Byte offset in BAR0, a multiple of 4. For accesses through a window, the offset of the register that sets the
    /// window's location.
    Register(u32),
    /// BAR1.
    Bar1,
    /// BAR3.
    Bar3,
    /// All locations that are not counted separately.
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

/// Numbers of accesses to one location that were denied for the same reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Count {
    /// Number of denied reads.
    pub reads: u64,
    /// Number of denied writes.
    pub writes: u64,
}

/// Denied accesses to a vGPU. Device resets do not reset the counts.
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

    /// Returns the counts for each location and reason, in address order.
    pub fn iter(&self) -> impl Iterator<Item = (Site, Reason, Count)> + '_ {
        self.counts.iter().map(|(&(site, reason), &count)| (site, reason, count))
    }

    /// Validates restored counts.
    pub(crate) fn check(&self) -> Result<(), Invalid> {
        let Self { counts, total: _ } = self;
        let sites = counts.keys().filter(|(site, _)| *site != Site::Elsewhere).count();
        Invalid::unless(sites <= DISTINCT, || {
            "too many combinations of register and reason are counted separately".into()
        })
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
        let rest = denials
            .iter()
            .find(|(site, ..)| *site == Site::Elsewhere)
            .expect("the remaining registers have no counter");
        assert_eq!(rest.2.reads, 0x4_0000 - DISTINCT as u64);
    }
}
