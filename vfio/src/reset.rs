//! Kinds of reset of a function, and the choice for a card.
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
    /// The function's own reset if it has one, its units otherwise.
    #[default]
    Auto,
    /// The bus, with all functions on it.
    Bus,
    /// Its units only.
    Units,
}

/// The chosen kind.
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

/// The kernel's names of resets that do not affect the function's neighbours and its slot.
const OWN: [&str; 3] = ["device_specific", "flr", "af_flr"];

/// Chooses a kind for a function of `group`. With `offered` the kernel can reset it alone; `ways` are the kinds, of
/// which the kernel uses the first.
///
/// # Errors
/// If a reset of the bus was requested, and is impossible.
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

/// Units that do work, as bits of [`pmc::ENABLE`]. The other capabilities are needed for memory and registers.
pub fn working_units() -> u32 {
    use pmc::ENABLE;
    [ENABLE::PGRAPH, ENABLE::PFIFO, ENABLE::CE0, ENABLE::CE1, ENABLE::MSPDEC, ENABLE::MSVLD, ENABLE::MSPPP]
        .iter()
        .fold(0, |units, unit| units | unit.mask())
}
