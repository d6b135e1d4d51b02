//! A command-line tool that installs the Slurm plugin and checks a node's health. Administrators and Slurm run it.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use admin_client::terminal;
use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use spank_gpu_mediator::options::Arguments;
use spank_gpu_mediator::{MARK, work};

/// Prefix of a node's drain reason.
const REASON: &str = "gpu-mediator:";
/// Path of the plugin in the package.
const PLUGIN: &str = "/usr/lib/gpu-mediator/slurm/spank_gpu_mediator.so";

/// Helps Slurm to share cards through gpu-mediator
#[derive(Parser)]
#[command(name = "gpu-mediator-slurm", version)]
enum What {
    /// Writes the plugin for this host's Slurm
    Install {
        /// The plugin from the package
        #[arg(long, value_name = "PATH", default_value = PLUGIN)]
        from: PathBuf,
        /// The plugin file that plugstack.conf names
        #[arg(long, value_name = "PATH", default_value = "/etc/slurm/spank_gpu_mediator.so")]
        to: PathBuf,
        /// Version of Slurm, such as 24.11; by default, the version that `scontrol --version` prints
        #[arg(long, value_name = "VERSION")]
        slurm: Option<String>,
    },
    /// Removes the parts of ended jobs, records the usage of other jobs, and drains the node while its daemon does not
    /// respond. For use as HealthCheckProgram, with the plugin's arguments as in plugstack.conf
    Health {
        /// KEY=VALUE, as in plugstack.conf
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    let done = match What::parse() {
        What::Install { from, to, slurm } => install(&from, &to, slurm),
        What::Health { arguments } => health(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpu-mediator-slurm: {}", terminal::lines(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

/// Returns a program's output.
fn said(program: &str, arguments: &[&str]) -> Result<String> {
    let output =
        Command::new(program).args(arguments).output().with_context(|| format!("{program} cannot be started"))?;
    ensure!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Converts a version to Slurm's numeric form. The first two components of the plugin's version must match Slurm's
/// version.
fn numbered(version: &str) -> Option<u32> {
    let mut numbers = version.split('.').map(|number| number.parse::<u8>().ok());
    let (major, minor) = (numbers.next()??, numbers.next()??);
    Some(u32::from(major) << 16 | u32::from(minor) << 8)
}

fn install(from: &std::path::Path, to: &std::path::Path, slurm: Option<String>) -> Result<()> {
    let text = match slurm {
        Some(version) => version,
        None => said("scontrol", &["--version"])?,
    };
    let version = text.split_whitespace().last().and_then(numbered);
    let version = version.with_context(|| format!("`{}`, expected a version such as 24.11", text.trim()))?;
    let mut plugin = std::fs::read(from).with_context(|| format!("{} cannot be read", from.display()))?;
    let mark: Vec<u8> = MARK.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let found: Vec<usize> =
        plugin.windows(mark.len()).enumerate().filter(|(_, window)| *window == mark).map(|(at, _)| at).collect();
    // The words of the mark may occur separately in code, but not in sequence.
    let [at] = found[..] else { bail!("{} has {} places for a version, expected one", from.display(), found.len()) };
    let place =
        at.checked_sub(4).and_then(|at| plugin.get_mut(at..at + 4)).context("the version field is truncated")?;
    place.copy_from_slice(&version.to_ne_bytes());
    cdi_spec::replace(to, &plugin, 0o644).with_context(|| format!("{} cannot be written", to.display()))?;
    println!("{} is for Slurm {}.{:02}", to.display(), version >> 16, version >> 8 & 255);
    Ok(())
}

fn health(words: &[String]) -> Result<()> {
    let node = std::env::var("SLURMD_NODENAME").context("SLURMD_NODENAME is not set: slurmd starts this")?;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let arguments = Arguments::read(&words).map_err(anyhow::Error::msg)?.on(Some(&node));
    let running = || -> Result<Vec<u32>> {
        let listed =
            said("squeue", &["--noheader", "--states=all", "--nodelist", &node, "--Format=JobID:20,State:20"])?;
        Ok(live(&listed))
    };
    let checked = work::reconcile(&arguments, || running().map_err(|error| format!("{error:#}")));
    let reason = said("scontrol", &["show", "node", &node]).unwrap_or_default();
    let drained_by_us = reason.contains(&format!("Reason={REASON}"));
    match checked {
        Ok(over) => {
            for job in &over {
                println!("job {job} has ended: its resources are free");
            }
            if drained_by_us {
                said("scontrol", &["update", &format!("nodename={node}"), "state=resume"])?;
            }
            for job in work::held(&arguments).map_err(anyhow::Error::msg)? {
                work::note(&arguments, job).map_err(anyhow::Error::msg)?;
            }
            Ok(())
        }
        Err(what) => {
            if !drained_by_us {
                let what: String = what.chars().filter(|c| *c != '"').take(200).collect();
                said(
                    "scontrol",
                    &["update", &format!("nodename={node}"), "state=drain", &format!("reason={REASON} {what}")],
                )?;
            }
            bail!(what)
        }
    }
}

/// Returns the jobs in `squeue`'s output that still occupy their node.
fn live(listed: &str) -> Vec<u32> {
    const LIVE: [&str; 8] =
        ["RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING"];
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        let (job, state) = (words.next()?, words.next()?);
        LIVE.contains(&state).then(|| job.parse().ok())?
    };
    listed.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_numbered_as_slurm_does() {
        assert_eq!(numbered("24.11.5"), Some(0x18_0b00));
        assert_eq!(numbered("22.05.8"), Some(0x16_0500));
        assert_eq!((numbered("24"), numbered("x.1"), numbered("300.1")), (None, None, None));
    }

    #[test]
    fn installed_plugin_gets_version_and_no_other_change() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("a.so"), folder.path().join("b.so"));
        let mark: Vec<u8> = MARK.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let plugin = [b"before....".as_slice(), &[0; 4], &mark, b"behind"].concat();
        std::fs::write(&from, &plugin).unwrap();
        install(&from, &to, Some("slurm-wlm 24.11.5".to_owned())).unwrap();
        let made = std::fs::read(&to).unwrap();
        assert_eq!(made[10..14], 0x18_0b00_u32.to_ne_bytes());
        assert_eq!((&made[..10], &made[14..]), (&plugin[..10], &plugin[14..]));
        assert!(install(&from, &to, Some("none".to_owned())).unwrap_err().to_string().contains("expected a version"));
        std::fs::write(&from, [&plugin[..], &mark].concat()).unwrap();
        assert!(install(&from, &to, Some("24.11".to_owned())).unwrap_err().to_string().contains("2 places"));
    }

    #[test]
    fn jobs_that_are_over_are_no_more_live() {
        let listed = "7                   RUNNING\n8    COMPLETED\n9  COMPLETING \nx RUNNING\n\n10 NODE_FAIL\n";
        assert_eq!(live(listed), [7, 9]);
    }
}
