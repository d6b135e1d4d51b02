//! The queue of the paravirtual interface, in pages of this program's own RAM.

use anyhow::{Context, Result, ensure};
use pv::abi::{Capability, register, status};
use pv::guest::{Ops, Reply};

use super::super::card::Card;
use super::super::layout::PAGE;
use super::lab::RamPage;
use gdev::mapping::{Mapping, Width};

/// Number of queue entries. It is small enough for all rings to fit in one page.
pub const ENTRIES: u16 = 16;
/// Offset of the available ring in its page.
pub const AVAILABLE: usize = 0x400;
/// Offset of the used ring in its page.
pub const USED: usize = 0x800;
/// Descriptor flag: another descriptor follows. Source of the flags and the ring layout: VIRTIO 1.2, section 2.7.
pub const NEXT: u16 = 1;
/// Descriptor flag: the device writes the memory.
pub const WRITE: u16 = 2;

/// An interface and its queue. Dropping it resets the interface.
pub struct Queue<'a> {
    registers: &'a Mapping,
    offset: usize,
    /// Page that contains the descriptors, the available ring, and the used ring.
    pub ring: RamPage,
    /// Page that contains the batch.
    pub request: RamPage,
    /// Page that receives the reply.
    pub reply: RamPage,
    next: u16,
}

impl<'a> Queue<'a> {
    /// Allocates the pages of a queue without setting it up.
    pub fn new(card: &'a Card, capability: &Capability) -> Result<Self> {
        let registers = card.region(capability.bar.into())?;
        let offset = usize::try_from(capability.offset)?;
        let end = offset.checked_add(register::BYTES as usize);
        ensure!(end.is_some_and(|end| end <= registers.bytes()), "the registers extend beyond their region");
        let pages = || RamPage::new().context("a queue's page");
        Ok(Self { registers, offset, ring: pages()?, request: pages()?, reply: pages()?, next: 0 })
    }

    /// Resets the interface and sets it up correctly.
    pub fn start(&mut self) -> Result<()> {
        self.describe(u32::MAX);
        self.write(register::STATUS, status::READY);
        ensure!(self.status() == status::READY, "our own queue is not accepted: {:#x}", self.status());
        Ok(())
    }

    /// Resets the interface and describes an empty queue. Accepts the features in `features` that the interface offers.
    pub fn describe(&mut self, features: u32) {
        self.write(register::STATUS, status::RESET);
        for page in [&self.ring, &self.request, &self.reply] {
            page.bytes.write(0, &[0; PAGE as usize]);
        }
        self.next = 0;
        self.write(register::FEATURES, features & self.read(register::FEATURES));
        self.write(register::QUEUE_SIZE, ENTRIES.into());
        for (register, offset) in
            [(register::QUEUE_DESCRIPTORS, 0), (register::QUEUE_AVAILABLE, AVAILABLE), (register::QUEUE_USED, USED)]
        {
            let at = self.ring.gpa + offset as u64;
            self.write(register, at as u32);
            self.write(register + 4, (at >> 32) as u32);
        }
    }

    /// Reads the interface's register at byte offset `register`.
    pub fn read(&self, register: u32) -> u32 {
        self.registers.load(self.offset + register as usize, Width::Dword) as u32
    }

    /// Writes the interface's register at byte offset `register`.
    pub fn write(&self, register: u32, value: u32) {
        self.registers.store(self.offset + register as usize, Width::Dword, value.into());
    }

    /// Reads the status of the interface.
    pub fn status(&self) -> u32 {
        self.read(register::STATUS)
    }

    /// Writes a descriptor: address, length, flags, next descriptor.
    pub fn descriptor(&self, index: u16, at: u64, bytes: u32, flags: u16, next: u16) {
        let place = usize::from(index) * 16;
        self.ring.bytes.store(place, Width::Qword, at);
        let rest = u64::from(bytes) | u64::from(flags) << 32 | u64::from(next) << 48;
        self.ring.bytes.store(place + 8, Width::Qword, rest);
    }

    /// Makes the chain that begins with `head` available, and rings the doorbell.
    pub fn publish(&mut self, head: u16) {
        let slot = AVAILABLE + 4 + 2 * usize::from(self.next % ENTRIES);
        self.ring.bytes.store(slot, Width::Word, head.into());
        self.next = self.next.wrapping_add(1);
        self.ring.bytes.store(AVAILABLE + 2, Width::Word, self.next.into());
        self.write(register::DOORBELL, 0);
    }

    /// Makes arbitrary bytes available as a batch, with `room` bytes for the reply, and rings the doorbell.
    ///
    /// # Panics
    /// Panics if the bytes exceed a page.
    pub fn post(&mut self, batch: &[u8], room: u32) {
        let head = self.next % (ENTRIES / 2) * 2;
        self.request.bytes.write(0, batch);
        self.descriptor(head, self.request.gpa, batch.len() as u32, NEXT, head + 1);
        self.descriptor(head + 1, self.reply.gpa, room, WRITE, 0);
        self.publish(head);
    }

    /// Sends arbitrary bytes as a batch, and returns the reply.
    pub fn send(&mut self, batch: &[u8]) -> Reply {
        self.send_with(batch, PAGE as u32)
    }

    /// Same as [`Self::send`], but with `room` bytes for the reply.
    pub fn send_with(&mut self, batch: &[u8], room: u32) -> Reply {
        self.post(batch, room);
        // This read completes after all work that the doorbell started.
        self.read(register::ENDED);
        let slot = USED + 4 + 8 * usize::from(self.next.wrapping_sub(1) % ENTRIES);
        let ended = self.ring.bytes.load(USED + 2, Width::Word) == u64::from(self.next);
        let written = self.ring.bytes.load(slot + 4, Width::Dword).min(PAGE) as usize;
        let mut bytes = vec![0; if ended { written } else { 0 }];
        self.reply.bytes.read(0, &mut bytes);
        Reply::read(&bytes)
    }

    /// Sends operations, and returns the reply.
    pub fn call(&mut self, ops: &Ops) -> Reply {
        self.send(&ops.bytes())
    }
}

impl Drop for Queue<'_> {
    fn drop(&mut self) {
        // Reset first, because the kernel then reclaims the pages.
        self.write(register::STATUS, status::RESET);
    }
}
