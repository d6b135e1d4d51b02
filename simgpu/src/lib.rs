//! A software GF100 that stock drivers accept: the default implementation of [`::card::Card`], without hardware.
//!
//! Parts, in the order in which an access reaches them:
//! - `card`: [`SimGpu`], its [`Config`] and [`Counters`]; `thread`: does the card's own work
//! - `gpu`: the map of BAR0; `blocks`: register blocks with behaviour; `storage`: registers without behaviour
//! - `aperture`: BAR1, BAR3 and PRAMIN; `interrupt`: MSI and INTx
//! - `fifo`: channels, the runlist, PBDMAs, host methods, and the host's view of the engines
//! - [`engines`]: executes methods; `compute`: grids of shader code; `graph`: the rest of PGRAPH, including FECS
//! - [`memory`] and [`mmu`]: VRAM, host memory, page tables, TLBs
//! - `clock`: PTIMER and the [`TimeModel`]; `faults`: injected [`Fault`]s; [`vbios`]: the ROM
//!
//! The card knows nothing about virtual machines, and enforces only the rules that the MMU of a real card enforces.
//!
//! # Not modelled
//! - 2D (0x902d) and 3D (0x9097), except binding an object, NOP and wait-for-idle: their other methods raise PGRAPH's
//!   illegal-method interrupt. The compute features that are listed in `compute`. Video decoding, the display, and
//!   their falcons are fused off.
//! - Falcon code: the model does not execute uploaded code. PMU, FECS, GPCCS and the copy engines' falcons behave like
//!   nouveau's own firmware, regardless of the uploaded code; without code, only the PMU works. FECS does not support
//!   the commands of NVIDIA's firmware.
//! - Contents of a PGRAPH context, except the methods of M2MF and compute: PGRAPH's state registers store values, but
//!   are not saved and loaded.
//! - Time slices in RAMFC (each slice is 2 ms), timeouts of acquires, and checksums of the push buffer.
//! - Bus errors: accesses to undeclared offsets are counted and read as `0xbad0da00`, but do not raise PBUS's fault
//!   interrupt. The caller must merge byte accesses to registers into dwords.
//! - Errors of the privileged ring, thermal events, GPIO, I2C; changed clocks and voltages do not change the speed.
//! - Time within a copy: with a time model, up to 256 KiB of a copy may become visible early. Semaphores, interrupts
//!   and the next method never become visible early.
//! - Bus contention: each engine has the full rate, regardless of other engines and of CPUs.
//! - Further features that [`mmu`], [`memory`] and [`engines`] list.
//!
//! # Lock order
//! The card's state; then an aperture's mode; then the MMU's gate, a TLB set, or the table of host memory.
//!
//! Sources: envytools (`rnndb`, `hwdocs`), nouveau (Linux 6.1 and 6.12), and NVIDIA's published class and RAMFC
//! headers. Unverified behaviour is marked `GUESS`.

pub mod compute;
pub mod engines;
pub mod memory;
pub mod mmu;
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
