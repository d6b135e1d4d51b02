//! Guests with Debian's kernels, one scenario per module.

#[path = "guest/faults.rs"]
mod faults;
#[path = "guest/harness.rs"]
mod harness;
#[path = "guest/killed.rs"]
mod killed;
#[path = "guest/monitoring.rs"]
mod monitoring;
#[path = "guest/moving.rs"]
mod moving;
#[path = "guest/paravirt.rs"]
mod paravirt;
#[path = "guest/paravirtual.rs"]
mod paravirtual;
#[path = "guest/saving.rs"]
mod saving;
#[path = "guest/service.rs"]
mod service;
#[path = "guest/stories.rs"]
mod stories;
#[path = "guest/upgrade.rs"]
mod upgrade;
#[path = "guest/workloads.rs"]
mod workload_stories;
