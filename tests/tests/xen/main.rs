//! Tests Xen domains with vGPUs in an emulated machine.

mod domains;
