//! Host signals about a card in use: the host needs the card back, or the card has failed.

use crate::kernel::{Irq, Kernel};
use std::io;
use std::sync::OnceLock;
use vfio_bindings::bindings::vfio::{VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Kinds of signals and their meanings.
const SIGNALS: [(u32, &str); 2] = [
    (
        VFIO_PCI_REQ_IRQ_INDEX,
        "the host needs it back: it was unplugged, or is being unbound from vfio-pci, which waits for the daemon to exit",
    ),
    (VFIO_PCI_ERR_IRQ_INDEX, "its bus reported an unrecoverable error"),
];

/// The signals of one card.
#[derive(Debug, Default)]
pub(crate) struct Lost {
    events: Vec<(EventFd, &'static str)>,
    why: OnceLock<&'static str>,
}

impl Lost {
    /// Registers for the kernel's signals. Skips signals that the function does not support.
    pub(crate) fn watch(kernel: &dyn Kernel) -> Self {
        let set = |(index, why): (u32, &'static str)| -> io::Result<_> {
            let event = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
            kernel.set_irq(index, Irq::Signal(&event))?;
            Ok((event, why))
        };
        let told = |error: &io::Error| tracing::debug!(%error, "the host does not report card loss");
        let events = SIGNALS.into_iter().filter_map(|signal| set(signal).inspect_err(told).ok()).collect();
        Self { events, why: OnceLock::new() }
    }

    /// Returns the meaning of the first signal, if one has arrived.
    pub(crate) fn reason(&self) -> Option<&'static str> {
        let signalled = || self.events.iter().find(|(event, _)| event.read().is_ok()).map(|(_, why)| *why);
        let why = self.why.get().copied().or_else(signalled)?;
        Some(*self.why.get_or_init(|| why))
    }
}
