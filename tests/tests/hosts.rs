//! Engines that place work, on one Debian host: libvirt, Slurm, and containers by CDI.

#[path = "hosts/cdi.rs"]
mod cdi;
#[path = "hosts/libvirt.rs"]
mod libvirt;
#[path = "hosts/site.rs"]
mod site;
#[path = "hosts/slurm.rs"]
mod slurm;

use anyhow::Result;

/// One boot for all: each leaves the host as it was.
#[test]
fn libvirt_slurm_and_podman_hand_out_vgpus_and_tenants() -> Result<()> {
    let host = site::boot("hosts")?;
    cdi::containers_have_what_they_claim(&host)?;
    slurm::jobs_have_what_they_ask_for(&host)?;
    libvirt::domains_have_vgpus(&host)
}
