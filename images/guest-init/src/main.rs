//! Init of the test guests: brings up a bare user space and runs commands for the host.
//!
//! The parts: [`setup`] mounts the file systems and opens the agent's serial line, [`agent`] speaks the line protocol on it,
//! [`commands`] carries commands out, [`modules`], [`pci`] and [`kmsg`] are what they need of the kernel, [`reaper`]
//! collects dead children, those of others included.
//!
//! It is no shell: words are split at blanks, there is no quoting. It never exits, since a kernel whose init exits panics.
//! In a system that has an init of its own, a service runs it: then it only serves the line.
//!
//! Kernel messages go to the console (`ttyS0`), the agent's line is `ttyS1`. With `gm.autoload=1` on the kernel's command
//! line the modules are loaded before the agent says that it is ready.

#![forbid(unsafe_code)]

mod agent;
mod commands;
mod kmsg;
mod modules;
mod pci;
mod reaper;
mod setup;

use std::time::Duration;

fn main() {
    // A thread that panics prints and ends; the process must stay.
    std::panic::set_hook(Box::new(|info| println!("guest-init: panic: {info}")));
    let ended = std::panic::catch_unwind(run);
    println!("guest-init: halted: {}", if ended.is_ok() { "the agent's line closed" } else { "after a panic" });
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// Brings the guest up and serves the agent's line for ever.
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
