//! An engine as seen by the host unit: the engine model, and the loaded context.

use crate::clock::CardNs;
use crate::cx::Cx;
use crate::faults::{EngineId, FaultKind};
use crate::fifo::fault::Client;
use nvspec::addr::{GpuVa, Target};
use nvspec::fifo::engine;
use nvspec::instance::context;
use nvspec::mmu::fault::{hub_client, unit};
use nvspec::regs::pmc;
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use simgpu_engines::engines::{ContextState, Engine, EngineCx, EngineError, Progress, Work};
use simgpu_memory::memory::BusAddr;
use simgpu_memory::mmu::{Access, AddressSpace, MmuFault};

/// Amount of work in bytes after which other users of the card may run.
const PIECE_BYTES: u64 = 256 << 10;

/// Operating state of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Condition {
    /// The engine's firmware is not running.
    Down,
    /// The engine accepts work.
    Good,
    /// The engine waits for the driver to handle an illegal method, bad data, or a warp error.
    Trapped,
    /// The engine stopped on an MMU fault, and stays idle until PMC resets it, even if the driver acknowledges the
    /// fault. nouveau resets every engine that faulted (`gf100_fifo_recover_work`).
    Failed,
    /// The engine hangs until it is reset. Only fault injection causes this.
    Hung,
}

/// The context that is loaded in an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resident {
    /// The channel if the host unit loaded the context, or `None` if the driver loaded it through FECS.
    pub(crate) channel: Option<u8>,
    pub(crate) instance: (Target, u64),
    pub(crate) space: AddressSpace,
    /// GPU virtual address of the context image.
    pub(crate) image: GpuVa,
}

pub(crate) struct Slot {
    pub(crate) id: EngineId,
    engine: Box<dyn Engine>,
    pub(crate) condition: Condition,
    /// The channel whose fault stopped the engine. The current context may belong to another channel.
    pub(crate) stopped_by: Option<u8>,
    pub(crate) resident: Option<Resident>,
    /// Set to corrupt a byte of the current work's output.
    corrupt: bool,
    /// Set if the engine's channel must be switched out while its work is in progress.
    pub(crate) switch: Option<Switch>,
    /// Card time at which completed work ends according to the time model. Until then, the card reports the work as in
    /// progress.
    pub(super) until: CardNs,
}

/// A context switch that waits for work to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Switch {
    /// The switch was requested at this time.
    Since(CardNs),
    /// The switch has timed out, and the driver has been notified.
    Reported,
}

/// Cost and side effects of an engine call.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Done {
    /// Duration in ns according to the time model, including injected delays.
    pub(crate) ns: u64,
    /// Set if a non-stall interrupt is due.
    pub(crate) non_stall: bool,
    /// Set if a semaphore was released.
    pub(crate) released: bool,
}

impl Slot {
    pub(crate) fn new(id: EngineId, engine: Box<dyn Engine>) -> Self {
        Self {
            id,
            engine,
            condition: Condition::Down,
            stopped_by: None,
            resident: None,
            corrupt: false,
            switch: None,
            until: 0,
        }
    }

    /// Returns the engine's number in SET_OBJECT and the runlist registers.
    pub(crate) fn number(&self) -> u32 {
        number(self.id)
    }

    /// Returns the engine's MMU fault unit.
    pub(crate) fn fault_unit(&self) -> u32 {
        match self.id {
            EngineId::Graph => unit::GR,
            EngineId::Copy0 => unit::CE0,
            EngineId::Copy1 => unit::CE1,
        }
    }

    /// Returns the fault client for the engine's own accesses.
    pub(crate) fn fault_client(&self) -> Client {
        Client::Hub(match self.id {
            EngineId::Graph => hub_client::DISPATCH,
            EngineId::Copy0 => hub_client::CE0,
            EngineId::Copy1 => hub_client::CE1,
        })
    }

    /// Returns the fault client for loading and saving the engine's contexts.
    pub(crate) fn context_client(&self) -> Client {
        Client::Hub(match self.id {
            EngineId::Graph => hub_client::CTXCTL,
            EngineId::Copy0 => hub_client::CE0,
            EngineId::Copy1 => hub_client::CE1,
        })
    }

    /// Returns the engine's bit in PMC's unit enable register.
    pub(crate) fn enable_bit(&self) -> u32 {
        match self.id {
            EngineId::Graph => pmc::ENABLE::PGRAPH.mask(),
            EngineId::Copy0 => pmc::ENABLE::CE0.mask(),
            EngineId::Copy1 => pmc::ENABLE::CE1.mask(),
        }
    }

    /// Returns true if the engine supports objects of the class.
    pub(crate) fn class_supported(&self, class: u32) -> bool {
        self.engine.class_supported(class)
    }

    pub(crate) fn pending(&self) -> bool {
        self.engine.pending()
    }

    /// Returns true if the engine is busy at card time `now`: work is pending, or completed work has not yet ended
    /// according to the time model.
    pub(crate) fn works(&self, now: CardNs) -> bool {
        self.pending() || self.until > now
    }

    /// Records that the engine's firmware is running.
    pub(crate) fn start(&mut self) {
        if self.condition == Condition::Down {
            self.condition = Condition::Good;
        }
    }

    /// Restores the power-on state: no firmware, no context, and no work.
    pub(crate) fn reset(&mut self) {
        let Self { id: _, engine, condition, stopped_by, resident, corrupt, switch, until } = self;
        engine.reset();
        *condition = Condition::Down;
        *stopped_by = None;
        *resident = None;
        *corrupt = false;
        *switch = None;
        *until = 0;
    }

    /// Resumes the engine after the driver has handled its trap.
    pub(crate) fn resume(&mut self) {
        if self.condition == Condition::Trapped {
            self.condition = Condition::Good;
        }
    }

    /// Makes the context of the channel with the instance block at `instance` current. Returns true if the context
    /// changed.
    pub(crate) fn make_current(
        &mut self,
        channel: Option<u8>,
        instance: (Target, u64),
        cx: &Cx,
    ) -> Result<bool, MmuFault> {
        if let Some(resident) = &mut self.resident
            && resident.instance == instance
        {
            resident.channel = channel.or(resident.channel);
            return Ok(false);
        }
        self.evict(cx)?;
        let space = AddressSpace::from_instance(&cx.memory, instance)?;
        let image = self.context_pointer(instance, cx)?;
        let access = Access::PRIVILEGED;
        // The whole image must be accessible, because a real card saves all of it.
        let last = image.offset(self.image_bytes(cx) - 4);
        cx.mmu.translate(&cx.memory, &space, last, true, access)?;
        cx.mmu.translate(&cx.memory, &space, image, true, access)?;
        self.engine.load(read_state(&space, image, self.state_words_max(), cx)?);
        self.resident = Some(Resident { channel, instance, space, image });
        Ok(true)
    }

    /// Saves the engine's context, if any. If saving fails, the context remains resident, but its state is lost.
    pub(crate) fn evict(&mut self, cx: &Cx) -> Result<(), MmuFault> {
        if let Some(resident) = self.resident {
            let state = self.engine.save();
            write_state(&state, &resident.space, resident.image, self.state_words_max(), cx)?;
            self.resident = None;
        }
        Ok(())
    }

    /// Drops the context and its work.
    pub(crate) fn abandon(&mut self) {
        self.engine.reset();
        self.resident = None;
        self.corrupt = false;
        self.until = 0;
    }

    /// Drops only the work in progress.
    pub(crate) fn stop(&mut self) {
        let state = self.engine.save();
        self.engine.load(ContextState::from_words(&state.to_words()));
    }

    fn image_bytes(&self, cx: &Cx) -> u64 {
        match self.id {
            EngineId::Graph => u64::from(cx.chip.graph_context_bytes),
            // Context size of the copy engines' firmware.
            EngineId::Copy0 | EngineId::Copy1 => COPY_CONTEXT_BYTES,
        }
    }

    fn state_words_max(&self) -> usize {
        match self.id {
            EngineId::Graph => STATE_WORDS_MAX,
            EngineId::Copy0 | EngineId::Copy1 => COPY_STATE_WORDS_MAX,
        }
    }

    fn context_pointer(&self, instance: (Target, u64), cx: &Cx) -> Result<GpuVa, MmuFault> {
        let unbound = MmuFault { reason: nvspec::mmu::fault::UNBOUND_INST, va: GpuVa(0), write: false };
        let block = BusAddr::from_target(instance.0, instance.1).ok_or(unbound)?;
        let at = match self.id {
            EngineId::Graph => context::GR,
            EngineId::Copy0 => context::CE0,
            EngineId::Copy1 => context::CE1,
        };
        let word = |offset| {
            cx.memory.read32(block.offset(offset)).map_err(|error| {
                cx.memory.count_lost(error);
                unbound
            })
        };
        let (low, high) = (word(at)?, word(at + 4)?);
        let va = GpuVa(u64::from(high & 0xff) << 32 | u64::from(low & !0xfff));
        // GUESS: FECS faults on a channel without a context as on an unmapped image. nouveau clears the pointer when it
        // closes a channel, and sends no methods afterwards.
        if low & context::VALID == 0 {
            return Err(MmuFault { reason: nvspec::mmu::fault::PTE, va, write: false });
        }
        Ok(va)
    }

    /// Returns the value of the engine's status register at card time `now`.
    pub(crate) fn status(&self, now: CardNs) -> u32 {
        use nvspec::regs::pfifo::ENGINE_STATUS::{BUSY, BUSY_2, CHANNEL, LOAD, SWITCHING};
        let channel = self.stopped_by.or(self.resident.and_then(|resident| resident.channel)).unwrap_or(0);
        let busy = self.works(now) || matches!(self.condition, Condition::Failed | Condition::Trapped);
        let switching = u32::from(self.switch.is_some());
        if busy {
            BUSY.encode(1)
                | BUSY_2.encode(1)
                | CHANNEL.encode(u32::from(channel))
                | LOAD.encode(switching)
                | SWITCHING.encode(switching)
        } else {
            0
        }
    }

    /// Executes a method in the current context. Does nothing without a context.
    pub(crate) fn method(
        &mut self,
        subchannel: u8,
        class: u32,
        method: u32,
        data: u32,
        now_ns: u64,
        cx: &mut Cx,
    ) -> Result<Done, EngineError> {
        let Some(resident) = self.resident else { return Ok(Done::default()) };
        let mut work = Work::default();
        let mut engine_cx =
            EngineCx { memory: &cx.memory, mmu: &cx.mmu, space: &resident.space, now_ns, work: &mut work };
        let result = self.engine.method(subchannel, class, method, data, &mut engine_cx);
        let done = self.charge(work, cx);
        result.map(|()| done)
    }

    /// Performs one step of the pending work.
    pub(crate) fn step(&mut self, now_ns: u64, cx: &mut Cx) -> Result<(Progress, Done), EngineError> {
        let Some(resident) = self.resident else {
            self.engine.reset();
            return Ok((Progress::Done, Done::default()));
        };
        let mut work = Work::default();
        let mut engine_cx =
            EngineCx { memory: &cx.memory, mmu: &cx.mmu, space: &resident.space, now_ns, work: &mut work };
        let result = self.engine.step(&mut engine_cx, PIECE_BYTES);
        // A kernel reports its writes only at its end.
        let later = work.written.is_none() && matches!(result, Ok(Progress::More | Progress::Elsewhere));
        if !later && std::mem::take(&mut self.corrupt) {
            self.spoil(&resident.space, work, cx);
        }
        let done = self.charge(work, cx);
        result.map(|progress| (progress, done))
    }

    fn charge(&mut self, work: Work, cx: &mut Cx) -> Done {
        let mut ns = cx.time.map_or(0, |model| model.cost_ns(self.id, &work));
        cx.copied.bytes += work.bytes;
        cx.copied.host_ns += work.host_ns;
        for _ in 0..work.launches {
            for fault in cx.faults.on_launch(self.id) {
                match fault {
                    FaultKind::Hang => self.condition = Condition::Hung,
                    FaultKind::Delay { ns: more } => ns = ns.saturating_add(more),
                    FaultKind::Corrupt => self.corrupt = true,
                    FaultKind::DropInterrupt => {}
                    FaultKind::Vanish => cx.apertures.vanish(),
                }
            }
        }
        let non_stall = work.non_stall && !cx.faults.drops_interrupt(self.id);
        Done { ns, non_stall, released: work.releases > 0 }
    }

    /// Inverts a byte of the last operation's output.
    fn spoil(&self, space: &AddressSpace, work: Work, cx: &Cx) {
        let Some(va) = work.written else { return };
        let mut byte = [0];
        let mut session = cx.mmu.session(&cx.memory, space, Access::USER);
        if session.read(va, &mut byte).is_ok() && session.write(va, &[!byte[0]]).is_ok() {
            tracing::debug!(engine = ?self.id, %va, "a copied byte was inverted");
        }
    }
}

/// Saved state of an engine without a context.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SavedSlot {
    condition: Condition,
    stopped_by: Option<u8>,
}

impl Slot {
    pub(crate) fn save(&self) -> SavedSlot {
        let Self {
            id: _,
            // The engine has no state without a context.
            engine: _,
            condition,
            stopped_by,
            resident: _,
            corrupt: _,
            switch: _,
            // All of the engine's work has ended.
            until: _,
        } = self;
        SavedSlot { condition: *condition, stopped_by: *stopped_by }
    }

    /// Restores the state to a newly created engine.
    pub(crate) fn restore(&mut self, saved: &SavedSlot) -> Result<(), Invalid> {
        let SavedSlot { condition, stopped_by } = *saved;
        let rests = !matches!(condition, Condition::Failed | Condition::Hung);
        Invalid::unless(rests, || format!("engine {} has stopped, but has no context", self.number()))?;
        (self.condition, self.stopped_by) = (condition, stopped_by);
        Ok(())
    }
}

/// Returns the engine's number in SET_OBJECT and the runlist registers.
pub(crate) const fn number(id: EngineId) -> u32 {
    match id {
        EngineId::Graph => engine::GR,
        EngineId::Copy0 => engine::CE0,
        EngineId::Copy1 => engine::CE1,
    }
}

/// Returns the engine with this number, if it is modelled.
pub(crate) fn by_number(number: u32) -> Option<EngineId> {
    match number {
        engine::GR => Some(EngineId::Graph),
        engine::CE0 => Some(EngineId::Copy0),
        engine::CE1 => Some(EngineId::Copy1),
        _ => None,
    }
}

/// Size of the part of a copy engine's context that the model uses, in bytes.
const COPY_CONTEXT_BYTES: u64 = 0x100;

/// Offset of the method state in a context image. The driver's data before this offset is preserved.
const STATE_OFFSET: u64 = 0x10;
/// Magic number in the upper half of the method state's header. The lower half is the number of words.
const STATE_MAGIC: u32 = 0x5347_0000;
/// Maximum number of words of method state.
const STATE_WORDS_MAX: usize = 1024;
/// Maximum number of words of method state in a copy engine's smaller image.
const COPY_STATE_WORDS_MAX: usize = ((COPY_CONTEXT_BYTES - STATE_OFFSET) / 4 - 1) as usize;

fn read_state(space: &AddressSpace, image: GpuVa, max: usize, cx: &Cx) -> Result<ContextState, MmuFault> {
    let mut session = cx.mmu.session(&cx.memory, space, Access::PRIVILEGED);
    let magic = session.read32(image.offset(STATE_OFFSET))?;
    let count = (magic & 0xffff) as usize;
    if magic & 0xffff_0000 != STATE_MAGIC || count > max {
        return Ok(ContextState::default());
    }
    let mut words = [0; STATE_WORDS_MAX];
    for (index, word) in words.iter_mut().enumerate().take(count) {
        *word = session.read32(image.offset(STATE_OFFSET + 4 + 4 * index as u64))?;
    }
    Ok(ContextState::from_words(&words[..count]))
}

fn write_state(state: &ContextState, space: &AddressSpace, image: GpuVa, max: usize, cx: &Cx) -> Result<(), MmuFault> {
    let words = state.to_words();
    assert!(words.len() <= max, "method state exceeds the context image");
    let mut session = cx.mmu.session(&cx.memory, space, Access::PRIVILEGED);
    session.write32(image.offset(STATE_OFFSET), STATE_MAGIC | words.len() as u32)?;
    for (index, word) in words.iter().enumerate() {
        session.write32(image.offset(STATE_OFFSET + 4 + 4 * index as u64), *word)?;
    }
    Ok(())
}
