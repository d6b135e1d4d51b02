//! A card that is a PCI function bound to VFIO. Implements [`card::Card`] with mapped BARs, an IOMMU container or an
//! iommufd, and eventfds.
//!
//! Modules:
//! - [`VfioCard`]: this module
//! - [`open`]: opens the card at an address, and reports all obstacles
//! - `reset`: the reset methods of a function
//! - `pci`: configuration space
//! - `dma`: memory mapped for the card
//! - `bar`: BAR accesses
//! - `lost`: host signals that the card must be returned or has failed
//! - `kernel`: the interface to VFIO's calls, with `real` (through container and group), `node` (through the function's
//!   own node) and `window`
//!
//! Not included: listing a host's functions and binding them to `vfio-pci` (see `vfio-host`), bring-up, firmware, the
//! card's VBIOS scripts, and groups with several cards.

use card::{Aperture, Card, DmaError, DmaMemory, Identity, InterruptMode};
use nvspec::regs::{pmc, ptop};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use vfio_bindings::bindings::vfio::{VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSI_IRQ_INDEX};
use vfio_host::Address;
use vmm_sys_util::eventfd::EventFd;

mod bar;
mod dma;
mod error;
mod files;
mod kernel;
mod lost;
mod node;
pub mod open;
mod pci;
mod real;
mod reset;
mod window;

#[cfg(test)]
mod tests;

pub use error::OpenError;
pub use open::Place;
pub use reset::Reset;

use bar::Bar;
use dma::Mappings;
use kernel::{Irq, Kernel};
use lost::Lost;
use reset::Method;

/// A card behind VFIO, used exclusively by this process until the value is dropped.
pub struct VfioCard {
    address: Address,
    identity: Identity,
    registers: Bar,
    bar1: Bar,
    bar3: Bar,
    config: Bar,
    method: Method,
    /// Units enabled when the card was opened, as bits of PMC's enable register.
    units: u32,
    /// The configured interrupt mode. The lock is held while an interrupt is configured and while the card is reset.
    interrupt: Mutex<Option<InterruptMode>>,
    lost: Lost,
    // The BAR mappings keep the function open in the kernel, so they must be dropped before this field. The memory that
    // the card can access must be dropped after it.
    kernel: Arc<dyn Kernel>,
    mappings: Mappings,
}

impl std::fmt::Debug for VfioCard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { address, identity, method, .. } = self;
        f.debug_struct("VfioCard")
            .field("address", address)
            .field("identity", identity)
            .field("method", method)
            .finish_non_exhaustive()
    }
}

impl VfioCard {
    /// Returns the name of the reset method used by [`Card::reset`].
    #[must_use]
    pub fn reset_method(&self) -> &'static str {
        self.method.name()
    }

    /// Returns the mappable I/O addresses, which are all addresses that the card can generate, except for the IOMMU's
    /// reserved ranges.
    #[must_use]
    pub fn usable(&self) -> &[Range<u64>] {
        self.mappings.usable()
    }

    fn aperture(&self, aperture: Aperture) -> &Bar {
        match aperture {
            Aperture::Bar1 => &self.bar1,
            Aperture::Bar3 => &self.bar3,
        }
    }

    fn interrupts_off(&self, now: &mut Option<InterruptMode>) {
        if let Some(mode) = now.take()
            && let Err(error) = self.kernel.set_irq(index(mode), Irq::Off)
        {
            tracing::error!(card = %self.address, %error, "cannot disable the card's interrupt");
        }
    }

    /// Aborts the work of all units, but preserves memory and the VBIOS settings.
    fn reset_units(&self) {
        self.write32(pmc::INTR_EN_0::OFFSET, 0);
        self.write32(pmc::INTR_EN_1::OFFSET, 0);
        self.write32(pmc::ENABLE::OFFSET, self.units & !reset::working_units());
        // The read flushes the write and gives the units time to reset.
        self.read32(pmc::ENABLE::OFFSET);
        self.write32(pmc::ENABLE::OFFSET, self.units);
        self.read32(pmc::ENABLE::OFFSET);
    }

    /// Resets the function with the chosen method. Returns `false` if the chosen method is a reset of its units, or if
    /// the kernel's reset fails.
    fn reset_function(&self) -> bool {
        let done = match &self.method {
            Method::Units => return false,
            Method::Function => self.kernel.reset(),
            Method::Bus => self.kernel.hot_reset(),
        };
        // The kernel has restored only the parts of configuration space that it knows.
        let done = done.and_then(|()| pci::wake(&self.config)).and_then(|()| pci::set_enabled(&self.config, true));
        if let Err(error) = &done {
            tracing::error!(card = %self.address, %error, "the kernel did not reset the card; resetting its units \
                instead");
            return false;
        }
        if !ptop::DEVINIT_STATUS::DONE.is_set(self.read32(ptop::DEVINIT_STATUS::OFFSET)) {
            tracing::error!(
                card = %self.address,
                "the reset erased the VBIOS settings: set `reset = \"units\"`, and restart the host"
            );
        }
        true
    }
}

fn index(mode: InterruptMode) -> u32 {
    match mode {
        InterruptMode::Msi => VFIO_PCI_MSI_IRQ_INDEX,
        InterruptMode::Intx => VFIO_PCI_INTX_IRQ_INDEX,
    }
}

impl Card for VfioCard {
    fn identity(&self) -> Identity {
        self.identity
    }

    fn read32(&self, offset: u32) -> u32 {
        self.registers.read32(offset)
    }

    fn write32(&self, offset: u32, value: u32) {
        self.registers.write32(offset, value);
    }

    fn aperture_read(&self, aperture: Aperture, offset: u64, data: &mut [u8]) {
        self.aperture(aperture).read(offset, data);
    }

    fn aperture_write(&self, aperture: Aperture, offset: u64, data: &[u8]) {
        self.aperture(aperture).write(offset, data);
    }

    fn map_dma(&self, iova: u64, memory: DmaMemory) -> Result<(), DmaError> {
        self.mappings.map(&*self.kernel, iova, memory)
    }

    fn unmap_dma(&self, iova: u64, len: u64) -> Result<(), DmaError> {
        self.mappings.unmap(&*self.kernel, iova, len)
    }

    fn set_interrupt(&self, mode: InterruptMode, event: Option<EventFd>) {
        let mut now = self.interrupt.lock();
        // VFIO permits only one kind of interrupt at a time.
        self.interrupts_off(&mut now);
        let Some(event) = event else { return };
        match self.kernel.set_irq(index(mode), Irq::Signal(&event)) {
            Ok(()) => *now = Some(mode),
            Err(error) => tracing::error!(card = %self.address, ?mode, %error, "cannot set up the card's interrupt"),
        }
    }

    fn unmask_intx(&self) {
        if *self.interrupt.lock() != Some(InterruptMode::Intx) {
            return;
        }
        if let Err(error) = self.kernel.set_irq(VFIO_PCI_INTX_IRQ_INDEX, Irq::Unmask) {
            tracing::error!(card = %self.address, %error, "the card's interrupt remains masked");
        }
    }

    fn reset(&self) {
        let mut interrupt = self.interrupt.lock();
        self.interrupts_off(&mut interrupt);
        if !self.reset_function() {
            self.reset_units();
        }
    }

    fn lost(&self) -> Option<&'static str> {
        self.lost.reason()
    }

    fn unmappable(&self) -> Vec<Range<u64>> {
        self.mappings.unmappable()
    }
}

impl Drop for VfioCard {
    /// Stops the card before the memory that it can access is freed.
    fn drop(&mut self) {
        self.interrupts_off(&mut self.interrupt.lock());
        self.reset_units();
        if let Err(error) = pci::set_enabled(&self.config, false) {
            tracing::error!(card = %self.address, %error, "cannot disable the card's bus mastering");
        }
        self.mappings.unmap_all(&*self.kernel);
    }
}
