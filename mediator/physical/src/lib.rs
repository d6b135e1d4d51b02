//! Configured cards: software cards in this process, and PCI functions behind VFIO. The crates that share a card among
//! VMs do not depend on its kind.
//!
//! [`Physical`] is a card. [`GoingCard`] is a card to be handed over to another daemon. It is first halted
//! ([`HaltedCard`]) and then saved ([`WrittenCard`]).
//!
//! The crate does not share a card among VMs (`card-manager` does), and does not support CUDA cards.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use card::Card;
use saved_state::{Known, SavedState, WriteError, Writer};
use simgpu::Vram;
use simgpu::{EngineId, EngineTiming, NotQuiescent, SavedCard, SimGpu, TimeModel};
use vfio_card::VfioCard;

use config::{CardKind, CardSpec, FaultEngine, FaultKind, FaultSpec, ResetWay};

/// Owner number of a card's own part in a handover file.
const PART: u32 = 0;

/// Interval between attempts to halt a card whose engines are busy.
const HALT_RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Reason why a card cannot be opened or handed over, and a remedy.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unusable(String);

impl Unusable {
    fn new(why: impl std::fmt::Display) -> Self {
        Self(why.to_string())
    }
}

/// A configured card.
pub enum Physical {
    /// A software card in this process.
    Software(Arc<SimGpu>),
    /// A PCI function behind VFIO.
    Vfio(Arc<dyn Card>),
}

impl Physical {
    /// Opens the configured card.
    ///
    /// # Errors
    /// Returns an error and a remedy if the card cannot be opened.
    pub fn open(spec: &CardSpec) -> Result<Self, Unusable> {
        match spec.kind {
            CardKind::Simgpu => {
                let made = SimGpu::new(&software_config(spec)?).map_err(Unusable::new)?;
                Ok(Self::Software(Arc::new(made)))
            }
            CardKind::Vfio => Ok(Self::Vfio(card_behind_vfio(spec)?)),
            CardKind::Cuda => Err(Unusable::new("a CUDA card belongs to its owner process")),
        }
    }

    /// Returns a card that another daemon has handed over.
    #[must_use]
    pub fn come(card: &GoingCard) -> Self {
        Self::Software(Arc::clone(&card.0))
    }

    /// Returns the card's common interface.
    #[must_use]
    pub fn card(&self) -> Arc<dyn Card> {
        match self {
            Self::Software(card) => Arc::clone(card) as Arc<dyn Card>,
            Self::Vfio(card) => Arc::clone(card),
        }
    }

    /// Returns true if the card's memory is in this process. In this case, the CPU can access it as fast as the engines
    /// can, and another daemon can map it.
    #[must_use]
    pub const fn is_of_this_process(&self) -> bool {
        matches!(self, Self::Software(_))
    }

    /// Returns the card in the form in which it can be handed over to another daemon.
    ///
    /// # Errors
    /// Returns an error if the card cannot be handed over.
    pub fn going(&self) -> Result<GoingCard, Unusable> {
        match self {
            Self::Software(card) => Ok(GoingCard(Arc::clone(card))),
            Self::Vfio(_) => Err(Unusable::new("a card behind VFIO cannot be handed over to another daemon yet")),
        }
    }
}

/// A card that can be handed over to another daemon.
pub struct GoingCard(Arc<SimGpu>);

/// A card that can be halted. Dropping this value resumes the card.
pub struct HaltedCard<'a>(&'a SimGpu);

/// Saved form of a card.
pub struct WrittenCard(SavedCard);

impl GoingCard {
    /// Returns the saved part that this crate supports.
    #[must_use]
    pub fn known() -> Known {
        Known::for_part::<SavedCard>()
    }

    /// Restores the card that another daemon has saved in `file`. The card remains halted until [`Self::go_on`].
    ///
    /// # Errors
    /// Returns an error if the part is invalid or contradicts the configuration.
    pub fn come(spec: &CardSpec, file: &mut SavedState<'_>, vram: File) -> Result<Self, Unusable> {
        if spec.kind != CardKind::Simgpu {
            return Err(Unusable::new(format!(
                "the configured kind is now \"{}\"; change it back to `simgpu`",
                spec.kind
            )));
        }
        let vram = Vram::of_file(vram, spec.vram_mib << 20).map_err(Unusable::new)?;
        let state = file.take(PART).map_err(Unusable::new)?;
        let card = SimGpu::restored(&software_config(spec)?, state, vram).map_err(Unusable::new)?;
        Ok(Self(Arc::new(card)))
    }

    /// Resumes the card.
    pub fn go_on(&self) {
        self.0.go_on();
    }

    /// Returns a guard that permits halting the card.
    #[must_use]
    pub fn halted(&self) -> HaltedCard<'_> {
        HaltedCard(&self.0)
    }

    /// Returns the file with the card's memory.
    #[must_use]
    pub fn vram_file(&self) -> Option<&File> {
        self.0.vram_file()
    }
}

impl HaltedCard<'_> {
    /// Removes all channels from the engines by `until`, and saves the card, excluding its memory.
    ///
    /// # Errors
    /// Returns an error if the card does not become idle in time.
    pub fn write_down(&self, until: Instant) -> Result<WrittenCard, Unusable> {
        while let Err(unrest) = self.0.halt() {
            if !matches!(unrest, NotQuiescent::Working(_)) || Instant::now() >= until {
                return Err(Unusable::new(unrest));
            }
            std::thread::sleep(HALT_RETRY_INTERVAL);
        }
        self.0.save().map(WrittenCard).ok_or_else(|| Unusable::new("the software card does not become idle"))
    }

    /// Leaves the card halted in this process, because it resumes in another daemon.
    pub fn leave(self) {
        std::mem::forget(self);
    }
}

impl Drop for HaltedCard<'_> {
    fn drop(&mut self) {
        self.0.go_on();
    }
}

impl WrittenCard {
    /// Adds the card's part to the handover file.
    ///
    /// # Errors
    /// Returns a [`WriteError`] if the part cannot be written.
    pub fn put(&self, file: &mut Writer) -> Result<(), WriteError> {
        file.put(PART, &self.0)
    }
}

/// Opens the configured card behind VFIO.
fn card_behind_vfio(spec: &CardSpec) -> Result<Arc<dyn Card>, Unusable> {
    let address = spec.address.ok_or_else(|| Unusable::new("the configuration has no address for the card"))?;
    let reset = match spec.reset {
        ResetWay::Auto => vfio_card::Reset::Auto,
        ResetWay::Bus => vfio_card::Reset::Bus,
        ResetWay::Units => vfio_card::Reset::Units,
    };
    let card = VfioCard::open(&vfio_card::Place::default(), address, reset)
        .map_err(|error| Unusable::new(format!("{error}; {}", error.what_to_do())))?;
    Ok(Arc::new(card))
}

/// Returns the configuration of a software card. Its memory is a memfd, which another daemon can take over.
fn software_config(spec: &CardSpec) -> Result<simgpu::Config, Unusable> {
    let timing = |bytes_per_second, launch_ns| EngineTiming { bytes_per_second, launch_ns };
    Ok(simgpu::Config {
        vram_mib: u32::try_from(spec.vram_mib).map_err(Unusable::new)?,
        bar1_size: spec.bar1_mib << 20,
        bar3_size: spec.bar3_mib << 20,
        time: spec.time.map(|time| TimeModel {
            graph: timing(time.copy_mib_per_s << 20, time.launch_ns),
            compute: simgpu::ComputeTiming::at(time.shader_mhz, time.shader_mib_per_s << 20),
            copy: timing(time.copy_mib_per_s << 20, time.launch_ns),
            switch_ns: time.switch_ns,
            bus_bytes_per_second: time.bus_mib_per_s << 20,
        }),
        profile: spec.profile,
        faults: spec.faults.iter().map(fault).collect(),
        shared: true,
        ..simgpu::Config::default()
    })
}

fn fault(spec: &FaultSpec) -> simgpu::Fault {
    simgpu::Fault {
        engine: match spec.engine {
            FaultEngine::Graph => EngineId::Graph,
            FaultEngine::Copy0 => EngineId::Copy0,
            FaultEngine::Copy1 => EngineId::Copy1,
        },
        kind: match spec.kind {
            FaultKind::Hang => simgpu::FaultKind::Hang,
            FaultKind::Corrupt => simgpu::FaultKind::Corrupt,
            FaultKind::DropInterrupt => simgpu::FaultKind::DropInterrupt,
            FaultKind::Vanish => simgpu::FaultKind::Vanish,
        },
        after: spec.after,
        count: spec.count,
    }
}
