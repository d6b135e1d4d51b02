//! Workload managers on a Debian host: libvirt, Slurm, and containers with CDI; Proxmox's hook; and
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
