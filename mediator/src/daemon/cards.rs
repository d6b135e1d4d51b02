//! The cards of a configuration, opened, and what they make of virtual machines.

use std::sync::Arc;

use card::Card;
use vmm_glue::Link;

use super::backend::{BackendError, Built, CardBackend, CardStatus, OpenCard};
use crate::config::check::MAX_CHANNELS;
use crate::config::{CardKind, CardSpec, VmSpec};
use crate::passthrough::PassthroughDevice;

/// Opens real and software cards.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cards;

impl OpenCard for Cards {
    fn open(&self, spec: &CardSpec) -> Result<Box<dyn CardBackend>, BackendError> {
        let card = match spec.kind {
            CardKind::Simgpu => software_card(spec)?,
        };
        Ok(Box::new(OwnedCard { spec: spec.clone(), card }))
    }
}

/// The software card that a configuration describes.
fn software_card(_spec: &CardSpec) -> Result<Arc<dyn Card>, BackendError> {
    Err(BackendError::failed("the software card is not built yet"))
}

/// A card of this daemon.
struct OwnedCard {
    spec: CardSpec,
    card: Arc<dyn Card>,
}

impl CardBackend for OwnedCard {
    fn status(&self) -> CardStatus {
        let id = self.card.identity();
        CardStatus { pci_id: format!("{:04x}:{:04x}", id.vendor, id.device), channels: MAX_CHANNELS, channels_used: 0 }
    }

    fn build(&self, vm: &VmSpec, link: &Link) -> Result<Built, BackendError> {
        if vm.passthrough {
            return PassthroughDevice::build(Arc::clone(&self.card), self.spec.vram_mib, &vm.name, link);
        }
        Err(BackendError::failed("mediated mode is not built yet"))
    }
}
