//! Tests of compute: programs, assembled here, on the engine alone. Launches through PFIFO stand in the crate's tests.

mod control;
mod differential;
mod errors;
mod float;
mod integer;
mod memory;
mod random;
mod rig;
