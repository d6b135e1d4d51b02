//! Tests the RPM package, installed with `rpm`.

use anyhow::{Result, ensure};

use crate::site::{Form, json, start_service, start_up};

#[test]
fn rpm_installs_serves_and_goes() -> Result<()> {
    let Some(host) = start_up("rpm", Form::Rpm)? else { return Ok(()) };
    // A configuration file changed by an administrator is kept, and the package's version of the file is stored next to
    // it.
    host.ok("grep -q desktop /etc/gpu-mediator.toml && test -e /etc/gpu-mediator.toml.rpmnew")?;
    let changed = host.sh("rpm --verify --nodeps gpu-mediator")?;
    ensure!(changed.lines.iter().all(|line| line.ends_with(" c /etc/gpu-mediator.toml")), "{}", changed.text());
    host.ok("getent passwd gpu-mediator && rpm --query --list gpu-mediator | grep -q '^/usr/bin/mediatord$'")?;
    start_service(&host)?;
    host.ok("mediatorctl vm add a --profile desktop")?;
    ensure!(json(&host, "vm show a")?["profile"] == "desktop", "the service's VM");
    host.stop("gpu-mediator")?;
    host.ok("rpm --erase --nodeps gpu-mediator")?;
    host.ok("! test -e /usr/bin/mediatord && ! test -e /usr/lib/gpu-mediator/cuda-owner && getent passwd gpu-mediator")
        .map(drop)
}
