//! Operations that a paravirtual guest uses to manage its memory and channels.
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

use super::VmBackend;
use card_manager::balance::Hint;
use card_manager::holdings::Holdings;
use card_manager::segments::Wanted;
use devmodel::backend::{Aperture, Backend};
use nvspec::addr::{GuestVramAddr, Place};
use nvspec::fifo::VirtualChannelId;
use pv::abi::Status;
use pv::{Control, Question};
use vram::victim::PRIORITY_DEFAULT;

/// Result of an operation: its value, or the status code of its failure.
pub(crate) type Done = Result<u64, Status>;

impl VmBackend {
    /// Returns the current usage of the card's memory.
    pub(crate) fn holdings(&self) -> Holdings {
        self.host.lock().holdings()
    }

    /// Resets the paravirtual interface, and removes its segments and kept tables. Does not unbind its channels.
    pub(crate) fn reset_pv(&mut self) {
        self.detach_all();
        let Some(pv) = &mut self.pv else { return };
        pv.reset();
        if let Some(tables) = self.memory.grants_mut().tables_mut() {
            tables.clear();
        }
        self.host.lock().memory_mut().forget_segments(self.vm);
        self.tables_written();
    }

    /// Finds a segment, or creates it if `wanted` permits this.
    pub(crate) fn share_get(&mut self, wanted: Wanted) -> Done {
        let pv = self.pv.as_ref().ok_or(Status::Unsupported)?;
        self.host.lock().memory_mut().share_get(pv.party(), wanted).map(u64::from)
    }

    /// Changes or queries a segment.
    pub(crate) fn share_control(&mut self, segment: u32, control: Control) -> Done {
        let pv = self.pv.as_ref().ok_or(Status::Unsupported)?;
        self.host.lock().memory_mut().share_control(pv.party(), segment, control)
    }

    pub(crate) fn tables(&mut self, act: impl FnOnce(&mut pv::Tables) -> Result<(), Status>) -> Done {
        act(self.memory.grants_mut().tables_mut().ok_or(Status::Unsupported)?).map(|()| 0)
    }

    pub(crate) fn count_entries(&mut self, count: u32) {
        if let Some(pv) = &mut self.pv {
            pv.count_entries(count);
        }
    }

    /// Marks written pages of kept tables as changed in the address spaces that use them.
    pub(crate) fn tables_written(&mut self) {
        self.memory.tables_written();
    }

    pub(crate) fn within_vram(&self, address: GuestVramAddr, bytes: u64) -> Result<(), Status> {
        let end = address.0.checked_add(bytes).ok_or(Status::Range)?;
        if end <= self.memory.grants().vram_bytes() { Ok(()) } else { Err(Status::Range) }
    }

    pub(crate) fn bind_directory(&mut self, directory: Option<pv::TableId>, instance: GuestVramAddr) -> Done {
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
        for aperture in [Aperture::Bar1, Aperture::Bar3] {
            if self.memory.aperture_instance(aperture) == instance {
                self.bind_aperture(aperture, instance);
            }
        }
        Ok(0)
    }

    pub(crate) fn flush_pv(&mut self, directory: Option<pv::TableId>) -> Done {
        let tables = self.memory.grants().tables().ok_or(Status::Unsupported)?;
        let directory = directory.map(|directory| tables.address(directory)).transpose()?;
        self.tables_written();
        match self.flush_spaces(directory.map(Place::Vram)) {
            Ok(()) => Ok(0),
            Err(error) => {
                tracing::error!(vm = %self.vm, %error, "cannot execute a guest's flush on the card");
                Err(Status::Failed)
            }
        }
    }

    pub(crate) fn create_channel(&mut self, channel: u32) -> Done {
        let channel = VirtualChannelId::new(channel).ok_or(Status::Range)?;
        let known = self.work.channels();
        let pv = self.pv.as_mut().ok_or(Status::Unsupported)?;
        pv.create_channel(channel, &known).map(|()| 0)
    }

    /// Returns the virtual channel with the given number if the guest has created it.
    pub(crate) fn created(&self, channel: u32) -> Result<VirtualChannelId, Status> {
        let channel = VirtualChannelId::new(channel).ok_or(Status::NoObject)?;
        let pv = self.pv.as_ref().ok_or(Status::Unsupported)?;
        pv.has_channel(channel).then_some(channel).ok_or(Status::NoObject)
    }

    pub(crate) fn set_priority(&mut self, address: GuestVramAddr, bytes: u64, priority: i32) -> Done {
        self.within_vram(address, bytes)?;
        if bytes == 0 {
            return Err(Status::Range);
        }
        let priority = i32::from(PRIORITY_DEFAULT).saturating_add(priority).max(0);
        let priority = u8::try_from(priority).unwrap_or(u8::MAX);
        let hint = Hint::Priority(priority);
        self.host
            .lock()
            .memory_mut()
            .hint(self.vm, GuestVramAddr(address.0), bytes, hint)
            .map_err(|_| Status::Range)?;
        Ok(0)
    }

    /// Responds to a query about the guest's memory or its share of the card.
    pub(crate) fn answer(&self, question: Question, holdings: &Holdings) -> Done {
        let chunk = holdings.view.summary.chunk_bytes;
        let bytes = |chunks: u32| u64::from(chunks).saturating_mul(chunk);
        let own = holdings.view.summary.vms.get(&self.vm).ok_or(Status::Failed)?;
        Ok(match question {
            Question::Vram => self.memory.grants().vram_bytes(),
            Question::Quota if own.limits.quota >= own.advertised => u64::MAX,
            Question::Quota => bytes(own.limits.quota),
            Question::Guarantee => bytes(own.guarantee),
            Question::Placed => bytes(own.placed),
            Question::Host => bytes(own.host),
            Question::Entitlement => holdings.view.entitled.get(&self.vm).map_or(0, |entitled| bytes(entitled.floor)),
            Question::Free => bytes(holdings.view.summary.free.saturating_add(holdings.view.summary.to_scrub)),
            Question::Pressure if own.host != 0 => 2,
            Question::Pressure => holdings.view.summary.vms.values().any(|vm| vm.host != 0).into(),
            Question::TimeShare => self.host.lock().time_share(self.vm),
            Question::TableBytesLeft => self.memory.grants().tables().map_or(0, pv::Tables::bytes_left),
        })
    }
}
