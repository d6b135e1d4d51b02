//! Kinds of reset of a function, and the choice of a kind for a card.
//!
//! A card is usable only after its VBIOS scripts have run at power-on (POST), and no code here can run them. A Fermi
//! has no function-level reset, and GUESS: a reset of its bus loses the scripts' settings. So a bus is reset only if
//! the operator requests it. If a card has no function reset, its units are reset, as its driver does.

use nvspec::regs::pmc;

use crate::error::OpenError;
use crate::kernel::Kernel;

/// The operator's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reset {
    /// The function's own reset if it has one, otherwise a reset of its units.
    #[default]
    Auto,
    /// A reset of the bus, which resets all functions on it.
    Bus,
    /// A reset of only the function's units.
    Units,
}

/// The chosen kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Uses `VFIO_DEVICE_RESET`.
    Function,
    /// Uses `VFIO_DEVICE_PCI_HOT_RESET`.
    Bus,
    /// Uses the card's registers.
    Units,
}

impl Method {
    /// Returns a human-readable name of the kind.
    pub fn name(self) -> &'static str {
        match self {
            Self::Function => "function",
            Self::Bus => "bus",
            Self::Units => "units",
        }
    }
}

/// The kernel's names of the resets that affect neither the function's neighbours nor its slot.
const OWN: [&str; 3] = ["device_specific", "flr", "af_flr"];

/// Chooses a kind for a function of `group`. `offered` is true if the kernel can reset only this function; `ways` are
/// the kernel's kinds, of which it uses the first.
///
/// # Errors
/// If a reset of the bus was requested, but is impossible.
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

/// Returns the units that execute work, as bits of [`pmc::ENABLE`]. The other units are needed for memory and
/// registers.
pub fn working_units() -> u32 {
    use pmc::ENABLE;
    [ENABLE::PGRAPH, ENABLE::PFIFO, ENABLE::CE0, ENABLE::CE1, ENABLE::MSPDEC, ENABLE::MSVLD, ENABLE::MSPPP]
        .iter()
        .fold(0, |units, unit| units | unit.mask())
}
