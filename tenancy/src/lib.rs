//! The state machine that shares a card between its tenants.
//!
//! A card has one of two executors: the owner of a card for virtual machines (`card-manager`), and the owner of a card
//! for CUDA programs (`cuda-owner`). Both report what happens on the card, and carry out the answers. Decisions are made
//! here, without I/O, threads or a clock of their own: each call takes the time.
//!
//! [`Residency`] decides whose memory is on the card: which chunks move, and which tenants wait while another tenant has
//! a quantum of the card's memory. Its parts are [`vram::Balancer`] and [`vram::Quanta`].

mod residency;

pub use residency::{Demand, Holds, Planned, Residency};
