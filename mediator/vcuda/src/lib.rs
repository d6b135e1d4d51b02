//! The CUDA function of a VM: a virtio-gpu device with a private capability set.
#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)]
#![cfg_attr(
    test,
    allow(
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation,
        reason = "a test that goes wrong may panic"
    )
)]

pub mod command;
pub mod core;
#[cfg(feature = "fuzz")]
pub mod fuzz;
