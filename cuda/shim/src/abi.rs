//! The functions that a program calls: the exported ones, and our own behind them.
//!
//! A function of the ABI gets no argument of this library. So this module, and no other, has the [`Shim`] as a static.

use std::sync::OnceLock;

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
mod start;
mod stubs;

/// The one object behind all functions. Static: the program's calls do not carry it. A child after `fork` has its
/// parent's shim, and uses it only if the parent had not initialised the driver (`fork`).
static SHIM: OnceLock<Shim> = OnceLock::new();

/// Returns the shim, and creates it on the first call.
fn shim() -> &'static Shim {
    SHIM.get_or_init(|| Shim::new(Settings::read()))
}

/// Returns the program's memory.
fn memory() -> Operations<'static> {
    shim().memory()
}

/// Makes the shim before the first use. Returns `None` in a child of a process that forked while making it.
fn prepare() -> Option<&'static Shim> {
    /// Static like the shim: a child does not wait for a thread of its parent that is making the shim.
    static MADE: Once = Once::new();
    MADE.run(|| {
        shim();
    })
    .then(shim)
}
