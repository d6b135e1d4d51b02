//! Tables of a software card: the time that its work takes, and its faults.

use serde::{Deserialize, Serialize};

/// A `[card.time]` table: the time that work takes on a software card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TimeSpec {
    /// MiB per second that one engine moves.
    pub copy_mib_per_s: u64,
    /// Nanoseconds for each launch of work.
    #[serde(default)]
    pub launch_ns: u64,
    /// Nanoseconds for each change of the channel on an engine.
    #[serde(default)]
    pub switch_ns: u64,
    /// MHz of the multiprocessors, each of which executes one instruction of a warp per clock.
    #[serde(default = "default_shader_mhz")]
    pub shader_mhz: u64,
    /// MiB per second that shaders' memory accesses move.
    #[serde(default = "default_shader_mib_per_s")]
    pub shader_mib_per_s: u64,
    /// MiB per second that one engine moves between the card and system memory; 0 for no bound.
    #[serde(default)]
    pub bus_mib_per_s: u64,
}

/// The default is the rate of a Quadro 6000.
const fn default_shader_mhz() -> u64 {
    1150
}

/// The default is the rate of a Quadro 6000: 144 GB/s.
const fn default_shader_mib_per_s() -> u64 {
    137_329
}

/// A `[[card.fault]]` table: operations of a software card's engine that fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FaultSpec {
    /// The engine.
    pub engine: FaultEngine,
    /// The kind of fault.
    pub kind: FaultKind,
    /// Successful operations of the engine before it.
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

/// A fault of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// It never ends.
    Hang,
    /// It writes a wrong byte.
    Corrupt,
    /// It raises no interrupt.
    DropInterrupt,
    /// It takes the card off the bus.
    Vanish,
}
