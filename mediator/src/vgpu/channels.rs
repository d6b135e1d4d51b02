//! The guest's channels: from an instance block to a channel of the card, and from a doorbell to work on it.

use super::backend::{Bound, VmBackend};
use super::named::Names;
use super::spaces::{Owned, Ring, Tables};
use crate::host::{Feeder, HostState};
use ::channels::{Bind, Doorbell, DoorbellError, GuestInstance, PullError, RingFault};
use devmodel::events::MmuFault;
use nvspec::addr::{GpuVa, Place, VramAddr};
use nvspec::fifo::{ChannelId, VirtualChannelId};
use nvspec::instance::{INSTANCE_BYTES, userd};
use nvspec::mmu::fault;
use shadow_pt::HostPage;
use std::cell::RefCell;
use std::time::Instant;

impl VmBackend {
    /// The guest has written a whole GP_PUT.
    pub(super) fn ring(&mut self, channel: VirtualChannelId, gp_put: u32) {
        let checked =
            self.with_channels(|channels, card, guest, vm| channels.doorbell(card, guest, vm, channel, gp_put));
        let doorbell = match checked {
            Ok(doorbell) => doorbell,
            Err(DoorbellError::Unbound) => return,
            Err(DoorbellError::Refused) => return self.fault(channel, GpuVa(0), fault::PDE),
            Err(error) => {
                self.counts.doorbells_refused += 1;
                tracing::warn!(vm = %self.vm, ?channel, %error, "a doorbell is refused");
                return;
            }
        };
        self.counts.doorbells += 1;
        self.submit(doorbell);
    }

    /// Takes a channel's new work to the card, with all that its address space maps. It starts when its turn comes.
    pub(super) fn submit(&mut self, doorbell: Doorbell) {
        let channel = doorbell.virtual_channel;
        let Some(Bound { space, .. }) = self.bound.get(&channel).copied() else { return };
        if self.host.lock().vram.was_short(self.vm) {
            // What was denied for want of memory may have some now.
            self.spaces.granted();
        }
        let Self { host, vm, link, ram, spaces, remap, bus_master, pv, .. } = self;
        let tables = pv.as_deref().map(|pv| &pv.tables);
        let owned = Owned { vm: *vm, ram, link, bus_master: *bus_master, remap, tables };
        if let Err(error) = spaces.prepare(host, &owned, space) {
            tracing::error!(%vm, ?channel, %error, "a channel's work does not reach the card");
            return;
        }
        let short = host.lock().vram.is_short(*vm);
        if short && self.may_wait(doorbell) {
            return;
        }
        self.wait_ends(channel);
        let Self { host, vm, link, ram, spaces, remap, objects, bus_master, pv, .. } = self;
        let tables = pv.as_deref().map(|pv| &pv.tables);
        let owned = Owned { vm: *vm, ram, link, bus_master: *bus_master, remap, tables };
        let (pulled, fault) = {
            let mut guard = host.lock();
            let now = guard.now_ns();
            let HostState { vram, channels, .. } = &mut *guard;
            let state = RefCell::new(vram);
            let tables = Tables { state: &state, owned: &owned };
            let names = state.borrow().watches().then(|| Names::new(objects.entry(channel).or_default()));
            let mut ring = Ring { spaces, space, tables, names };
            let mut card = super::backend::CardAccess(&state);
            let (pulled, fault) = match channels.pull(&mut card, &mut ring, doorbell, now) {
                Ok(pulled) => (pulled, None),
                Err(PullError { pulled, fault }) => (pulled, Some(fault)),
            };
            if let Some(submission) = pulled.submission {
                guard.worked(*vm);
                guard.arrived(*vm, doorbell.channel, submission);
            }
            (pulled, fault)
        };
        self.counts.submissions += u64::from(pulled.submission.is_some());
        self.counts.entries += u64::from(pulled.taken);
        match fault {
            None => {}
            Some(RingFault::Unmapped { va }) => self.fault(channel, va, fault::PTE),
            Some(error) => {
                tracing::warn!(vm = %self.vm, ?channel, %error, "a channel's ring holds what no channel can do");
                self.fault(channel, GpuVa(0), fault::PTE);
            }
        }
    }

    /// Work whose memory has no place waits for it, for as long as the operator lets it. False when it has waited that long.
    fn may_wait(&mut self, doorbell: Doorbell) -> bool {
        let channel = doorbell.virtual_channel;
        let since = self.waiting.get(&channel).map_or_else(Instant::now, |(_, since)| *since);
        let waits = since.elapsed() < self.queue_limit;
        if waits {
            self.counts.memory_waits += u64::from(self.waiting.insert(channel, (doorbell, since)).is_none());
        } else {
            self.counts.memory_denied += 1;
            tracing::error!(
                vm = %self.vm,
                ?channel,
                queue_ms = self.queue_limit.as_millis(),
                "work has waited for memory for as long as `memory.queue_ms` lets it, and faults; raise that or the VM's \
                 `memory.guarantee_mib`, or give the card `memory.host_mib` and the VM `memory.on_full` = `swap`"
            );
        }
        waits
    }

    /// A channel's work waits for memory no more, if it did.
    fn wait_ends(&mut self, channel: VirtualChannelId) {
        if let Some((_, since)) = self.waiting.remove(&channel) {
            self.counts.memory_waited_ns += u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        }
    }

    /// Tries work again that waits for memory.
    pub(super) fn retry(&mut self) {
        let waiting: Vec<Doorbell> = self.waiting.values().map(|(doorbell, _)| *doorbell).collect();
        if waiting.is_empty() {
            // What was denied was no work's: nothing waits for it.
            self.host.lock().vram.was_short(self.vm);
        }
        for doorbell in waiting {
            self.submit(doorbell);
        }
    }

    /// A channel can go on no more: it leaves the card, and the guest is told as the card's host unit would.
    fn fault(&mut self, channel: VirtualChannelId, va: GpuVa, reason: u32) {
        let instance = self.instances.get(&channel).copied();
        tracing::warn!(vm = %self.vm, ?channel, %va, reason, "a channel's ring cannot be fetched");
        self.take_off(channel);
        self.counts.faults += 1;
        self.faults.push(MmuFault {
            unit: fault::unit::FIFO,
            instance,
            va,
            reason,
            client: fault::hub_client::FIFO,
            hub: true,
            write: false,
            gpc: 0,
        });
    }

    pub(super) fn bind(&mut self, channel: VirtualChannelId, instance: Place) -> Result<(), String> {
        let mut block = [0; INSTANCE_BYTES as usize];
        self.with_channels(|_, _, guest, _| guest.fill(instance, &mut block))
            .ok_or_else(|| format!("its instance block at {instance} is not the guest's memory"))?;
        let mut guest = GuestInstance::parse(&block).map_err(|error| error.to_string())?;
        if let Some(directory) = self.pv.as_ref().and_then(|pv| pv.directory_of(instance)) {
            guest.directory = directory;
        }
        let space = self.spaces.open(&self.host, guest.directory).map_err(|error| error.to_string())?;
        let bound = self.bind_in(channel, instance, &guest, space);
        if bound.is_err() {
            // The shadow may have been made for it.
            self.spaces.collect(&self.host);
        }
        bound
    }

    fn bind_in(
        &mut self,
        channel: VirtualChannelId,
        instance: Place,
        guest: &GuestInstance,
        space: shadow_pt::SpaceId,
    ) -> Result<(), String> {
        let directory = self.spaces.directory(space).ok_or("its address space has gone")?;
        let bind = Bind { instance, guest, directory };
        let physical = self
            .with_channels(|channels, card, _, vm| channels.bind(card, vm, channel, bind))
            .map_err(|error| error.to_string())?;
        let pages = own_pages(self.host.layout(), physical);
        if let Err(error) = self.spaces.map_host(&self.host, space, &pages) {
            if let Err(error) = self.host.lock().end_channel(self.vm, channel) {
                tracing::error!(vm = %self.vm, ?channel, %error, "a channel stays on the card");
            }
            return Err(error.to_string());
        }
        self.userd.insert(guest.userd.0 / userd::BYTES, channel);
        self.instances.insert(channel, instance);
        self.bound.insert(channel, Bound { space, physical });
        Ok(())
    }

    /// Remembers a channel that is not on the card, so that its first doorbell is answered by a fault.
    pub(super) fn refuse(&mut self, channel: VirtualChannelId, instance: Place) {
        let mut block = [0; INSTANCE_BYTES as usize];
        let read = self.with_channels(|_, _, guest, _| guest.fill(instance, &mut block));
        let userd = read.and_then(|()| GuestInstance::parse(&block).ok()).map(|guest| guest.userd);
        self.host.lock().channels.refuse(::channels::VmId(self.vm.0), channel, instance, userd);
        if let Some(userd) = userd {
            self.userd.insert(userd.0 / userd::BYTES, channel);
        }
        self.instances.insert(channel, instance);
    }

    /// Takes a channel off the card. Where its ring stands goes into its instance block, as the card saves it there.
    pub(super) fn unbind(&mut self, channel: VirtualChannelId) {
        let Some(instance) = self.instances.remove(&channel) else { return };
        self.userd.retain(|_, owner| *owner != channel);
        self.doorbells.remove(&channel);
        self.polled.remove(&channel);
        self.rung.remove(&channel);
        self.objects.remove(&channel);
        self.wait_ends(channel);
        self.take_off(channel);
        self.save(channel, instance);
        self.spaces.collect(&self.host);
    }

    /// Ends a channel that the card's interrupt thread has retired; returns its instance block. `None`, and nothing, when
    /// the guest has unbound it since: what has its number now is another channel.
    pub(super) fn end_retired(&mut self, channel: VirtualChannelId) -> Option<Place> {
        let retired = self.host.lock().channels.is_retired(::channels::VmId(self.vm.0), channel);
        retired.then(|| self.take_off(channel))?;
        self.instances.get(&channel).copied()
    }

    /// Takes a channel off the card and its work area out of its address space; only then is its number free for others.
    pub(super) fn take_off(&mut self, channel: VirtualChannelId) {
        let retired = self.host.lock().retire_channel(self.vm, channel);
        self.detach_channel(channel);
        if let Some(Bound { space, physical }) = self.bound.remove(&channel) {
            let pages = own_pages(self.host.layout(), physical);
            self.spaces.unmap_host(&self.host, space, &pages);
        }
        let ended = self.host.lock().end_channel(self.vm, channel);
        if let Err(error) = retired.and(ended) {
            tracing::error!(vm = %self.vm, ?channel, %error, "a channel stays on the card");
        }
    }

    /// Writes the ring's indices into the guest's instance block.
    pub(super) fn save(&mut self, channel: VirtualChannelId, instance: Place) {
        let words = self.with_channels(|channels, card, _, vm| channels.saved_words(card, vm, channel));
        for (offset, value) in words.into_iter().flatten() {
            let Some(Place::Vram(at)) = instance.checked_add(offset) else { continue };
            // The block was the guest's when the channel was bound, and guest VRAM does not shrink.
            if self.guest_write(at, &value.to_le_bytes()).is_err() {
                tracing::debug!(?channel, "a channel's state could not be saved");
            }
        }
    }
}

/// What the address space of a physical channel must map of the mediator's.
fn own_pages(layout: &::channels::Layout, physical: ChannelId) -> [(HostPage, VramAddr, bool); 4] {
    layout.work_pages(physical).map(|(index, at, writable)| (HostPage::Own(index), at, writable))
}
