//! Tests the Python client generated from the API description, as an operator would use it.

use std::env;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tests::Daemon;
use tests::daemon::run_to_end;
use tests::guest::{card_toml, vm_toml};
use tests::wait::Scratch;

/// Configuration table of a second card.
const OTHER_CARD: &str = "\n[[card]]\nname = \"card1\"\nkind = \"simgpu\"\nvram_mib = 256\n";
/// Time limit for generating the client. The generator is downloaded the first time.
const CLIENT_LIMIT: Duration = Duration::from_secs(400);
/// Time limit for the operator's session.
const DAY_LIMIT: Duration = Duration::from_secs(200);

#[test]
fn generated_python_client_performs_an_operators_day() -> Result<()> {
    let scratch = Scratch::new("client")?;
    let site = scratch.path().join("site");
    let mut make = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    make.args(["run", "--quiet", "--package", "xtask", "--", "python-client", "--out"]).arg(scratch.path());
    let made = run_to_end(&mut make, CLIENT_LIMIT)?.success()?.stdout;
    let [wheel, tools] = made.lines().collect::<Vec<_>>()[..] else { anyhow::bail!("no wheel: {made}") };
    let mut install = Command::new("python3");
    install.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(&site).arg(wheel);
    run_to_end(install.env("PIP_ROOT_USER_ACTION", "ignore"), CLIENT_LIMIT)?.success()?;

    let daemon = Daemon::start("client", |paths| card_toml(paths, 256) + OTHER_CARD + &vm_toml("web", 32))?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fleet/operators_day.py");
    let packages = env::join_paths([&site, Path::new(tools)]).context("paths")?;
    let mut day = Command::new("python3");
    day.arg(script).arg(&daemon.paths().admin_socket).env("PYTHONPATH", packages);
    let day = run_to_end(&mut day, DAY_LIMIT)?.success()?;
    print!("{}", day.stdout);
    ensure!(day.stdout.contains("refused: VM `large`") && day.stdout.contains("removed build"), "{}", day.stdout);
    Ok(())
}
