//! Tests of guests with Debian's kernels, with one scenario per module.

mod faults;
mod first_hour;
mod gdev;
mod harness;
mod killed;
mod monitoring;
mod moving;
mod paravirt;
mod paravirtual;
mod saving;
mod service;
mod stories;
mod upgrade;
mod workload_stories;
