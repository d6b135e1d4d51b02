//! A Debian host with systemd in a VM, administered through a shell.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::agent::Output;
use crate::files::Files;
use crate::wait::{self, Scratch};
use crate::{Vm, VmConfig};

/// Time limit of a command.
const COMMAND_LIMIT: Duration = Duration::from_secs(180);
/// Number of journal lines shown after an error.
const JOURNAL_LINES: u32 = 60;

/// A running host.
pub struct Host {
    vm: Vm,
    up: Instant,
    _initrd: Scratch,
}

impl Host {
    /// Boots a host with `files` on it.
    pub fn boot(name: &str, files: Files) -> Result<Self> {
        let system = images::ensure_system(&images::Progress::stderr())?;
        let images = crate::images()?;
        let scratch = Scratch::new(&format!("{name}-initrd"))?;
        let mut config = VmConfig::new(name, images, "6.1")?;
        config.kernel = system.bootable(files.finish(), &scratch.path().join("initrd"))?;
        (config.memory_mib, config.smp) = (1536, 2);
        // Show boot messages on the console, to identify the unit that a boot is waiting for.
        config.append = "systemd.show_status=1 systemd.default_timeout_start_sec=300s".to_owned();
        let vm = Vm::launch(&config)?;
        vm.wait_ready()?;
        Ok(Self { vm, up: Instant::now(), _initrd: scratch })
    }

    /// Returns the VM in which the host runs.
    pub fn vm(&self) -> &Vm {
        &self.vm
    }

    /// Runs a shell command. Does not check the exit code. Prints the command and its output.
    pub fn sh(&self, command: &str) -> Result<Output> {
        self.say(command);
        let output = self.vm.run_within(&format!("sh {command}"), COMMAND_LIMIT)?;
        println!("{}{}", output.text(), if output.code == 0 { String::new() } else { format!("\n[{}]", output.code) });
        Ok(output)
    }

    /// Calls [`Self::sh`], but treats a nonzero exit code as an error, which contains the end of the journal. Returns
    /// the output without its trailing newline.
    pub fn ok(&self, command: &str) -> Result<String> {
        let output = self.sh(command)?;
        let text = output.text();
        ensure!(output.code == 0, "{command}: exited with code {}:\n{text}\n{}", output.code, self.journal());
        Ok(text)
    }

    /// Waits until a shell command succeeds. Returns the command's output.
    pub fn until(&self, what: &str, command: &str, limit: Duration) -> Result<String> {
        self.say(&format!("until {command}"));
        let ended = wait::until(what, limit, || {
            let output = self.vm.run_within(&format!("sh {command}"), COMMAND_LIMIT)?;
            Ok((output.code == 0).then(|| output.text()))
        });
        ended.with_context(|| self.journal())
    }

    fn say(&self, command: &str) {
        println!("[{:6.1} s] # {command}", self.up.elapsed().as_secs_f64());
    }

    /// Returns the end of the journal.
    pub fn journal(&self) -> String {
        let command = format!("sh journalctl --no-pager --lines={JOURNAL_LINES}");
        let journal = self.vm.run_within(&command, COMMAND_LIMIT).map(|output| output.text());
        format!("the journal's end:\n{}", journal.unwrap_or_else(|error| format!("{error:#}")))
    }
}
