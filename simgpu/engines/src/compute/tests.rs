//! Unit tests that assemble programs and run them on the compute engine alone. The crate's tests cover launches through
//! PFIFO.

mod control;
mod differential;
mod errors;
mod float;
mod integer;
mod memory;
mod random;
mod rig;
