//! The card's interrupt tree: reads and acknowledges interrupts, and converts them to events for the VMs concerned. The
//! same thread periodically checks for channels without progress.

use super::interrupt_thread::{Served, Woken, serve_wakeup};
use super::scrubber::SCRUBBER;
use super::{CardState, ManagedCard};
use crate::tenants::GuestEvent;
use crate::work::engine_numbered;
use card::Card;
use card_memory::COPIER;
use channels::{Hang, Pause, Stall};
use devmodel::events::SmError;
use nvspec::addr::{GpuVa, VramAddr};
use nvspec::fifo::{ChannelId, VirtualChannelId, engine};
use nvspec::mmu::fault;
use nvspec::regs::{ce0, ce1, fecs, pbdma, pbus, pfifo, pgraph, pmc, ppci, ptimer, sm_trap};
use sched::Engine;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Weak;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::poll::{PollContext, PollToken};
use vram::TenantId;

/// Dword that replaces a method that a PBDMA cannot execute: a valid NOP on subchannel 0.
const NOP_METHOD: u32 = 0x8060_0008;
/// Interval between checks for channels without progress. A check costs nothing while no work is in flight.
const PROGRESS_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Event sources of the interrupt thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    Event,
    Timer,
    GuestAlarms,
}

impl PollToken for Token {
    fn as_raw_token(&self) -> u64 {
        *self as u64
    }

    fn from_raw_token(data: u64) -> Self {
        let all = [Self::Event, Self::Timer, Self::GuestAlarms];
        all.into_iter().find(|token| token.as_raw_token() == data).unwrap_or(Self::Event)
    }
}

/// Niceness of the interrupt thread. The thread must have priority over virtual CPUs, so that the card does not idle
/// while they keep the host busy. The host's own interrupt threads have priority over both.
const NICE: i32 = -10;

/// Raises the calling thread's priority if `RLIMIT_NICE` or `CAP_SYS_NICE` permits the change.
pub(crate) fn run_first() {
    // `None` stands for the calling thread.
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::info!(%error, nice = NICE, "the card's interrupt thread has no priority over VMs; raise RLIMIT_NICE to allow it");
    }
}

/// Runs the interrupt thread until the card is closed or dropped. Serves `host` whenever `event` is signalled or the
/// scheduler's `timer` expires, and serves guests' alarms whenever `guest_timer` expires.
pub(crate) fn serve(host: &Weak<ManagedCard>, event: &EventFd, timer: &OwnedFd, guest_timer: &OwnedFd) {
    let wait = PollContext::new().and_then(|wait| {
        wait.add(event, Token::Event)?;
        wait.add(timer, Token::Timer)?;
        wait.add(guest_timer, Token::GuestAlarms)?;
        Ok(wait)
    });
    let wait = match wait {
        Ok(wait) => wait,
        Err(error) => {
            tracing::error!(%error, "cannot wait for the card's interrupts; interrupts are off");
            return;
        }
    };
    let mut looked = Instant::now();
    loop {
        let (woken, alarms) = match wait.wait_timeout(PROGRESS_CHECK_INTERVAL) {
            Ok(events) => {
                let is = |token| events.iter_readable().any(|event| event.token() == token);
                (Woken { signalled: is(Token::Event), expired: is(Token::Timer) }, is(Token::GuestAlarms))
            }
            Err(error) if error.errno() == rustix::io::Errno::INTR.raw_os_error() => continue,
            Err(error) => {
                tracing::error!(%error, "cannot wait for the card's interrupts; interrupts are off");
                return;
            }
        };
        let Some(host) = host.upgrade() else { return };
        if host.over() {
            return;
        }
        let line = Line { host: &host, event };
        if let Err(error) = serve_wakeup(&line, woken) {
            tracing::error!(%error, "cannot read the card's interrupts; interrupts are off");
            return;
        }
        if alarms {
            let due = host.lock().due_guest_alarms();
            due.into_iter().for_each(|vm| line.deliver(vm, GuestEvent::Alarm));
        }
        if looked.elapsed() >= PROGRESS_CHECK_INTERVAL {
            looked = Instant::now();
            if let Some(why) = host.card().lost() {
                host.fail(why);
                return;
            }
            let (undone, events) = {
                let mut state = host.lock();
                (state.vram().memory.undone(), state.look())
            };
            // The reset that is part of closing the card is not a failure.
            if let Some(why) = undone.filter(|_| !host.over()) {
                host.fail(why);
                return;
            }
            events.into_iter().for_each(|(vm, event)| line.deliver(vm, event));
        }
    }
}

/// A card, and the event that signals its interrupt.
struct Line<'a> {
    host: &'a ManagedCard,
    event: &'a EventFd,
}

impl Served for Line<'_> {
    fn acknowledge(&self) -> io::Result<()> {
        self.event.read()?;
        self.host.card().write32(ppci::MSI_REARM::OFFSET, ppci::MSI_REARM::REARM.mask());
        Ok(())
    }

    fn service(&self) -> (bool, Vec<(TenantId, GuestEvent)>) {
        self.host.lock().service()
    }

    fn tick(&self) {
        let mut state = self.host.lock();
        state.look_at_departures();
        let before = state.work.ended();
        state.feeder().tick();
        if state.work.ended() != before {
            // Work that completed without an interrupt may have freed ring space for which a VM waits.
            let mut events = Vec::new();
            state.resume(&mut events);
            state.work.schedule_mut().outbox.extend(events);
        }
    }

    fn take_outbox(&self) -> Vec<(TenantId, GuestEvent)> {
        self.host.lock().work.schedule_mut().take_outbox()
    }

    fn deliver(&self, vm: TenantId, event: GuestEvent) {
        self.host.deliver(vm, event);
    }
}

impl ManagedCard {
    /// Delivers an event to a VM if it still exists. Never waits for the VM.
    pub(crate) fn deliver(&self, vm: TenantId, event: GuestEvent) {
        // Look up the VM for each event, because it may have been removed. The VM's lock must not be acquired with the
        // card's lock held.
        let target = self.lock().vms.get(&vm).and_then(Weak::upgrade);
        if let Some(target) = target {
            target.deliver(event);
        }
    }
}

impl CardState {
    /// Removes the guests' due PTIMER alarms, and returns their VMs.
    fn due_guest_alarms(&mut self) -> Vec<TenantId> {
        let now = self.now_ns();
        self.guest_alarms.due(now)
    }

    /// Makes one pass through the interrupt tree. Returns a flag that is true if any interrupt was pending, and the
    /// events to deliver.
    pub(super) fn service(&mut self) -> (bool, Vec<(TenantId, GuestEvent)>) {
        let mut events = Vec::new();
        let card = std::sync::Arc::clone(self.vram().memory.card());
        let pending = card.read32(pmc::INTR_0::OFFSET);
        if pmc::INTR_0::PFIFO.is_set(pending) {
            self.service_fifo(&*card, &mut events);
        }
        if pmc::INTR_0::PGRAPH.is_set(pending) {
            self.service_graph(&*card, &mut events);
        }
        if pmc::INTR_0::CE0.is_set(pending) {
            self.service_copy(&*card, 0, &mut events);
        }
        if pmc::INTR_0::CE1.is_set(pending) {
            self.service_copy(&*card, 1, &mut events);
        }
        // The mediator does not use these interrupts. Clear them so that the interrupt line is deasserted.
        if pmc::INTR_0::PBUS.is_set(pending) {
            let intr = card.read32(pbus::INTR::OFFSET);
            tracing::warn!(intr, "the card reports a register bus access fault");
            card.write32(pbus::INTR::OFFSET, intr);
        }
        if pmc::INTR_0::PTIMER.is_set(pending) {
            card.write32(ptimer::INTR::OFFSET, u32::MAX);
        }
        (pending != 0, events)
    }

    /// Performs the periodic check: kills channels without progress, polls waiting and departing channels, and resumes
    /// rings whose entries wait for space.
    fn look(&mut self) -> Vec<(TenantId, GuestEvent)> {
        let mut events = Vec::new();
        let now_ns = self.now_ns();
        self.set_clock();
        self.feeder().complete();
        for vm in self.work.noise_mut().look() {
            self.work.channels_mut().pause(self.memory.card_mut(), vm, Pause::InterruptRateLimit, false);
        }
        // This poll is only a fallback. Normally, the thread that can end a wait also polls.
        self.feeder().look_at_waits(None);
        self.look_at_departures();
        for Hang { engine, vm, channel, for_ns, .. } in self.work.channels_mut().look(self.memory.card_mut(), now_ns) {
            tracing::warn!(vm = vm.0, ?channel, engine, for_ms = for_ns / 1_000_000, "a channel makes no progress");
            self.kill_channel(vm, channel, engine);
            if let Some(engine) = engine_numbered(engine) {
                self.feeder().feed([sched::Event::Struck { vgpu: vm, engine }]);
            }
            events.push((vm, GuestEvent::Hang { engine, channel }));
        }
        for Stall { vm, channel, at } in self.work.channels_mut().stalled(self.memory.card_mut(), now_ns) {
            tracing::warn!(vm = vm.0, ?channel, va = %at, "a channel makes no progress; its fault was not recorded");
            self.retire_now(vm, channel);
            use pfifo::FAULT_TYPE::{CLIENT, HUB, REASON};
            let kind = REASON.encode(fault::PTE) | HUB.encode(1) | CLIENT.encode(fault::hub_client::FIFO);
            events.push((vm, GuestEvent::MmuFault { channel, unit: fault::unit::FIFO, va: at, kind }));
        }
        self.runlists_taken(&mut events);
        self.resume(&mut events);
        let now = self.card_time();
        self.work.tell_overdue(now);
        events
    }

    /// Notifies VMs of their runlists that have taken effect.
    fn runlists_taken(&mut self, events: &mut Vec<(TenantId, GuestEvent)>) {
        let taken = self.work.channels_mut().runlists_taken(self.memory.card_mut());
        events.extend(taken.into_iter().map(|vm| (vm, GuestEvent::Runlist)));
    }

    /// Notifies VMs that they can retry the ring entries that did not fit earlier.
    fn resume(&mut self, events: &mut Vec<(TenantId, GuestEvent)>) {
        let waiting = self.work.channels().pending_pull();
        events.extend(waiting.into_iter().map(|doorbell| (doorbell.vm, GuestEvent::Resume(doorbell))));
    }

    /// Returns the VM and channel whose instance block is at VRAM address `instance`.
    fn owner_of(&self, instance: VramAddr) -> Option<(TenantId, VirtualChannelId)> {
        let (vm, channel, _) = self.work.channels().by_instance(instance)?;
        Some((vm, channel))
    }

    /// Returns true if a VM's channel has no PGRAPH context or currently runs without it.
    fn lacks_graphics(&self, vm: TenantId, channel: VirtualChannelId) -> bool {
        let channels = self.work.channels();
        let [graphics, ..] = channels.physical(vm, channel).map_or([true; 3], |physical| channels.contexts(physical));
        !graphics
    }

    fn service_fifo(&mut self, card: &dyn Card, events: &mut Vec<(TenantId, GuestEvent)>) {
        let intr = card.read32(pfifo::INTR::OFFSET);
        if pfifo::INTR::MMU_FAULT.is_set(intr) {
            let units = card.read32(pfifo::MMU_FAULT_ID::OFFSET);
            for unit in (0..u32::BITS).filter(|unit| units & (1 << unit) != 0) {
                self.service_fault(card, unit, events);
            }
        }
        if pfifo::INTR::PBDMA.is_set(intr) {
            let units = card.read32(pfifo::PBDMA_INTR_ID::OFFSET);
            for unit in (0..pbdma::INTR_0::COUNT).filter(|unit| units & (1 << unit) != 0) {
                self.service_pbdma(card, unit, events);
            }
        }
        if pfifo::INTR::RUNLIST.is_set(intr) {
            let done = card.read32(pfifo::RUNLIST_INTR::OFFSET);
            card.write32(pfifo::RUNLIST_INTR::OFFSET, done);
            self.runlists_taken(events);
        }
        if pfifo::INTR::NON_STALL.is_set(intr) {
            self.service_non_stall(card, events);
        }
        let strange = pfifo::INTR::SCHED_ERROR.mask() | pfifo::INTR::INTR_0.mask();
        if intr & strange != 0 {
            let reason = card.read32(pfifo::SCHED_ERROR_REASON::OFFSET);
            tracing::error!(intr, reason, "the card's scheduler reports an error");
        }
        card.write32(pfifo::INTR::OFFSET, intr);
    }

    fn service_non_stall(&mut self, card: &dyn Card, events: &mut Vec<(TenantId, GuestEvent)>) {
        let engines = card.read32(pfifo::NON_STALL_ID::OFFSET);
        let raised = || (0..engine::COUNT).filter(|engine| engines & (1 << engine) != 0);
        for engine in raised() {
            let bits = card.read32(pfifo::NON_STALL_INTR::at(engine));
            card.write32(pfifo::NON_STALL_INTR::at(engine), bits);
        }
        // Determine the VMs before `complete`. Work that `complete` starts has not raised the interrupt, so its guest
        // would poll without success.
        let working: Vec<_> =
            raised().map(|engine| (engine, self.work.channels_mut().at_work(self.memory.card_mut(), engine))).collect();
        // Call this once for all engines, because it polls every channel with work in flight.
        let before = self.work.ended();
        self.feeder().complete();
        let in_vain = self.work.ended() == before;
        for (engine, mut vms) in working {
            vms.extend(self.work.channels_mut().news(engine));
            if in_vain && let Some(vm) = self.raised_by(engine, &vms) {
                self.count_noise(vm);
            }
            events.extend(vms.into_iter().map(|vm| (vm, GuestEvent::NonStall { engine })));
        }
        self.resume(events);
    }

    /// Guesses which of the candidates `vms` raised an engine's interrupt without a completion: the only candidate, or
    /// the one that currently occupies the engine. A single guess may be wrong, but a VM that raises many such
    /// interrupts is identified.
    fn raised_by(&mut self, engine: u32, vms: &BTreeSet<TenantId>) -> Option<TenantId> {
        if vms.len() == 1 {
            return vms.first().copied();
        }
        let occupant = self.work.channels_mut().occupant(self.memory.card_mut(), engine)?;
        self.work.channels().by_physical(occupant).map(|(vm, _)| vm).filter(|vm| vms.contains(vm))
    }

    /// Charges a VM for an interrupt without a completion. A VM that causes too many is paused until the next check.
    fn count_noise(&mut self, vm: TenantId) {
        if vm == COPIER || vm == SCRUBBER || !self.work.noise_mut().count(vm) {
            return;
        }
        tracing::warn!(%vm, "a VM exceeds its interrupt rate; its channels are paused for up to a tenth of a second");
        self.work.channels_mut().pause(self.memory.card_mut(), vm, Pause::InterruptRateLimit, true);
        self.feeder().look_at_waits(Some(vm));
    }

    fn service_fault(&mut self, card: &dyn Card, unit: u32, events: &mut Vec<(TenantId, GuestEvent)>) {
        let instance =
            VramAddr(u64::from(pfifo::FAULT_INST::ADDRESS.get(card.read32(pfifo::FAULT_INST::at(unit)))) << 12);
        let low = card.read32(pfifo::FAULT_VA_LO::at(unit));
        let high = card.read32(pfifo::FAULT_VA_HI::at(unit));
        let va = GpuVa((u64::from(high) << 32) | u64::from(low));
        let kind = card.read32(pfifo::FAULT_TYPE::at(unit));
        // Clear the report before the engine continues. Otherwise, the report of its next fault would be lost.
        card.write32(pfifo::MMU_FAULT_ID::OFFSET, 1 << unit);
        let owner = self.owner_of(instance);
        let trespasser =
            owner.filter(|_| unit == fault::unit::GR).filter(|&(vm, channel)| self.lacks_graphics(vm, channel));
        self.recover(card, owner, unit);
        if let Some((vm, channel)) = trespasser {
            // PGRAPH was reset because of this channel, possibly during another VM's slice.
            tracing::warn!(%vm, ?channel, "a channel without a PGRAPH context used PGRAPH");
            self.feeder().feed([sched::Event::Struck { vgpu: vm, engine: Engine::Compute }]);
        }
        match owner {
            Some((vm, channel)) => events.push((vm, GuestEvent::MmuFault { channel, unit, va, kind })),
            // The channel was unbound before the interrupt was handled.
            None => tracing::warn!(unit, %instance, %va, kind, "an MMU fault does not belong to any VM"),
        }
    }

    fn service_pbdma(&mut self, card: &dyn Card, unit: u32, events: &mut Vec<(TenantId, GuestEvent)>) {
        let intr = card.read32(pbdma::INTR_0::at(unit));
        let method = card.read32(pbdma::METHOD_0::at(unit));
        let data = card.read32(pbdma::DATA_0::at(unit));
        let physical = ChannelId(pbdma::CHANNEL::CHANNEL.get(card.read32(pbdma::CHANNEL::at(unit))) as u8);
        if intr & pbdma::INTR_0::EMPTY_SUBC.mask() != 0 {
            card.write32(pbdma::METHOD_0::at(unit), NOP_METHOD);
        }
        card.write32(pbdma::INTR_0::at(unit), intr);
        card.write32(pfifo::PBDMA_INTR_ID::OFFSET, 1 << unit);
        match self.work.channels().by_physical(physical) {
            Some((vm, channel)) => {
                events.push((vm, GuestEvent::Pbdma { channel, unit, intr, method, data }));
                self.count_noise(vm);
            }
            None => tracing::error!(unit, intr, ?physical, "a PBDMA error does not belong to any VM"),
        }
    }

    fn service_graph(&mut self, card: &dyn Card, events: &mut Vec<(TenantId, GuestEvent)>) {
        let intr = card.read32(pgraph::INTR::OFFSET);
        let current = card.read32(fecs::CURRENT::OFFSET);
        let address = card.read32(pgraph::TRAPPED_ADDRESS::OFFSET);
        let subchannel = pgraph::TRAPPED_ADDRESS::SUBCHANNEL.get(address);
        let trap = if pgraph::INTR::TRAP.is_set(intr) { card.read32(pgraph::TRAP::OFFSET) } else { 0 };
        let sm = if pgraph::TRAP::GPC.is_set(trap) { take_sm_errors(card) } else { None };
        let event = |channel| GuestEvent::Graph {
            channel,
            intr,
            code: card.read32(pgraph::DATA_ERROR::OFFSET),
            class: card.read32(pgraph::SUBCHANNEL_CLASS::at(subchannel)),
            address,
            data: card.read32(pgraph::TRAPPED_DATA_LO::OFFSET),
            trap,
            sm,
        };
        let instance = VramAddr(u64::from(fecs::CURRENT::ADDRESS.get(current)) << 12);
        let owner = self.owner_of(instance).filter(|_| fecs::CURRENT::VALID.is_set(current));
        match owner {
            Some((vm, channel)) => events.push((vm, event(channel))),
            None => tracing::error!(intr, current, "a PGRAPH error does not belong to any VM"),
        }
        card.write32(pgraph::TRAP::OFFSET, u32::MAX);
        card.write32(pgraph::INTR::OFFSET, intr);
        card.write32(pgraph::CONTROL::OFFSET, pgraph::CONTROL::FIFO_ACCESS.mask() | pgraph::CONTROL::METHODS.mask());
        if let Some((vm, _)) = owner {
            self.count_noise(vm);
        }
    }

    fn service_copy(&mut self, card: &dyn Card, index: u32, events: &mut Vec<(TenantId, GuestEvent)>) {
        let (status, clear, current, scratch) = if index == 0 {
            (ce0::INTR::OFFSET, ce0::INTR_CLEAR::OFFSET, ce0::CHANNEL_CURRENT::OFFSET, ce0::SCRATCH::at(0))
        } else {
            (ce1::INTR::OFFSET, ce1::INTR_CLEAR::OFFSET, ce1::CHANNEL_CURRENT::OFFSET, ce1::SCRATCH::at(0))
        };
        let intr = card.read32(status);
        let instance = VramAddr(u64::from(ce0::CHANNEL_CURRENT::ADDRESS.get(card.read32(current))) << 12);
        let owner = self.owner_of(instance);
        match owner {
            Some((vm, channel)) => {
                // The first dword is the firmware's report about the method, and the second one is the method's data.
                let (report, data) = (card.read32(scratch), card.read32(scratch + 4));
                events.push((vm, GuestEvent::Copy { channel, engine: index, intr, report, data }));
            }
            None => tracing::error!(index, intr, %instance, "a copy engine error does not belong to any VM"),
        }
        card.write32(clear, intr);
        if let Some((vm, _)) = owner {
            self.count_noise(vm);
        }
    }
}

/// Acknowledges the error reports of all multiprocessors, and returns the first one.
fn take_sm_errors(card: &dyn Card) -> Option<SmError> {
    let gpcs = card.read32(pgraph::TRAP_GPCS::OFFSET);
    let mut first = None;
    for gpc in (0..sm_trap::GPCS).filter(|gpc| gpcs & 1 << gpc != 0) {
        let trap = card.read32(sm_trap::gpc(gpc));
        let tpcs = sm_trap::TPC_MASK.get(trap);
        for tpc in (0..sm_trap::TPCS).filter(|tpc| tpcs & 1 << tpc != 0) {
            let units = card.read32(sm_trap::tpc(gpc, tpc));
            if sm_trap::SM.is_set(units) {
                let warp = card.read32(sm_trap::warp_error(gpc, tpc));
                let global = card.read32(sm_trap::global_error(gpc, tpc));
                first = first.or(Some(SmError { gpc, tpc, warp, global }));
                card.write32(sm_trap::warp_error(gpc, tpc), 0);
                card.write32(sm_trap::global_error(gpc, tpc), global);
            }
            card.write32(sm_trap::tpc(gpc, tpc), units);
        }
        card.write32(sm_trap::gpc(gpc), trap);
    }
    card.write32(pgraph::TRAP_GPCS::OFFSET, gpcs);
    first
}
