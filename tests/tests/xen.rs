//! Xen domains with vGPUs, in an emulated machine.

#[path = "xen/domains.rs"]
mod domains;
