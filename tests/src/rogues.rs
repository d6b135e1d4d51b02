//! Real guests that mean harm, beside neighbours with a steady load.

use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::contest::{Contest, Load, Outcome};
use crate::crowd::{Crowd, ROUND_NS};

/// Time at the start that is left out.
const WARM: Duration = Duration::from_millis(500);
/// Kernels that a guest with a steady load has on their way.
const IN_FLIGHT: u32 = 32;
/// Time that a kernel of a rogue may run that is to be quarantined, in ms, and the default again behind it.
const LIMIT_MS: &str = "200";
const DEFAULT_LIMIT_MS: &str = "10000";
/// Strikes until a VM is quarantined: the default.
const STRIKES: &str = "3";

/// Activity of a rogue's VM, or its fate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// `gpu-workloads rogue --what` this.
    Program(&'static str),
    /// It works, and QEMU stops its CPUs.
    Stopped,
    /// It works, and the whole of QEMU is stopped.
    Frozen,
}

/// A guest that means harm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rogue {
    /// As reports name it.
    pub name: &'static str,
    /// Its VM is quarantined in the end.
    pub quarantined: bool,
    way: Way,
}

impl Rogue {
    const fn program(name: &'static str, what: &'static str) -> Self {
        Self { name, quarantined: false, way: Way::Program(what) }
    }

    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::program("flood", "flood"),
        Self::program("split_work", "split"),
        Self { quarantined: true, ..Self::program("endless", "endless") },
        Self::program("doorbell_kept_back", "withhold"),
        Self::program("holds_the_pbdma", "hold"),
        Self { name: "cpus_stopped", quarantined: false, way: Way::Stopped },
        Self { name: "vmm_frozen", quarantined: false, way: Way::Frozen },
    ];

    /// By registers that take a channel off the card and let it back while its kernels are there.
    pub const BY_REGISTERS: [Self; 3] = [
        Self::program("state_toggled", "stopped"),
        Self::program("masks_and_preemption", "masked"),
        Self::program("runlist_rewritten", "unlisted"),
    ];

    /// By the card's registers, and by what keeps its owner busy: each meant to go on under all of it, unpunished.
    pub const ATTACKS: [Self; 9] = [
        Self::BY_REGISTERS[0],
        Self::BY_REGISTERS[1],
        Self::BY_REGISTERS[2],
        Self::program("channels_that_fault", "faults"),
        Self::program("batches_of_gigabytes", "batches"),
        Self::program("bus_mastering_toggled", "mastering"),
        Self::program("channels_that_hand_over", "handover"),
        Self::program("non_stall_interrupts", "non-stall"),
        Self::program("illegal_methods", "illegal"),
    ];

    /// Keys of VMs' tables that all of these need.
    pub const KEYS: &str = "paravirtual = { offered = true }\n";

    /// Keeps VMs from being quarantined, so that a rogue goes on for all of the time. Strikes are counted all the same.
    pub fn unpunished(crowd: &Crowd) -> Result<()> {
        crowd.set(&["--strikes", "0"])
    }

    /// Time that it may go on for at most. QEMU waits 5 s for an answer of its device, by the clock: one that was stopped for longer in the
    /// middle of an access has lost its device when it goes on, and never takes the answer that lies there.
    pub fn longest(self) -> Duration {
        match self.way {
            Way::Frozen => Duration::from_secs(4),
            Way::Program(_) | Way::Stopped => Duration::MAX,
        }
    }

    /// Lets the last of `neighbours.len() + 1` VMs be the rogue, while the others run kernels of so many rounds.
    ///
    /// Fails when a result is wrong: a neighbour's, or what the rogue computes behind all that.
    pub fn beside(self, crowd: &Crowd, neighbours: &[u32], measured: Duration) -> Result<Outcome> {
        let vm = neighbours.len();
        let mut loads: Vec<Load> = (0..).zip(neighbours).map(|(vm, rounds)| neighbour(vm, *rounds)).collect();
        loads.push(match self.way {
            Way::Program(what) => Load::rogue(vm, what),
            Way::Stopped | Way::Frozen => Load::kernels(vm, 4, IN_FLIGHT),
        });
        if self.quarantined {
            crowd.set_vm(vm, &["--max-run-ms", LIMIT_MS])?;
        }
        let contest = Contest { loads, warm: WARM, measured };
        let outcome = contest.run_until(crowd, |crowd| self.strike(crowd, vm), |crowd| self.relent(crowd, vm));
        crowd.set_vm(vm, &["--max-run-ms", DEFAULT_LIMIT_MS])?;
        crowd.set(&["--strikes", STRIKES])?;
        outcome.with_context(|| format!("rogue {}", self.name))
    }

    fn strike(self, crowd: &Crowd, vm: usize) -> Result<()> {
        match self.way {
            Way::Program(_) => Ok(()),
            Way::Stopped => crowd.vm(vm)?.qmp("stop", json!({})).map(drop),
            Way::Frozen => signal(crowd, vm, Signal::STOP),
        }
    }

    fn relent(self, crowd: &Crowd, vm: usize) -> Result<()> {
        match self.way {
            // For what it still does, it is not quarantined again: its program is to end.
            Way::Program(_) => Self::unpunished(crowd).and_then(|()| crowd.release(vm)),
            Way::Stopped => crowd.vm(vm)?.qmp("cont", json!({})).map(drop),
            Way::Frozen => signal(crowd, vm, Signal::CONT),
        }
    }
}

/// A guest with a steady load, which tells when its kernels have ended.
pub fn neighbour(vm: usize, rounds: u32) -> Load {
    Load::kernels(vm, rounds, IN_FLIGHT).telling_ends()
}

fn signal(crowd: &Crowd, vm: usize, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(crowd.vm(vm)?.pid())?).context("QEMU has no process number")?;
    kill_process(pid, signal).context("cannot signal QEMU")
}

/// Returns the time that a neighbour's kernels of so many rounds were on the card, by its clock, over what they take: more
/// than 1 when a rogue had the card in between, which the neighbour paid for. A busy host does not matter: it is late before
/// and behind.
pub fn stretched(outcome: &Outcome, place: usize, rounds: u32) -> Result<f64> {
    let kernels_ns = outcome.reported(place, "launches")? * f64::from(rounds) * ROUND_NS as f64;
    Ok(outcome.reported(place, "gpu_us")? * 1e3 / kernels_ns)
}
