//! Engines that place work, on a Debian host: libvirt, Slurm, and containers by CDI; and the package in its other form.

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
