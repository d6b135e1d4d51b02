//! The functions that programs call: the exported functions, and this library's replacements for driver functions. ABI
//! functions receive arguments only from the program, so only this module keeps the [`Shim`] in a static.

use std::sync::OnceLock;

use crate::driver::Address;
use crate::memory::Operations;
use crate::process::Once;
use crate::settings::Settings;
use crate::shim::Shim;

mod captures;
mod contexts;
mod devices;
mod gated;
mod loader;
mod lookup;
mod memory;
mod nvml;
mod peers;
mod start;
mod stubs;

/// State shared by all functions. A static variable, because the program's calls have no argument for it. A forked
/// child inherits its parent's shim, but uses it only if the parent had not initialized the driver (`fork`).
static SHIM: OnceLock<Shim> = OnceLock::new();

/// Returns the shim. Creates it on the first call.
fn shim() -> &'static Shim {
    SHIM.get_or_init(|| Shim::new(Settings::read()))
}

/// Returns the memory operations for the current context's card.
fn memory() -> Operations<'static> {
    let shim = shim();
    shim.memory(shim.current())
}

/// Returns the memory operations for the card that an address belongs to.
fn memory_at(address: Address) -> Operations<'static> {
    let shim = shim();
    shim.memory(shim.of_address(address))
}

/// Creates the shim before its first use. Returns `None` in a child whose parent forked while creating the shim.
fn prepare() -> Option<&'static Shim> {
    /// Runs the creation once. A static variable, like the shim. A child does not wait for a thread of its parent that
    /// was creating the shim.
    static MADE: Once = Once::new();
    MADE.run(|| {
        shim();
    })
    .then(shim)
}
