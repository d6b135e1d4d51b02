//! What each operation means for the vGPU and the card.
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

use super::super::backend::VmBackend;
use super::super::device::Core;
use devmodel::backend::{Aperture, Backend};
use nvspec::addr::{GuestVramAddr, Place};
use nvspec::fifo::VirtualChannelId;
use nvspec::regs::pfifo::{CHANNEL, CHANNEL_STATE};
use owner::balance::Hint;
use owner::holdings::Holdings;
use owner::segments::Wanted;
use pv::abi::Status;
use pv::{Begun, Op, Question};
use vram::GuestAddr;
use vram::victim::PRIORITY_DEFAULT;

/// Bytes that are filled or copied at a time.
const PIECE: usize = 64 << 10;

/// Bytes that are handled while the VM's lock is held. Others have the VM then, before the batch goes on.
const BUDGET: u64 = 256 << 10;
/// Bytes that an operation counts for that handles none.
const OPERATION: u64 = 1 << 10;

type Done = Result<u64, Status>;

/// State of the operations of a batch that are done under one hold of the VM's lock.
struct Context {
    /// How the card's memory is held, from the first question on.
    holdings: Option<Holdings>,
    /// Bytes of [`BUDGET`] that are left.
    left: u64,
    /// Bytes of the operation whose turn it is that have been handled, if it has begun and goes on later.
    begun: Option<u64>,
}

impl Context {
    fn spend(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(bytes);
    }
}

/// Bytes that an operation counts for, but for those that it fills or copies.
fn cost(op: &Op<'_>) -> u64 {
    let entries = |count: u64| count.saturating_mul(nvspec::mmu::ENTRY_BYTES).max(OPERATION);
    match op {
        Op::TableCreate { kind, .. } => kind.bytes(),
        Op::EntriesRun { count, .. } | Op::EntriesZero { count, .. } => entries((*count).into()),
        Op::EntriesList { entries: list, .. } => entries(list.len() as u64),
        // How much these have to do depends on what was done before.
        Op::TableDestroy { .. }
        | Op::DirectoryBind { .. }
        | Op::Flush { .. }
        | Op::ChannelBind { .. }
        | Op::ChannelDestroy { .. }
        | Op::ShareAttach { .. }
        | Op::ShareDetach { .. } => BUDGET,
        _ => OPERATION,
    }
}

/// Outcome of one hold of the VM's lock for a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Executed {
    /// The batch has ended.
    Whole,
    /// It goes on at once.
    Part,
    /// It goes on when the card has memory for the channel that its current operation names.
    AwaitsBind,
}

/// The channel whose address space an operation is about: it is to be bound first.
fn channel_of(op: &Op<'_>) -> Option<VirtualChannelId> {
    match op {
        Op::ShareAttach { channel, .. } | Op::ShareDetach { channel, .. } => VirtualChannelId::new(*channel),
        _ => None,
    }
}

impl Core {
    /// Does as much of a batch as one hold of the VM's lock is good for. `begun`: bytes of its current operation that were
    /// handled before.
    pub(super) fn execute(&mut self, batch: &mut Begun, begun: &mut Option<u64>) -> Executed {
        let accepted = self.backend.pv.as_ref().map_or(0, |pv| pv.accepted);
        let mut context = Context { holdings: None, left: BUDGET, begun: begun.take() };
        let executed = loop {
            let Some(op) = batch.current(accepted) else { break Executed::Whole };
            if context.left == 0 || self.backend.moves_wait() {
                break Executed::Part;
            }
            let channel = op.as_ref().ok().and_then(channel_of);
            if channel.is_some_and(|channel| self.backend.pending.is_bind(channel)) {
                break Executed::AwaitsBind;
            }
            let done = op.and_then(|op| {
                let done = self.operate(op, &mut context);
                if let Err(status) = done {
                    tracing::debug!(vm = %self.backend.vm, ?op, %status, "a guest's operation is refused");
                }
                done
            });
            if context.begun.is_none() {
                batch.answer(done);
            }
        };
        *begun = context.begun;
        self.backend.tables_written();
        // What comes of an operation is there before its batch is answered.
        if self.backend.moves_wait() { Executed::Part } else { executed }
    }

    fn operate(&mut self, op: Op<'_>, context: &mut Context) -> Done {
        let Self { gpu, backend, .. } = self;
        context.spend(cost(&op));
        match op {
            Op::TableCreate { table, kind } => backend.tables(|tables| tables.create(table, kind)),
            Op::TableDestroy { table } => backend.tables(|tables| tables.destroy(table)),
            Op::DirectorySet { directory, index, small, large } => {
                backend.count_entries(1);
                backend.tables(|tables| tables.set(directory, index, small, large))
            }
            Op::EntriesRun { table, first, count, entry, step } => {
                backend.count_entries(count);
                backend.tables(|tables| tables.run(table, first, count, entry, step))
            }
            Op::EntriesList { table, first, entries } => {
                backend.count_entries(u32::try_from(entries.len()).unwrap_or(u32::MAX));
                backend.tables(|tables| tables.list(table, first, entries))
            }
            Op::EntriesZero { table, first, count } => {
                backend.count_entries(count);
                backend.tables(|tables| tables.zero(table, first, count))
            }
            Op::DirectoryBind { directory, instance } => backend.bind_directory(directory, instance),
            Op::Flush { directory } => backend.flush_pv(directory),
            Op::ChannelCreate { channel } => backend.create_channel(channel),
            Op::ChannelBind { channel, instance } => {
                let channel = backend.created(channel)?;
                backend.within_vram(instance, nvspec::instance::INSTANCE_BYTES)?;
                let page = u32::try_from(instance.0 >> 12).map_err(|_| Status::Range)?;
                let value = CHANNEL::VALID.mask() | CHANNEL::POLL_USERD.mask() | CHANNEL::ADDRESS.of(page);
                backend.tables_written();
                gpu.bar0_write32(CHANNEL::at(channel.0.into()), value, backend);
                let bound = backend.bound.contains_key(&channel) || backend.pending.is_bind(channel);
                if bound { Ok(0) } else { Err(Status::Failed) }
            }
            Op::ChannelEnable { channel } => {
                let channel = backend.created(channel)?;
                let value = CHANNEL_STATE::ENGINES.mask() | CHANNEL_STATE::ENABLED.mask();
                gpu.bar0_write32(CHANNEL_STATE::at(channel.0.into()), value, backend);
                Ok(0)
            }
            Op::ChannelDisable { channel } => {
                let channel = backend.created(channel)?;
                gpu.bar0_write32(CHANNEL_STATE::at(channel.0.into()), CHANNEL_STATE::ENGINES.mask(), backend);
                Ok(0)
            }
            Op::ChannelDestroy { channel } => {
                let channel = backend.created(channel)?;
                gpu.bar0_write32(CHANNEL::at(channel.0.into()), 0, backend);
                if let Some(pv) = &mut backend.pv {
                    pv.channels.remove(&channel.0);
                }
                Ok(0)
            }
            Op::Runlist { channels } => {
                let wanted: Option<Vec<_>> =
                    channels.iter().map(|channel| VirtualChannelId::new(channel.get())).collect();
                backend.set_runlist(&wanted.ok_or(Status::Range)?);
                Ok(0)
            }
            Op::MemoryFill { address, bytes, value } => backend.fill_vram(address, bytes, value, context),
            Op::MemoryCopy { to, from, bytes } => backend.copy_vram(to, from, bytes, context),
            Op::BufferPriority { address, bytes, priority } => backend.set_priority(address, bytes, priority),
            Op::ShareGet { key, bytes, create, exclusive, abroad, mode } => {
                let pv = backend.pv.as_ref().ok_or(Status::Unsupported)?;
                let wanted = Wanted { key, bytes, create, exclusive, abroad, mode };
                backend.host.lock().share_get(&pv.party, wanted).map(u64::from)
            }
            Op::ShareAttach { segment, channel, read_only } => {
                backend.attach(segment, VirtualChannelId::new(channel).ok_or(Status::NoObject)?, read_only)
            }
            Op::ShareDetach { segment, channel } => {
                backend.detach(segment, VirtualChannelId::new(channel).ok_or(Status::NoObject)?).map(|()| 0)
            }
            Op::ShareControl { segment, control } => {
                let pv = backend.pv.as_ref().ok_or(Status::Unsupported)?;
                backend.host.lock().share_control(&pv.party, segment, control)
            }
            Op::Query { question } => backend.answer(question, context),
        }
    }

    /// Takes the interface back to where it was at first, and off the card what was made by it.
    pub(crate) fn reset_pv(&mut self) {
        let Self { gpu, backend, .. } = self;
        let Some(pv) = &backend.pv else { return };
        for channel in pv.channels.clone() {
            gpu.bar0_write32(CHANNEL::at(channel.into()), 0, backend);
        }
        backend.reset_pv();
        // Address spaces that other channels have of the tables that were.
        if let Err(error) = backend.flush_spaces(None) {
            tracing::error!(vm = %backend.vm, %error, "the card may keep translations of tables that are gone");
        }
        self.signal_pv();
    }

    /// The function's interrupt is as the interface has it now.
    pub(crate) fn signal_pv(&mut self) {
        let asserted = self.backend.pv.as_ref().is_some_and(|pv| pv.interrupt);
        self.gpu.set_beside(asserted, &mut self.backend);
    }
}

impl VmBackend {
    fn tables(&mut self, act: impl FnOnce(&mut pv::Tables) -> Result<(), Status>) -> Done {
        let pv = self.pv.as_mut().ok_or(Status::Unsupported)?;
        act(&mut pv.tables).map(|()| 0)
    }

    fn count_entries(&mut self, count: u32) {
        if let Some(pv) = &mut self.pv {
            pv.counts.entries = pv.counts.entries.saturating_add(count.into());
        }
    }

    /// Whoever has read the tables is told which of their pages have changed.
    pub(crate) fn tables_written(&mut self) {
        let Self { pv, spaces, .. } = self;
        if let Some(pv) = pv {
            pv.tables.take_written(|at, bytes| spaces.written(at, bytes));
        }
    }

    fn within_vram(&self, address: GuestVramAddr, bytes: u64) -> Result<(), Status> {
        let end = address.0.checked_add(bytes).ok_or(Status::Range)?;
        if end <= self.vram_bytes { Ok(()) } else { Err(Status::Range) }
    }

    fn bind_directory(&mut self, directory: Option<pv::TableId>, instance: GuestVramAddr) -> Done {
        self.within_vram(instance, nvspec::instance::INSTANCE_BYTES)?;
        self.tables(|tables| match directory {
            Some(directory) => tables.bind(directory, instance),
            None => {
                tables.unbind(instance);
                Ok(())
            }
        })?;
        self.tables_written();
        let instance = Some(Place::Vram(instance));
        for (aperture, tlb) in
            [(Aperture::Bar1, &self.bar1), (Aperture::Bar3, &self.bar3)].map(|(a, t)| (a, t.instance()))
        {
            if tlb == instance {
                self.bind_aperture(aperture, instance);
            }
        }
        Ok(0)
    }

    fn flush_pv(&mut self, directory: Option<pv::TableId>) -> Done {
        let pv = self.pv.as_ref().ok_or(Status::Unsupported)?;
        let directory = directory.map(|directory| pv.tables.address(directory)).transpose()?;
        self.tables_written();
        match self.flush_spaces(directory.map(Place::Vram)) {
            Ok(()) => Ok(0),
            Err(error) => {
                tracing::error!(vm = %self.vm, %error, "a guest's flush did not reach the card");
                Err(Status::Failed)
            }
        }
    }

    fn create_channel(&mut self, channel: u32) -> Done {
        let channel = VirtualChannelId::new(channel).ok_or(Status::Range)?;
        let pv = self.pv.as_mut().ok_or(Status::Unsupported)?;
        if pv.channels.contains(&channel.0) || self.instances.contains_key(&channel) {
            return Err(Status::Exists);
        }
        let others = self.instances.keys().filter(|bound| !pv.channels.contains(&bound.0)).count();
        if pv.channels.len().saturating_add(others) >= pv.channel_cap as usize {
            return Err(Status::Limit);
        }
        pv.channels.insert(channel.0);
        Ok(0)
    }

    /// A channel that the guest has set aside.
    fn created(&self, channel: u32) -> Result<VirtualChannelId, Status> {
        let channel = VirtualChannelId::new(channel).ok_or(Status::NoObject)?;
        let pv = self.pv.as_ref().ok_or(Status::Unsupported)?;
        pv.channels.contains(&channel.0).then_some(channel).ok_or(Status::NoObject)
    }

    fn fill_vram(&mut self, address: GuestVramAddr, bytes: u64, value: u32, context: &mut Context) -> Done {
        self.within_vram(address, bytes)?;
        let piece = value.to_le_bytes().repeat(PIECE / 4);
        self.in_pieces(bytes, context, |this, offset, len| {
            this.guest_write(address.offset(offset), piece.get(..len).unwrap_or_default()).is_ok()
        })
    }

    fn copy_vram(&mut self, to: GuestVramAddr, from: GuestVramAddr, bytes: u64, context: &mut Context) -> Done {
        self.within_vram(to, bytes)?;
        self.within_vram(from, bytes)?;
        let mut piece = vec![0; PIECE];
        self.in_pieces(bytes, context, |this, offset, len| {
            let Some(data) = piece.get_mut(..len) else { return false };
            this.guest_read(from.offset(offset), data).is_ok() && this.guest_write(to.offset(offset), data).is_ok()
        })
    }

    /// Calls `each` with offset and length of each piece, as far as the budget goes. What it cannot do is for want of memory:
    /// the range is the guest's.
    fn in_pieces(
        &mut self,
        bytes: u64,
        context: &mut Context,
        mut each: impl FnMut(&mut Self, u64, usize) -> bool,
    ) -> Done {
        let mut done = context.begun.take().unwrap_or(0);
        while done < bytes {
            if context.left == 0 {
                context.begun = Some(done);
                return Ok(0);
            }
            let len = usize::try_from(bytes.saturating_sub(done)).unwrap_or(PIECE).min(PIECE);
            context.spend(len as u64);
            if !each(self, done, len) {
                return Err(Status::Limit);
            }
            done = done.saturating_add(len as u64);
        }
        Ok(0)
    }

    fn set_priority(&mut self, address: GuestVramAddr, bytes: u64, priority: i32) -> Done {
        self.within_vram(address, bytes)?;
        if bytes == 0 {
            return Err(Status::Range);
        }
        let priority = i32::from(PRIORITY_DEFAULT).saturating_add(priority).max(0);
        let priority = u8::try_from(priority).unwrap_or(u8::MAX);
        let hint = Hint::Priority(priority);
        self.host.lock().hint(self.vm, GuestAddr(address.0), bytes, hint).map_err(|_| Status::Range)?;
        Ok(0)
    }

    fn answer(&self, question: Question, context: &mut Context) -> Done {
        let holdings = context.holdings.get_or_insert_with(|| self.host.lock().holdings());
        let chunk = holdings.summary.chunk_bytes;
        let bytes = |chunks: u32| u64::from(chunks).saturating_mul(chunk);
        let own = holdings.summary.vms.get(&self.vm).ok_or(Status::Failed)?;
        Ok(match question {
            Question::Vram => self.vram_bytes,
            Question::Quota if own.limits.quota >= own.advertised => u64::MAX,
            Question::Quota => bytes(own.limits.quota),
            Question::Guarantee => bytes(own.guarantee),
            Question::Placed => bytes(own.placed),
            Question::Host => bytes(own.host),
            Question::Entitlement => holdings.entitled.get(&self.vm).map_or(0, |entitled| bytes(entitled.floor)),
            Question::Free => bytes(holdings.summary.free.saturating_add(holdings.summary.to_scrub)),
            Question::Pressure if own.host != 0 => 2,
            Question::Pressure => holdings.summary.vms.values().any(|vm| vm.host != 0).into(),
            Question::TimeShare => self.host.lock().time_share(self.vm),
            Question::TableBytesLeft => self.pv.as_ref().map_or(0, |pv| pv.tables.bytes_left()),
        })
    }
}
