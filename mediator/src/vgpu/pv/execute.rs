//! What each operation means for the vGPU and the card.

use super::super::backend::VmBackend;
use super::super::device::Core;
use crate::host::balance::Hint;
use crate::host::holdings::Holdings;
use crate::host::segments::Wanted;
use devmodel::backend::{Aperture, Backend};
use nvspec::addr::{GuestVramAddr, Place};
use nvspec::fifo::VirtualChannelId;
use nvspec::regs::pfifo::{CHANNEL, CHANNEL_STATE};
use pv::abi::Status;
use pv::{Answers, Batch, Op, Question};
use vram::GuestAddr;
use vram::victim::PRIORITY_DEFAULT;

/// Bytes that are filled or copied at a time.
const PIECE: usize = 64 << 10;

type Done = Result<u64, Status>;

/// What the operations of one batch share.
#[derive(Default)]
struct Context {
    /// How the card's memory is held, from the first question on.
    holdings: Option<Holdings>,
}

impl Core {
    /// Does a batch.
    pub(super) fn execute(&mut self, batch: &Batch<'_>) -> Answers {
        let accepted = self.backend.pv.as_ref().map_or(0, |pv| pv.accepted);
        let mut context = Context::default();
        let answers = batch.execute(accepted, |op| {
            let done = self.operate(op, &mut context);
            if let Err(status) = done {
                tracing::debug!(vm = %self.backend.vm, ?op, %status, "a guest's operation is refused");
            }
            done
        });
        self.backend.tables_written();
        answers
    }

    fn operate(&mut self, op: Op<'_>, context: &mut Context) -> Done {
        let Self { gpu, backend, .. } = self;
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
                backend.count_entries(entries.len() as u32);
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
                let page = (instance.0 >> 12) as u32;
                let value = CHANNEL::VALID.mask() | CHANNEL::POLL_USERD.mask() | CHANNEL::ADDRESS.of(page);
                backend.tables_written();
                gpu.bar0_write32(CHANNEL::at(channel.0.into()), value, backend);
                if backend.bound.contains_key(&channel) { Ok(0) } else { Err(Status::Failed) }
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
            Op::MemoryFill { address, bytes, value } => backend.fill_vram(address, bytes, value),
            Op::MemoryCopy { to, from, bytes } => backend.copy_vram(to, from, bytes),
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
    pub(in crate::vgpu) fn reset_pv(&mut self) {
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
    pub(in crate::vgpu) fn signal_pv(&mut self) {
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
            pv.counts.entries += u64::from(count);
        }
    }

    /// Whoever has read the tables is told which of their pages have changed.
    pub(in crate::vgpu) fn tables_written(&mut self) {
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
        if pv.channels.len() + others >= pv.channel_cap as usize {
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

    fn fill_vram(&mut self, address: GuestVramAddr, bytes: u64, value: u32) -> Done {
        self.within_vram(address, bytes)?;
        let piece = value.to_le_bytes().repeat(PIECE / 4);
        self.in_pieces(bytes, |this, offset, len| this.guest_write(address.offset(offset), &piece[..len]).is_ok())
    }

    fn copy_vram(&mut self, to: GuestVramAddr, from: GuestVramAddr, bytes: u64) -> Done {
        self.within_vram(to, bytes)?;
        self.within_vram(from, bytes)?;
        let mut piece = vec![0; PIECE];
        self.in_pieces(bytes, |this, offset, len| {
            let data = &mut piece[..len];
            this.guest_read(from.offset(offset), data).is_ok() && this.guest_write(to.offset(offset), data).is_ok()
        })
    }

    /// Calls `each` with offset and length of each piece. What it cannot do is for want of memory: the range is the guest's.
    fn in_pieces(&mut self, bytes: u64, mut each: impl FnMut(&mut Self, u64, usize) -> bool) -> Done {
        let mut done = 0;
        while done < bytes {
            let len = (bytes - done).min(PIECE as u64) as usize;
            if !each(self, done, len) {
                return Err(Status::Limit);
            }
            done += len as u64;
        }
        Ok(0)
    }

    fn set_priority(&mut self, address: GuestVramAddr, bytes: u64, priority: i32) -> Done {
        self.within_vram(address, bytes)?;
        if bytes == 0 {
            return Err(Status::Range);
        }
        let priority = i32::from(PRIORITY_DEFAULT).saturating_add(priority).clamp(0, u8::MAX.into()) as u8;
        let hint = Hint::Priority(priority);
        self.host.lock().hint(self.vm, GuestAddr(address.0), bytes, hint).map_err(|_| Status::Range)?;
        Ok(0)
    }

    fn answer(&self, question: Question, context: &mut Context) -> Done {
        let holdings = context.holdings.get_or_insert_with(|| self.host.lock().holdings());
        let chunk = holdings.summary.chunk_bytes;
        let bytes = |chunks: u32| u64::from(chunks) * chunk;
        let own = holdings.summary.vms.get(&self.vm).ok_or(Status::Failed)?;
        Ok(match question {
            Question::Vram => self.vram_bytes,
            Question::Quota if own.limits.quota >= own.advertised => u64::MAX,
            Question::Quota => bytes(own.limits.quota),
            Question::Guarantee => bytes(own.guarantee),
            Question::Placed => bytes(own.placed),
            Question::Host => bytes(own.host),
            Question::Entitlement => holdings.entitled.get(&self.vm).map_or(0, |entitled| bytes(entitled.floor)),
            Question::Free => bytes(holdings.summary.free + holdings.summary.to_scrub),
            Question::Pressure if own.host != 0 => 2,
            Question::Pressure => holdings.summary.vms.values().any(|vm| vm.host != 0).into(),
            Question::TimeShare => self.host.lock().time_share(self.vm),
            Question::TableBytesLeft => self.pv.as_ref().map_or(0, |pv| pv.tables.bytes_left()),
        })
    }
}
