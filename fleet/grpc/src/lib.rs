//! Protocols of the kubelet and KubeVirt, and a gRPC server on UNIX sockets that is compatible with Go clients.
//!
//! The messages and services are generated from the files in `proto`. [`socket`] serves the services, and [`authority`]
//! makes the kubelet's requests acceptable to the `h2` crate.
//!
//! The crate does not interpret claims or domains.

pub mod authority;
pub mod socket;

#[allow(
    missing_docs,
    clippy::all,
    clippy::pedantic,
    clippy::allow_attributes_without_reason,
    reason = "generated from proto/*.proto, which contain the documentation"
)]
mod protocols {
    include!(concat!(env!("OUT_DIR"), "/protocols.rs"));
}

/// Registration of a plugin with the kubelet.
pub use protocols::pluginregistration;

/// Preparation of a claim's allocation.
pub mod dra {
    pub use crate::protocols::k8s::io::kubelet::pkg::apis::dra::{v1, v1beta1};
}

/// Health of devices: the messages are in [`health::v1alpha1`], and the service has three names.
pub mod health {
    pub use crate::protocols::{v1, v1alpha1, v1beta1};
}

/// Hooks for KubeVirt: the messages are in [`hooks::v1alpha2`].
pub mod hooks {
    pub use crate::protocols::kubevirt::hooks::{info, v1alpha2, v1alpha3};
}
