//! Opens a card that another owner has saved, together with its VMs, and takes it over.
//!
//! The other owner keeps the card until this process takes it over, so there are two steps. First,
//! [`ManagedCard::reopen`] restores and checks all saved state, and VMs are restored and
//! [readmitted](Reopened::readmit); this step only reads card registers, and queues writes to card memory. Then
//! [`Reopened::take_over`] performs these writes and resumes all VMs.
//!
//! The mediator's own channels are not restored but bound again, because they have no work in flight when a card is
//! quiesced.

use super::saved::{SavedHost, SavedOwner};
use super::scrubber::{SCRUBBER, Scrubber};
use super::{CardState, GuestEvents, ManagedCard, Parts, Sharing, Timers, Waits};
use crate::ManagerError;
use crate::work::schedule::Stage;
use crate::work::time::{self, Clock};
use bringup::CardError;
use bringup::layout::Layout;
use bringup::memory::CardMemory;
use bringup::start::{self, CardInfo};
use card::{Card, Identity};
use card_memory::balance::Divider;
use card_memory::iova::Claims;
use card_memory::{COPIER, CardVram, FIRST_BYTES, Memory, Restored, check_places};
use card_state::{RestoredCard, RestoredVm, Surroundings, VmSurroundings};
use channels::Pause;
use firmware::Set;
use nvspec::addr::{Iova, VramAddr};
use saved_state::Invalid;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tenancy::Residency;
use vram::TenantId;

/// Time limit for the mediator's own channels, which have no work, to leave the engines.
// TIMEOUT: leaving takes microseconds on hardware. The software card needs its thread to run, which a busy host may
// delay.
const LEAVE_LIMIT: Duration = Duration::from_secs(5);
/// Interval between polls of departing channels.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Input for reopening a card.
pub struct Handed {
    /// Saved form of the card and its VMs.
    pub saved: SavedHost,
    /// File with the host memory for chunks, if any.
    pub host_memory: Option<File>,
}

/// A card that can be taken over, but still belongs to another owner.
pub struct Reopened {
    host: Arc<ManagedCard>,
    waits: Waits,
    vms: BTreeMap<TenantId, RestoredVm>,
    /// I/O addresses that no owner has claimed yet.
    claims: Claims,
    /// Queued writes to VRAM.
    writes: Vec<(VramAddr, Vec<u8>)>,
    scheduler: sched::Config,
    clear: bool,
}

/// Context in which the card's parts are restored.
struct Around<'a> {
    layout: channels::Layout,
    own: (u32, u32),
    now_ns: u64,
    vm: &'a dyn Fn(TenantId) -> Option<VmSurroundings>,
    writes: Vec<(VramAddr, Vec<u8>)>,
}

impl Surroundings for Around<'_> {
    fn layout(&self) -> channels::Layout {
        self.layout
    }

    fn own(&self) -> (u32, u32) {
        self.own
    }

    fn now_ns(&self) -> u64 {
        self.now_ns
    }

    fn vm(&self, vm: TenantId) -> Option<VmSurroundings> {
        (self.vm)(vm)
    }

    fn write(&mut self, address: VramAddr, data: &[u8]) {
        self.writes.push((address, data.to_vec()));
    }
}

impl ManagedCard {
    /// Opens a `card` that another owner has saved, without changing it. Uses the settings in `sharing`, except the
    /// chunk size and the host memory. `vm` returns each VM's settings.
    ///
    /// # Errors
    /// Returns an error if the saved state is invalid, belongs to another card, or contradicts the settings, or if the
    /// host has too little memory.
    pub fn reopen(
        card: Arc<dyn Card>,
        sharing: &Sharing,
        firmware: Set,
        handed: Handed,
        vm: &dyn Fn(TenantId, &CardInfo, Identity) -> Option<VmSurroundings>,
    ) -> Result<Reopened, ManagerError> {
        let Handed { saved: SavedHost { card: saved, owner, segments: shared }, host_memory } = handed;
        let SavedOwner { chunk_bytes: had, own: (first, bytes), context_bytes, host_ns, memory, work } = owner;
        let Sharing { chunk_bytes, host_bytes, division, scheduler: config, clear, engines_zero, .. } = *sharing;
        Invalid::unless(had == chunk_bytes, || {
            format!("it has chunks of {had:#x} bytes, which cannot change, but {chunk_bytes:#x} is set")
        })?;
        let info = start::look_at(&*card, context_bytes)?;
        let layout = layout_of(first, bytes, &info, chunk_bytes)?;
        let identity = card.identity();
        let chunk = |bytes: u64| u32::try_from(bytes / chunk_bytes).unwrap_or(u32::MAX);
        let mut around = Around {
            layout: layout.channels(),
            own: (chunk(first), chunk(bytes)),
            now_ns: time::now_ns(&*card),
            vm: &|of| vm(of, &info, identity),
            writes: Vec::new(),
        };
        let restored = saved.restore(&mut around)?;
        let writes = around.writes;
        let RestoredCard { chunks, balancer, quanta, channels, scheduler, pool, segments, vms } = restored;
        let Restored { iova, claims, barrier, pinned, turns } = memory.restored(&card, chunk_bytes, host_memory)?;
        let summary = chunks.summary();
        let fits = summary.chunk_bytes == chunk_bytes
            && u64::from(summary.total) == info.vram_bytes / chunk_bytes
            && u64::from(summary.host.budget.max(summary.host.end)) * chunk_bytes <= pinned.range().1;
        Invalid::unless(fits, || {
            format!(
                "it has {} chunks of {:#x} bytes and {} in host memory, but this card {:#x} bytes in chunks of \
                 {chunk_bytes:#x}, and {:#x} in host memory",
                summary.total,
                summary.chunk_bytes,
                summary.host.end,
                info.vram_bytes,
                pinned.range().1
            )
        })?;
        let slots = chunk(host_bytes);
        Invalid::unless(u64::from(slots) * chunk_bytes <= pinned.range().1, || {
            format!(
                "it has {:#x} bytes of host memory, which can only be increased by a restart, but {host_bytes:#x} are set",
                pinned.range().1
            )
        })?;
        check_places(&chunks, &pinned)?;
        let moving = vms.keys().find(|vm| !channels.is_paused(**vm, Pause::Standstill));
        Invalid::unless(moving.is_none(), || format!("VM {moving:?} is not quiescent"))?;
        let is_held = |vm: &TenantId| channels.is_paused(*vm, Pause::Turn);
        let held = vms.keys().copied().filter(is_held).map(|vm| (vm, host_ns)).collect();
        let divider = Divider::restored(&division, Residency::restored(balancer, quanta, turns, held), chunk_bytes);
        let (timers, alarm) = Timers::new()?;
        let vram = CardVram::new(CardMemory::resume(Arc::clone(&card), layout, info.vram_bytes), pinned, chunks);
        let mut memory = Memory::restored(vram, iova, barrier, pool, divider);
        if let Some(shared) = shared {
            memory.restore_segments(shared, segments)?;
        }
        let (host, waits) = Self::assembled(Parts {
            card,
            info,
            layout,
            own: (VramAddr(first), bytes),
            memory,
            work: work.restored(channels, scheduler, alarm)?,
            clock: Clock::since(host_ns),
            firmware,
            engines_zero,
            timers,
        });
        {
            let mut state = host.lock();
            state.still = true;
            state.memory_mut().set_division(&division)?;
            state.vram_mut().chunks.set_host_budget(slots);
        }
        // Reject settings now that a later step would reject.
        config.check()?;
        Ok(Reopened { host, waits, vms, claims, writes, scheduler: config, clear })
    }
}

/// Returns the layout of the fixed structures in the `bytes` bytes from `first` on.
fn layout_of(first: u64, bytes: u64, info: &CardInfo, chunk_bytes: u64) -> Result<Layout, ManagerError> {
    let whole = |bytes: u64| bytes.checked_rem(chunk_bytes) == Some(0);
    let within = first.checked_add(bytes).is_some_and(|end| end <= info.vram_bytes);
    Invalid::unless(whole(first) && whole(bytes) && within && first < 1 << 40, || {
        format!("the mediator's structures take {bytes:#x} bytes at {first:#x} of a card with {:#x}", info.vram_bytes)
    })?;
    Ok(Layout::new(VramAddr(first), bytes, info.context_bytes.into())?)
}

impl Reopened {
    /// Returns the card. It serves only [readmitted](Self::readmit) VMs, and no VM resumes before [`Self::take_over`].
    #[must_use]
    pub fn host(&self) -> &Arc<ManagedCard> {
        &self.host
    }

    /// Returns the numbers of the saved VMs that have not been [taken](Self::take_vm) yet.
    #[must_use]
    pub fn vms(&self) -> Vec<TenantId> {
        self.vms.keys().copied().collect()
    }

    /// Returns the restored state of a VM, for rebuilding the VM.
    ///
    /// # Errors
    /// Returns an error if the VM was not saved, or if its state was already taken.
    pub fn take_vm(&mut self, vm: TenantId) -> Result<RestoredVm, ManagerError> {
        let restored = self.vms.remove(&vm);
        Ok(restored.ok_or_else(|| Invalid::new(format_args!("VM {vm} was not saved, or already exists")))?)
    }

    /// Readmits a saved VM, which receives `events`. `ram` contains the VM's I/O address ranges, and `held` is the size
    /// of its page pool in bytes.
    ///
    /// # Errors
    /// Returns an error if the ranges belong to another owner or have no owner.
    pub fn readmit(
        &mut self,
        vm: TenantId,
        events: Weak<dyn GuestEvents>,
        ram: impl Iterator<Item = (Iova, u64)>,
        held: u64,
    ) -> Result<(), ManagerError> {
        let mut state = self.host.lock();
        for (iova, len) in ram {
            state.memory_mut().iova_mut().claim(&mut self.claims, Some(vm), iova, len)?;
        }
        let (held, first) = (state.vram().count(held), state.vram().count(FIRST_BYTES));
        let wants = &mut state.vram_mut().wants;
        wants.admit(vm, first);
        wants.hold(vm, held, first);
        state.vms.insert(vm, events);
        Ok(())
    }

    /// Marks I/O address ranges as used by restored objects.
    ///
    /// # Errors
    /// Returns an error if the ranges belong to another owner.
    pub fn claim(&mut self, ranges: impl Iterator<Item = (Iova, u64)>) -> Result<(), ManagerError> {
        let mut state = self.host.lock();
        for (iova, len) in ranges {
            state.memory_mut().iova_mut().claim(&mut self.claims, None, iova, len)?;
        }
        Ok(())
    }

    /// Takes over the card after the previous owner has given it up, and resumes its VMs.
    ///
    /// # Errors
    /// Returns an error if a VM was not restored, or if the card does not respond. In the latter case, the takeover may
    /// be incomplete, so the card must be reset.
    pub fn take_over(self, name: &str) -> Result<Arc<ManagedCard>, ManagerError> {
        let Self { host, waits, vms, claims: _, writes, scheduler, clear } = self;
        if let Some(vm) = vms.keys().next() {
            return Err(Invalid::new(format_args!("VM {vm} was not restored")).into());
        }
        let no_moves = host.moving.lock();
        host.owned.store(true, Ordering::Release);
        {
            let state = &mut *host.lock();
            state.vram_mut().pinned.owned();
            for (address, data) in writes {
                state.vram_mut().memory.write(address, &data)?;
            }
            state.flush_all()?;
            let CardState { memory, work, .. } = state;
            work.channels().allow_again(memory.card_mut());
        }
        host.clear_own()?;
        {
            let state = &mut *host.lock();
            state.set_clock();
            state.memory.give_back_own();
            state.bind_own(clear, host.engines_zero, host.info.chip)?;
            if !clear {
                let CardState { memory, work, .. } = state;
                work.channels_mut().admit_all(memory.card_mut());
            }
            if *state.scheduler().config() != scheduler {
                state.feeder().set_scheduler(scheduler);
            }
            state.want_graphics_again();
        }
        for vm in host.tenants() {
            vm.taken_over()?;
        }
        host.start(name, waits)?;
        {
            let state = &mut *host.lock();
            state.move_again();
            state.feeder().tick();
        }
        // The card does not repeat interrupts that it raised in the meantime.
        host.wake_threads();
        drop(no_moves);
        Ok(host)
    }
}

impl ManagedCard {
    /// Removes the mediator's own channels that the previous owner left on the card. Releases the lock between polls.
    fn clear_own(&self) -> Result<(), ManagerError> {
        for vm in [COPIER, SCRUBBER] {
            let own: Vec<_> = self.lock().channels().bound_of(vm).collect();
            let began = Instant::now();
            for physical in own {
                while self.lock().leaves(physical).is_err() {
                    if began.elapsed() > LEAVE_LIMIT {
                        return Err(
                            CardError::Unresponsive("one of the mediator's own channels does not leave it").into()
                        );
                    }
                    locks::sleep(POLL_INTERVAL);
                }
            }
            let stuck = {
                let CardState { memory, work, .. } = &mut *self.lock();
                work.channels_mut().destroy_vm(memory.card_mut(), vm)
            };
            if !stuck.is_empty() {
                return Err(CardError::Unresponsive("one of the mediator's own channels does not leave it").into());
            }
        }
        Ok(())
    }
}

impl CardState {
    /// Requests that a channel leave its engines. Returns an error if it has not left yet.
    fn leaves(&mut self, physical: nvspec::fifo::ChannelId) -> Result<(), channels::Stuck> {
        let Self { memory, work, .. } = self;
        work.channels_mut().kick(memory.card_mut(), physical)
    }

    /// Flushes all address spaces from the card's TLBs.
    fn flush_all(&mut self) -> Result<(), ManagerError> {
        let directories: BTreeSet<VramAddr> = self.channels().directories().map(|(_, directory)| directory).collect();
        for directory in directories {
            self.vram_mut().memory.invalidate(directory, false)?;
        }
        Ok(())
    }

    /// Makes VMs wait for PGRAPH again if they have started work that may need it. Either no VM holds PGRAPH now, or
    /// the VMs' channels ran without it.
    pub(super) fn want_graphics_again(&mut self) {
        let begun: Vec<TenantId> =
            self.vms.keys().copied().filter(|vm| self.has_on_graphics(*vm, &[Stage::Started])).collect();
        if let Some(Scrubber { tenancy, .. }) = &mut self.scrubber {
            begun.into_iter().for_each(|vm| tenancy.want(vm));
        }
    }
}
