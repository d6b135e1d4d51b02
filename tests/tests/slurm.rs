//! Slurm with two nodes: many jobs, cancelled, killed, and a node lost.

#![allow(dead_code, reason = "the suite `hosts` uses the rest")]

#[path = "hosts/site.rs"]
mod site;
#[path = "hosts/slurm.rs"]
mod slurm;

use anyhow::Result;

#[test]
fn forty_jobs_leave_nothing_and_their_accounts_add_up() -> Result<()> {
    let host = site::boot("slurm")?;
    slurm::many_jobs(&host, 40)
}
