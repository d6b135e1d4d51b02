//! Tests of compute: programs, assembled here, on the engine alone. The crate's tests cover launches through PFIFO.

mod control;
mod differential;
mod errors;
mod float;
mod integer;
mod memory;
mod random;
mod rig;
