//! A software card whose behaviour a test can override.

use card::{Aperture, Card, DmaError, DmaMemory, Identity, InterruptMode};
use simgpu::SimGpu;
use std::sync::Arc;
use vmm_sys_util::eventfd::EventFd;

/// Overrides the behaviour of a card. The default methods for accesses call the card.
pub trait Alter: Send + Sync + 'static {
    /// Reads a register of BAR0.
    fn read32(&self, card: &SimGpu, offset: u32) -> u32 {
        card.read32(offset)
    }

    /// Writes a register of BAR0.
    fn write32(&self, card: &SimGpu, offset: u32, value: u32) {
        card.write32(offset, value);
    }

    /// Returns the reason why the host is removing the card, or `None` if it is not.
    fn lost(&self) -> Option<&'static str> {
        None
    }

    /// Maps host memory at the I/O virtual address `iova`.
    ///
    /// # Errors
    /// Returns the same errors as [`Card::map_dma`].
    fn map_dma(&self, card: &SimGpu, iova: u64, memory: DmaMemory) -> Result<(), DmaError> {
        card.map_dma(iova, memory)
    }
}

/// A card with overridden behaviour.
#[derive(Debug)]
pub struct Altered<A> {
    card: Arc<SimGpu>,
    alter: A,
}

impl<A: Alter> Altered<A> {
    /// Overrides the behaviour of `card` with `alter`.
    pub fn over(card: Arc<SimGpu>, alter: A) -> Arc<dyn Card> {
        Arc::new(Self { card, alter })
    }
}

impl<A: Alter> Card for Altered<A> {
    fn takes_any_image(&self) -> bool {
        self.card.takes_any_image()
    }

    fn identity(&self) -> Identity {
        self.card.identity()
    }

    fn read32(&self, offset: u32) -> u32 {
        self.alter.read32(&self.card, offset)
    }

    fn write32(&self, offset: u32, value: u32) {
        self.alter.write32(&self.card, offset, value);
    }

    fn aperture_read(&self, aperture: Aperture, offset: u64, data: &mut [u8]) {
        self.card.aperture_read(aperture, offset, data);
    }

    fn aperture_write(&self, aperture: Aperture, offset: u64, data: &[u8]) {
        self.card.aperture_write(aperture, offset, data);
    }

    fn map_dma(&self, iova: u64, memory: DmaMemory) -> Result<(), DmaError> {
        self.alter.map_dma(&self.card, iova, memory)
    }

    fn unmap_dma(&self, iova: u64, len: u64) -> Result<(), DmaError> {
        self.card.unmap_dma(iova, len)
    }

    fn set_interrupt(&self, mode: InterruptMode, event: Option<EventFd>) {
        self.card.set_interrupt(mode, event);
    }

    fn unmask_intx(&self) {
        self.card.unmask_intx();
    }

    fn reset(&self) {
        self.card.reset();
    }

    fn lost(&self) -> Option<&'static str> {
        self.alter.lost()
    }
}
