//! Tests of the whole machine. [`crate::sim`] tests the effect of a policy on workloads over time.

mod band_model;
mod competing;
mod copies;
mod harness;
mod limits;
mod machine;
mod properties;
