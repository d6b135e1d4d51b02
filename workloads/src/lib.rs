//! Compute workloads for Fermi cards. The kernels are those in the tables of GPUvm and Gdev, written in our own
//! assembly, with inputs and expected results.
//!
//! A [`Workload`] does not depend on a driver, but on a [`Gpu`], which provides buffers, programs and launches. In a
//! guest, this is nouveau through raw ioctls. In this crate's tests, it is `simgpu`'s compute engine. [`run`] executes
//! a workload, measures the time of its phases as in GPUvm's table, and compares the result with that of the CPU: bit
//! for bit for integers, and within a stated bound for floats.
//!
//! Parts: `gpu` (the interface to the device), `setup` (a workload on a device), `phases` ([`run`] and the phase
//! times), `check` (the comparison), and one file per workload, with its kernels in `kernels/NAME.sm20`.

#![forbid(unsafe_code)]

mod backprop;
mod bfs;
mod check;
mod cpy;
mod element;
mod gpu;
mod heartwall;
mod hotspot;
mod lud;
mod madd;
mod memory;
mod mmul;
mod nn;
mod node;
mod nop;
mod nw;
mod phases;
mod random;
mod setup;
mod spin;
mod srad;
mod srad2;

pub use check::{Bound, compare_floats, compare_words};
pub use gpu::{Buffer, Gpu, Grid, Module, Params, Place};
pub use node::{NodeKernel, yardstick};
pub use phases::{Phase, Report, Run, run};
pub use random::Random;
pub use setup::{Results, Setup, Slot};

/// A computation with an input and a known result. [`Setup`] creates its buffers and transfers from [`Self::buffers`].
pub trait Workload {
    /// Returns the command-line name.
    fn name(&self) -> &'static str;

    /// Returns the problem size as text, such as `256x256`.
    fn size(&self) -> String;

    /// Returns the workload's kernels, as assembly source.
    fn source(&self) -> &'static str;

    /// Returns the workload's buffers. Names of outputs are unique.
    fn buffers(&self) -> Vec<Slot>;

    /// Launches all kernels. The caller waits for the launches.
    ///
    /// # Errors
    /// Returns an error if the device reports an error.
    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> anyhow::Result<()>;

    /// Computes the result on the CPU and compares it with the given results. Returns the number of bytes compared.
    ///
    /// # Errors
    /// Returns an error if the results differ. The error describes the differences.
    fn check(&self, results: &Results) -> anyhow::Result<u64>;
}

/// Options that determine a workload's size and input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Approximate size as a multiple of the smallest size, from 1 to 1000. The work is proportional to the size. At
    /// size 1, a workload takes a fraction of a second on a software card.
    pub scale: u32,
    /// Seed of the input.
    pub seed: u64,
    /// Number of repetitions in kernels with a variable duration: `loop`, `long-madd`, `memory`. `None` selects each
    /// workload's default.
    pub rounds: Option<u32>,
    /// Size of `memory`'s working set in bytes. `None` selects the default.
    pub working_set: Option<u64>,
    /// Side of the matrices of `madd` and `long-madd`, which is at most [`MOST_SIDE`] and does not depend on the scale.
    /// `None` selects their default.
    pub side: Option<u32>,
}

/// Maximum of [`Options::side`].
pub const MOST_SIDE: u32 = 4096;

impl Default for Options {
    fn default() -> Self {
        Self { scale: 1, seed: 1, rounds: None, working_set: None, side: None }
    }
}

/// Names of all workloads, in the order of the papers' tables.
#[rustfmt::skip]
pub const NAMES: &[&str] = &[
    "nop", "loop", "madd", "mmul", "fmadd", "fmmul", "cpy", "pincpy",
    "backprop", "bfs", "heartwall", "hotspot", "lud", "srad", "srad2",
    "nw", "nn", "long-madd", "memory",
];

/// Returns the workload with the given name, if it exists.
#[must_use]
pub fn by_name(name: &str, options: Options) -> Option<Box<dyn Workload>> {
    let Options { scale, seed, rounds, working_set, side } = options;
    let scale = scale.clamp(1, 1000);
    let madd_side = side.map_or_else(|| madd::side(scale), |side| side.clamp(1, MOST_SIDE));
    Some(match name {
        "nop" => Box::new(nop::Nop),
        "loop" => Box::new(spin::Spin::new(scale, seed, rounds)),
        "madd" => Box::new(madd::Madd::new("madd", madd_side, seed, 1)),
        "mmul" => Box::new(mmul::Mmul::new(scale, seed)),
        "fmadd" => Box::new(madd::Madd::floats(scale, seed)),
        "fmmul" => Box::new(mmul::Mmul::floats(scale, seed)),
        "cpy" => Box::new(cpy::Cpy::new(scale, seed)),
        "pincpy" => Box::new(cpy::PinCpy::new(scale, seed)),
        "backprop" => Box::new(backprop::Backprop::new(scale, seed)),
        "bfs" => Box::new(bfs::Bfs::new(scale, seed)),
        "heartwall" => Box::new(heartwall::Heartwall::new(scale, seed)),
        "hotspot" => Box::new(hotspot::Hotspot::new(scale, seed)),
        "lud" => Box::new(lud::Lud::new(scale, seed)),
        "srad" => Box::new(srad::Srad::new(scale, seed)),
        "srad2" => Box::new(srad2::Srad2::new(scale, seed)),
        "nw" => Box::new(nw::Nw::new(scale, seed)),
        "nn" => Box::new(nn::Nn::new(scale, seed)),
        "long-madd" => Box::new(madd::Madd::new("long-madd", madd_side, seed, rounds.unwrap_or(madd::LONG_ROUNDS))),
        "memory" => Box::new(memory::MemoryHungry::new(scale, seed, working_set, rounds)),
        _ => return None,
    })
}

/// Returns the side of a square with an area proportional to `scale`, which is between 1 and 1000. The side is a
/// multiple of 16.
fn side(smallest: u32, scale: u32) -> u32 {
    (smallest * smallest * scale).isqrt().next_multiple_of(16)
}

/// Assembles a kernel of this crate.
fn assemble(source: &str) -> anyhow::Result<sm20::Program> {
    sm20::assemble(source).map_err(|errors| {
        let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
        anyhow::anyhow!("a kernel does not assemble: {}", lines.join("; "))
    })
}

/// Returns words as bytes, in memory order.
fn words_to_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Returns bytes in memory order as words.
fn bytes_to_words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

/// Returns floats as bytes, in memory order.
fn floats_to_bytes(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|float| float.to_le_bytes()).collect()
}

/// Returns bytes in memory order as floats.
fn bytes_to_floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}
