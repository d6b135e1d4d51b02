//! Moves a VM whose programs use CUDA. Its programs continue in new workers on the other card, so both owners have the
//! tenant during the move, each with a socket of its own.

use std::time::Duration;

use cuda_control::Tenant;

use crate::{Carried, Failure, Owner, Phases, Plan, Trouble, view};

/// A VM's move to another card.
#[derive(Clone, Copy)]
pub struct VmPlan<'a> {
    /// The owner of the VM's card.
    pub from: &'a dyn Owner,
    /// The owner of the other card.
    pub to: &'a dyn Owner,
    /// The VM, as described to the owner of the other card.
    pub there: &'a Tenant,
}

/// Moves a VM. `carry` moves the VM's programs to the other card, with at most the given number of bytes of one
/// program's memory in host memory, and returns the number of programs and their pause. If `carry` fails, no program
/// has moved.
///
/// # Errors
/// Returns the reason why the move failed. The VM is then on its card.
pub fn carry_vm(
    plan: VmPlan<'_>,
    carry: impl FnOnce(u64) -> Result<(usize, Duration), String>,
) -> Result<Carried, Failure> {
    let VmPlan { from, to, there } = plan;
    let plan = Plan { from, to, here: there, there };
    let stays = |trouble: Trouble| Failure::Stays(trouble.to_string());
    let (bytes, free) = plan.copies().map_err(stays)?;
    if let Err(trouble) = plan.add(to, there) {
        // The other owner may have added the tenant before it exited.
        if matches!(trouble, Trouble::Absent(_)) {
            plan.undo("the other card", || plan.remove(to, true));
        }
        return Err(stays(trouble));
    }
    match carry(free) {
        Ok((programs, pause)) => {
            plan.undo("the first card", || plan.remove(from, true));
            Ok(Carried { programs, bytes, pause, phases: Phases::default() })
        }
        Err(why) => {
            plan.undo("the other card", || plan.remove(to, true));
            Err(Failure::Stays(why))
        }
    }
}

impl Plan<'_> {
    /// Checks that the other card has enough space for the VM's memory. Returns the size of this memory, and the amount
    /// of the other card's host memory that is left for a copy, in bytes.
    fn copies(&self) -> Result<(u64, u64), Trouble> {
        let (here, there) = (view(self.from)?, view(self.to)?);
        let (placed, in_host) = self.chunks(&here);
        let (chunk_bytes, all) = (here.memory.summary.chunk_bytes, placed.saturating_add(in_host));
        let (card, host) = (there.memory.summary.spare(), there.memory.summary.host);
        let bytes = |chunks: u32| u64::from(chunks).saturating_mul(chunk_bytes);
        // The owner subtracts the VM's window from the host memory when it adds the VM.
        let window = self.there.window_bytes.div_ceil(chunk_bytes.max(1));
        let window = u32::try_from(window).unwrap_or(u32::MAX);
        let free = host.budget.saturating_sub(host.used).saturating_sub(window);
        let room = card.saturating_add(free);
        if all > room {
            let (room, needed) = (bytes(room) >> 20, bytes(all) >> 20);
            return Err(Trouble::Refused(format!(
                "the other card, with its host memory, has space for {room} MiB, but {needed} MiB are needed"
            )));
        }
        // The part that does not fit on the card also needs host memory.
        Ok((bytes(all), bytes(free.saturating_sub(all.saturating_sub(card)))))
    }
}
