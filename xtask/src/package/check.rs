//! Checks a finished package: its files, whether its build is reproducible, lintian's results, and its service.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::output;
use super::spec::Spec;

/// Returns all problems with a package. `again` is the package from a second build.
pub(super) fn problems(spec: &Spec, package: &Path, again: &Path) -> Result<Vec<String>> {
    let mut problems = problems_of_contents(spec, package, again)?;
    problems.extend(lintian_problems(package)?);
    if spec.has_service {
        problems.extend(service_problems(package)?);
    }
    Ok(problems)
}

/// Returns problems with the configuration and the unit in a package.
fn service_problems(package: &Path) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    let folder = tempfile::tempdir().context("a folder for the package's files")?;
    output(Command::new("dpkg-deb").arg("--extract").arg(package).arg(folder.path()))?;
    let at = |path: &str| folder.path().join(path);
    let checked = Command::new(at("usr/bin/mediatord"))
        .arg("--check")
        .arg("--config")
        .arg(at("etc/gpu-mediator.toml"))
        .output()?;
    if !checked.status.success() {
        problems.push(format!("mediatord rejects its configuration: {}", String::from_utf8_lossy(&checked.stderr)));
    }
    problems.extend(unit_problems(folder.path())?);
    Ok(problems)
}

/// Returns problems with the package's file list, and differences between the two builds.
pub(super) fn problems_of_contents(spec: &Spec, package: &Path, again: &Path) -> Result<Vec<String>> {
    let listed = output(Command::new("dpkg-deb").arg("--contents").arg(package))?;
    let listed = String::from_utf8_lossy(&listed).into_owned();
    let mut files = BTreeMap::new();
    for line in listed.lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        if let [mode, owner, .., path] = words[..] {
            files.insert(path.trim_start_matches("./").to_owned(), format!("{mode} {owner}"));
        }
    }
    let mut problems = Vec::new();
    for (path, mode) in spec.expected {
        match files.get(*path) {
            None => problems.push(format!("{path} is missing")),
            Some(found) if *found != format!("{mode} root/root") => {
                problems.push(format!("{path}: {found}, expected {mode} root/root"));
            }
            Some(_) => {}
        }
    }
    if fs::read(package)? != fs::read(again)? {
        problems.push("a second build differs".to_owned());
    }
    Ok(problems)
}

/// Returns capabilities that the drop-in for CUDA cards lacks, or else systemd's complaints about the unit.
fn unit_problems(tree: &Path) -> Result<Vec<String>> {
    let unit = fs::read_to_string(tree.join("usr/lib/systemd/system/gpu-mediator.service"))?;
    // Make systemd find the program in the unpacked tree.
    let unit = unit.replace("ExecStart=/usr/bin/", &format!("ExecStart={}/usr/bin/", tree.display()));
    let path = tree.join("gpu-mediator.service");
    fs::write(&path, unit)?;
    // Include the optional drop-ins, as an administrator would install them.
    let drop_ins = tree.join("gpu-mediator.service.d");
    fs::create_dir_all(&drop_ins)?;
    let drop_in = fs::read_to_string(tree.join("usr/share/doc/gpu-mediator/examples/cuda.conf"))?;
    fs::write(drop_ins.join("cuda.conf"), &drop_in)?;
    fs::copy(tree.join("usr/share/doc/gpu-mediator/examples/page.conf"), drop_ins.join("page.conf"))?;
    // Without this capability, the daemon cannot kill other users' programs.
    let rights = ["CapabilityBoundingSet=CAP_KILL", "AmbientCapabilities=CAP_KILL"];
    let missing = rights.iter().filter(|right| !drop_in.lines().any(|line| line == **right));
    let missing: Vec<String> = missing.map(|right| format!("cuda.conf does not contain {right}")).collect();
    if !missing.is_empty() {
        return Ok(missing);
    }
    let mut command = Command::new("systemd-analyze");
    match command.args(["verify", "--man=no"]).arg(&path).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("systemd-analyze is not installed: the unit is not checked");
            Ok(Vec::new())
        }
        Err(error) => Err(error).context("systemd-analyze"),
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            let ours = text.lines().filter(|line| line.contains("gpu-mediator.service") || line.contains(".conf"));
            let mut problems: Vec<_> = ours.map(str::to_owned).collect();
            if !output.status.success() && problems.is_empty() {
                problems.push(format!("systemd-analyze verify: {text}"));
            }
            Ok(problems)
        }
    }
}

fn lintian_problems(package: &Path) -> Result<Vec<String>> {
    match Command::new("lintian").args(["--fail-on", "error"]).arg(package).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("lintian is not installed: its rules are not checked");
            Ok(Vec::new())
        }
        Err(error) => Err(error).context("lintian"),
        Ok(output) if output.status.success() => Ok(Vec::new()),
        Ok(output) => Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()),
    }
}
