//! The cards of a CUDA program: those that it sees, those that its driver sees, and access between them.
//!
//! A program can move to another card only if its driver saw that card from the start (decision 165). The driver
//! therefore sees the tenant's cards, followed by the other cards to which the program could move. The library in front
//! of the driver hides these other cards from the program.
//!
//! - [`list`]: the value of `CUDA_VISIBLE_DEVICES` for the driver's initialization;
//! - [`files`]: the cards whose device files the program can reach;
//! - [`calls`]: functions whose arguments name devices, and the rejection of calls that name hidden devices;
//! - [`identities`]: the UUIDs of the devices that the driver sees;
//! - [`integrity`]: the answer to the integrity query of NVIDIA's runtime;
//! - [`peers`]: pairs of contexts with peer access;
//! - [`cross`]: the cards on which a program must be quiesced while memory moves.
//!
//! This crate does not change the environment, and calls the driver only for the identities of devices.

pub mod calls;
pub mod cross;
pub mod files;
pub mod identities;
pub mod integrity;
pub mod list;
pub mod peers;
