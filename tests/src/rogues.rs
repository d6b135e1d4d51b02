//! Malicious guests, alongside other guests with a steady load.

use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use sched::Engine;
use serde_json::json;

use crate::contention::{Contest, Load, Outcome};
use crate::many_vms::{Crowd, ROUND_NS};
use crate::wait::until;

/// Duration of the warm-up before the measurement.
const WARM_UP: Duration = Duration::from_millis(500);
/// Number of kernels in flight in a steady load.
const IN_FLIGHT: u32 = 32;
/// Kernel time limit in ms for rogues that must be quarantined.
const LIMIT_MS: &str = "200";
/// Default kernel time limit in ms, which is restored afterwards.
const DEFAULT_LIMIT_MS: &str = "10000";
/// Default number of strikes after which a VM is quarantined.
const STRIKES: &str = "3";
/// TIMEOUT: only a failing test waits this long. The history of charges must still cover this time.
const QUARANTINE_LIMIT: Duration = Duration::from_secs(30);

/// Type of attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Runs an attack of `gpu-workloads rogue`.
    Program(&'static str),
    /// QEMU stops the guest's CPUs while the guest works.
    Stopped,
    /// The QEMU process is stopped while the guest works.
    Frozen,
}

/// A malicious guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rogue {
    /// Name in reports.
    pub name: &'static str,
    /// True if the rogue's VM must be quarantined at the end.
    pub quarantined: bool,
    way: Way,
}

impl Rogue {
    const fn program(name: &'static str, what: &'static str) -> Self {
        Self { name, quarantined: false, way: Way::Program(what) }
    }

    /// All rogues except for those in [`Self::BY_REGISTERS`] and [`Self::ATTACKS`].
    pub const ALL: [Self; 7] = [
        Self::program("flood", "flood"),
        Self::program("split_work", "split"),
        Self { quarantined: true, ..Self::program("endless", "endless") },
        Self::program("doorbell_kept_back", "withhold"),
        Self::program("holds_the_pbdma", "hold"),
        Self { name: "cpus_stopped", quarantined: false, way: Way::Stopped },
        Self { name: "vmm_frozen", quarantined: false, way: Way::Frozen },
    ];

    /// Rogues that toggle a channel through registers while the card executes the channel's kernels.
    pub const BY_REGISTERS: [Self; 3] = [
        Self::program("state_toggled", "stopped"),
        Self::program("masks_and_preemption", "masked"),
        Self::program("runlist_rewritten", "unlisted"),
    ];

    /// Attacks through the card's registers, and through load on the card manager. They are not punished, so they may
    /// continue for the whole measurement.
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

    /// Keys that [`Self::ATTACKS`] need in the VMs' tables.
    pub const KEYS: &str = "paravirtual = { offered = true }\n";

    /// Disables quarantine, so that a rogue can continue for the whole measurement. Strikes are still counted.
    pub fn unpunished(crowd: &Crowd) -> Result<()> {
        crowd.set(&["--strikes", "0"])
    }

    /// Returns the maximum duration of the attack. QEMU waits 5 s of wall-clock time for its device. If QEMU is stopped
    /// for longer during an access, it drops its device when it resumes, and never reads the reply.
    pub fn longest(self) -> Duration {
        match self.way {
            Way::Frozen => Duration::from_secs(4),
            Way::Program(_) | Way::Stopped => Duration::MAX,
        }
    }

    /// Runs the rogue in the last of `neighbours.len() + 1` VMs. The other VMs run kernels with the given numbers of
    /// rounds.
    ///
    /// Fails if another VM produces a wrong result, or if the rogue does so after the attack.
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
        let contest = Contest { loads, warm: WARM_UP, measured };
        let outcome = contest.run_until(crowd, |crowd| self.strike(crowd, vm), |crowd| self.relent(crowd, vm));
        crowd.set_vm(vm, &["--max-run-ms", DEFAULT_LIMIT_MS])?;
        crowd.set(&["--strikes", STRIKES])?;
        outcome.with_context(|| format!("rogue {}", self.name))
    }

    fn strike(self, crowd: &Crowd, vm: usize) -> Result<()> {
        match self.way {
            // Wait within the measured time, because the rogue may submit late on a busy host.
            Way::Program(_) if self.quarantined => until("the rogue's quarantine", QUARANTINE_LIMIT, || {
                Ok(crowd.accounts(Engine::Compute.name())?[vm].quarantined.then_some(()))
            }),
            Way::Program(_) => Ok(()),
            Way::Stopped => crowd.vm(vm)?.qmp("stop", json!({})).map(drop),
            Way::Frozen => signal(crowd, vm, Signal::STOP),
        }
    }

    fn relent(self, crowd: &Crowd, vm: usize) -> Result<()> {
        match self.way {
            // Prevent another quarantine during the rest of the attack, so that the rogue's program can end.
            Way::Program(_) => Self::unpunished(crowd).and_then(|()| crowd.release(vm)),
            Way::Stopped => crowd.vm(vm)?.qmp("cont", json!({})).map(drop),
            Way::Frozen => signal(crowd, vm, Signal::CONT),
        }
    }
}

/// Returns a steady load that reports the end time of each kernel.
pub fn neighbour(vm: usize, rounds: u32) -> Load {
    Load::kernels(vm, rounds, IN_FLIGHT).telling_ends()
}

fn signal(crowd: &Crowd, vm: usize, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(crowd.vm(vm)?.pid())?).context("QEMU has no process ID")?;
    kill_process(pid, signal).context("cannot signal QEMU")
}

/// Returns the card time of a load's kernels, divided by their expected duration. The result exceeds 1 if a rogue used
/// the card during these kernels. A busy host does not affect the result, because it delays kernels only before and
/// after their execution.
pub fn stretched(outcome: &Outcome, place: usize, rounds: u32) -> Result<f64> {
    let kernels_ns = outcome.reported(place, "launches")? * f64::from(rounds) * ROUND_NS as f64;
    Ok(outcome.reported(place, "gpu_us")? * 1e3 / kernels_ns)
}
