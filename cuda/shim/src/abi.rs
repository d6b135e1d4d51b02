//! The functions that a program calls: the exported functions, and this library's replacements for driver functions.
//!
//! An ABI function gets no argument from this library. Therefore, this module has the [`Shim`] as a static, and no
//! other module does.

use std::sync::OnceLock;

use crate::driver::Address;
use crate::memory::Operations;
use crate::process::Once;
use crate::settings::Settings;
use crate::shim::Shim;

mod captures;
mod contexts;
mod gated;
mod loader;
mod lookup;
mod memory;
mod nvml;
mod peers;
mod start;
mod stubs;

/// The state that all functions share. This state is static because the program's calls do not pass it. A forked child
/// has its parent's shim, and uses it only if the parent had not initialised the driver (`fork`).
static SHIM: OnceLock<Shim> = OnceLock::new();

/// Returns the shim, and creates it on the first call.
fn shim() -> &'static Shim {
    SHIM.get_or_init(|| Shim::new(Settings::read()))
}

/// Returns the program's memory on the card of the current context.
fn memory() -> Operations<'static> {
    let shim = shim();
    shim.memory(shim.current())
}

/// Returns the program's memory on the card that has an address.
fn memory_at(address: Address) -> Operations<'static> {
    let shim = shim();
    shim.memory(shim.of_address(address))
}

/// Creates the shim before its first use. Returns `None` in a child of a process that forked while it was creating the
/// shim.
fn prepare() -> Option<&'static Shim> {
    /// Static, like the shim. A child does not wait for a thread of its parent that was creating the shim.
    static MADE: Once = Once::new();
    MADE.run(|| {
        shim();
    })
    .then(shim)
}
