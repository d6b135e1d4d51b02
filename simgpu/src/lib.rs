//! A software GF100 that stock drivers accept. It is the default implementation of [`::card::Card`], and needs no
//! hardware.
//!
//! Modules, in the order in which an access reaches them:
//! - `card`: [`SimGpu`], its [`Config`] and [`Counters`]; `thread`: performs the card's own work
//! - `gpu`: the BAR0 map; `blocks`: register blocks with behaviour; `storage`: registers without behaviour
//! - `aperture`: BAR1, BAR3 and PRAMIN; `interrupt`: MSI and INTx
//! - `fifo`: channels, the runlist, PBDMAs, host methods, and the engines as seen by the host unit
//! - the `simgpu-engines` crate executes methods and grids of shader code; `graph`: the rest of PGRAPH, including FECS
//! - the `simgpu-memory` crate contains VRAM, host memory, page tables and TLBs
//! - `clock`: PTIMER and the [`TimeModel`]; `faults`: injected [`Fault`]s; [`vbios`]: the ROM
//!
//! The card is unaware of virtual machines, and enforces only the rules that a real card's MMU enforces.
//!
//! # Not modelled
//! - 2D (0x902d) and 3D (0x9097), except for binding an object, NOP and wait-for-idle: their other methods raise
//!   PGRAPH's illegal-method interrupt. The compute features listed in [`simgpu_engines::compute`]. Video decoding, the
//!   display, and their falcons are fused off.
//! - Falcon code: uploaded code is not executed. PMU, FECS, GPCCS and the copy engines' falcons behave like nouveau's
//!   own firmware, regardless of the uploaded code; without code, only the PMU works. FECS does not support the
//!   commands of NVIDIA's firmware.
//! - Contents of a PGRAPH context, except for the methods of M2MF and compute: PGRAPH's state registers store values,
//!   but are not part of the saved context.
//! - RAMFC time slices (each slice is 2 ms), acquire timeouts, and push buffer checksums.
//! - Bus errors: accesses to undeclared offsets are counted and read as `0xbad0da00`, but do not raise PBUS's fault
//!   interrupt. The caller must merge byte accesses to registers into dwords.
//! - Privileged ring errors, thermal events, GPIO and I2C. Changes of clocks and voltages do not affect speed.
//! - Progress within a copy: with a time model, up to 256 KiB of a copy may become visible early. Semaphores,
//!   interrupts and subsequent methods never become visible early.
//! - Bus contention: each engine has the full bandwidth, regardless of other engines and CPUs.
//! - Further features listed in [`simgpu_memory::mmu`], [`simgpu_memory::memory`] and [`simgpu_engines::engines`].
//!
//! # Lock order
//! The card's state, then an aperture's mode, and then the MMU's gate, a TLB set, or the host memory table.
//!
//! Sources: envytools (`rnndb`, `hwdocs`), nouveau (Linux 6.1 and 6.12), and NVIDIA's published class and RAMFC
//! headers. Unverified behaviour is marked `GUESS`.

pub mod vbios;

mod aperture;
mod blocks;
mod card;
mod clock;
mod cx;
mod falcon;
mod faults;
mod fifo;
mod gpu;
mod graph;
mod interrupt;
mod saved;
mod storage;
mod thread;

#[cfg(test)]
mod tests;

pub use card::{Config, Counters, Error, SimGpu};
pub use clock::{ComputeTiming, EngineTiming, TimeModel};
pub use cx::Copied;
pub use faults::{EngineId, Fault, FaultKind};
pub use fifo::FifoCounters;
pub use saved::{NotQuiescent, SavedCard};
pub use simgpu_memory::memory::Vram;
