//! Executes single operations on the vGPU and the card.
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

use crate::backend::{Done, VmBackend};
use crate::device::Core;
use crate::pv::Interface;
use card_manager::holdings::Holdings;
use card_manager::segments::Wanted;
use nvspec::addr::GuestVramAddr;
use nvspec::fifo::VirtualChannelId;
use nvspec::regs::pfifo::{CHANNEL, CHANNEL_STATE};
use pv::abi::Status;
use pv::{Begun, Op};

/// Maximum number of bytes that a fill or copy processes per step.
const BYTES_PER_STEP: usize = 64 << 10;

/// Cost in bytes after which the VM's lock is released, so that other threads can acquire it.
const BUDGET: u64 = 256 << 10;
/// Cost of an operation in bytes, excluding the bytes that it fills or copies.
const OPERATION: u64 = 1 << 10;

/// State of a batch within a critical section of the VM's lock.
struct Context {
    /// Card memory usage, cached by the first query.
    holdings: Option<Holdings>,
    /// Remaining part of [`BUDGET`], in bytes.
    left: u64,
    /// Number of bytes of the current operation that have been processed, if it was interrupted and must continue.
    begun: Option<u64>,
}

impl Context {
    fn spend(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(bytes);
    }
}

/// Returns the cost of an operation in bytes, excluding the bytes that it fills or copies.
fn cost(op: &Op<'_>) -> u64 {
    let entries = |count: u64| count.saturating_mul(nvspec::mmu::ENTRY_BYTES).max(OPERATION);
    match op {
        Op::TableCreate { kind, .. } => kind.bytes(),
        Op::EntriesRun { count, .. } | Op::EntriesZero { count, .. } => entries((*count).into()),
        Op::EntriesList { entries: list, .. } => entries(list.len() as u64),
        // The cost of these operations depends on earlier operations, so assume the entire budget.
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

/// Outcome of executing a batch in one critical section of the VM's lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Executed {
    /// The batch is complete.
    Whole,
    /// The batch can continue immediately.
    Part,
    /// The batch can continue when the card has memory for the channel of the current operation.
    AwaitsBind,
}

/// Returns the channel in whose address space an operation takes place. This channel must be bound first.
fn channel_of(op: &Op<'_>) -> Option<VirtualChannelId> {
    match op {
        Op::ShareAttach { channel, .. } | Op::ShareDetach { channel, .. } => VirtualChannelId::new(*channel),
        _ => None,
    }
}

impl Core {
    /// Executes as much of a batch as one critical section of the VM's lock permits. `begun` is the number of bytes of
    /// the current operation that have been processed.
    pub(super) fn execute(&mut self, batch: &mut Begun, begun: &mut Option<u64>) -> Executed {
        let accepted = self.backend.pv().map_or(0, Interface::accepted);
        let mut context = Context { holdings: None, left: BUDGET, begun: begun.take() };
        let executed = loop {
            let Some(op) = batch.current(accepted) else { break Executed::Whole };
            if context.left == 0 || self.backend.moves_wait() {
                break Executed::Part;
            }
            let channel = op.as_ref().ok().and_then(channel_of);
            if channel.is_some_and(|channel| self.backend.awaits_bind(channel)) {
                break Executed::AwaitsBind;
            }
            let done = op.and_then(|op| {
                let done = self.operate(op, &mut context);
                if let Err(status) = done {
                    tracing::debug!(vm = %self.backend.vm(), ?op, %status, "rejected a guest's operation");
                }
                done
            });
            if context.begun.is_none() {
                batch.answer(done);
            }
        };
        *begun = context.begun;
        self.backend.tables_written();
        // All effects of a batch's operations must be complete before the response to the batch is sent.
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
                let value = CHANNEL::VALID.mask() | CHANNEL::POLL_USERD.mask() | CHANNEL::ADDRESS.encode(page);
                backend.tables_written();
                gpu.bar0_write32(CHANNEL::at(channel.0.into()), value, backend);
                if backend.is_bound(channel) { Ok(0) } else { Err(Status::Failed) }
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
                if let Some(pv) = backend.pv_mut() {
                    pv.forget_channel(channel);
                }
                Ok(0)
            }
            Op::Runlist { channels } => {
                let wanted: Option<Vec<_>> =
                    channels.iter().map(|channel| VirtualChannelId::new(channel.get())).collect();
                backend.set_runlist(&wanted.ok_or(Status::Range)?);
                Ok(0)
            }
            Op::MemoryFill { address, bytes, value } => fill_vram(backend, address, bytes, value, context),
            Op::MemoryCopy { to, from, bytes } => copy_vram(backend, to, from, bytes, context),
            Op::BufferPriority { address, bytes, priority } => backend.set_priority(address, bytes, priority),
            Op::ShareGet { key, bytes, create, exclusive, abroad, mode } => {
                backend.share_get(Wanted { key, bytes, create, exclusive, abroad, mode })
            }
            Op::ShareAttach { segment, channel, read_only } => {
                backend.attach(segment, VirtualChannelId::new(channel).ok_or(Status::NoObject)?, read_only)
            }
            Op::ShareDetach { segment, channel } => {
                backend.detach(segment, VirtualChannelId::new(channel).ok_or(Status::NoObject)?).map(|()| 0)
            }
            Op::ShareControl { segment, control } => backend.share_control(segment, control),
            Op::Query { question } => {
                let holdings = context.holdings.get_or_insert_with(|| backend.holdings());
                backend.answer(question, holdings)
            }
        }
    }
}

fn fill_vram(backend: &mut VmBackend, address: GuestVramAddr, bytes: u64, value: u32, context: &mut Context) -> Done {
    backend.within_vram(address, bytes)?;
    let piece = value.to_le_bytes().repeat(BYTES_PER_STEP / 4);
    in_pieces(bytes, context, |offset, len| {
        backend.guest_write(address.offset(offset), piece.get(..len).unwrap_or_default()).is_ok()
    })
}

fn copy_vram(
    backend: &mut VmBackend,
    to: GuestVramAddr,
    from: GuestVramAddr,
    bytes: u64,
    context: &mut Context,
) -> Done {
    backend.within_vram(to, bytes)?;
    backend.within_vram(from, bytes)?;
    let mut piece = vec![0; BYTES_PER_STEP];
    in_pieces(bytes, context, |offset, len| {
        let Some(data) = piece.get_mut(..len) else { return false };
        backend.guest_read(from.offset(offset), data).is_ok() && backend.guest_write(to.offset(offset), data).is_ok()
    })
}

/// Calls `each` with the offset and length of each part, until the budget is exhausted. If `each` fails, no memory is
/// available, because the range is known to belong to the guest.
fn in_pieces(bytes: u64, context: &mut Context, mut each: impl FnMut(u64, usize) -> bool) -> Done {
    let mut done = context.begun.take().unwrap_or(0);
    while done < bytes {
        if context.left == 0 {
            context.begun = Some(done);
            return Ok(0);
        }
        let len = usize::try_from(bytes.saturating_sub(done)).unwrap_or(BYTES_PER_STEP).min(BYTES_PER_STEP);
        context.spend(len as u64);
        if !each(done, len) {
            return Err(Status::Limit);
        }
        done = done.saturating_add(len as u64);
    }
    Ok(0)
}
