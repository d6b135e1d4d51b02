//! Counts and limits the interrupts that VMs cause in addition to those for completions.
//!
//! The card's single interrupt thread handles each of these interrupts (unknown methods, engine errors, interrupts
//! within a submission) under the card's lock. A VM may cause [`MAX_INTERRUPTS_PER_CHECK`] of them between two checks
//! by that thread. If a VM causes more, its channels are paused until the next check, so the VM loses its own time
//! rather than that of others.

use std::collections::BTreeMap;
use vram::TenantId;

/// Maximum number of interrupts per VM between two checks, which are a tenth of a second apart.
pub(crate) const MAX_INTERRUPTS_PER_CHECK: u32 = 256;
/// Number of interrupts per submission that are not counted, for the guest's fences.
const FREE_INTERRUPTS_PER_SUBMISSION: u32 = 2;

/// A VM's interrupt account.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Caused {
    /// Number of interrupts since the last check beyond the allowance for the VM's submissions.
    pub(super) lately: u32,
    pub(super) total: u64,
    pub(super) paused: bool,
    pub(super) pauses: u64,
}

/// Accounts of all VMs.
#[derive(Debug, Default)]
pub(crate) struct InterruptRateLimit(pub(super) BTreeMap<TenantId, Caused>);

impl InterruptRateLimit {
    /// Counts an interrupt. Returns true if the VM's channels must be paused now.
    pub(crate) fn count(&mut self, vm: TenantId) -> bool {
        let caused = self.0.entry(vm).or_default();
        caused.total = caused.total.saturating_add(1);
        caused.lately = caused.lately.saturating_add(1);
        let exceeds = caused.lately > MAX_INTERRUPTS_PER_CHECK && !caused.paused;
        caused.paused |= exceeds;
        caused.pauses = caused.pauses.saturating_add(u64::from(exceeds));
        exceeds
    }

    /// Credits a VM with the allowance for one completed submission.
    pub(crate) fn ended(&mut self, vm: TenantId) {
        if let Some(caused) = self.0.get_mut(&vm) {
            caused.lately = caused.lately.saturating_sub(FREE_INTERRUPTS_PER_SUBMISSION);
        }
    }

    /// Resets the counts at a check. Returns the VMs whose channels resume.
    pub(crate) fn look(&mut self) -> Vec<TenantId> {
        let mut resumed = Vec::new();
        for (vm, caused) in &mut self.0 {
            caused.lately = 0;
            if std::mem::take(&mut caused.paused) {
                resumed.push(*vm);
            }
        }
        resumed
    }

    /// Returns the number of interrupts that a VM has caused, and the number of pauses due to them.
    pub(crate) fn interrupts_and_pauses(&self, vm: TenantId) -> (u64, u64) {
        self.0.get(&vm).map(|caused| (caused.total, caused.pauses)).unwrap_or_default()
    }

    /// Removes the account of a VM that no longer exists.
    pub(crate) fn forget(&mut self, vm: TenantId) {
        self.0.remove(&vm);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOISY: TenantId = TenantId(1);
    const QUIET: TenantId = TenantId(2);

    #[test]
    fn vm_over_interrupt_limit_is_paused_until_next_poll() {
        let mut noise = InterruptRateLimit::default();
        let most = u64::from(MAX_INTERRUPTS_PER_CHECK);
        assert!((0..most).all(|_| !noise.count(NOISY) && !noise.count(QUIET)));
        assert!(noise.count(NOISY));
        assert!(!noise.count(NOISY), "the VM is paused only once");
        assert_eq!(noise.look(), [NOISY]);
        assert_eq!(noise.look(), []);
        assert!((0..most).all(|_| !noise.count(NOISY)));
        assert_eq!(
            (noise.interrupts_and_pauses(NOISY), noise.interrupts_and_pauses(QUIET)),
            ((2 * most + 2, 1), (most, 0))
        );
        noise.forget(NOISY);
        assert_eq!(noise.interrupts_and_pauses(NOISY), (0, 0));
    }

    #[test]
    fn interrupts_of_many_submissions_are_no_noise() {
        let mut noise = InterruptRateLimit::default();
        for _ in 0..10 * MAX_INTERRUPTS_PER_CHECK {
            assert!(!noise.count(NOISY) && !noise.count(NOISY));
            noise.ended(NOISY);
        }
        assert_eq!(noise.look(), []);
    }
}
