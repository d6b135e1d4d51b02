//! Cards of the configuration: software of this process, or functions behind VFIO. No other crate of the mediator knows which.
//!
//! [`Physical`] is a card, [`GoingCard`] one that goes over to another daemon, halted ([`HaltedCard`]) and written down ([`WrittenCard`]).
//!
//! What it does not do: share a card (`owner` does), or know of cards that have an owner of their own.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use card::Card;
use saved_state::{Known, SavedState, WriteError, Writer};
use simgpu::memory::Vram;
use simgpu::{EngineId, EngineTiming, SavedCard, SimGpu, TimeModel, Unrest};
use vfio_card::VfioCard;

use config::{CardKind, CardSpec, FaultEngine, FaultKind, FaultSpec, ResetWay};

/// Owner of a card's own part in the file that goes to another daemon.
const PART: u32 = 0;

/// Time between two tries to halt a card of which an engine is at work.
const AGAIN: Duration = Duration::from_millis(1);

/// Says why a card cannot be opened, or goes over to nobody, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unusable(String);

impl Unusable {
    fn of(why: impl std::fmt::Display) -> Self {
        Self(why.to_string())
    }
}

/// A card itself.
pub enum Physical {
    /// Software of this process.
    Software(Arc<SimGpu>),
    /// A function behind VFIO.
    Vfio(Arc<dyn Card>),
}

impl Physical {
    /// Opens the card that a configuration describes.
    ///
    /// # Errors
    /// When it cannot be opened, with what to do.
    pub fn open(spec: &CardSpec) -> Result<Self, Unusable> {
        match spec.kind {
            CardKind::Simgpu => {
                let made = SimGpu::new(&software_config(spec)?).map_err(Unusable::of)?;
                Ok(Self::Software(Arc::new(made)))
            }
            CardKind::Vfio => Ok(Self::Vfio(card_behind_vfio(spec)?)),
            CardKind::Cuda => Err(Unusable::of("it has an owner of its own, and no card here")),
        }
    }

    /// The card that has come from another daemon.
    #[must_use]
    pub fn come(card: &GoingCard) -> Self {
        Self::Software(Arc::clone(&card.0))
    }

    /// The card as everything above has it.
    #[must_use]
    pub fn card(&self) -> Arc<dyn Card> {
        match self {
            Self::Software(card) => Arc::clone(card) as Arc<dyn Card>,
            Self::Vfio(card) => Arc::clone(card),
        }
    }

    /// Returns whether the card's memory is this process's: the CPU reaches it as fast as engines would, and another daemon can map it.
    #[must_use]
    pub const fn is_of_this_process(&self) -> bool {
        matches!(self, Self::Software(_))
    }

    /// The card as it goes to another daemon.
    ///
    /// # Errors
    /// When it cannot.
    pub fn going(&self) -> Result<GoingCard, Unusable> {
        match self {
            Self::Software(card) => Ok(GoingCard(Arc::clone(card))),
            Self::Vfio(_) => Err(Unusable::of("a card behind VFIO cannot go over to another daemon yet")),
        }
    }
}

/// A card that another daemon can go on with.
pub struct GoingCard(Arc<SimGpu>);

/// A card that does nothing by itself, and goes on when this is dropped.
pub struct HaltedCard<'a>(&'a SimGpu);

/// A card as it was written down.
pub struct WrittenCard(SavedCard);

impl GoingCard {
    /// The part that is read and written here.
    #[must_use]
    pub fn known() -> Known {
        Known::of::<SavedCard>()
    }

    /// Makes the card that another daemon has written down in `file`. It is halted until [`Self::go_on`].
    ///
    /// # Errors
    /// When it does not go with the configuration, or is none that there can be.
    pub fn come(spec: &CardSpec, file: &mut SavedState<'_>, vram: File) -> Result<Self, Unusable> {
        if spec.kind != CardKind::Simgpu {
            return Err(Unusable::of(format!("it is of kind = \"{}\" now; put `simgpu` back", spec.kind)));
        }
        let vram = Vram::of_file(vram, spec.vram_mib << 20).map_err(Unusable::of)?;
        let state = file.take(PART).map_err(Unusable::of)?;
        let card = SimGpu::restored(&software_config(spec)?, state, vram).map_err(Unusable::of)?;
        Ok(Self(Arc::new(card)))
    }

    /// Ends a halt.
    pub fn go_on(&self) {
        self.0.go_on();
    }

    /// Lets the card be halted, until what this returns is dropped.
    #[must_use]
    pub fn halted(&self) -> HaltedCard<'_> {
        HaltedCard(&self.0)
    }

    /// The file that the card's memory lies in.
    #[must_use]
    pub fn vram_file(&self) -> Option<&File> {
        self.0.vram_file()
    }
}

impl HaltedCard<'_> {
    /// Has the card take all off its engines, which may take until some time, and writes it down, but for its memory.
    ///
    /// # Errors
    /// When it does not come to rest.
    pub fn write_down(&self, until: Instant) -> Result<WrittenCard, Unusable> {
        while let Err(unrest) = self.0.halt() {
            if !matches!(unrest, Unrest::Working(_)) || Instant::now() >= until {
                return Err(Unusable::of(unrest));
            }
            std::thread::sleep(AGAIN);
        }
        self.0.save().map(WrittenCard).ok_or_else(|| Unusable::of("the software card does not rest"))
    }

    /// The card goes on with another daemon: here it stays halted.
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
    /// Puts the card's own part into the file that goes to another daemon.
    ///
    /// # Errors
    /// [`WriteError`].
    pub fn put(&self, file: &mut Writer) -> Result<(), WriteError> {
        file.put(PART, &self.0)
    }
}

/// The card behind VFIO that a configuration names.
fn card_behind_vfio(spec: &CardSpec) -> Result<Arc<dyn Card>, Unusable> {
    let address = spec.address.ok_or_else(|| Unusable::of("the configuration names no address"))?;
    let reset = match spec.reset {
        ResetWay::Auto => vfio_card::Reset::Auto,
        ResetWay::Bus => vfio_card::Reset::Bus,
        ResetWay::Units => vfio_card::Reset::Units,
    };
    let card = VfioCard::open(&vfio_card::Place::default(), address, reset)
        .map_err(|error| Unusable::of(format!("{error}; {}", error.what_to_do())))?;
    Ok(Arc::new(card))
}

/// The software card that a configuration describes. Its memory is a file of the kernel's, so that another daemon can go on with it.
fn software_config(spec: &CardSpec) -> Result<simgpu::Config, Unusable> {
    let timing = |bytes_per_second, launch_ns| EngineTiming { bytes_per_second, launch_ns };
    Ok(simgpu::Config {
        vram_mib: u32::try_from(spec.vram_mib).map_err(Unusable::of)?,
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
