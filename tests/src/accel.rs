//! Starts a guest to detect whether KVM works, because opening the device file proves nothing.

use std::fs::{self, File};
use std::path::Path;
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use std::{env, thread};

use anyhow::{Context, Result, bail};
use images::Images;

use crate::children;
use crate::wait::{self, Scratch};

/// Time limit for the test guest's kernel to print output. If it is exceeded, KVM is considered broken.
const PROBE_LIMIT: Duration = Duration::from_secs(10);

/// Accelerator of the guests' CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// KVM.
    Kvm,
    /// QEMU's binary translator (TCG).
    Tcg,
    /// TCG with AMD's virtualization extension, so that the guest can use KVM.
    TcgWithSvm {
        /// True to use one thread per CPU. Requires [a QEMU that delivers each interrupt only
        /// once](images::ensure_svm). Other versions silently reset the guest's VMs.
        threads: bool,
    },
}

impl Accel {
    /// Returns the accelerator named in `GPU_MEDIATOR_ACCEL`, if set. Otherwise, returns KVM if a guest kernel starts
    /// under KVM, and TCG if not. The probe runs once per host boot.
    pub fn detect(images: &Images) -> Result<Self> {
        match env::var("GPU_MEDIATOR_ACCEL").ok().as_deref() {
            Some("kvm") => return Ok(Self::Kvm),
            Some("tcg") => return Ok(Self::Tcg),
            Some(other) => bail!("GPU_MEDIATOR_ACCEL is {other:?}, expected kvm or tcg"),
            None => {}
        }
        // Guests that start concurrently share a single probe.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        if File::options().read(true).write(true).open("/dev/kvm").is_err() {
            return Ok(Self::Tcg);
        }
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let note = images::cache::folder().join("kvm-works");
        let known = fs::read_to_string(&note).unwrap_or_default();
        if let Some(answer) = known.strip_prefix(boot.trim()).filter(|_| !boot.is_empty()) {
            return Ok(if answer.trim() == "yes" { Self::Kvm } else { Self::Tcg });
        }
        let works = try_kvm(images).unwrap_or(false);
        let answer = if works { "yes" } else { "no" };
        fs::write(&note, format!("{} {answer}\n", boot.trim()))
            .with_context(|| format!("cannot write {}", note.display()))?;
        Ok(if works { Self::Kvm } else { Self::Tcg })
    }

    /// Returns the QEMU arguments that select the accelerator.
    pub fn args(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Self::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max"],
            Self::TcgWithSvm { threads: true } => ["-accel", "tcg,thread=multi", "-cpu", "EPYC,+svm,+npt"],
            Self::TcgWithSvm { threads: false } => ["-accel", "tcg,thread=single", "-cpu", "EPYC,+svm,+npt"],
        }
    }
}

fn try_kvm(images: &Images) -> Result<bool> {
    let scratch = Scratch::new("kvm")?;
    let console = scratch.path().join("console");
    let kernel = images.kernels.first().context("no kernel")?;
    let mut command = images.qemu.command();
    command.args(["-M", "q35", "-m", "256M", "-nodefaults", "-display", "none", "-vga", "none", "-monitor", "none"]);
    command.args(Accel::Kvm.args()).arg("-no-reboot").arg("-serial").arg(format!("file:{}", console.display()));
    command.arg("-kernel").arg(&kernel.vmlinuz).args(["-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1"]);
    let mut child = children::spawn(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()))?;
    let result = wait::until("a kernel under KVM", PROBE_LIMIT, || {
        let spoke = says_linux(&console);
        let ended = child.try_wait()?.is_some();
        Ok((spoke || ended).then_some(spoke))
    });
    // Kill and reap the process, which may already have exited.
    let _ = child.kill();
    thread::spawn(move || child.wait());
    Ok(result.unwrap_or(false))
}

fn says_linux(console: &Path) -> bool {
    fs::read(console).is_ok_and(|b| String::from_utf8_lossy(&b).contains("Linux version"))
}
