//! Init of the test guests, which starts a minimal user space and runs commands for the host.
//!
//! Parts: [`setup`] mounts file systems and opens the agent's serial port; [`agent`] implements the protocol on that
//! port; [`commands`] executes commands with [`modules`], [`pci`] and [`kmsg`]; [`reaper`] reaps child processes,
//! including orphans.
//!
//! This is not a shell: words are separated by spaces, and cannot be quoted. The program never exits, because the
//! kernel panics when init exits. On a system with another init, the program runs as a service that mounts no file
//! systems.
//!
//! Kernel messages go to the console (`ttyS0`). The agent uses `ttyS1`. With `gm.autoload=1` on the kernel command
//! line, the modules are loaded before the agent reports readiness.

#![forbid(unsafe_code)]

mod agent;
mod commands;
mod kmsg;
mod modules;
mod pci;
mod reaper;
mod request;
mod setup;

use std::time::Duration;

fn main() {
    // A panic must terminate only its thread, with a message. The process must continue.
    std::panic::set_hook(Box::new(|info| println!("guest-init: panic: {info}")));
    let ended = std::panic::catch_unwind(run);
    println!("guest-init: halted: {}", if ended.is_ok() { "the agent's line closed" } else { "after a panic" });
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// Sets up the guest, and then serves the agent's serial port.
fn run() {
    if std::process::id() == 1 {
        setup::mount_all();
    }
    reaper::start();
    if setup::kernel_parameter("gm.autoload").as_deref() == Some("1") {
        match modules::load_all("") {
            Ok(lines) => lines.iter().for_each(|line| println!("guest-init: {line}")),
            Err(error) => println!("guest-init: autoload: {error}"),
        }
    }
    agent::serve(&setup::open_agent_line());
}
