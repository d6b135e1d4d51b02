//! A minimal guest side of the paravirtual interface: a queue in RAM.

use super::Machine;
use pv::abi::register;
pub use pv::abi::{kind, status};
pub use pv::guest::{Ops, Reply};
use vgpu::pv::OFFSET;

/// Number of entries in the queue.
pub const ENTRIES: u16 = 64;
/// Size of an interface's RAM in bytes.
pub const RAM_BYTES: u64 = 0x2_0000;
const AVAILABLE: u64 = 0x800;
const USED_RING_AT: u64 = 0x1000;
const REQUEST: u64 = 0x2000;
const REPLY: u64 = 0x1_8000;
const REPLY_BYTES: u32 = 0x8000;

/// A configured interface, with its queue in RAM.
#[derive(Clone, Copy, Debug)]
pub struct Interface {
    /// Guest-physical start address of the interface's RAM.
    pub base: u64,
    next: u16,
}

impl Interface {
    /// Sets up an interface in the [`RAM_BYTES`] bytes of RAM at `base`, and accepts all offered features.
    pub fn open(machine: &mut impl Machine, base: u64) -> Self {
        Self::open_with(machine, base, u32::MAX)
    }

    /// Like [`Self::open`], but accepts only `features`.
    pub fn open_with(machine: &mut impl Machine, base: u64, features: u32) -> Self {
        machine.ram_write(base, &vec![0; RAM_BYTES as usize]);
        Self::set_up(machine, base, features);
        Self { base, next: 0 }
    }

    /// Configures a queue at `base`, regardless of the memory's contents. Returns true if the device accepts it.
    pub fn set_up(machine: &mut impl Machine, base: u64, features: u32) -> bool {
        machine.wr(OFFSET + register::STATUS, status::RESET);
        Self::describe(machine, base, features);
        machine.wr(OFFSET + register::STATUS, status::READY);
        Self::status(machine) == status::READY
    }

    /// Writes the accepted features, and the queue's size and location, without enabling the queue.
    pub fn describe(machine: &mut impl Machine, base: u64, features: u32) {
        let features = features & machine.rd(OFFSET + register::FEATURES);
        machine.wr(OFFSET + register::FEATURES, features);
        machine.wr(OFFSET + register::QUEUE_SIZE, ENTRIES.into());
        for (register, at) in [
            (register::QUEUE_DESCRIPTORS, base),
            (register::QUEUE_AVAILABLE, base + AVAILABLE),
            (register::QUEUE_USED, base + USED_RING_AT),
        ] {
            machine.wr(OFFSET + register, at as u32);
            machine.wr(OFFSET + register + 4, (at >> 32) as u32);
        }
    }

    /// Returns the status of the interface, as reported by the device.
    pub fn status(machine: &mut impl Machine) -> u32 {
        machine.rd(OFFSET + register::STATUS)
    }

    /// Publishes a batch, rings the doorbell, and returns the reply.
    pub fn call(&mut self, machine: &mut impl Machine, ops: &Ops) -> Reply {
        self.send(machine, &ops.bytes())
    }

    /// Like [`Self::call`], but publishes arbitrary bytes.
    pub fn send(&mut self, machine: &mut impl Machine, batch: &[u8]) -> Reply {
        self.post(machine, batch);
        let ended = machine.rd(OFFSET + register::ENDED);
        assert!(
            ended == u32::from(self.next) || Self::status(machine) != status::READY,
            "{ended} batches have completed"
        );
        self.reply(machine)
    }

    /// Publishes arbitrary bytes as a batch, and rings the doorbell.
    pub fn post(&mut self, machine: &mut impl Machine, batch: &[u8]) {
        let head = (self.next % (ENTRIES / 2)) * 2;
        machine.ram_write(self.base + REQUEST, batch);
        machine.ram_write(self.base + REPLY, &vec![0xff; REPLY_BYTES as usize]);
        self.descriptor(machine, head, self.base + REQUEST, batch.len() as u32, 1, head + 1);
        self.descriptor(machine, head + 1, self.base + REPLY, REPLY_BYTES, 2, 0);
        self.publish(machine, head);
    }

    /// Writes a descriptor: its address, length in bytes, flags (1 for chained, 2 for device-writable), and the index
    /// of the next descriptor.
    pub fn descriptor(&self, machine: &impl Machine, index: u16, at: u64, bytes: u32, flags: u16, next: u16) {
        let mut raw = at.to_le_bytes().to_vec();
        raw.extend(bytes.to_le_bytes());
        raw.extend(flags.to_le_bytes());
        raw.extend(next.to_le_bytes());
        machine.ram_write(self.base + u64::from(index) * 16, &raw);
    }

    /// Publishes the chain that starts with `head`, and rings the doorbell.
    pub fn publish(&mut self, machine: &mut impl Machine, head: u16) {
        let slot = self.base + AVAILABLE + 4 + 2 * u64::from(self.next % ENTRIES);
        machine.ram_write(slot, &head.to_le_bytes());
        self.next = self.next.wrapping_add(1);
        machine.ram_write(self.base + AVAILABLE + 2, &self.next.to_le_bytes());
        machine.wr(OFFSET + register::DOORBELL, 0);
    }

    /// Returns the number of chains that the device has used.
    #[must_use]
    pub fn used(&self, machine: &impl Machine) -> u16 {
        let mut index = [0; 2];
        machine.ram_read(self.base + USED_RING_AT + 2, &mut index);
        u16::from_le_bytes(index)
    }

    fn reply(self, machine: &impl Machine) -> Reply {
        let slot = self.base + USED_RING_AT + 4 + 8 * u64::from(self.next.wrapping_sub(1) % ENTRIES);
        let mut used = [0; 8];
        machine.ram_read(slot, &mut used);
        let written = u32::from_le_bytes(used[4..].try_into().expect("four bytes")).min(REPLY_BYTES);
        let mut bytes = vec![0; written as usize];
        machine.ram_read(self.base + REPLY, &mut bytes);
        Reply::read(&bytes)
    }
}
