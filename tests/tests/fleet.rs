//! Workload managers on a Debian host: libvirt, Slurm, and containers with CDI; and the package as an RPM.

#[path = "fleet/cdi.rs"]
mod cdi;
#[path = "fleet/libvirt.rs"]
mod libvirt;
#[path = "fleet/package.rs"]
mod package;
#[path = "fleet/site.rs"]
mod site;
#[path = "fleet/slurm.rs"]
mod slurm;
