//! Tests the whole state machine. [`crate::sim`] tests how policies affect workloads over time.

mod band_model;
mod competing;
mod copies;
mod harness;
mod limits;
mod machine;
mod properties;
