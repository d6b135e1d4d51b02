//! Clears PGRAPH between tenants by running the mediator's own kernel on the mediator's own channel.
//!
//! [`residue::Tenancy`] decides which VM uses PGRAPH, and this module executes its steps. A VM's channels with a PGRAPH
//! context are kept off the card until the VM is admitted ([`channels::Channels::admit`]). The VM's slice begins with
//! the clearing, which the VM is charged for.

use super::CardState;
use crate::ManagerError;
use crate::work::card_view::CardView;
use crate::work::schedule::Stage;
use card_memory::{CardVram, NoMemory, OwnRing, OwnSpace, RING_LOG2, bind, own_pages, va};
use channels::{Channels, Parts, Presence, Submission};
use nvspec::addr::{SMALL_PAGE, VramAddr};
use nvspec::chip::Chip;
use nvspec::fifo::{ChannelId, GpEntry, VirtualChannelId, engine};
use residue::kernel::Kernel;
use residue::{Counts, Step, Tenancy};
use sched::Nanos;
use vram::{PagePool, Place, TenantId};

/// VM number of the mediator's PGRAPH channel in [`Channels`]. No operator's VM has this number.
pub(super) const SCRUBBER: TenantId = TenantId::CLEARER;

/// Number of the mediator's only channel on PGRAPH.
const CHANNEL: VirtualChannelId = VirtualChannelId(0);
/// Size of the kernel's code, and of its push buffer, in bytes.
const PART_BYTES: u64 = SMALL_PAGE;

/// The clearing channel and its kernel.
pub(super) struct Scrubber {
    space: OwnSpace,
    physical: ChannelId,
    /// Address of the push buffer, which never changes, and its length in dwords.
    push: (VramAddr, u32),
    ring: [u64; 1 << RING_LOG2],
    put: u32,
    busy: Option<Submission>,
    /// Set if the channel has hung or faulted.
    broken: bool,
    pub(super) tenancy: Tenancy,
    pub(super) keeping: Keeping,
    /// Channels that had not left the card when PGRAPH's tenant changed, because a copy engine was executing them.
    elsewhere: Vec<ChannelId>,
}

/// Time that a departing tenant blocks PGRAPH without using it.
#[derive(Debug, Default)]
pub(super) struct Keeping {
    /// Tenant that blocked PGRAPH at the last poll, and the time of this poll.
    since: Option<(TenantId, Nanos)>,
    /// Tenant to charge, and the start of the time that has not been reported to the scheduler yet.
    kept: Option<(TenantId, Nanos)>,
}

impl Keeping {
    /// Records a poll while PGRAPH's tenant must leave. `keeps` is true if the tenant has not left although PGRAPH is
    /// idle. The tenant is then charged for the time until the next poll.
    fn look(&mut self, vm: TenantId, keeps: bool, now: Nanos) {
        if let Some((_, since)) = self.since.take().filter(|(of, _)| *of == vm) {
            let before = self.kept.filter(|(of, _)| *of == vm).map_or(since, |(_, before)| before);
            self.kept = Some((vm, before));
        }
        self.since = keeps.then_some((vm, now));
    }

    /// Returns and clears the tenant to charge, and the start of the time that has not been reported to the scheduler
    /// yet.
    pub(super) fn take(&mut self) -> Option<(TenantId, Nanos)> {
        self.kept.take()
    }
}

impl Scrubber {
    /// Binds the channel, and writes the kernel to VRAM. From now on, only the admitted VM's channels use PGRAPH.
    pub(super) fn new(
        vram: &mut CardVram,
        channels: &mut Channels,
        pool: &mut PagePool,
        chip: &Chip,
    ) -> Result<Self, ManagerError> {
        let mut space = OwnSpace::new(vram, pool)?;
        channels.add_vm(SCRUBBER, 1);
        channels.trust(SCRUBBER);
        let kernel = Kernel::assemble().map_err(|why| ManagerError::OwnKernel { why })?;
        let (code, push) = (vram.alloc(pool, PART_BYTES)?, vram.alloc(pool, PART_BYTES)?);
        vram.memory.write(code, &kernel.code)?;
        let words = kernel.launch(chip, va(Place::Card(vram::VramAddr(code.0))));
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        vram.memory.write(push, &bytes)?;
        let physical = bind(&mut space, vram, channels, SCRUBBER, CHANNEL, engine::GR)?;
        let push = (push, words.len() as u32);
        let ring = [0; 1 << RING_LOG2];
        let scrubber = Self {
            space,
            physical,
            push,
            ring,
            put: 0,
            busy: None,
            broken: false,
            tenancy: Tenancy::default(),
            keeping: Keeping::default(),
            elsewhere: Vec::new(),
        };
        scrubber.enable(vram, channels);
        channels.admit(&mut vram.memory, None);
        Ok(scrubber)
    }

    fn enable(&self, vram: &mut CardVram, channels: &mut Channels) {
        let mut own = Parts { card: &mut vram.memory, guest: &mut NoMemory };
        channels.enable(&mut own, SCRUBBER, CHANNEL, true);
        channels.submit_runlist(&mut own, SCRUBBER, &[CHANNEL]);
    }

    /// Submits one run of the kernel.
    fn submit(&mut self, vram: &mut CardVram, channels: &mut Channels, now: u64) -> Result<(), ManagerError> {
        let address = va(Place::Card(vram::VramAddr(self.push.0.0)));
        let entry = GpEntry::new().with_address_dwords(address.0 >> 2).with_dwords(self.push.1);
        self.ring[self.put as usize] = entry.into();
        self.put = (self.put + 1) % (1 << RING_LOG2);
        let doorbell = channels.doorbell(
            &mut Parts { card: &mut vram.memory, guest: &mut NoMemory },
            SCRUBBER,
            CHANNEL,
            self.put,
        )?;
        let pulled = channels
            .pull(&mut Parts { card: &mut vram.memory, guest: &mut OwnRing(&self.ring) }, doorbell, now)
            .map_err(|error| error.fault)?;
        let submission = pulled.submission.ok_or(ManagerError::OwnRingStill)?;
        channels.start(&mut vram.memory, self.physical, submission);
        self.busy = Some(submission);
        Ok(())
    }

    /// Records that PGRAPH's tenant changes while copy engines execute these channels of the previous tenant.
    fn not_awaited(&mut self, channels: Vec<ChannelId>) {
        self.elsewhere.extend(channels);
        self.elsewhere.sort_unstable();
        self.elsewhere.dedup();
    }

    /// Returns true if a copy engine may still be executing a channel for which PGRAPH's next tenant did not wait.
    pub(super) fn is_awaited_elsewhere(&self) -> bool {
        !self.elsewhere.is_empty()
    }

    /// Returns true if the kernel is running.
    pub(super) fn is_busy(&self) -> bool {
        self.busy.is_some()
    }

    /// Marks the clearing channel as broken after a hang or fault.
    pub(super) fn breaks(&mut self, now: u64) {
        (self.broken, self.busy) = (true, None);
        let _waits = self.tenancy.cleared(now, false);
    }
}

impl CardState {
    /// Returns the counts of PGRAPH's tenant changes, or `None` if PGRAPH is not cleared between VMs.
    #[must_use]
    pub fn tenancy_counts(&self) -> Option<Counts> {
        self.scrubber.as_ref().map(|scrubber| scrubber.tenancy.counts())
    }

    /// Returns true if the engines that a channel's work needs must be known: the channel may use PGRAPH, PGRAPH is
    /// cleared between VMs, and there is another VM.
    #[must_use]
    pub fn asks_needs(&self, channel: ChannelId) -> bool {
        self.scrubber.is_some() && self.vms.len() > 1 && self.work.channels().has_graphics(channel)
    }

    /// Records that a channel has work. If the work may need PGRAPH, it waits until its VM is admitted.
    pub(super) fn wants_graphics(&mut self, channel: ChannelId) {
        let [graphics, ..] = self.work.channels().contexts(channel);
        if let (Some(scrubber), Some((vm, _)), true) =
            (&mut self.scrubber, self.work.channels().by_physical(channel), graphics)
        {
            scrubber.tenancy.want(vm);
            self.change_hands();
        }
    }

    /// Ends a VM's use of PGRAPH or its wait for PGRAPH, because the VM is being removed from the card.
    pub(super) fn forget_graphics(&mut self, vm: TenantId) {
        if let Some(scrubber) = &mut self.scrubber {
            scrubber.tenancy.forget(vm);
            scrubber.keeping = Keeping::default();
            if self.work.channels().admitted() == Some(vm) {
                self.work.channels_mut().admit(self.memory.card_mut(), None);
            }
            self.change_hands();
        }
    }

    /// Admits the next VM to PGRAPH after the clearing kernel has completed.
    pub(super) fn graphics_cleared(&mut self, submission: Submission) {
        let now = self.now_ns();
        if let Some(mut scrubber) = self.scrubber.take() {
            if scrubber.busy.take_if(|busy| *busy == submission).is_some()
                && let Step::Admit(vm) = scrubber.tenancy.cleared(now, true)
            {
                self.admit(&scrubber, vm);
            }
            self.scrubber = Some(scrubber);
        }
    }

    /// Admits a VM to PGRAPH. Channels of other VMs that a copy engine is still executing lose their PGRAPH contexts
    /// first.
    fn admit(&mut self, scrubber: &Scrubber, vm: TenantId) {
        let (vram, channels) = self.parts();
        for channel in &scrubber.elsewhere {
            if channels.by_physical(*channel).is_some_and(|(of, _)| of != vm) {
                channels.withdraw_graphics(&mut vram.memory, *channel);
            }
        }
        channels.admit(&mut vram.memory, Some(vm));
    }

    /// Advances the change of PGRAPH's tenant as far as currently possible. Does nothing while the card is quiesced.
    pub(super) fn change_hands(&mut self) {
        let now = self.now_ns();
        while !self.still {
            let Some(mut scrubber) = self.scrubber.take() else { return };
            self.look_elsewhere(&mut scrubber, now);
            let (works, left) = match scrubber.tenancy.tenant() {
                Some((vm, true)) => {
                    let (idle, left) = self.has_left_graphics(&mut scrubber, vm);
                    scrubber.keeping.look(vm, idle && !left, self.clock.card_time());
                    (true, left)
                }
                Some((vm, false)) => (scrubber.tenancy.is_changing() && self.works_on_graphics(vm), false),
                None => (false, true),
            };
            let step = scrubber.tenancy.next(now, works, left);
            let again = match step {
                Step::Wait => false,
                Step::Close(vm) => {
                    self.work.channels_mut().admit(self.memory.card_mut(), None);
                    for channel in self.work.channels().on_graphics(vm) {
                        self.work.channels_mut().ask_to_leave(self.memory.card_mut(), channel);
                    }
                    // Work that waits for a semaphore is not included: it returns through the scheduler.
                    let started = self.started_on_graphics(vm);
                    let (copies, others): (Vec<_>, Vec<_>) =
                        started.into_iter().partition(|channel| self.is_copied_for(*channel));
                    scrubber.not_awaited(copies);
                    if !others.is_empty() {
                        scrubber.tenancy.want(vm);
                    }
                    true
                }
                Step::Clear => {
                    if let Err(error) = self.clear_graphics(&mut scrubber, now) {
                        tracing::error!(%error, "PGRAPH cannot be cleared; VMs wait until it can be");
                        scrubber.breaks(now);
                    }
                    false
                }
                Step::Admit(vm) => {
                    self.admit(&scrubber, vm);
                    true
                }
            };
            self.scrubber = Some(scrubber);
            if !again {
                return;
            }
        }
    }

    fn clear_graphics(&mut self, scrubber: &mut Scrubber, now: u64) -> Result<(), ManagerError> {
        if scrubber.broken {
            self.end_channel(SCRUBBER, CHANNEL)?;
            let (vram, channels) = self.parts();
            for (index, ..) in own_pages(channels, scrubber.physical) {
                scrubber.space.unmap_work(vram, index)?;
            }
            (scrubber.put, scrubber.broken) = (0, false);
            scrubber.physical = bind(&mut scrubber.space, vram, channels, SCRUBBER, CHANNEL, engine::GR)?;
            scrubber.enable(vram, channels);
        }
        let (vram, channels) = self.parts();
        scrubber.space.flush(vram)?;
        scrubber.submit(vram, channels, now)
    }

    /// Returns true if a VM has work that may need PGRAPH at one of these stages.
    pub(super) fn has_on_graphics(&self, vm: TenantId, stages: &[Stage]) -> bool {
        self.work.schedule().any_at(stages, &self.work.channels().on_graphics(vm))
    }

    /// Returns true if a VM has work that is on PGRAPH or may reach it soon. Work on a copy engine does not count while
    /// PGRAPH is idle.
    fn works_on_graphics(&mut self, vm: TenantId) -> bool {
        let on = self.started_on_graphics(vm);
        let busy = |state: &mut Self| state.work.channels_mut().occupant(state.memory.card_mut(), engine::GR).is_some();
        !on.is_empty() && (busy(self) || on.into_iter().any(|channel| !self.is_copied_for(channel)))
    }

    /// Returns a VM's channels with started work that may need PGRAPH.
    fn started_on_graphics(&self, vm: TenantId) -> Vec<ChannelId> {
        let started = self.work.schedule().channels_at(&[Stage::Started]);
        let on = self.work.channels().on_graphics(vm).into_iter();
        on.filter(|channel| started.contains_key(channel)).collect()
    }

    /// Returns true if a copy engine is executing a channel.
    fn is_copied_for(&mut self, channel: ChannelId) -> bool {
        let mut works =
            |unit| self.work.channels_mut().occupant(self.memory.card_mut(), unit).is_some_and(|on| on == channel);
        works(engine::CE0) || works(engine::CE1)
    }

    /// Returns two flags. The first is true if PGRAPH is idle. The second is true if, in addition, no more of a VM's
    /// work can reach PGRAPH. Work on a copy engine cannot, because its channel is stopped and runs on no other engine
    /// before the VM is admitted again.
    // GUESS: the card does not schedule a stopped channel on any engine other than the one that is already executing
    // it.
    fn has_left_graphics(&mut self, scrubber: &mut Scrubber, vm: TenantId) -> (bool, bool) {
        let leaving = self.work.channels_mut().vacating(self.memory.card_mut(), vm);
        let on = self.work.channels().on_graphics(vm);
        let leaves = |channel: &ChannelId| {
            self.work.channels().by_physical(*channel).is_some_and(|(_, of)| leaving.contains(&of))
        };
        let leaves: Vec<ChannelId> = on.into_iter().filter(leaves).collect();
        if self.work.channels_mut().occupant(self.memory.card_mut(), engine::GR).is_some() {
            return (false, false);
        }
        let stays = leaves.iter().any(|channel| !self.is_copied_for(*channel));
        if !stays {
            scrubber.not_awaited(leaves);
        }
        (true, !stays)
    }

    /// Queues for PGRAPH the VMs of channels that lost PGRAPH while a copy engine was executing them, once that work
    /// has completed.
    fn look_elsewhere(&mut self, scrubber: &mut Scrubber, now: u64) {
        for channel in std::mem::take(&mut scrubber.elsewhere) {
            let Some((vm, _)) = self.work.channels().by_physical(channel) else { continue };
            if self.work.channels().admitted() == Some(vm) {
                continue;
            }
            if self.presence(channel) == Presence::Works {
                if !self.is_copied_for(channel) {
                    self.ask_to_leave(channel);
                }
                scrubber.elsewhere.push(channel);
                continue;
            }
            if self.work.schedule().any_at(&[Stage::Started], &[channel]) {
                scrubber.tenancy.want_again(vm, now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenant_keeping_pgraph_idle_is_charged_from_first_such_poll() {
        let (a, b) = (TenantId(1), TenantId(2));
        let mut keeping = Keeping::default();
        keeping.look(a, true, Nanos(10));
        assert_eq!(keeping.take(), None, "the duration is unknown");
        keeping.look(a, true, Nanos(20));
        keeping.look(a, false, Nanos(30));
        assert_eq!((keeping.take(), keeping.take()), (Some((a, Nanos(10))), None));
        // The tenant uses PGRAPH in between, and then another VM becomes the tenant.
        keeping.look(a, true, Nanos(40));
        keeping.look(b, true, Nanos(50));
        keeping.look(b, false, Nanos(60));
        assert_eq!(keeping.take(), Some((b, Nanos(50))));
    }
}
