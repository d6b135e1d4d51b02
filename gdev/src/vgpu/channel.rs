//! A channel with its memory, submissions, and waits.

use std::sync::Arc;
use std::time::Duration;

use nvspec::instance::ramfc;

use super::device::{Device, State};
use super::ram::PinnedMemory;
use super::ranges::PAGE_BYTES;
use super::space::{Physical, Space};
use crate::nouveau::push::{PUSHBUFFER_BYTES, Push};
use crate::{Error, Result};

/// Maximum number of submissions in flight.
pub(super) const MAX_IN_FLIGHT: u64 = 32;
/// Log2 of the number of GPFIFO entries. The GPFIFO is larger than the number of submissions in flight.
const RING_LOG2: u32 = 6;
const RING_ENTRIES: u64 = 1 << RING_LOG2;
const _: () = assert!(MAX_IN_FLIGHT < RING_ENTRIES);
/// Offset of the fence in the channel's pinned memory, between the GPFIFO and the push buffers.
const FENCE_OFFSET: u64 = RING_ENTRIES * 8;
const SLOTS_OFFSET: u64 = PAGE_BYTES;
const PINNED_BYTES: u64 = SLOTS_OFFSET + MAX_IN_FLIGHT * PUSHBUFFER_BYTES;
/// Size of the PGRAPH context in bytes.
const IMAGE_BYTES: u64 = 16 * PAGE_BYTES;
/// Instance block offsets of the context addresses of PGRAPH and the copy engines.
const CONTEXT_OFFSETS: [u64; 3] = [0x210, 0x230, 0x240];
/// Flag of a context address: the address is valid and in VRAM.
const CONTEXT_VALID: u32 = 4;
/// Maximum duration of a wait for an interrupt. Another thread may already have handled the interrupt.
const MAX_WAIT: Duration = Duration::from_millis(5);
/// Number of fence polls before a thread sleeps.
const SPINS: u32 = 100;

/// The memory of a channel.
#[derive(Debug)]
struct Memory {
    /// VRAM address of the instance block.
    instance: u64,
    /// VRAM address of the PGRAPH context.
    image: u64,
    /// Virtual address of the PGRAPH context.
    image_address: u64,
    /// The GPFIFO, the fence and the push buffers.
    pinned: PinnedMemory,
    /// Virtual address of `pinned`.
    pinned_address: u64,
}

impl Memory {
    fn new(device: &mut State, space: &mut Space) -> Result<Self> {
        let pinned = PinnedMemory::new(device, PINNED_BYTES)?;
        let pinned_address = space.map(device, pinned.physical(), PINNED_BYTES)?;
        let instance = device.take_vram(PAGE_BYTES)?;
        let image = device.take_vram(IMAGE_BYTES).inspect_err(|_| device.vram.give(instance, PAGE_BYTES))?;
        let image_address = space.map(device, Physical::Vram(image), IMAGE_BYTES)?;
        Ok(Self { instance, image, image_address, pinned, pinned_address })
    }

    /// Writes the instance block and USERD of the first free channel. Returns the channel's number.
    fn describe(&self, device: &mut State, space: &Space) -> Result<u8> {
        let what = "more than 127 channels";
        let id = device.free_channel().ok_or(Error::Unsupported { device: "vgpu", what })?;
        device.bus.zero_vram(self.instance, PAGE_BYTES)?;
        device.bus.zero_vram(self.image, IMAGE_BYTES)?;
        space.assign(device, self.instance)?;
        let userd = device.userd(id);
        device.bus.zero_vram(userd, PAGE_BYTES)?;
        let own = [
            (ramfc::USERD_LO, userd as u32),
            (ramfc::USERD_HI, (userd >> 32) as u32),
            (ramfc::GP_BASE_LO, self.pinned_address as u32),
            (ramfc::GP_BASE_HI, (self.pinned_address >> 32) as u32 | RING_LOG2 << 16),
        ];
        let contexts = CONTEXT_OFFSETS.iter().flat_map(|offset| {
            let low = (*offset, self.image_address as u32 | CONTEXT_VALID);
            [low, (*offset + 4, (self.image_address >> 32) as u32)]
        });
        for (offset, value) in own.into_iter().chain(contexts).chain(ramfc::DEFAULTS) {
            device.bus.write_vram32(self.instance + offset, value)?;
        }
        Ok(id)
    }

    fn release(&self, device: &mut State) {
        device.vram.give(self.instance, PAGE_BYTES);
        device.vram.give(self.image, IMAGE_BYTES);
        self.pinned.release(device);
    }
}

/// A channel with its own address space.
#[derive(Debug)]
pub(super) struct Channel {
    device: Arc<Device>,
    id: u8,
    space: Space,
    memory: Memory,
    submitted: u64,
}

impl Channel {
    /// Creates a channel that is ready for work.
    ///
    /// # Errors
    /// Returns an error if not enough memory or no channel is available.
    pub(super) fn new(device: &Arc<Device>) -> Result<Self> {
        let mut state = device.lock();
        let mut space = Space::new(&mut state)?;
        let built = Memory::new(&mut state, &mut space).and_then(|memory| {
            let bound = memory.describe(&mut state, &space).and_then(|id| state.bind(id, memory.instance).map(|()| id));
            bound.inspect_err(|_| memory.release(&mut state)).map(|id| (id, memory))
        });
        match built {
            Ok((id, memory)) => {
                drop(state);
                let channel = Self { device: Arc::clone(device), id, space, memory, submitted: 0 };
                device.wait_for_runlist()?;
                Ok(channel)
            }
            Err(error) => {
                space.destroy(&mut state);
                Err(error)
            }
        }
    }

    /// Returns the channel's number.
    pub(super) fn id(&self) -> u8 {
        self.id
    }

    /// Returns the number of the last submission, or 0 before the first one.
    pub(super) fn submitted(&self) -> u64 {
        self.submitted
    }

    /// Returns the virtual address of the fence: a stamp with a submission number as its payload.
    pub(super) fn fence_address(&self) -> u64 {
        self.memory.pinned_address + FENCE_OFFSET
    }

    /// Submits a push buffer, which must end with a stamp of the next submission number at [`Self::fence_address`].
    ///
    /// # Errors
    /// Returns an error if the channel or the daemon is lost.
    pub(super) fn submit(&mut self, push: &Push) -> Result<u64> {
        let number = self.submitted + 1;
        self.wait(number.saturating_sub(MAX_IN_FLIGHT))?;
        let slot = SLOTS_OFFSET + number % MAX_IN_FLIGHT * PUSHBUFFER_BYTES;
        let bytes: Vec<u8> = push.words().iter().flat_map(|word| word.to_le_bytes()).collect();
        self.memory.pinned.write(slot, &bytes);
        let entry = (self.memory.pinned_address + slot) | (push.words().len() as u64) << 42;
        let index = self.submitted % RING_ENTRIES;
        self.memory.pinned.write(index * 8, &entry.to_le_bytes());
        let mut device = self.device.lock();
        device.ring(self.id, (number % RING_ENTRIES) as u32)?;
        self.submitted = number;
        Ok(number)
    }

    /// Returns true if a submission has completed.
    pub(super) fn is_done(&self, number: u64) -> bool {
        // Payloads have 32 bits, and fewer than 2^31 submissions are in flight.
        self.memory.pinned.load32(FENCE_OFFSET).wrapping_sub(number as u32).cast_signed() >= 0
    }

    /// Waits until a submission has completed.
    ///
    /// # Errors
    /// Returns an error if the channel or the daemon is lost.
    pub(super) fn wait(&self, number: u64) -> Result<()> {
        for _ in 0..SPINS {
            if self.is_done(number) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        while !self.is_done(number) {
            self.device.wait_for_interrupt(MAX_WAIT)?;
            let why = self.device.lock().why_lost(self.id).map(str::to_owned);
            if let Some(why) = why
                && !self.is_done(number)
            {
                return Err(Error::Lost(why));
            }
        }
        Ok(())
    }

    /// Returns the device.
    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Locks the device, and returns its state and the channel's address space.
    pub(super) fn parts(&mut self) -> (std::sync::MutexGuard<'_, State>, &mut Space) {
        (self.device.lock(), &mut self.space)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // If the daemon is lost, all of the device's resources are lost as well. If the channel does not leave its
        // engine, its memory remains allocated until the device is closed.
        if self.device.unbind(self.id).is_ok_and(|has_left| has_left) {
            let mut state = self.device.lock();
            self.space.destroy(&mut state);
            self.memory.release(&mut state);
        }
    }
}
