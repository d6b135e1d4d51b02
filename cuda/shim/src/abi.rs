//! The functions that a program calls: the exported ones, and our own behind them.

mod loader;
mod lookup;
mod nvml;
mod start;
pub mod stubs;
