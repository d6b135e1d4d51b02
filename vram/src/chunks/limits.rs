//! Limits of a VM's use of the card and of host memory.

use serde::{Deserialize, Serialize};

/// Behaviour if no card chunk is available for a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OnFull {
    /// Place the chunk in host memory.
    #[default]
    Swap,
    /// Make the request wait for as long as the caller permits.
    Queue,
    /// Reject the request.
    Refuse,
}

impl OnFull {
    /// Returns the policy's name in configuration files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Swap => "swap",
            Self::Queue => "queue",
            Self::Refuse => "refuse",
        }
    }
}

impl std::fmt::Display for OnFull {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for OnFull {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Swap, Self::Queue, Self::Refuse];
        all.into_iter()
            .find(|policy| policy.name() == text)
            .ok_or_else(|| format!("`{text}` is not a policy for a full card: `swap`, `queue` or `refuse`"))
    }
}

/// Limits of a VM, in chunks. A moving chunk counts towards the limits of both memories until it has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Maximum number of chunks on the card.
    pub quota: u32,
    /// Number of chunks guaranteed on the card, which must not exceed the quota. If it exceeds the number of guest
    /// chunks, only that number is reserved.
    pub guarantee: u32,
    /// Maximum number of chunks in host memory, whether evicted or placed there.
    pub swap_cap: u32,
    /// Weight for dividing chunks, relative to the weights of other VMs. The weight is at least 1.
    pub weight: u32,
    /// Behaviour if no card chunk is available for the VM.
    pub on_full: OnFull,
}

impl Limits {
    /// Keeps all of the guest's VRAM on the card.
    pub const RESERVED: Self = Self { guarantee: u32::MAX, swap_cap: 0, on_full: OnFull::Refuse, ..Self::DEFAULT };
    /// Permits card chunks on a first-come, first-served basis, but no host memory.
    pub const UNRESERVED: Self = Self { swap_cap: 0, on_full: OnFull::Refuse, ..Self::DEFAULT };

    const DEFAULT: Self =
        Self { quota: u32::MAX, guarantee: 0, swap_cap: u32::MAX, weight: 100, on_full: OnFull::Swap };
}

impl Default for Limits {
    /// Returns unlimited use, no guarantee, and a weight of 100.
    fn default() -> Self {
        Self::DEFAULT
    }
}
