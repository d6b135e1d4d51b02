//! Ways to reset a function, and which one a card gets.
//!
//! A card is of use only after its VBIOS scripts have run at power-on (POST), and nobody here can run them. A Fermi has no
//! function-level reset, and GUESS: a reset of its bus loses what the scripts have set up. So a bus is reset only where the
//! operator says so; without a reset of its own a card's units are reset, as its driver does it.

use nvspec::regs::pmc;

use crate::kernel::Kernel;
use crate::open::OpenError;

/// The operator's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reset {
    /// The function's own reset if it has one, its units otherwise.
    #[default]
    Auto,
    /// The bus, with all functions on it.
    Bus,
    /// Its units only.
    Units,
}

/// The way that is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// `VFIO_DEVICE_RESET`.
    Function,
    /// `VFIO_DEVICE_PCI_HOT_RESET`.
    Bus,
    /// Registers.
    Units,
}

impl Method {
    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Function => "function",
            Self::Bus => "bus",
            Self::Units => "units",
        }
    }
}

/// Kernel's names of resets that leave the function's neighbours and its slot alone.
const OWN: [&str; 3] = ["device_specific", "flr", "af_flr"];

/// Chooses a way for a function of `group`. `offered` says that the kernel can reset it alone, `ways` in which ways, the
/// first of which it takes.
///
/// # Errors
/// When the bus is to be reset, and cannot be.
pub fn choose(
    kernel: &dyn Kernel,
    wanted: Reset,
    offered: bool,
    ways: &[String],
    group: u32,
) -> Result<Method, OpenError> {
    match wanted {
        Reset::Units => Ok(Method::Units),
        Reset::Auto => {
            let own = ways.first().is_some_and(|way| OWN.contains(&way.as_str()));
            Ok(if offered && own { Method::Function } else { Method::Units })
        }
        Reset::Bus => {
            let others = kernel.dependents().map_err(|error| OpenError::NoBusReset(error.to_string()))?;
            match others.iter().find(|other| other.group != group) {
                None => Ok(Method::Bus),
                Some(other) => Err(OpenError::NoBusReset(format!(
                    "{} in IOMMU group {} would be reset as well",
                    other.address, other.group
                ))),
            }
        }
    }
}

/// Units that do work, as bits of [`pmc::ENABLE`]. The others carry memory and registers.
pub fn working_units() -> u32 {
    use pmc::ENABLE;
    [ENABLE::PGRAPH, ENABLE::PFIFO, ENABLE::CE0, ENABLE::CE1, ENABLE::MSPDEC, ENABLE::MSVLD, ENABLE::MSPPP]
        .iter()
        .fold(0, |units, unit| units | unit.mask())
}
