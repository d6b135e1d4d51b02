//! The reset methods of a function, and the selection of a method for a card.
//!
//! A card is usable only after its VBIOS scripts have run at power-on (POST), and no code here can run them. A Fermi
//! card has no function-level reset. GUESS: a bus reset loses the settings made by the scripts. The bus is therefore
//! reset only at the operator's request. If a card has no function-level reset, its units are reset individually, as
//! the card's driver does.

use nvspec::regs::pmc;

use crate::error::OpenError;
use crate::kernel::Kernel;

/// The operator's choice of a reset method.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reset {
    /// The function's own reset if available, or a reset of its units otherwise.
    #[default]
    Auto,
    /// A bus reset, which resets all functions on the bus.
    Bus,
    /// A reset of the function's units only.
    Units,
}

/// The selected reset method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// A reset of the function through `VFIO_DEVICE_RESET`.
    Function,
    /// A reset of the bus through `VFIO_DEVICE_PCI_HOT_RESET`.
    Bus,
    /// A reset of the units through the card's registers.
    Units,
}

impl Method {
    /// Returns a human-readable name of the method.
    pub fn name(self) -> &'static str {
        match self {
            Self::Function => "function",
            Self::Bus => "bus",
            Self::Units => "units",
        }
    }
}

/// The kernel's names for reset methods that affect only the function itself.
const OWN: [&str; 3] = ["device_specific", "flr", "af_flr"];

/// Selects a reset method for a function in `group`. `offered` is true if the kernel offers `VFIO_DEVICE_RESET` for
/// this function. `ways` lists the kernel's methods. The kernel uses the first one.
///
/// # Errors
/// Returns an error if a bus reset was requested but is impossible.
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

/// Returns the units that execute work, as bits of [`pmc::ENABLE`]. Memory and registers depend on the other units.
pub fn working_units() -> u32 {
    use pmc::ENABLE;
    [ENABLE::PGRAPH, ENABLE::PFIFO, ENABLE::CE0, ENABLE::CE1, ENABLE::MSPDEC, ENABLE::MSVLD, ENABLE::MSPPP]
        .iter()
        .fold(0, |units, unit| units | unit.mask())
}
