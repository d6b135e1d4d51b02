//! PFIFO: the channel table, the runlist, preemption, and scheduler interrupts. All accesses are virtual or translated,
//! and none of them reaches the card's registers.

use super::hang::{Hang, Hangs};
use super::pmc::pbdma_mask;
use super::{At, Backlog, Cx, page_address};
use crate::backend::{EngineStatus, Place};
use crate::denied::Reason;
use crate::events::MmuFault;
use nvspec::addr::Target;
use nvspec::fifo::{CHANNELS, VirtualChannelId, engine, sched_error};
use nvspec::regs::pfifo::{
    CHANNEL, CHANNEL_STATE, ENGINE_STATUS, FAULT_INST, FAULT_TRIGGER, FAULT_TYPE, INTR, NON_STALL_EN, PREEMPT, RUNLIST,
    RUNLIST_BASE, RUNLIST_INTR, RUNLIST_STATUS, Reg, SCHED_ERROR_REASON,
};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};

/// Size of a runlist entry in bytes.
const ENTRY_BYTES: u64 = size_of::<nvspec::fifo::RunlistEntry>() as u64;
const ENGINES: usize = engine::COUNT as usize;
const UNITS: usize = FAULT_INST::COUNT as usize;
/// Mask of all engines.
const ENGINE_MASK: u32 = (1 << engine::COUNT) - 1;

/// Channel table, runlist state, and interrupt registers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pfifo {
    /// Channels that are bound in the backend, as a bit mask.
    bound: u128,
    /// Channels that the guest has enabled, as a bit mask.
    enabled: u128,
    userd_base: u32,
    runlist_base: u32,
    runlist: u32,
    runlist_pending: bool,
    runlist_intr: u32,
    preempted: u32,
    blocked: u32,
    /// Interrupt causes that the guest clears with a write. Excludes causes derived from other registers.
    intr: u32,
    intr_en: u32,
    sched_code: u32,
    hangs: Hangs,
    pbdmas: u32,
    non_stall: [u32; ENGINES],
    non_stall_en: u32,
    /// Last fault of each unit, and a flag that is true while the fault is pending.
    faults: [Option<(MmuFault, bool)>; UNITS],
    backlog: Backlog<MmuFault>,
}

impl Default for Pfifo {
    fn default() -> Self {
        Self {
            bound: 0,
            enabled: 0,
            userd_base: 0,
            runlist_base: 0,
            runlist: 0,
            runlist_pending: false,
            runlist_intr: 0,
            preempted: 0,
            blocked: 0,
            intr: 0,
            intr_en: 0,
            sched_code: 0,
            hangs: Hangs::default(),
            pbdmas: 0,
            non_stall: [0; ENGINES],
            non_stall_en: 0,
            faults: [None; UNITS],
            backlog: Backlog::default(),
        }
    }
}

impl Pfifo {
    /// Reads a register. `pbdma` is the mask of PBDMAs with a pending interrupt.
    pub(crate) fn read(&self, reg: Reg, at: At, pbdma: u32, cx: &mut Cx) -> u32 {
        match reg {
            Reg::INTR => self.status(pbdma),
            Reg::INTR_EN => self.intr_en,
            Reg::PBDMA_PRESENT => self.pbdmas,
            Reg::USERD_BASE => self.userd_base,
            Reg::RUNLIST_BASE => self.runlist_base,
            Reg::RUNLIST => self.runlist,
            Reg::RUNLIST_STATUS => RUNLIST_STATUS::PENDING.encode(self.runlist_pending.into()),
            Reg::RUNLIST_INTR => self.runlist_intr,
            Reg::SCHED_ERROR_REASON => SCHED_ERROR_REASON::CODE.encode(self.sched_code),
            Reg::MMU_FAULT_ID => self.fault_units(),
            Reg::PBDMA_INTR_ID => pbdma,
            Reg::NON_STALL_ID => self.non_stall_engines(),
            Reg::NON_STALL_INTR => self.non_stall.get(at.index()).copied().unwrap_or(0),
            Reg::NON_STALL_EN => self.non_stall_en,
            Reg::SCHED_DISABLE => self.blocked,
            Reg::SCHED_ENABLE_ACK => 0,
            Reg::PREEMPT => self.preempt_state(cx),
            Reg::ENGINE_STATUS => self.engine_status(at.index, cx),
            Reg::FAULT_INST | Reg::FAULT_VA_LO | Reg::FAULT_VA_HI | Reg::FAULT_TYPE => self.fault(reg, at.index()),
            Reg::CHANNEL => cx.storage.get(at.offset),
            Reg::CHANNEL_STATE => self.channel_state(at, cx),
            _ => cx.plain_read(at),
        }
    }

    pub(crate) fn write(&mut self, reg: Reg, at: At, value: u32, cx: &mut Cx) {
        match reg {
            Reg::INTR => {
                self.intr &= !value;
                self.show_next_hang();
            }
            Reg::INTR_EN => self.intr_en = value,
            Reg::PBDMA_PRESENT => self.pbdmas = value & pbdma_mask(cx),
            // The mediator obtains the VRAM address of USERD from the instance block, and ignores the BAR1 address in
            // this register.
            Reg::USERD_BASE => self.userd_base = value,
            Reg::RUNLIST_BASE => self.runlist_base = value,
            Reg::RUNLIST => self.submit_runlist(at, value, cx),
            Reg::RUNLIST_INTR => self.runlist_intr &= !value,
            Reg::MMU_FAULT_ID => self.acknowledge_faults(value),
            Reg::NON_STALL_INTR => {
                if let Some(bits) = self.non_stall.get_mut(at.index()) {
                    *bits &= !value;
                }
            }
            Reg::NON_STALL_EN => self.non_stall_en = NON_STALL_EN::NIBBLE.get(value),
            Reg::SCHED_DISABLE => self.block(value & ENGINE_MASK, cx),
            Reg::PREEMPT => self.preempt(at, value, cx),
            Reg::FAULT_TRIGGER => {
                cx.plain_write(at, value);
                if FAULT_TRIGGER::TRIGGER.is_set(value) {
                    let unit = FAULT_TRIGGER::UNIT.get(value);
                    let instance = self.instance_on(at.index, cx);
                    self.mmu_fault(MmuFault { instance, ..MmuFault::triggered(unit) });
                }
            }
            Reg::CHANNEL => self.bind(at, value, cx),
            Reg::CHANNEL_STATE => self.enable(at, value, cx),
            Reg::RUNLIST_STATUS
            | Reg::SCHED_ERROR_REASON
            | Reg::PBDMA_INTR_ID
            | Reg::NON_STALL_ID
            | Reg::SCHED_ENABLE_ACK
            | Reg::ENGINE_STATUS
            | Reg::FAULT_INST
            | Reg::FAULT_VA_LO
            | Reg::FAULT_VA_HI
            | Reg::FAULT_TYPE => {}
            _ => cx.plain_write(at, value),
        }
    }

    pub(crate) fn reset(&mut self) {
        let backlog = Backlog { dropped: self.backlog.dropped, ..Backlog::default() };
        let mut hangs = std::mem::take(&mut self.hangs);
        hangs.reset();
        *self = Self { backlog, hangs, ..Self::default() };
    }

    /// Validates restored state, in which at most `channels` channels may be bound.
    pub(crate) fn check(&self, channels: u32) -> Result<(), Invalid> {
        let Self { bound, blocked, hangs, faults, backlog, .. } = self;
        hangs.check()?;
        backlog.check(|fault| (fault.unit as usize) < UNITS)?;
        let units = (0u32..).zip(faults).all(|(unit, fault)| fault.is_none_or(|(fault, _)| fault.unit == unit));
        Invalid::unless(units, || "a fault is visible for the wrong unit".into())?;
        Invalid::unless(bound.count_ones() <= channels, || {
            format!("{} channels are bound, at most {channels} are permitted", bound.count_ones())
        })?;
        Invalid::unless(blocked & !ENGINE_MASK == 0, || "nonexistent engines are blocked".into())
    }

    /// Returns the mask of channels that the guest has bound.
    pub(crate) fn bound_bits(&self) -> u128 {
        self.bound
    }

    /// Returns the mask of engines that the guest has blocked.
    pub(crate) fn blocked(&self) -> u32 {
        self.blocked
    }

    /// Marks the most recently submitted runlist as active, and raises the runlist interrupt.
    pub(crate) fn runlist_done(&mut self) {
        self.runlist_pending = false;
        self.runlist_intr |= RUNLIST_INTR::DONE.mask();
    }

    /// Raises the non-stall interrupt of `engine`.
    pub(crate) fn non_stall(&mut self, engine: u32) {
        if let Some(bits) = self.non_stall.get_mut(engine as usize) {
            *bits |= 1;
        }
    }

    /// Shows a fault in the registers, or queues it until the guest has acknowledged the unit's visible fault.
    pub(crate) fn mmu_fault(&mut self, fault: MmuFault) {
        match self.faults.get_mut(fault.unit as usize) {
            Some(Some((_, true))) => self.backlog.push(fault),
            Some(slot) => *slot = Some((fault, true)),
            None => {}
        }
    }

    /// Reports a scheduler error. `code` has the format of `SCHED_ERROR_REASON`. Drops the error while a previous one
    /// is unacknowledged.
    pub(crate) fn sched_error(&mut self, code: u32) {
        if !INTR::SCHED_ERROR.is_set(self.intr) {
            self.sched_code = code;
            self.intr |= INTR::SCHED_ERROR.mask();
        }
    }

    /// Reports a channel that did not leave an engine in time. Ignores invalid engines and unbound channels, which need
    /// no recovery by the driver.
    pub(crate) fn ctxsw_timeout(&mut self, engine: u32, channel: VirtualChannelId) {
        if engine < engine::COUNT && self.is_bound(channel) {
            self.hangs.add(Hang { engine, channel });
            self.show_next_hang();
        }
    }

    /// Removes the hangs on an engine that the driver has reset.
    pub(crate) fn engine_reset(&mut self, engine: u32) {
        self.hangs.end(|hang| hang.engine == engine);
        self.show_next_hang();
    }

    pub(crate) fn pending(&self, pbdma: u32) -> bool {
        self.status(pbdma) & self.intr_en != 0
    }

    /// Returns the number of channels that the guest has bound.
    #[must_use]
    pub fn bound(&self) -> u32 {
        self.bound.count_ones()
    }

    /// Returns the number of channels that the guest has enabled.
    #[must_use]
    pub fn enabled(&self) -> u32 {
        self.enabled.count_ones()
    }

    /// Returns the numbers of visible, queued and dropped faults.
    #[must_use]
    pub fn faults(&self) -> (u32, usize, u64) {
        (self.fault_units().count_ones(), self.backlog.len(), self.backlog.dropped)
    }

    /// Returns the engine and channel of the visible hang, and the numbers of queued and dropped hangs.
    #[must_use]
    pub fn hangs(&self) -> (Option<(u32, VirtualChannelId)>, usize, u64) {
        let (shown, waiting, dropped) = self.hangs.counts();
        (shown.map(|hang| (hang.engine, hang.channel)), waiting, dropped)
    }

    /// Returns true if the submitted runlist is not active yet.
    #[must_use]
    pub fn runlist_pending(&self) -> bool {
        self.runlist_pending
    }

    fn status(&self, pbdma: u32) -> u32 {
        let level = |on: bool, field: nvspec::Field| if on { field.mask() } else { 0 };
        self.intr
            | level(self.non_stall_engines() != 0, INTR::NON_STALL)
            | level(self.runlist_intr != 0, INTR::RUNLIST)
            | level(pbdma != 0, INTR::PBDMA)
            | level(self.fault_units() != 0, INTR::MMU_FAULT)
    }

    /// Returns the mask of engines with an enabled, pending non-stall interrupt.
    fn non_stall_engines(&self) -> u32 {
        // The enable register contains a single nibble, which applies to all eight nibbles of each engine's interrupt
        // register.
        let enabled = self.non_stall_en.wrapping_mul(0x1111_1111);
        let mut engines = 0;
        for (engine, bits) in (0u32..).zip(&self.non_stall) {
            if bits & enabled != 0 {
                engines |= 1u32.wrapping_shl(engine);
            }
        }
        engines
    }

    fn fault_units(&self) -> u32 {
        let mut units = 0;
        for (unit, fault) in (0u32..).zip(&self.faults) {
            if matches!(fault, Some((_, true))) {
                units |= 1u32.wrapping_shl(unit);
            }
        }
        units
    }

    #[expect(clippy::cast_possible_truncation, reason = "registers contain the low and high dwords of an address")]
    fn fault(&self, reg: Reg, unit: usize) -> u32 {
        let Some((fault, _)) = self.faults.get(unit).copied().flatten() else { return 0 };
        match reg {
            Reg::FAULT_INST => {
                FAULT_INST::ADDRESS.encode(fault.instance.map_or(0, |instance| (instance.address() >> 12) as u32))
            }
            Reg::FAULT_VA_LO => fault.va.0 as u32,
            Reg::FAULT_VA_HI => (fault.va.0 >> 32) as u32,
            _ => {
                FAULT_TYPE::GPC.encode(fault.gpc)
                    | FAULT_TYPE::CLIENT.encode(fault.client)
                    | FAULT_TYPE::WRITE.encode(fault.write.into())
                    | FAULT_TYPE::HUB.encode(fault.hub.into())
                    | FAULT_TYPE::REASON.encode(fault.reason)
            }
        }
    }

    fn acknowledge_faults(&mut self, units: u32) {
        for (unit, slot) in (0u32..).zip(&mut self.faults) {
            let acknowledged = units & 1u32.wrapping_shl(unit) != 0;
            if let (true, Some((_, pending))) = (acknowledged, slot.as_mut()) {
                *pending = false;
                if let Some(next) = self.backlog.take(|fault| fault.unit == unit) {
                    *slot = Some((next, true));
                }
            }
        }
    }

    fn bind(&mut self, at: At, value: u32, cx: &mut Cx) {
        let Some(id) = channel(at.index) else { return };
        let was_bound = self.bound & bit(id) != 0;

        let mut instance = None;
        if CHANNEL::VALID.is_set(value) {
            if !was_bound && self.bound.count_ones() >= cx.config.channels {
                cx.deny_write(at, Reason::ChannelLimit, value);
            } else {
                instance = cx.instance(at, value, CHANNEL::TARGET.get(value), CHANNEL::ADDRESS.get(value));
            }
        }

        cx.storage.set(at.offset, value);
        self.hangs.end(|hang| hang.channel == id);
        let enabled = self.enabled & bit(id) != 0;
        if instance.is_some() {
            self.bound |= bit(id);
        } else {
            self.bound &= !bit(id);
            self.enabled &= !bit(id);
        }
        self.show_next_hang();

        if instance.is_some() || was_bound {
            cx.backend.bind_channel(id, instance);
        }
        // The backend treats a channel with a new instance block as a new channel, which is initially disabled.
        if instance.is_some() && enabled {
            cx.backend.enable_channel(id, true);
        }
    }

    fn enable(&mut self, at: At, value: u32, cx: &mut Cx) {
        let Some(id) = channel(at.index) else { return };
        let on = CHANNEL_STATE::ENABLED.is_set(value);
        cx.storage.set(at.offset, value & CHANNEL_STATE::ENGINES.mask());
        if on {
            self.enabled |= bit(id);
        } else {
            self.enabled &= !bit(id);
        }
        // Notify the mediator of every write, because even an unchanged value may restart a channel that the mediator
        // has stopped.
        if self.bound & bit(id) != 0 {
            cx.backend.enable_channel(id, on);
        }
    }

    fn channel_state(&self, at: At, cx: &mut Cx) -> u32 {
        let Some(id) = channel(at.index) else { return 0 };
        let stored = cx.storage.get(at.offset);
        let enabled = CHANNEL_STATE::ENABLED.encode((self.enabled & bit(id) != 0).into());
        if self.bound & bit(id) == 0 {
            return stored | enabled;
        }
        let state = cx.backend.channel_state(id);
        stored
            | enabled
            | CHANNEL_STATE::ACQUIRE_PENDING.encode(state.acquire_pending.into())
            | CHANNEL_STATE::LOADED.encode(state.loaded.into())
            | CHANNEL_STATE::PENDING.encode(state.pending.into())
    }

    fn submit_runlist(&mut self, at: At, value: u32, cx: &mut Cx) {
        let length = RUNLIST::LENGTH.get(value);
        let (target, page) =
            (RUNLIST_BASE::TARGET.get(self.runlist_base), RUNLIST_BASE::ADDRESS.get(self.runlist_base));
        self.runlist = value;
        if length > CHANNELS {
            cx.deny_write(at, Reason::Runlist, value);
            return;
        }
        let bytes = u64::from(length).saturating_mul(ENTRY_BYTES);
        let Some(list) = cx.place(at, value, target, page_address(page), bytes) else { return };

        self.runlist_pending = true;
        cx.backend.submit_runlist(list, length);
    }

    /// Returns the value of the preempt register. Linux 6.1 only polls for the channel number, while Linux 6.12 polls
    /// until the pending bit is clear.
    fn preempt_state(&self, cx: &mut Cx) -> u32 {
        let pending = channel(self.preempted).is_some_and(|id| self.bound & bit(id) != 0 && cx.backend.preempting(id));
        PREEMPT::CHANNEL.encode(self.preempted) | PREEMPT::PENDING.encode(pending.into())
    }

    fn preempt(&mut self, at: At, value: u32, cx: &mut Cx) {
        let Some(id) = channel(PREEMPT::CHANNEL.get(value)) else {
            cx.deny_write(at, Reason::Channel, value);
            return;
        };
        self.preempted = u32::from(id.0);
        if self.bound & bit(id) != 0 {
            cx.backend.preempt(id);
        }
    }

    /// Shows the next hang if the driver has acknowledged the previous one.
    fn show_next_hang(&mut self) {
        let bound = self.bound;
        if !INTR::SCHED_ERROR.is_set(self.intr) && self.hangs.next(|hang| bound & bit(hang.channel) != 0) {
            self.sched_error(sched_error::CTXSW_TIMEOUT);
        }
    }

    /// Returns the state of an engine for this guest, and a flag that is true if a context switch on the engine has
    /// hung.
    fn on_engine(&self, engine: u32, cx: &mut Cx) -> (EngineStatus, bool) {
        match self.hangs.on(engine) {
            Some(channel) => (EngineStatus { channel: Some(channel), busy: true }, true),
            None => (cx.backend.engine_status(engine), false),
        }
    }

    fn engine_status(&self, engine: u32, cx: &mut Cx) -> u32 {
        let (status, switching) = self.on_engine(engine, cx);
        let (busy, switching) = (status.busy.into(), switching.into());
        ENGINE_STATUS::BUSY.encode(busy)
            | ENGINE_STATUS::BUSY_2.encode(busy)
            | ENGINE_STATUS::LOAD.encode(switching)
            | ENGINE_STATUS::SWITCHING.encode(switching)
            | ENGINE_STATUS::CHANNEL.encode(status.channel.map_or(0, |id| id.0.into()))
    }

    /// Returns the guest address of the instance block of the channel on an engine.
    fn instance_on(&self, engine: u32, cx: &mut Cx) -> Option<Place> {
        let (status, _) = self.on_engine(engine, cx);
        let id = status.channel.filter(|&id| self.is_bound(id))?;
        let word = cx.storage.get(CHANNEL::at(id.0.into()));
        Place::new(Target::from_bits(CHANNEL::TARGET.get(word)), page_address(CHANNEL::ADDRESS.get(word)))
    }

    fn is_bound(&self, id: VirtualChannelId) -> bool {
        u32::from(id.0) < CHANNELS && self.bound & bit(id) != 0
    }

    fn block(&mut self, engines: u32, cx: &mut Cx) {
        let (stopped, allowed) = (engines & !self.blocked, self.blocked & !engines);
        self.blocked = engines;
        if stopped != 0 {
            cx.backend.block_engines(stopped, true);
        }
        if allowed != 0 {
            cx.backend.block_engines(allowed, false);
        }
    }
}

/// Returns the channel with number `index`, if it exists.
fn channel(index: u32) -> Option<VirtualChannelId> {
    u8::try_from(index).ok().filter(|_| index < CHANNELS).map(VirtualChannelId)
}

fn bit(id: VirtualChannelId) -> u128 {
    1u128.wrapping_shl(u32::from(id.0))
}
