//! Tests workload managers on a Debian host: libvirt, Slurm, Proxmox's hook, and containers with CDI. Also tests
//! releases and the encrypting block device.

mod cdi;
mod client;
mod crypt;
mod libvirt;
mod package;
mod page;
mod proxmox;
mod release;
mod site;
mod slurm;
