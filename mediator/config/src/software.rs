//! Tables of a software card: the duration of its work, and its faults.

use serde::{Deserialize, Serialize};

/// A `[card.time]` table: the duration of work on a software card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TimeSpec {
    /// Copy rate of one engine, in MiB per second.
    pub copy_mib_per_s: u64,
    /// Duration of each launch of work, in nanoseconds.
    #[serde(default)]
    pub launch_ns: u64,
    /// Duration of each channel switch on an engine, in nanoseconds.
    #[serde(default)]
    pub switch_ns: u64,
    /// Clock of the multiprocessors, in MHz. Each executes one instruction of a warp per clock cycle.
    #[serde(default = "default_shader_mhz")]
    pub shader_mhz: u64,
    /// Rate of the shaders' memory accesses, in MiB per second.
    #[serde(default = "default_shader_mib_per_s")]
    pub shader_mib_per_s: u64,
    /// Transfer rate of one engine between the card and system memory, in MiB per second; 0 means no limit.
    #[serde(default)]
    pub bus_mib_per_s: u64,
}

/// Returns the default: the clock of a Quadro 6000, in MHz.
const fn default_shader_mhz() -> u64 {
    1150
}

/// Returns the default: the memory bandwidth of a Quadro 6000 (144 GB/s), in MiB per second.
const fn default_shader_mib_per_s() -> u64 {
    137_329
}

/// A `[[card.fault]]` table: operations of a software card's engine that fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FaultSpec {
    /// The engine that fails.
    pub engine: FaultEngine,
    /// Kind of the fault.
    pub kind: FaultKind,
    /// Number of the engine's operations that succeed before the fault.
    #[serde(default)]
    pub after: u32,
    /// Number of operations that then fail.
    #[serde(default = "one")]
    pub count: u32,
}

fn one() -> u32 {
    1
}

/// An engine of a software card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum FaultEngine {
    /// PGRAPH.
    Graph,
    /// Copy engine 0.
    Copy0,
    /// Copy engine 1.
    Copy1,
}

/// Effect of a fault on an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// The operation never completes.
    Hang,
    /// The operation writes a wrong byte.
    Corrupt,
    /// The operation raises no interrupt.
    DropInterrupt,
    /// The operation makes the card fall off the bus.
    Vanish,
}
