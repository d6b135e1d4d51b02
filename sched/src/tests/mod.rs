//! Tests of the whole machine. What a policy makes of workloads over time is tested in [`crate::sim`].

mod band_model;
mod competing;
mod copies;
mod harness;
mod limits;
mod machine;
mod properties;
