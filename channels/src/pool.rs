//! The card's physical channels and their owners.

mod moving;
mod saved;

pub use moving::{Arrived, MoveError, Moving, SavedMoving};
pub use saved::{SavedChannels, SavedPlace};

use crate::card;
use crate::episode::{Episode, Watchdog};
use crate::image::{self, Golden};
use crate::instance::{CONTEXTS_BYTES, CONTEXTS_FIRST, contexts_in};
use crate::preempt::Preemptions;
use crate::refuse::Refused;
use crate::ring::Ring;
use crate::state::{Gate, Graphics, Permit, RequestedState, SavedWords};
use crate::work::Span;
use crate::{
    Bind, BindError, GuestMemory, HANG_LIMIT_NS, Host, Layout, Pause, Place, RunState, Stuck, Submitted, TenantId,
};
use nvspec::addr::{GpuVa, GuestVramAddr, VramAddr};
use nvspec::fifo::{CHANNELS, ChannelId, VirtualChannelId, engine};
use nvspec::instance::INSTANCE_BYTES;
use std::collections::BTreeMap;

/// A physical channel. The rest of its state is in its instance block and on the card.
#[derive(Debug)]
pub(crate) enum Slot {
    Free,
    Bound(Box<Bound>),
    /// The channel has ended, but the card may still use the directory, which belongs to a VM.
    Stuck {
        vm: TenantId,
        directory: VramAddr,
        /// The channel's address range in the directory.
        span: Span,
        /// True if the channel's work area may still be reachable through this directory, even if no engine is running
        /// the channel.
        stranded: bool,
    },
}

/// A bound channel.
#[derive(Debug)]
pub(crate) struct Bound {
    pub(crate) vm: TenantId,
    pub(crate) channel: VirtualChannelId,
    /// Serial number that distinguishes this binding from earlier bindings of the same channel.
    pub(crate) serial: u64,
    pub(crate) instance: Place,
    pub(crate) directory: VramAddr,
    /// Address range of the host's structures in the directory's address space.
    pub(crate) span: Span,
    pub(crate) userd: GuestVramAddr,
    /// Guest pointers of the contexts in the card's block.
    pub(crate) contexts: [Option<GpuVa>; 3],
    /// Permitted use of the PGRAPH context.
    pub(crate) graphics: Graphics,
    /// Contexts that the channel gets as soon as no work is in flight.
    pub(crate) next_contexts: Option<[Option<GpuVa>; 3]>,
    pub(crate) requested: RequestedState,
    pub(crate) permit: Permit,
    /// [`RunState::Running`] if the card may schedule the channel whenever the gate permits it, or
    /// [`RunState::Stopped`].
    pub(crate) told: RunState,
    /// True if the channel's number must not be reused after the channel has ended.
    pub(crate) stranded: bool,
    /// Current period without progress, if its reason is unknown.
    pub(crate) still: Option<Episode>,
    pub(crate) ring: Ring,
}

#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) cap: u32,
    /// Mask of the reasons ([`Pause`]) for which the VM is paused.
    pub(crate) paused: u8,
    /// True if the VM's completion records are trusted.
    pub(crate) trusted: bool,
    /// Physical channels by guest channel number.
    pub(crate) channels: BTreeMap<u8, ChannelId>,
    /// The VM's part of the runlist, in the guest's order. Contains only bound channels.
    pub(crate) list: Vec<u8>,
    /// Channels that the guest has removed from its runlist, but that are still on their engines.
    pub(crate) unlisted: Vec<ChannelId>,
    /// Channels whose bind was rejected, by guest channel number.
    pub(crate) refused: BTreeMap<u8, Refused>,
    /// Saved ring state of unbound channels, by guest channel number.
    pub(crate) saved: BTreeMap<u8, SavedWords>,
    /// Mask of the engines for which the VM has not been notified of ended work.
    pub(crate) news: u32,
    /// True if the VM has been notified of ended work, for any engine, since the last poll for completions.
    pub(crate) told: bool,
    /// Time limit for the VM's channels to keep an engine busy without progress, in ns.
    pub(crate) hang_limit: Option<u64>,
    /// Number of the physical channel at which the next poll for completions starts.
    pub(crate) next_look: u8,
}

/// All physical channels of a card.
#[derive(Debug)]
pub struct Channels {
    pub(crate) layout: Layout,
    golden: Golden,
    pub(crate) slots: Vec<Slot>,
    pub(crate) vms: BTreeMap<TenantId, Vm>,
    /// Index of the runlist page to write next, 0 or 1.
    next_page: usize,
    /// Channel number at which the next search for a free channel starts, so that freed numbers are reused as late as
    /// possible.
    next_slot: usize,
    serial: u64,
    /// Number of the next submission.
    pub(crate) submissions: u64,
    /// True if the last poll for completions skipped channels, or found a submission that appears to have ended while
    /// an engine is still running its channel.
    pub(crate) deferred: bool,
    pub(crate) watchdog: Watchdog,
    pub(crate) preemptions: Preemptions,
    pub(crate) gate: Gate,
}

impl Channels {
    /// Creates the channels, all free. `golden` is an unused context's image as saved by PGRAPH's firmware.
    #[must_use]
    pub fn new(layout: Layout, golden: &[u8]) -> Self {
        let slots = (0..CHANNELS).map(|_| Slot::Free).collect();
        Self {
            layout,
            golden: Golden::new(golden, &layout),
            slots,
            vms: BTreeMap::new(),
            next_page: 0,
            next_slot: 0,
            serial: 0,
            submissions: 0,
            deferred: false,
            watchdog: Watchdog::new(HANG_LIMIT_NS),
            preemptions: Preemptions::default(),
            gate: Gate::default(),
        }
    }

    /// Adds a VM with at most `cap` channels at a time.
    pub fn add_vm(&mut self, vm: TenantId, cap: u32) {
        let record = Vm {
            cap,
            paused: 0,
            trusted: false,
            channels: BTreeMap::new(),
            list: Vec::new(),
            unlisted: Vec::new(),
            refused: BTreeMap::new(),
            saved: BTreeMap::new(),
            news: 0,
            told: false,
            hang_limit: Some(self.watchdog.limit_ns()),
            next_look: 0,
        };
        self.vms.insert(vm, record);
    }

    /// Ends all of a VM's channels and removes the VM. Returns the channels that are still on their engines. Until all
    /// of them have left, neither the VM's memory nor its shadow tables may be reused.
    pub fn destroy_vm(&mut self, host: &mut impl Host, vm: TenantId) -> Vec<Stuck> {
        let Some(record) = self.vms.remove(&vm) else { return Vec::new() };
        for channel in record.channels.values() {
            self.halt(host, *channel);
        }
        let kicked: Vec<_> =
            record.channels.into_values().map(|channel| (channel, card::kick(host, channel))).collect();
        if !record.list.is_empty() {
            self.submit(host);
        }
        for (channel, kicked) in &kicked {
            self.release(host, *channel, *kicked);
        }
        kicked.into_iter().filter_map(|(_, kicked)| kicked.err()).collect()
    }

    /// Binds a guest channel to a free physical channel, with a host-owned instance block. Unbinds the guest channel
    /// first if it is already bound. The new channel is stopped and not in any runlist.
    ///
    /// # Errors
    /// Returns a [`BindError`] if the channel cannot be bound.
    pub fn bind(
        &mut self,
        host: &mut impl Host,
        vm: TenantId,
        channel: VirtualChannelId,
        bind: Bind<'_>,
    ) -> Result<ChannelId, BindError> {
        if u32::from(channel.0) >= CHANNELS {
            return Err(BindError::NoSuchChannel);
        }
        self.unbind(host, vm, channel)?;
        let record = self.vms.get_mut(&vm).ok_or(BindError::NoSuchVm)?;
        if record.channels.len() >= record.cap as usize {
            return Err(BindError::Cap { cap: record.cap });
        }
        let physical = self.take_free()?;
        let span = self.take_span(vm, physical)?;
        let record = self.vms.get_mut(&vm).ok_or(BindError::NoSuchVm)?;
        record.channels.insert(channel.0, physical);
        record.saved.remove(&channel.0);
        self.serial = self.serial.wrapping_add(1);
        let Bind { instance, guest, directory } = bind;
        let bound = Bound {
            vm,
            channel,
            serial: self.serial,
            instance,
            directory,
            span,
            userd: guest.userd,
            contexts: guest.contexts,
            graphics: Graphics::Attached,
            next_contexts: None,
            requested: RequestedState::Stopped,
            permit: Permit::Granted,
            told: RunState::Stopped,
            stranded: false,
            still: None,
            ring: Ring::new(guest),
        };
        self.go(physical, Slot::Bound(Box::new(bound)));
        let block = guest.block(span, self.layout.userd(physical), directory);
        card::stop(host, physical);
        image::renew(host, &self.layout, physical, &self.golden, guest.contexts.map(|context| context.is_some()));
        card::bind(host, &self.layout, physical, &block);
        Ok(physical)
    }

    /// Stops the channel, removes it from its engines and the runlist, and frees it. If the channel is not bound, only
    /// its rejected bind and saved ring state are discarded. Work in flight ends without a
    /// [`Completion`](crate::Completion). [`Self::saved_words`] returns the channel's position.
    ///
    /// # Errors
    /// Returns [`Stuck`] if the channel has not left its engines yet. The VM has lost the channel, but the channel's
    /// number cannot be reused before [`Self::let_go`].
    pub fn unbind(&mut self, host: &mut impl Host, vm: TenantId, channel: VirtualChannelId) -> Result<(), Stuck> {
        let Some(record) = self.vms.get_mut(&vm) else { return Ok(()) };
        record.refused.remove(&channel.0);
        record.saved.remove(&channel.0);
        let Some(physical) = record.channels.remove(&channel.0) else { return Ok(()) };
        let listed = record.list.contains(&channel.0);
        record.list.retain(|entry| *entry != channel.0);
        self.halt(host, physical);
        // Remove the channel from its engines first, because the card accepts a runlist only after removed channels
        // have left.
        let kicked = card::kick(host, physical);
        if listed {
            self.submit(host);
        }
        if let (Some(saved), Some(record)) = (self.words_of(host, physical), self.vms.get_mut(&vm)) {
            record.saved.insert(channel.0, saved);
        }
        self.release(host, physical, kicked);
        kicked
    }

    /// Lets the card schedule the channel, or prevents this. Returns `false` if the channel is not bound.
    pub fn enable(
        &mut self,
        card: &mut (impl Host + GuestMemory),
        vm: TenantId,
        channel: VirtualChannelId,
        enabled: bool,
    ) -> bool {
        let Some(physical) = self.physical(vm, channel) else { return false };
        self.refresh(card, physical);
        if let Some(bound) = self.bound_mut(physical) {
            bound.requested = if enabled { RequestedState::Enabled } else { RequestedState::Stopped };
        }
        self.apply(card, physical);
        true
    }

    /// Makes `list` the VM's part of the runlist, and submits the union of all VMs' parts to the card. The card removes
    /// unlisted channels from their engines. If some of them have not left when this function returns,
    /// [`Self::runlists_taken`] reports their departure later.
    pub fn submit_runlist(
        &mut self,
        card: &mut (impl Host + GuestMemory),
        vm: TenantId,
        list: &[VirtualChannelId],
    ) -> Submitted {
        let Some(record) = self.vms.get_mut(&vm) else { return Submitted::default() };
        let before = std::mem::take(&mut record.list);
        let mut ignored = 0u32;
        for channel in list {
            let listable = record.channels.get(&channel.0).is_some_and(|physical| {
                matches!(self.slots.get(usize::from(physical.0)), Some(Slot::Bound(bound)) if bound.permit != Permit::Ended)
            });
            if listable && !record.list.contains(&channel.0) {
                record.list.push(channel.0);
            } else {
                ignored = ignored.saturating_add(1);
            }
        }
        let listed: Vec<ChannelId> =
            record.list.iter().filter_map(|channel| record.channels.get(channel).copied()).collect();
        for physical in &listed {
            self.refresh(card, *physical);
        }
        self.submit(card);
        let Some(record) = self.vms.get_mut(&vm) else { return Submitted::default() };
        let removed = before.iter().filter(|channel| !record.list.contains(channel));
        record.unlisted = removed.filter_map(|channel| record.channels.get(channel).copied()).collect();
        let taken = !self.is_unlisting(card, vm);
        Submitted { listed: u32::try_from(listed.len()).unwrap_or(u32::MAX), ignored, taken }
    }

    /// Returns the locations of the host's structures.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Marks a VM as trusted because it belongs to the host. [`Self::completed`] always accepts a trusted VM's
    /// completions.
    pub fn trust(&mut self, vm: TenantId) {
        if let Some(record) = self.vms.get_mut(&vm) {
            record.trusted = true;
        }
    }

    /// Adds a reason for pausing a VM's channels, or removes it. The card does not schedule paused channels, even if
    /// the guest enables them. Channels on an engine stay there until they are preempted or their work ends.
    pub fn pause(&mut self, host: &mut impl Host, vm: TenantId, why: Pause, paused: bool) {
        let Some(record) = self.vms.get_mut(&vm) else { return };
        record.paused = if paused { record.paused | why.bit() } else { record.paused & !why.bit() };
        let channels: Vec<ChannelId> = record.channels.values().copied().collect();
        for physical in channels {
            self.apply(host, physical);
        }
    }

    /// Prevents a physical channel from running, or lets it run again. A withheld channel does not run even if its
    /// guest enables it. Its started work is kept, and the channel leaves its engine as if its guest had requested a
    /// preemption.
    pub fn withhold(&mut self, host: &mut impl Host, physical: ChannelId, withheld: bool) {
        let permit = if withheld { Permit::Withheld } else { Permit::Granted };
        let Some(bound) = self.bound_mut(physical) else { return };
        if bound.permit == Permit::Ended || std::mem::replace(&mut bound.permit, permit) == permit {
            return;
        }
        self.apply(host, physical);
        if withheld {
            self.ask_to_leave(host, physical);
        }
    }

    /// Returns the physical channel to which a guest channel is bound.
    #[must_use]
    pub fn physical(&self, vm: TenantId, channel: VirtualChannelId) -> Option<ChannelId> {
        self.vms.get(&vm)?.channels.get(&channel.0).copied()
    }

    /// Returns the guest channel bound to a physical channel, for engine status and PBDMA errors.
    #[must_use]
    pub fn by_physical(&self, channel: ChannelId) -> Option<(TenantId, VirtualChannelId)> {
        self.bound(channel).map(|bound| (bound.vm, bound.channel))
    }

    /// Returns the channel whose instance block contains a VRAM address, and the location of the guest's block, for MMU
    /// faults.
    #[must_use]
    pub fn by_instance(&self, address: VramAddr) -> Option<(TenantId, VirtualChannelId, Place)> {
        let index = address.0.checked_sub(self.layout.instances.0)?.checked_div(INSTANCE_BYTES)?;
        let bound = self.bound(ChannelId(u8::try_from(index).ok()?))?;
        Some((bound.vm, bound.channel, bound.instance))
    }

    /// Returns the guest channel whose instance block is at `instance`, even if its bind was rejected.
    #[must_use]
    pub fn by_guest_instance(&self, vm: TenantId, instance: Place) -> Option<VirtualChannelId> {
        let bound = self.bounds_of(vm).find(|bound| bound.instance == instance).map(|bound| bound.channel);
        bound.or_else(|| {
            self.refused_of(vm).find(|(_, refused)| refused.instance == instance).map(|(channel, _)| channel)
        })
    }

    /// Returns true if the card may use the shadow `directory` for a channel, including stuck channels.
    #[must_use]
    pub fn uses_directory(&self, directory: VramAddr) -> bool {
        self.slots.iter().any(|slot| match slot {
            Slot::Free => false,
            Slot::Bound(bound) => bound.directory == directory,
            Slot::Stuck { directory: stuck, .. } => *stuck == directory,
        })
    }

    /// Returns the state of a physical channel.
    #[must_use]
    pub fn run_state(&self, channel: ChannelId) -> RunState {
        self.slots.get(usize::from(channel.0)).map_or(RunState::Free, state)
    }

    /// Returns the number of channels in use by a VM.
    #[must_use]
    pub fn in_use(&self, vm: TenantId) -> u32 {
        self.vms.get(&vm).and_then(|vm| u32::try_from(vm.channels.len()).ok()).unwrap_or(0)
    }

    /// Frees a stuck channel after it has left the card, as reported by [`Self::kick`]. Returns `false` if the channel
    /// was not stuck, or remains stuck because it is [stranded](Self::strand).
    pub fn let_go(&mut self, host: &mut impl Host, channel: ChannelId) -> bool {
        if !matches!(self.slots.get(usize::from(channel.0)), Some(Slot::Stuck { stranded: false, .. })) {
            return false;
        }
        card::clear(host, &self.layout, channel);
        self.go(channel, Slot::Free);
        true
    }

    /// Prevents the reuse of a bound channel's number after its end, until [`Self::unstrand`] or [`Self::card_reset`],
    /// because the card's TLBs may still translate the addresses of its work area. [`Self::has_stuck`] reports the
    /// channel even after its VM has ended.
    pub fn strand(&mut self, vm: TenantId, channel: VirtualChannelId) {
        let physical = self.physical(vm, channel);
        if let Some(bound) = physical.and_then(|physical| self.bound_mut(physical)) {
            bound.stranded = true;
        }
    }

    /// Records that the work area of a [stranded](Self::strand) channel is no longer reachable.
    pub fn unstrand(&mut self, channel: ChannelId) {
        if let Some(Slot::Stuck { stranded, .. }) = self.slots.get_mut(usize::from(channel.0)) {
            *stranded = false;
        }
    }

    /// Returns the number of channels that cannot be reused, because the card may still use their memory.
    #[must_use]
    pub fn stuck(&self) -> u32 {
        let stuck = self.slots.iter().filter(|slot| matches!(slot, Slot::Stuck { .. })).count();
        u32::try_from(stuck).unwrap_or(u32::MAX)
    }

    /// Frees every channel, including stuck ones, after a card reset. Guests must bind their channels again.
    pub fn card_reset(&mut self) {
        self.preemptions.clear();
        for slot in &mut self.slots {
            *slot = Slot::Free;
        }
        for vm in self.vms.values_mut() {
            vm.channels.clear();
            vm.list.clear();
            vm.unlisted.clear();
            vm.refused.clear();
            vm.saved.clear();
        }
    }

    pub(crate) fn bound(&self, channel: ChannelId) -> Option<&Bound> {
        match self.slots.get(usize::from(channel.0))? {
            Slot::Bound(bound) => Some(bound),
            Slot::Free | Slot::Stuck { .. } => None,
        }
    }

    pub(crate) fn bound_mut(&mut self, channel: ChannelId) -> Option<&mut Bound> {
        match self.slots.get_mut(usize::from(channel.0))? {
            Slot::Bound(bound) => Some(bound),
            Slot::Free | Slot::Stuck { .. } => None,
        }
    }

    pub(crate) fn bounds_of(&self, vm: TenantId) -> impl Iterator<Item = &Bound> {
        self.vms.get(&vm).into_iter().flat_map(|vm| vm.channels.values()).filter_map(|physical| self.bound(*physical))
    }

    /// Rereads the guest's engine context pointers, and updates the card's block for the contexts that now exist. As on
    /// hardware, the guest may change the pointers of a running channel, and the card sees the change when it next
    /// loads the context. The guest's images are never read, because the host provides the images.
    ///
    /// If work is in flight, the change is deferred until this work has ended. The change is still made before the next
    /// pull, because work is charged to the engine that the channel's contexts selected at submission.
    pub(crate) fn refresh(&mut self, card: &mut (impl Host + GuestMemory), physical: ChannelId) {
        let Some(bound) = self.bound_mut(physical) else { return };
        let mut bytes = [0; CONTEXTS_BYTES];
        let Some(place) = bound.instance.checked_add(CONTEXTS_FIRST) else { return };
        if card.read(place, &mut bytes).is_err() {
            return;
        }
        let contexts = contexts_in(&bytes);
        bound.next_contexts = (contexts != bound.contexts).then_some(contexts);
        self.renew_contexts(card, physical);
    }

    /// Writes changed context pointers to the card. Returns false, and writes nothing, if work is in flight.
    pub(crate) fn renew_contexts(&mut self, host: &mut impl Host, physical: ChannelId) -> bool {
        let Some(bound) = self.bound(physical) else { return true };
        let Some(contexts) = bound.next_contexts else { return true };
        if !bound.ring.records.is_empty() {
            return false;
        }
        if bound.graphics != Graphics::Attached {
            // Stop the channel, because it must not run with the new contexts before its VM is admitted.
            card::stop(host, physical);
            self.set_graphics(host, physical, Graphics::Attached);
        }
        let Some(bound) = self.bound(physical) else { return true };
        card::set_contexts(host, &self.layout, physical, bound.span, &self.golden, &bound.contexts, &contexts);
        if let Some(bound) = self.bound_mut(physical) {
            (bound.contexts, bound.next_contexts) = (contexts, None);
        }
        self.bring_to_gate(host, physical);
        true
    }

    /// Updates the card's scheduling according to the guest's request, the host's permission, and the VM's pauses.
    fn apply(&mut self, host: &mut impl Host, physical: ChannelId) {
        let Some(bound) = self.bound(physical) else { return };
        let paused = self.vms.get(&bound.vm).is_some_and(|vm| vm.paused != 0);
        let run = bound.requested == RequestedState::Enabled && !paused && bound.permit == Permit::Granted;
        if run {
            // Also do this for a running channel, because a guest that starts it again expects the effects of a start.
            self.set_running(physical, true);
            self.bring_to_gate(host, physical);
        } else if bound.told == RunState::Running {
            self.set_running(physical, false);
            card::stop(host, physical);
        }
    }

    pub(crate) fn halt(&mut self, host: &mut impl Host, physical: ChannelId) {
        if self.bound(physical).is_some_and(|bound| bound.told == RunState::Running) {
            self.set_running(physical, false);
        }
        card::stop(host, physical);
    }

    /// Frees a stopped channel that is in no runlist. Marks it as stuck instead if it is stranded or `kicked` is an
    /// error.
    fn release(&mut self, host: &mut impl Host, physical: ChannelId, kicked: Result<(), Stuck>) {
        self.preemptions.forget(physical);
        card::unbind(host, physical);
        // Only bound channels reach this point.
        let Some(&Bound { vm, directory, span, stranded, .. }) = self.bound(physical) else { return };
        if kicked.is_ok() && !stranded {
            card::clear(host, &self.layout, physical);
            self.go(physical, Slot::Free);
        } else {
            self.go(physical, Slot::Stuck { vm, directory, span, stranded });
        }
    }

    /// Returns the VMs whose last runlist has taken effect since [`Self::submit_runlist`] reported that it had not.
    /// Call this periodically, and when the card reports an accepted runlist.
    pub fn runlists_taken(&mut self, host: &mut impl Host) -> Vec<TenantId> {
        let waiting: Vec<TenantId> =
            self.vms.iter().filter(|(_, record)| !record.unlisted.is_empty()).map(|(vm, _)| *vm).collect();
        waiting.into_iter().filter(|vm| !self.is_unlisting(host, *vm)).collect()
    }

    /// Returns true if a channel that the VM has removed from its runlist is still on its engines.
    fn is_unlisting(&mut self, host: &mut impl Host, vm: TenantId) -> bool {
        let Some(record) = self.vms.get_mut(&vm).filter(|record| !record.unlisted.is_empty()) else { return false };
        let at_work: Vec<ChannelId> = (0..engine::COUNT).filter_map(|unit| card::working_for(host, unit)).collect();
        // A channel that has been unbound in the meantime has left the card, and its number may belong to another
        // channel.
        record.unlisted.retain(|physical| {
            record.channels.values().any(|bound| bound == physical)
                && (at_work.contains(physical) || card::is_loaded(host, *physical))
        });
        !record.unlisted.is_empty()
    }

    /// Submits the union of all VMs' parts of the runlist. Alternates between two pages, because the card may still be
    /// reading the previous one.
    pub(crate) fn submit(&mut self, host: &mut impl Host) {
        let list: Vec<ChannelId> = self
            .vms
            .values()
            .flat_map(|vm| vm.list.iter().filter_map(|channel| vm.channels.get(channel).copied()))
            .collect();
        let [first, second] = self.layout.runlists;
        let page = if self.next_page == 0 { first } else { second };
        self.next_page ^= 1;
        card::submit(host, page, &list);
    }

    pub(crate) fn take_free(&mut self) -> Result<ChannelId, BindError> {
        let count = self.slots.len();
        let index = (0..count)
            .filter_map(|step| self.next_slot.checked_add(step)?.checked_rem(count))
            .find(|index| matches!(self.slots.get(*index), Some(Slot::Free)))
            .ok_or(BindError::Full)?;
        self.next_slot = index.wrapping_add(1);
        u8::try_from(index).map(ChannelId).map_err(|_| BindError::Full)
    }

    fn set_running(&mut self, physical: ChannelId, running: bool) {
        let Some(bound) = self.bound_mut(physical) else { return };
        let to = if running { RunState::Running } else { RunState::Stopped };
        if bound.told != to {
            check(physical, bound.told, to);
            bound.told = to;
        }
    }

    pub(crate) fn go(&mut self, physical: ChannelId, to: Slot) {
        if let Some(slot) = self.slots.get_mut(usize::from(physical.0)) {
            check(physical, state(slot), state(&to));
            *slot = to;
        }
    }
}

/// Panics on an illegal state transition, which would be a bug in this crate, because guests cannot cause one.
fn check(channel: ChannelId, from: RunState, to: RunState) {
    assert!(from.can_go(to), "channel {} cannot change from {from:?} to {to:?}", channel.0);
}

fn state(slot: &Slot) -> RunState {
    match slot {
        Slot::Free => RunState::Free,
        Slot::Bound(bound) => bound.told,
        Slot::Stuck { .. } => RunState::Stuck,
    }
}

#[cfg(test)]
mod tests;
