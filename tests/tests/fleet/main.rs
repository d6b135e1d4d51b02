//! Tests workload managers on a Debian host (libvirt, Slurm, and containers with CDI), and the package as an RPM.

mod cdi;
mod client;
mod libvirt;
mod package;
mod page;
mod site;
mod slurm;
