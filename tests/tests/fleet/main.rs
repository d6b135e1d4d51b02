//! Workload managers on a Debian host: libvirt, Slurm, Proxmox's hook, and containers with CDI. Also tests
//! releases.

mod cdi;
mod client;
mod libvirt;
mod package;
mod page;
mod proxmox;
mod release;
mod site;
mod slurm;
