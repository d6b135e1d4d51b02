//! A software GF100 card that a stock driver accepts: the default implementation of [`::card::Card`], without hardware.
//!
//! Parts, in the order in which an access passes them:
//! - `card`: [`SimGpu`], its [`Config`] and [`Counters`]; the `thread` for the card's own work;
//! - `gpu`: the map of BAR0; `blocks`, the register blocks with behaviour; `storage`, all registers without behaviour;
//! - `aperture`: BAR1, BAR3 and PRAMIN; `interrupt`: MSI and INTx;
//! - `fifo`: channels, runlist, PBDMAs, host methods, and the host's view of the engines;
//! - [`engines`]: execution of methods; `compute`: grids of shader code; `graph`: PGRAPH's other parts, including FECS;
//! - [`memory`] and [`mmu`]: VRAM, host memory, page tables, TLBs;
//! - `clock`: PTIMER and the [`TimeModel`]; `faults`: injected [`Fault`]s; [`vbios`]: the ROM.
//!
//! The card does not know virtual machines and enforces only the rules of the real card's MMU.
//!
//! # Not modelled
//! - 2D (0x902d) and 3D (0x9097) except binding an object, NOP and wait-for-idle: all of their other methods raise
//!   PGRAPH's illegal-method interrupt. Compute features listed at the top of `compute`. Video decoding, display and
//!   their falcons are fused off.
//! - Falcon code: uploaded code is not executed. PMU, FECS, GPCCS and the copy engines' falcons behave like nouveau's
//!   own firmware, with any uploaded code; without code, only the PMU works. FECS does not support commands of NVIDIA's
//!   firmware.
//! - The contents of a PGRAPH context except M2MF's and compute's methods; PGRAPH's state registers are stored, but not
//!   saved and loaded.
//! - Time slices of RAMFC (all are 2 ms), acquire timeouts, push buffer checksums.
//! - Errors of the bus: accesses to undeclared offsets are counted and read `0xbad0da00`, without PBUS's fault
//!   interrupt. The caller must merge byte accesses to registers.
//! - The privileged ring's errors, thermal events, GPIO, I2C; clocks and voltages do not change the speed.
//! - Time within a copy: with a time model, bytes may be visible up to 256 KiB before their time; semaphores,
//!   interrupts and the next method never are.
//! - Sharing of the bus: each engine has the full rate, independent of other engines and CPUs.
//! - The further limits listed in [`mmu`], [`memory`] and [`engines`].
//!
//! # Lock order
//! The card's state, then an aperture's mode, then the MMU's gate, a TLB set or the table of host memory.
//!
//! Sources: envytools (`rnndb`, `hwdocs`), nouveau (Linux 6.1 and 6.12), NVIDIA's published class and RAMFC headers.
//! Unknown behaviour is marked `GUESS`.

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
