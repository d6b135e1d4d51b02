//! Tests the whole state machine. [`crate::sim`] tests the effect of policies on workloads over time.

mod band_model;
mod competing;
mod copies;
mod harness;
mod limits;
mod machine;
mod properties;
