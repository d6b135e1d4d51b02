//! Messages to operators about exhausted memory limits.

use vram::balance::PinError;
use vram::{Error, Limit};

/// A limit that was reached, with its key, its value, and a remedy. The context identifies the object: errors of the
/// admin API start with the virtual machine or the card, and log events of a virtual machine's thread are in its span.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}; {what_to_do}")]
pub struct Shortage {
    /// Key and value of the limit, and permitted values.
    pub what: String,
    /// Remedy for the operator.
    pub what_to_do: String,
}

impl Shortage {
    /// Creates a shortage from its two texts.
    pub fn new(what: impl Into<String>, what_to_do: impl Into<String>) -> Self {
        Self { what: what.into(), what_to_do: what_to_do.into() }
    }

    /// Describes an error of a chunk table with chunks of `chunk_bytes` bytes.
    #[must_use]
    pub fn from_error(error: &Error, chunk_bytes: u64) -> Self {
        let mib = |chunks: u64| size(chunks.saturating_mul(chunk_bytes));
        match *error {
            Error::Full { limit, host, .. } => Self::of_limit(limit.decisive(host), chunk_bytes),
            Error::CardFull { wanted, free, to_scrub, promised } => {
                let left = u64::from(free) + u64::from(to_scrub);
                let what = format!(
                    "{} of the card are requested in addition to `reserve_mib`, expected at most {}: {} have no owner, of which {} are \
                     promised to VMs or kept for evictions",
                    mib(wanted),
                    mib(left.saturating_sub(promised.into())),
                    mib(left),
                    mib(promised.into())
                );
                Self::new(what, "request less, lower a VM's `memory.guarantee_mib`, or raise the card's `reserve_mib`")
            }
            Error::Promise { wanted, now, left, .. } => {
                let what = format!(
                    "memory.guarantee_mib: {}, expected at most {}: the rest of the card is guaranteed to other VMs or belongs to the \
                     mediator, and {} could be guaranteed at present",
                    mib(wanted.into()),
                    mib(left.into()),
                    mib(now.into())
                );
                Self::new(what, "request less, or lower another VM's guarantee with `mediatorctl memory set-guarantee`")
            }
            Error::Guarantee { guarantee, quota, .. } => {
                let (guarantee, quota) = (mib(guarantee.into()), mib(quota.into()));
                let what =
                    format!("memory.guarantee_mib: {guarantee}, expected at most `memory.quota_mib`, which is {quota}");
                Self::new(what, "request less, or raise the quota with `mediatorctl memory set-quota`")
            }
            Error::Weight(_) => Self::new("memory.weight: 0, expected 1 to 10000", "correct `memory.weight`"),
            Error::ReserveFull(chunks) => Self::new(
                format!("the card's `memory.reserve_mib` of {} is exhausted", mib(chunks.into())),
                "wait until it has been refilled, or raise it with `mediatorctl memory set CARD --reserve-mib`",
            ),
            Error::Empty => Self::new("vram_mib: 0 MiB, expected at least 16", "correct `vram_mib`"),
            Error::Advertised(bytes) => {
                Self::new(format!("vram_mib: {}, expected at most 1048576 MiB", size(bytes)), "correct `vram_mib`")
            }
            Error::CardSize(bytes) => Self::new(
                format!("vram_mib: {} of the card is not a multiple of `chunk_kib`, or exceeds the limit", size(bytes)),
                "correct the card's `vram_mib` or `chunk_kib`",
            ),
            Error::ChunkSize(bytes) => Self::new(
                format!("chunk_kib: {}, expected a power of two from 128 to 65536", bytes >> 10),
                "correct the card's `chunk_kib`",
            ),
            // These errors are not limits. They are temporary, or violate an assumption of the mediator.
            Error::NeedsScrub { .. } | Error::Moving { .. } | Error::Settled { .. } => {
                Self::new(error.to_string(), "try again")
            }
            Error::Exists(_) | Error::NoSuchVm(_) | Error::OutOfRange { .. } | Error::NotPlaced { .. } => Self::new(
                error.to_string(),
                "see the daemon's log; if the problem persists, remove the VM and add it again",
            ),
        }
    }

    fn of_limit(limit: Limit, chunk_bytes: u64) -> Self {
        let mib = |chunks: u32| size(u64::from(chunks).saturating_mul(chunk_bytes));
        match limit {
            Limit::Card { free, to_scrub, promised } => {
                let what = format!(
                    "its `memory.guarantee_mib` is exhausted, and the card has no spare memory: {} have no owner, {} \
                     are reserved for others",
                    mib(free.saturating_add(to_scrub)),
                    mib(promised)
                );
                let what_to_do = "raise it with `mediatorctl memory set-guarantee`, lower another VM's `memory.quota_mib`, or \
                                  let the VM swap (`mediatorctl memory set-policy`)";
                Self::new(what, what_to_do)
            }
            Limit::Quota(chunks) => Self::new(
                format!("its `memory.quota_mib` of {} is exhausted", mib(chunks)),
                "raise it with `mediatorctl memory set-quota`, or let the VM swap (`mediatorctl memory set-policy`)",
            ),
            Limit::HostBudget(chunks) => Self::new(
                format!("the card's `memory.host_mib` of {} is exhausted", mib(chunks)),
                "raise it in the configuration file and restart the daemon, or lower a VM's `memory.swap_cap_mib`",
            ),
            Limit::SwapCap(chunks) => Self::new(
                format!("its `memory.swap_cap_mib` of {} is exhausted", mib(chunks)),
                "raise it with `mediatorctl memory set-swap-cap`, or its `memory.guarantee_mib`",
            ),
            Limit::Policy(policy) => Self::new(
                format!("its `memory.on_full = {policy}` excludes it from host memory"),
                "choose `swap` with `mediatorctl memory set-policy`",
            ),
        }
    }

    /// Describes a guarantee of bus addresses that cannot be granted. `most` is the size of the largest free range in
    /// bytes.
    #[must_use]
    pub fn of_ram(guarantee: u64, most: u64) -> Self {
        let what = format!(
            "memory.ram.guarantee_mib: {}, expected at most {}: the rest of the card's bus addresses is guaranteed to other VMs \
             or in use",
            size(guarantee),
            size(most)
        );
        Self::new(what, "request less, or lower another VM's guarantee with `mediatorctl memory set-ram`")
    }

    /// Describes the reason why a range cannot be pinned.
    #[must_use]
    pub fn of_pin(error: &PinError, chunk_bytes: u64) -> Self {
        match error {
            PinError::Range(error) => Self::from_error(error, chunk_bytes),
            PinError::Guarantee { pinned, guarantee, .. } => {
                let mib = |chunks: u32| size(u64::from(chunks).saturating_mul(chunk_bytes));
                let (pinned, guarantee) = (mib(*pinned), mib(*guarantee));
                let what =
                    format!("{pinned} would be pinned, expected at most `memory.guarantee_mib`, which is {guarantee}");
                Self::new(what, "raise it with `mediatorctl memory set-guarantee`, or unpin other memory")
            }
        }
    }
}

/// Formats a size in MiB, or in KiB if it is not a multiple of 1 MiB.
fn size(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 20) { format!("{} MiB", bytes >> 20) } else { format!("{} KiB", bytes >> 10) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vram::{GuestVramAddr, OnFull, TenantId, Tier};

    const CHUNK: u64 = 2 << 20;
    const VM: TenantId = TenantId(7);

    /// Returns the variant's number. A new variant also needs an entry with its message in the list below.
    fn variant(error: &Error) -> usize {
        match error {
            Error::ChunkSize(_) => 0,
            Error::CardSize(_) => 1,
            Error::Full { limit, .. } => match limit {
                Limit::Card { .. } => 2,
                Limit::Quota(_) => 3,
                Limit::HostBudget(_) => 4,
                Limit::SwapCap(_) => 5,
                Limit::Policy(_) => 6,
            },
            Error::CardFull { .. } => 7,
            Error::Promise { .. } => 8,
            Error::Guarantee { .. } => 9,
            Error::Weight(_) => 10,
            Error::NeedsScrub { .. } => 11,
            Error::Empty => 12,
            Error::Advertised(_) => 13,
            Error::Exists(_) => 14,
            Error::NoSuchVm(_) => 15,
            Error::OutOfRange { .. } => 16,
            Error::NotPlaced { .. } => 17,
            Error::Settled { .. } => 18,
            Error::ReserveFull(_) => 19,
            Error::Moving { .. } => 20,
        }
    }

    const VARIANTS: usize = 21;

    #[test]
    fn limit_error_names_key_value_and_remedy() {
        let full = |limit, host| Error::Full { vm: VM, limit, host };
        let card = Limit::Card { free: 3, to_scrub: 1, promised: 2 };
        let swapping = full(card, Some(Limit::HostBudget(16)));
        // Each entry contains the error, and the keys and values that its message must contain.
        let limits: [(Error, &[&str], &[&str]); 17] = [
            (Error::ChunkSize(5 << 10), &["chunk_kib"], &["5,"]),
            (Error::CardSize(1 << 20), &["vram_mib", "chunk_kib"], &["1 MiB"]),
            (full(card, None), &["memory.guarantee_mib"], &["8 MiB", "4 MiB"]),
            (full(card, Some(Limit::Policy(OnFull::Queue))), &["memory.guarantee_mib"], &["8 MiB", "4 MiB"]),
            (full(Limit::Quota(9), None), &["memory.quota_mib"], &["18 MiB"]),
            (swapping, &["memory.host_mib"], &["32 MiB"]),
            (full(Limit::HostBudget(16), None), &["memory.host_mib"], &["32 MiB"]),
            (full(Limit::Quota(9), Some(Limit::SwapCap(5))), &["memory.swap_cap_mib"], &["10 MiB"]),
            (full(Limit::SwapCap(5), None), &["memory.swap_cap_mib"], &["10 MiB"]),
            (full(Limit::Policy(OnFull::Refuse), None), &["memory.on_full"], &["`memory.on_full = refuse`"]),
            (
                Error::CardFull { wanted: 9, free: 4, to_scrub: 2, promised: 1 },
                &["reserve_mib", "memory.guarantee_mib"],
                &["18 MiB", "at most 10 MiB"],
            ),
            (
                Error::Promise { vm: VM, wanted: 8, now: 2, left: 4 },
                &["memory.guarantee_mib"],
                &["16 MiB", "at most 8 MiB", "4 MiB could"],
            ),
            (
                Error::Guarantee { vm: VM, guarantee: 8, quota: 4 },
                &["memory.guarantee_mib", "memory.quota_mib"],
                &["16 MiB", "8 MiB"],
            ),
            (Error::Weight(VM), &["memory.weight"], &["0,"]),
            (Error::Empty, &["vram_mib"], &["0 MiB"]),
            (Error::Advertised(3 << 40), &["vram_mib"], &["3145728 MiB"]),
            (Error::ReserveFull(6), &["memory.reserve_mib"], &["12 MiB"]),
        ];
        // Errors that are not limits need no entry with a message.
        let (index, address) = (5, GuestVramAddr(0x40_0000));
        let others = [
            Error::NeedsScrub { tier: Tier::Card, short: 1 },
            Error::Exists(VM),
            Error::NoSuchVm(VM),
            Error::OutOfRange { vm: VM, address },
            Error::NotPlaced { vm: VM, index },
            Error::Settled { vm: VM, index },
            Error::Moving { vm: VM, index },
        ];
        let mut seen = [false; VARIANTS];
        for (error, keys, values) in limits {
            seen[variant(&error)] = true;
            let shortage = Shortage::from_error(&error, CHUNK);
            let text = shortage.to_string();
            assert!(keys.iter().all(|key| text.contains(key)), "{error:?}: {text}");
            assert!(values.iter().all(|value| shortage.what.contains(value)), "{error:?}: {text}");
            let advice = &shortage.what_to_do;
            assert!(
                advice.contains("`mediatorctl ")
                    || keys.iter().any(|key| advice.contains(key))
                    || advice.contains("_mib`"),
                "{error:?}: {advice}"
            );
            assert!(!text.contains("chunks"), "operators count in MiB: {text}");
        }
        for error in others {
            seen[variant(&error)] = true;
            let Shortage { what, what_to_do } = Shortage::from_error(&error, CHUNK);
            assert!(what == error.to_string() && !what_to_do.is_empty(), "{error:?}");
        }
        assert_eq!(seen, [true; VARIANTS], "each variant must be tested");
    }

    #[test]
    fn pin_shortage_names_guarantee() {
        let error = PinError::Guarantee { vm: VM, pinned: 3, guarantee: 2 };
        let shortage = Shortage::of_pin(&error, CHUNK);
        assert_eq!(shortage.what, "6 MiB would be pinned, expected at most `memory.guarantee_mib`, which is 4 MiB");
        assert!(shortage.what_to_do.contains("`mediatorctl memory set-guarantee`"));
        let range = Error::NoSuchVm(VM);
        assert_eq!(Shortage::of_pin(&PinError::Range(range), CHUNK), Shortage::from_error(&range, CHUNK));
    }

    #[test]
    fn sizes_are_in_the_unit_that_suits_them() {
        assert_eq!([128 << 10, 1 << 20, 3 << 19].map(size), ["128 KiB", "1 MiB", "1536 KiB"]);
    }
}
