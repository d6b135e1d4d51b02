//! Configured cards: software cards in this process, and PCI functions behind VFIO. No other crate of the mediator
//! depends on the kind of card.
//!
//! [`Physical`] is a card. [`GoingCard`] is a card to be handed over to another daemon: it is first halted
//! ([`HaltedCard`]) and then serialized ([`WrittenCard`]).
//!
//! The crate does not share a card among VMs (`card-manager` does), and does not handle CUDA cards.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use card::Card;
use saved_state::{Known, SavedState, WriteError, Writer};
use simgpu::Vram;
use simgpu::{EngineId, EngineTiming, NotQuiescent, SavedCard, SimGpu, TimeModel};
use vfio_card::VfioCard;

use config::{CardKind, CardSpec, FaultEngine, FaultKind, FaultSpec, ResetWay};

/// Owner number of a card's own part in the file for another daemon.
const PART: u32 = 0;

/// Interval between attempts to halt a card with a busy engine.
const HALT_RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Reason why a card cannot be opened or handed over, with a remedy.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unusable(String);

impl Unusable {
    fn new(why: impl std::fmt::Display) -> Self {
        Self(why.to_string())
    }
}

/// A card of any kind.
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
    /// Returns an error with a remedy if the card cannot be opened.
    pub fn open(spec: &CardSpec) -> Result<Self, Unusable> {
        match spec.kind {
            CardKind::Simgpu => {
                let made = SimGpu::new(&software_config(spec)?).map_err(Unusable::new)?;
                Ok(Self::Software(Arc::new(made)))
            }
            CardKind::Vfio => Ok(Self::Vfio(card_behind_vfio(spec)?)),
            CardKind::Cuda => Err(Unusable::new("it has its own owner process, and cannot be opened here")),
        }
    }

    /// Returns a card received from another daemon.
    #[must_use]
    pub fn come(card: &GoingCard) -> Self {
        Self::Software(Arc::clone(&card.0))
    }

    /// Returns the card as the interface used by all higher layers.
    #[must_use]
    pub fn card(&self) -> Arc<dyn Card> {
        match self {
            Self::Software(card) => Arc::clone(card) as Arc<dyn Card>,
            Self::Vfio(card) => Arc::clone(card),
        }
    }

    /// Returns true if the card's memory belongs to this process. The CPU can then access it as fast as the engines
    /// can, and another daemon can map it.
    #[must_use]
    pub const fn is_of_this_process(&self) -> bool {
        matches!(self, Self::Software(_))
    }

    /// Returns the card in a form for handing it over to another daemon.
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

/// A card that another daemon can take over.
pub struct GoingCard(Arc<SimGpu>);

/// A card that can be halted, and that resumes when this value is dropped.
pub struct HaltedCard<'a>(&'a SimGpu);

/// A serialized card.
pub struct WrittenCard(SavedCard);

impl GoingCard {
    /// Returns the saved-state part of this crate.
    #[must_use]
    pub fn known() -> Known {
        Known::for_part::<SavedCard>()
    }

    /// Rebuilds the card that another daemon has serialized to `file`. The card stays halted until [`Self::go_on`].
    ///
    /// # Errors
    /// Returns an error if the part contradicts the configuration or is invalid.
    pub fn come(spec: &CardSpec, file: &mut SavedState<'_>, vram: File) -> Result<Self, Unusable> {
        if spec.kind != CardKind::Simgpu {
            return Err(Unusable::new(format!("it is now of kind = \"{}\"; restore `simgpu`", spec.kind)));
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

    /// Returns a guard. The card can be halted while the guard exists.
    #[must_use]
    pub fn halted(&self) -> HaltedCard<'_> {
        HaltedCard(&self.0)
    }

    /// Returns the file that contains the card's memory.
    #[must_use]
    pub fn vram_file(&self) -> Option<&File> {
        self.0.vram_file()
    }
}

impl HaltedCard<'_> {
    /// Removes all channels from the card's engines, waiting until `until` at the latest, and serializes the card,
    /// except for its memory.
    ///
    /// # Errors
    /// Returns an error if the card does not become quiescent.
    pub fn write_down(&self, until: Instant) -> Result<WrittenCard, Unusable> {
        while let Err(unrest) = self.0.halt() {
            if !matches!(unrest, NotQuiescent::Working(_)) || Instant::now() >= until {
                return Err(Unusable::new(unrest));
            }
            std::thread::sleep(HALT_RETRY_INTERVAL);
        }
        self.0.save().map(WrittenCard).ok_or_else(|| Unusable::new("the software card does not become idle"))
    }

    /// Leaves the card halted in this process, because another daemon resumes it.
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
    /// Adds the card's own part to the file for another daemon.
    ///
    /// # Errors
    /// Returns a [`WriteError`] if the part cannot be written.
    pub fn put(&self, file: &mut Writer) -> Result<(), WriteError> {
        file.put(PART, &self.0)
    }
}

/// Returns the configured card behind VFIO.
fn card_behind_vfio(spec: &CardSpec) -> Result<Arc<dyn Card>, Unusable> {
    let address = spec.address.ok_or_else(|| Unusable::new("the configuration does not contain an address"))?;
    let reset = match spec.reset {
        ResetWay::Auto => vfio_card::Reset::Auto,
        ResetWay::Bus => vfio_card::Reset::Bus,
        ResetWay::Units => vfio_card::Reset::Units,
    };
    let card = VfioCard::open(&vfio_card::Place::default(), address, reset)
        .map_err(|error| Unusable::new(format!("{error}; {}", error.what_to_do())))?;
    Ok(Arc::new(card))
}

/// Returns the software card's configuration. The card's memory is a memfd, which another daemon can take over.
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
